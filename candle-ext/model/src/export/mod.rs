//! Export of a model: base weights with the adapter merged in, as a Hugging Face folder or for other formats.

mod merged_model;
mod safetensors;

/// Callback after each tensor of an export, with the number of finished tensors and of all.
pub type TensorCallback<'a> = &'a dyn Fn(usize, usize);

pub use merged_model::{MergedModel, ParamValues};
pub use safetensors::{MergeReport, SafetensorsExport};
