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

use candlewick_text::tokenizer::GgufVocabulary;

use crate::{Family, MergedModel, ModelError, ParamSpec, TensorCallback};
use architecture::Architecture;
use tensor::{GgufTensor, Source};
use writer::{GgufWriter, TensorHeader};

pub use architecture::QuantizedModel;
pub use file_type::GgufType;
pub use reader::GgufModel;

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

    /// Writes the file, reads it back and compares every value. Two values of a parameter are in memory, in f32.
    ///
    /// Each tensor counts twice in `on_tensor`: written and compared.
    pub fn write(&self, model: &MergedModel, path: &Path, on_tensor: TensorCallback) -> Result<(), ModelError> {
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
        let mut writer = GgufWriter::create(path, &metadata, headers)?;
        let mut read: Option<(&ParamSpec, candle_core::Tensor)> = None;
        for (idx, tensor) in tensors.iter().enumerate() {
            on_tensor(idx + 1, 2 * tensors.len());
            let value = match &tensor.source {
                Source::Values(values) => candle_core::Tensor::new(values.as_slice(), &candle_core::Device::Cpu)?,
                Source::Param { param, arrangement } => {
                    // Gate and up projections of experts are one parameter.
                    let value = match read.take().filter(|(known, _)| known.name == param.name) {
                        Some((_, value)) => value,
                        None => model.value(param)?,
                    };
                    let arranged = arrangement.of(&value, &tensor.shape)?;
                    read = Some((param, value));
                    arranged
                }
            };
            writer.write(&value)?;
        }
        writer.finish()?;
        verify::verify(model, path, &|n_done| on_tensor(tensors.len() + n_done, 2 * tensors.len()))
    }
}
