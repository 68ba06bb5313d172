//! GGUF files of llama.cpp: architectures, tensor names, metadata and quantized types.
//!
//! Names and keys are those of llama.cpp's convert_hf_to_gguf.py, and the types of Q4_K_M those of its llama-quantize.
//! candle quantizes the values.

mod architecture;
mod file_type;
mod metadata;
mod reader;
mod tensor;
mod verify;
mod writer;

use std::path::Path;

use candle_core::Tensor;
use candlewick_text::tokenizer::GgufVocabulary;

use crate::checkpoint::with_elements;
use crate::{Family, MergedModel, ModelError, ParamSpec};
use architecture::Architecture;
use tensor::{GgufTensor, Source};
use verify::WrittenGguf;
use writer::{GgufWriter, TensorHeader};

pub use file_type::GgufType;
pub use reader::GgufFile;

/// A GGUF file to write.
#[derive(Clone, Copy, Debug)]
pub struct GgufExport<'a> {
    /// Name of the model, for `general.name`.
    pub name: &'a str,
    /// Tokenizer and chat templates.
    pub vocabulary: &'a GgufVocabulary,
    /// Types of the weights.
    pub file_type: GgufType,
}

impl GgufExport<'_> {
    /// Returns true if models of the family are exported.
    pub fn has_family(family: Family) -> bool {
        Architecture::of_family(family).is_some()
    }

    /// Checks that GGUF can express the model.
    ///
    /// # Errors
    /// If llama.cpp has no such architecture, or computes it in another way.
    pub fn check(model: &MergedModel) -> Result<(), ModelError> {
        Architecture::of(model.config()).map(drop)
    }

    /// Writes the file, reads it back, and compares every key and every value. One f32 value of a parameter is in memory.
    ///
    /// `on_bytes` gets the number of bytes that are done, and of all. Each counts twice: written and compared.
    pub fn write(&self, model: &MergedModel, path: &Path, on_bytes: &dyn Fn(usize, usize)) -> Result<(), ModelError> {
        let config = model.config();
        let architecture = Architecture::of(config)?;
        let tensors = tensor::tensors(architecture, config, model.params())?;
        let header = |tensor: &GgufTensor| TensorHeader {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            dtype: self.file_type.dtype_of(tensor, config),
        };
        let headers: Vec<TensorHeader> = tensors.iter().map(header).collect();
        let general = metadata::general(self.name, self.file_type, architecture);
        let metadata = [general, metadata::model(architecture, config), metadata::tokenizer(self.vocabulary)].concat();
        let n_all = 2 * headers.iter().map(TensorHeader::n_bytes).sum::<usize>();
        let mut n_done = 0;
        let mut add = |n_bytes: usize| {
            n_done += n_bytes;
            on_bytes(n_done, n_all);
        };
        let mut writer = GgufWriter::create(path, &metadata, headers.clone())?;
        for_each_value(model, &tensors, |_, values| writer.write(values, &mut add))?;
        writer.finish()?;
        let written = WrittenGguf::open(path, &metadata, &headers)?;
        for_each_value(model, &tensors, |idx, values| written.verify(&headers[idx], values, &mut add))
    }
}

/// Calls `take` with the index and the values of each tensor, in the order of the file.
fn for_each_value(
    model: &MergedModel,
    tensors: &[GgufTensor],
    mut take: impl FnMut(usize, &[f32]) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let mut read: Option<(&ParamSpec, Tensor)> = None;
    for (idx, tensor) in tensors.iter().enumerate() {
        let (param, arrangement) = match &tensor.source {
            Source::Values(values) => {
                take(idx, values)?;
                continue;
            }
            Source::Param { param, arrangement } => (*param, arrangement),
        };
        // Gate and up projections of experts are one parameter. The value before is freed first.
        let value = match read.take().filter(|(known, _)| known.name == param.name) {
            Some((_, value)) => value,
            None => model.value(param)?,
        };
        with_elements(&arrangement.of(&value, &tensor.shape)?, |values| take(idx, values))??;
        read = Some((param, value));
    }
    Ok(())
}
