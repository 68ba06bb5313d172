//! Comparison of a written GGUF file with the model, value by value.

use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use half::{bf16, f16};
use rayon::prelude::*;

use super::reader::GgufFile;
use super::writer::{TensorHeader, elements_of_a_piece, pieces_at_once};
use crate::ModelError;

/// A written file to compare.
pub(super) struct WrittenGguf<'a> {
    path: &'a Path,
    file: GgufFile,
}

impl<'a> WrittenGguf<'a> {
    /// Reads a file's header back.
    ///
    /// # Errors
    /// If a key has another value, or the number of keys or tensors differs.
    pub(super) fn open(
        path: &'a Path,
        metadata: &[(String, Value)],
        tensors: &[TensorHeader],
    ) -> Result<Self, ModelError> {
        let this = Self { path, file: GgufFile::open(path)? };
        let differs =
            |(key, value): &&(String, Value)| !this.file.value(key).is_some_and(|found| is_equal(found, value));
        if let Some((key, _)) = metadata.iter().find(differs) {
            return Err(this.wrong(&format!("the value of the key {key} differs from the model's")));
        }
        match (this.file.n_values(), this.file.n_tensors()) == (metadata.len(), tensors.len()) {
            true => Ok(this),
            false => Err(this.wrong("the number of keys or tensors differs from the model's")),
        }
    }

    /// Reads a tensor back, a piece at a time, and compares it with the model's values in the order of the file. `on_bytes` gets
    /// the numbers of compared bytes.
    ///
    /// # Errors
    /// If a value differs by more than the rounding of the type.
    pub(super) fn verify(
        &self,
        header: &TensorHeader,
        values: &[f32],
        mut on_bytes: impl FnMut(usize),
    ) -> Result<(), ModelError> {
        let TensorHeader { name, shape, dtype } = header;
        if self.file.tensor_type(name) != Some((*dtype, shape.as_slice())) {
            return Err(self.wrong(&format!("the tensor `{name}` has not the type {dtype:?} and the shape {shape:?}")));
        }
        let n = elements_of_a_piece(shape);
        let compare = |(idx, exact): (usize, &[f32])| {
            let mut found = vec![0f32; exact.len()];
            self.file.read(name, idx * n, &mut found)?;
            match is_rounded(*dtype, exact, &found) {
                true => Ok(()),
                false => Err(self.wrong(&format!(
                    "the values of `{name}` differ from the model's by more than the rounding to {dtype:?}"
                ))),
            }
        };
        let pieces: Vec<(usize, &[f32])> = values.chunks(n).enumerate().collect();
        pieces.chunks(pieces_at_once()).try_for_each(|pieces| {
            pieces.par_iter().copied().try_for_each(compare)?;
            on_bytes(pieces.iter().map(|(_, exact)| header.n_bytes_of(exact.len())).sum());
            Ok(())
        })
    }

    fn wrong(&self, what: &str) -> ModelError {
        let remedy = "check the disk and run the command again, or export another format";
        ModelError::mismatch(self.path, format!("{what}; {remedy}"))
    }
}

/// Compares two values of a key. candle's reader removes zeros at the end of a text.
fn is_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_equal(a, b)),
        (Value::String(a), Value::String(b)) => a.trim_end_matches('\0') == b.trim_end_matches('\0'),
        (a, b) => format!("{a:?}") == format!("{b:?}"),
    }
}

/// Returns true if `found` are the values `exact`, rounded to a type.
fn is_rounded(dtype: GgmlDType, exact: &[f32], found: &[f32]) -> bool {
    let is_equal = |round: fn(f32) -> f32| {
        exact.iter().zip(found).all(|(exact, found)| round(*exact).to_bits() == found.to_bits())
    };
    match dtype {
        GgmlDType::F32 => is_equal(|x| x),
        GgmlDType::F16 => is_equal(|x| f16::from_f32(x).to_f32()),
        GgmlDType::BF16 => is_equal(|x| bf16::from_f32(x).to_f32()),
        _ => {
            let n = dtype.block_size();
            let most = |block: &[f32]| largest_error(dtype, block);
            exact.chunks(n).zip(found.chunks(n)).all(|(exact, found)| {
                let bound = most(exact);
                exact.iter().zip(found).all(|(exact, found)| (exact - found).abs() <= bound)
            })
        }
    }
}

/// Returns the largest error of an element of a quantized block.
///
/// Twice the range of a block over its number of levels covers the rounding of the elements and of their scales. The scales
/// are f16, whose smallest step is 2^-24.
fn largest_error(dtype: GgmlDType, block: &[f32]) -> f32 {
    let (levels, steps_of_scale) = match dtype {
        GgmlDType::Q8_0 | GgmlDType::Q8_1 | GgmlDType::Q8K => (256.0, 127.0),
        GgmlDType::Q6K => (64.0, 32.0 * 127.0),
        GgmlDType::Q5_0 | GgmlDType::Q5_1 => (32.0, 31.0),
        GgmlDType::Q5K => (32.0, 31.0 * 63.0),
        _ => (16.0, 15.0 * 63.0),
    };
    let largest = block.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    2.0 * (2.0 * largest) / levels + steps_of_scale * f32::powi(2.0, -24)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::quantized::QTensor;
    use candle_core::{Device, Tensor};

    use super::super::writer::{GgufWriter, quantized};
    use super::*;

    /// Returns a number from -1 to 1.
    fn noise(i: usize) -> f32 {
        let bits = (i as u32).wrapping_add(17).wrapping_mul(2_654_435_761);
        (bits ^ (bits >> 15)) as f32 / u32::MAX as f32 * 2.0 - 1.0
    }

    /// Rows of 512 elements: even, heavy-tailed, with outliers, of one sign, tiny and zero.
    fn rows() -> Vec<Vec<f32>> {
        let row = |value: &dyn Fn(usize) -> f32| (0..512).map(value).collect();
        vec![
            row(&noise),
            row(&|i| noise(i + 1000).powi(5)),
            row(&|i| noise(i).powi(9) * 40.0),
            row(&|i| noise(i + 7) * if i % 97 == 0 { 30.0 } else { 0.03 }),
            row(&|i| if i == 300 { 5.0 } else { 0.16 + 0.01 * noise(i) }),
            row(&|i| 3.0 + noise(i).abs()),
            row(&|i| -noise(i).abs()),
            row(&|i| noise(i) * 1e-5),
            row(&|_| 0.0),
            row(&|_| 0.7),
            row(&|_| -3.0),
            row(&|i| if i < 256 { 2e4 } else { 1e-20 }),
            row(&|i| if i / 32 % 2 == 0 { 0.02 } else { noise(i) }),
            row(&|i| if i / 32 % 2 == 0 { -0.5 } else { noise(i).abs() }),
        ]
    }

    fn written(dtype: GgmlDType, values: &[f32]) -> Vec<f32> {
        let blocks = dtype.from_data(quantized(values, dtype).unwrap().into());
        match blocks.dequantize(values.len()).unwrap() {
            candle_core::CpuStorage::F32(values) => values,
            _ => unreachable!(),
        }
    }

    const TYPES: [GgmlDType; 9] = [
        GgmlDType::F32,
        GgmlDType::F16,
        GgmlDType::BF16,
        GgmlDType::Q8_0,
        GgmlDType::Q6K,
        GgmlDType::Q5K,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q4K,
    ];

    #[test]
    fn values_that_a_type_rounds_are_accepted() {
        for dtype in TYPES {
            for (i, row) in rows().iter().enumerate() {
                assert!(is_rounded(dtype, row, &written(dtype, row)), "{dtype:?}, row {i}");
            }
        }
    }

    #[test]
    fn values_of_another_row_and_a_changed_value_are_refused() {
        for dtype in TYPES {
            for row in &rows()[..3] {
                let mut other = row.clone();
                other.rotate_left(1);
                assert!(!is_rounded(dtype, row, &written(dtype, &other)), "{dtype:?}");
                for wrong in [f32::NAN, f32::INFINITY] {
                    let mut changed = written(dtype, row);
                    changed[311] = wrong;
                    assert!(!is_rounded(dtype, row, &changed), "{dtype:?} {wrong}");
                }
            }
        }
        let one_bit = f32::from_bits(1.0f32.to_bits() + 1);
        assert!(!is_rounded(GgmlDType::F32, &[1.0], &[one_bit]));
        assert!(!is_rounded(GgmlDType::F16, &[one_bit], &[one_bit]));
    }

    #[test]
    fn other_elements_have_the_blocks_of_candle() {
        for dtype in TYPES {
            for row in &rows()[..7] {
                let tensor = Tensor::from_slice(row, row.len(), &Device::Cpu).unwrap();
                let candle = QTensor::quantize(&tensor, dtype).unwrap();
                assert!(quantized(row, dtype).unwrap() == *candle.data().unwrap(), "{dtype:?}");
            }
        }
    }

    /// The scale of equal positive elements is their 15th or 31st part, as in llama.cpp, in f16.
    #[test]
    fn equal_elements_are_stored_by_their_scale_or_minimum() {
        for dtype in [GgmlDType::Q4K, GgmlDType::Q5K] {
            for x in [0.7f32, -0.7, 1e3, -1e3, 0.013, -0.013] {
                let found = written(dtype, &[x; 256]);
                let error = found.iter().fold(0f32, |most, found| most.max((found - x).abs()));
                // The scale of a block is f16, whose smallest step is 2^-24.
                let bound = 6e-4 * x.abs() + 31.0 * 63.0 * f32::powi(2.0, -25);
                assert!(error < bound, "{dtype:?}: {x} became {:?}, error {error}", &found[..4]);
            }
        }
    }

    #[test]
    fn a_swapped_tensor_and_a_changed_key_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("two.gguf");
        let header = |name: &str| TensorHeader { name: name.to_owned(), shape: vec![2, 256], dtype: GgmlDType::Q8_0 };
        let headers = [header("a"), header("b")];
        let metadata = |tokens: [&str; 2]| {
            let tokens = tokens.map(|token| Value::String(token.to_owned()));
            vec![("eps".to_owned(), Value::F32(1e-5)), ("tokens".to_owned(), Value::Array(tokens.to_vec()))]
        };
        let values: Vec<Vec<f32>> = rows().into_iter().take(2).collect();
        let mut writer = GgufWriter::create(&path, &metadata(["x", "y"]), headers.to_vec()).unwrap();
        values.iter().for_each(|values| writer.write(values, |_| ()).unwrap());
        writer.finish().unwrap();
        let written = WrittenGguf::open(&path, &metadata(["x", "y"]), &headers).unwrap();
        let verify = |header: &TensorHeader, values: &[f32]| written.verify(header, values, |_| ());
        assert!(verify(&headers[0], &values[0]).is_ok() && verify(&headers[1], &values[1]).is_ok());
        let error = verify(&headers[0], &values[1]).unwrap_err().to_string();
        assert!(error.contains("the values of `a` differ"), "{error}");
        let other_type = TensorHeader { dtype: GgmlDType::F16, ..header("a") };
        assert!(verify(&other_type, &values[0]).is_err());
        let error = WrittenGguf::open(&path, &metadata(["x", "z"]), &headers).err().unwrap().to_string();
        assert!(error.contains("the key tokens"), "{error}");
        assert!(WrittenGguf::open(&path, &metadata(["x", "y"])[..1], &headers).is_err());
        assert!(WrittenGguf::open(&path, &metadata(["x", "y"]), &headers[..1]).is_err());
    }
}
