//! Parameters of a GGUF file, dequantized.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candlewick_text::files::open_regular_file;

use super::architecture::Architecture;
use super::tensor::{Arrangement, GgufTensor, Source, tensors};
use crate::{Config, Model, ModelError, ParamSpec, ParamValues};

/// A GGUF file, read as the parameters of a model.
pub struct GgufModel {
    path: PathBuf,
    content: Content,
    file: RefCell<BufReader<File>>,
    /// Tensors of each parameter: name and arrangement.
    tensors: HashMap<String, Vec<(String, Arrangement)>>,
}

impl GgufModel {
    /// Opens a file that holds the model of `config`.
    pub fn open(path: &Path, config: &Config) -> Result<Self, ModelError> {
        let mut file = BufReader::new(open_regular_file(path).map_err(ModelError::io("open", path))?);
        let content = Content::read(&mut file)?;
        let model = Model::new(config.clone(), None)?;
        let mut by_param: HashMap<String, Vec<(String, Arrangement)>> = HashMap::new();
        for GgufTensor { name, source, .. } in tensors(Architecture::of(config)?, config, model.base_params())? {
            if let Source::Param { param, arrangement } = source {
                by_param.entry(param.name.clone()).or_default().push((name, arrangement));
            }
        }
        Ok(Self { path: path.to_path_buf(), content, file: RefCell::new(file), tensors: by_param })
    }

    /// Returns the type of a parameter's tensors, which have one type.
    pub(super) fn dtype_of(&self, param: &ParamSpec) -> Result<GgmlDType, ModelError> {
        let (name, _) = &self.parts(param)?[0];
        let info = self.content.tensor_infos.get(name).map(|info| info.ggml_dtype);
        info.ok_or_else(|| ModelError::mismatch(&self.path, format!("it has no tensor {name}")))
    }

    fn parts(&self, param: &ParamSpec) -> Result<&[(String, Arrangement)], ModelError> {
        let parts = self.tensors.get(&param.name).map(Vec::as_slice);
        parts.ok_or_else(|| ModelError::mismatch(&self.path, format!("it has no tensor of {}", param.name)))
    }
}

impl ParamValues for GgufModel {
    fn value(&self, param: &ParamSpec) -> Result<Tensor, ModelError> {
        let mut parts = Vec::new();
        for (name, arrangement) in self.parts(param)? {
            let tensor = self.content.tensor(&mut *self.file.borrow_mut(), name, &Device::Cpu)?;
            parts.push(arrangement.inverse(&tensor.dequantize(&Device::Cpu)?)?);
        }
        let whole = if parts.len() == 1 { parts.swap_remove(0) } else { Tensor::cat(&parts, 1)? };
        Ok(whole.reshape(param.shape.as_slice())?)
    }

    fn dtype(&self) -> Option<DType> {
        None
    }
}
