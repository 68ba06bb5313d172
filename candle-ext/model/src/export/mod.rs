//! Export of a model: base weights with the adapter merged in, as a Hugging Face folder or for other formats.

mod merge;
mod merged_model;
mod safetensors;

pub use merge::AdapterMerge;
pub use merged_model::{MergedModel, ParamValues};
pub use safetensors::{MergeReport, SafetensorsExport};
