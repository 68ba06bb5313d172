//! Reader of a GGUF file, a piece of a tensor at a time.

use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::quantized::{GgmlDType, QuantizedType};
use candle_core::{CpuStorage, Device, Tensor};
use candlewick_text::files::open_regular_file;
use rayon::prelude::*;

use super::writer::elements_of_a_piece;
use crate::ModelError;

/// A GGUF file.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    content: Content,
    file: File,
}

impl GgufFile {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let file = open_regular_file(path).map_err(ModelError::io("open", path))?;
        let content = Content::read(&mut BufReader::new(&file));
        let content = content.map_err(|error| ModelError::malformed(path, error.to_string()))?;
        let n_bytes = file.metadata().map_err(ModelError::io("read", path))?.len();
        let is_outside = |info: &&TensorInfo| end_of(info, content.tensor_data_offset).is_none_or(|end| end > n_bytes);
        if let Some((name, _)) = content.tensor_infos.iter().find(|(_, info)| is_outside(info)) {
            let problem = format!("the tensor `{name}` is no whole blocks within the file of {n_bytes} bytes");
            return Err(ModelError::malformed(path, problem));
        }
        Ok(Self { path: path.to_path_buf(), content, file })
    }

    /// Returns the value of a key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// Returns the number of keys.
    pub(super) fn n_values(&self) -> usize {
        self.content.metadata.len()
    }

    /// Returns the number of tensors.
    pub(super) fn n_tensors(&self) -> usize {
        self.content.tensor_infos.len()
    }

    /// Returns type and shape of a tensor, the slowest dim first; `None` if the file has no such tensor.
    pub fn tensor_type(&self, name: &str) -> Option<(GgmlDType, &[usize])> {
        let info = self.content.tensor_infos.get(name)?;
        Some((info.ggml_dtype, info.shape.dims()))
    }

    /// Reads a tensor in f32, on the CPU.
    pub fn tensor(&self, name: &str) -> Result<Tensor, ModelError> {
        let info = self.info(name)?;
        let mut values = vec![0f32; info.shape.elem_count()];
        let n = elements_of_a_piece(info.shape.dims());
        values.par_chunks_mut(n).enumerate().try_for_each(|(idx, piece)| self.read(name, idx * n, piece))?;
        Ok(Tensor::from_vec(values, info.shape.clone(), &Device::Cpu)?)
    }

    /// Reads elements of a tensor from `start` on. Both ends are those of blocks.
    pub(super) fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let info = self.info(name)?;
        let n_bytes = |n: usize| n / info.ggml_dtype.block_size() * info.ggml_dtype.type_size();
        // candle needs the alignment of its blocks' fields.
        let mut words = vec![0u64; n_bytes(out.len()).div_ceil(size_of::<u64>())];
        let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..n_bytes(out.len())];
        let place = self.content.tensor_data_offset.saturating_add(info.offset).saturating_add(n_bytes(start) as u64);
        self.file.read_exact_at(bytes, place).map_err(ModelError::io("read", &self.path))?;
        let blocks: Box<dyn QuantizedType> = info.ggml_dtype.from_data((&*bytes).into());
        match blocks.dequantize(out.len())? {
            CpuStorage::F32(values) => out.copy_from_slice(&values),
            _ => unreachable!("candle dequantizes to f32"),
        }
        Ok(())
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, ModelError> {
        let info = self.content.tensor_infos.get(name);
        info.ok_or_else(|| ModelError::malformed(&self.path, format!("it has no tensor `{name}`")))
    }
}

/// Returns the position after a tensor's last byte; `None` if its rows are no whole blocks, or it does not fit in 64 bits.
fn end_of(info: &TensorInfo, data_offset: u64) -> Option<u64> {
    let dims = info.shape.dims();
    let n_elements = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim))?;
    let block = info.ggml_dtype.block_size();
    dims.last().copied().unwrap_or(1).is_multiple_of(block).then_some(())?;
    let n_bytes = (n_elements / block).checked_mul(info.ggml_dtype.type_size())? as u64;
    data_offset.checked_add(info.offset)?.checked_add(n_bytes)
}
