//! Writer of the GGUF format, version 3, one tensor at a time.
//!
//! `candle_core::quantized::gguf_file::write` needs all quantized tensors in memory, so it is not used.

use std::borrow::Cow;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{DEFAULT_ALIGNMENT, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use rayon::prelude::*;

use crate::ModelError;
use crate::checkpoint::DurableFile;

const MAGIC: &[u8; 4] = b"GGUF";
const VERSION: u32 = 3;
/// Elements that a thread quantizes at once, about.
const PIECE: usize = 1 << 16;
/// Elements of a block of Q4_K and Q5_K that share a scale and a minimum.
const SUB_BLOCK: usize = 32;

/// Name, shape and type of a tensor in the file.
#[derive(Clone, Debug)]
pub(super) struct TensorHeader {
    pub(super) name: String,
    /// Shape with the slowest dim first.
    pub(super) shape: Vec<usize>,
    pub(super) dtype: GgmlDType,
}

impl TensorHeader {
    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes_of(self.shape.iter().product())
    }

    /// Returns the bytes of some elements in whole blocks.
    pub(super) fn n_bytes_of(&self, n_elements: usize) -> usize {
        n_elements / self.dtype.block_size() * self.dtype.type_size()
    }
}

/// A file whose header is written. The tensors follow in the order of the header.
pub(super) struct GgufWriter {
    path: PathBuf,
    out: BufWriter<DurableFile>,
    tensors: std::vec::IntoIter<TensorHeader>,
}

impl GgufWriter {
    /// Creates the file and writes its header.
    pub(super) fn create(
        path: &Path,
        metadata: &[(String, Value)],
        tensors: Vec<TensorHeader>,
    ) -> Result<Self, ModelError> {
        let file = DurableFile::create_new(path).map_err(ModelError::io("create", path))?;
        let mut writer = Self {
            path: path.to_path_buf(),
            out: BufWriter::with_capacity(1 << 20, file),
            tensors: Vec::new().into_iter(),
        };
        writer.put(&header(metadata, &tensors))?;
        writer.tensors = tensors.into_iter();
        Ok(writer)
    }

    /// Writes the next tensor: the f32 values of its header's shape, in order. All threads quantize. `on_bytes` gets the
    /// numbers of written bytes.
    ///
    /// # Errors
    /// If a value is not finite, or does not fit in f16.
    pub(super) fn write(&mut self, values: &[f32], mut on_bytes: impl FnMut(usize)) -> Result<(), ModelError> {
        let header = self.tensors.next().expect("there are as many tensors as headers");
        assert_eq!(
            values.len(),
            header.shape.iter().product::<usize>(),
            "the values of {} have its shape",
            header.name
        );
        let n = elements_of_a_piece(&header.shape);
        for pieces in values.chunks(n * pieces_at_once()) {
            let quantize = |piece| self.quantize(piece, &header);
            let bytes: Vec<Vec<u8>> = pieces.par_chunks(n).map(quantize).collect::<Result<_, _>>()?;
            bytes.iter().try_for_each(|piece| self.put(piece))?;
            on_bytes(header.n_bytes_of(pieces.len()));
        }
        self.put(&padding(header.n_bytes()))
    }

    fn quantize(&self, piece: &[f32], header: &TensorHeader) -> Result<Vec<u8>, ModelError> {
        let wrong = |problem| Err(ModelError::mismatch(&self.path, format!("tensor `{}` {problem}", header.name)));
        if piece.iter().any(|x| !x.is_finite()) {
            return wrong("has values that are not finite; check the weights for NaN");
        }
        if header.dtype == GgmlDType::F16 && piece.iter().any(|x| x.abs() > half::f16::MAX.to_f32()) {
            return wrong("has a value above 65504, which does not fit in f16; export bf16 or f32");
        }
        Ok(quantized(piece, header.dtype)?)
    }

    /// Flushes the file to disk.
    pub(super) fn finish(self) -> Result<(), ModelError> {
        assert_eq!(self.tensors.len(), 0, "every tensor is written");
        let io = |error| ModelError::io("write", &self.path)(error);
        self.out.into_inner().map_err(|error| io(error.into_error()))?.sync().map_err(io)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        self.out.write_all(bytes).map_err(ModelError::io("write", &self.path))
    }
}

/// Returns the number of elements of a tensor that a thread takes at once: some rows.
pub(super) fn elements_of_a_piece(shape: &[usize]) -> usize {
    let n_columns = shape.last().copied().unwrap_or(1).max(1);
    PIECE.div_ceil(n_columns) * n_columns
}

/// Returns the number of pieces between two steps of the progress.
pub(super) fn pieces_at_once() -> usize {
    4 * rayon::current_num_threads()
}

/// Returns the blocks of values, quantized by candle.
pub(super) fn quantized(values: &[f32], dtype: GgmlDType) -> candle_core::Result<Vec<u8>> {
    let has_minima = matches!(dtype, GgmlDType::Q4K | GgmlDType::Q5K);
    let values = if has_minima { without_equal_sub_blocks(values) } else { values.into() };
    let tensor = Tensor::from_slice(&values, values.len(), &Device::Cpu)?;
    Ok(QTensor::quantize(&tensor, dtype)?.data()?.into_owned())
}

/// Scales the first of 32 equal elements by 1 - 2^-12, which its 4 or 5 bits do not show.
///
/// candle's `make_qkx1_quants` makes zeros of equal elements. llama.cpp's `make_qkx2_quants` stores them by the scale if they are
/// positive, and by the minimum if they are negative. So does candle for elements that are not quite equal.
fn without_equal_sub_blocks(values: &[f32]) -> Cow<'_, [f32]> {
    let mut values = Cow::Borrowed(values);
    for start in (0..values.len()).step_by(SUB_BLOCK) {
        let block = &values[start..values.len().min(start + SUB_BLOCK)];
        // A smaller value is zero in the scales of a block, which are f16.
        if block[0].abs() > 1e-30 && block.iter().all(|x| *x == block[0]) {
            values.to_mut()[start] *= 1.0 - f32::powi(2.0, -12);
        }
    }
    values
}

fn header(metadata: &[(String, Value)], tensors: &[TensorHeader]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_text(&mut bytes, key);
        bytes.extend(type_of(value).to_le_bytes());
        put_value(&mut bytes, value);
    }
    let mut offset = 0;
    for tensor in tensors {
        put_text(&mut bytes, &tensor.name);
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|len| bytes.extend((*len as u64).to_le_bytes()));
        bytes.extend(number(tensor.dtype).to_le_bytes());
        bytes.extend((offset as u64).to_le_bytes());
        offset += tensor.n_bytes() + padding(tensor.n_bytes()).len();
    }
    bytes.extend(padding(bytes.len()));
    bytes
}

/// Returns the zeros after `n_bytes` bytes.
fn padding(n_bytes: usize) -> Vec<u8> {
    vec![0; n_bytes.next_multiple_of(DEFAULT_ALIGNMENT as usize) - n_bytes]
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Returns the format's number of a value's type.
fn type_of(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn put_value(bytes: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(x) => bytes.push(*x),
        Value::I8(x) => bytes.extend(x.to_le_bytes()),
        Value::U16(x) => bytes.extend(x.to_le_bytes()),
        Value::I16(x) => bytes.extend(x.to_le_bytes()),
        Value::U32(x) => bytes.extend(x.to_le_bytes()),
        Value::I32(x) => bytes.extend(x.to_le_bytes()),
        Value::U64(x) => bytes.extend(x.to_le_bytes()),
        Value::I64(x) => bytes.extend(x.to_le_bytes()),
        Value::F32(x) => bytes.extend(x.to_le_bytes()),
        Value::F64(x) => bytes.extend(x.to_le_bytes()),
        Value::Bool(x) => bytes.push(u8::from(*x)),
        Value::String(text) => put_text(bytes, text),
        Value::Array(values) => {
            bytes.extend(values.first().map_or(4, type_of).to_le_bytes());
            bytes.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_value(bytes, value));
        }
    }
}

/// Returns the format's number of a tensor's type: `ggml_type`.
fn number(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q8_1 => 9,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::Q8K => 15,
        GgmlDType::BF16 => 30,
    }
}
