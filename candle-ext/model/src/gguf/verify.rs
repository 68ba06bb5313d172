//! Comparison of the values of a written GGUF file with those of the model.

use std::path::Path;

use candle_core::Tensor;
use candle_core::quantized::GgmlDType;
use candlewick_ops::to_host;
use half::{bf16, f16};
use rayon::prelude::*;

use super::GgufModel;
use crate::{MergedModel, ModelError, ParamValues};

/// Reads a file back, and compares every parameter with the model's value.
///
/// # Errors
/// If a value differs by more than the rounding of its type.
pub(super) fn verify(model: &MergedModel, path: &Path, on_param: &dyn Fn(usize)) -> Result<(), ModelError> {
    let file = GgufModel::open(path, model.config())?;
    for (idx, param) in model.params().enumerate() {
        on_param(idx + 1);
        let dtype = file.dtype_of(param)?;
        let [exact, found] = [values(&model.value(param)?)?, values(&file.value(param)?)?];
        if !is_rounded(dtype, &exact, &found) {
            let problem = format!(
                "the values of `{}` differ from the model's by more than the rounding to {dtype:?}; check the disk and run \
                 the command again, or export another format",
                param.name
            );
            return Err(ModelError::mismatch(path, problem));
        }
    }
    Ok(())
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    Ok(to_host(&tensor.flatten_all()?)?.to_vec1()?)
}

/// Returns true if `found` are the values `exact`, rounded to a type.
fn is_rounded(dtype: GgmlDType, exact: &[f32], found: &[f32]) -> bool {
    let is_equal = |round: fn(f32) -> f32| {
        exact.par_iter().zip(found).all(|(exact, found)| round(*exact).to_bits() == found.to_bits())
    };
    match dtype {
        GgmlDType::F32 => is_equal(|x| x),
        GgmlDType::F16 => is_equal(|x| f16::from_f32(x).to_f32()),
        GgmlDType::BF16 => is_equal(|x| bf16::from_f32(x).to_f32()),
        _ => {
            let n = dtype.block_size();
            let most = |block: &[f32]| largest_error(dtype, block);
            exact.par_chunks(n).zip(found.par_chunks(n)).all(|(exact, found)| {
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
    use candle_core::{DType, Device};

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
        ]
    }

    fn written(dtype: GgmlDType, values: &[f32]) -> Vec<f32> {
        let tensor = Tensor::from_slice(values, (values.len() / 256, 256), &Device::Cpu).unwrap();
        let read = QTensor::quantize(&tensor, dtype).unwrap().dequantize(&Device::Cpu).unwrap();
        read.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
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
        // candle makes zeros of 32 equal positive elements in these types.
        for dtype in [GgmlDType::Q4K, GgmlDType::Q5K] {
            assert!(!is_rounded(dtype, &[0.7; 256], &written(dtype, &[0.7; 256])), "{dtype:?}");
        }
        let one_bit = f32::from_bits(1.0f32.to_bits() + 1);
        assert!(!is_rounded(GgmlDType::F32, &[1.0], &[one_bit]));
        assert!(!is_rounded(GgmlDType::F16, &[one_bit], &[one_bit]));
    }
}
