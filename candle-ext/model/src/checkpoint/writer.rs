//! Export of Hugging Face checkpoints: shards, index, config.json and tokenizer files.

use std::{
    fs,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use candle_core::{DType, Tensor};
use candlewick_ops::WeightStorage;
use serde_json::{Map, Value, json};

use super::carried::CarriedShard;
use super::{
    CarriedTensors, DurableFile, HeaderEntry, StagingFolder,
    element::{self, disk_dtype},
    encode_header,
};
use crate::family::multimodal::NameLayout;
use crate::{Config, HubLayout, HubTensor, HubTensors, ModelError, ParamSpec, unit::copies_in_mtp_layers};

/// Default maximum shard size, in bytes: 5 GB, as in transformers.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

const GENERATION_CONFIG: &str = "generation_config.json";

/// Tokenizer and generation files, copied if a folder has them.
const COMPANIONS: &[&str] = &[
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// Files of a checkpoint besides the weights.
#[derive(Clone, Copy, Debug, Default)]
pub struct AuxiliaryFiles<'a> {
    /// Source folders of tokenizer files and generation_config.json.
    ///
    /// All tokenizer files come from the first folder with a tokenizer.json, generation_config.json from the first
    /// folder that has one.
    pub folders: &'a [&'a Path],
    /// Chat template that overrides the one of the source folders.
    pub chat_template: Option<&'a str>,
    /// Additional text files: name and content.
    pub files: &'a [(&'a str, &'a str)],
}

/// Tensors of the routed experts of a layer in an exported checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertTensors {
    /// A tensor per expert matrix, as on the Hub.
    #[default]
    Separate,
    /// 3-D tensors of all experts, as transformers 5 holds them in memory.
    Fused,
}

/// A checkpoint to export.
#[derive(Clone, Debug)]
pub struct CheckpointExport<'a> {
    /// Folder to write or replace.
    pub folder: &'a Path,
    /// Config of the model. Its dtype is set to `dtype`.
    pub config: &'a Config,
    /// Files of a checkpoint besides the weights.
    pub auxiliary_files: AuxiliaryFiles<'a>,
    /// Dtype of the weights on disk: F32, BF16 or F16.
    pub dtype: DType,
    /// Maximum shard size, in bytes; see [`DEFAULT_SHARD_BYTES`].
    pub shard_bytes: u64,
    /// Tensors of the routed experts.
    pub expert_tensors: ExpertTensors,
}

impl CheckpointExport<'_> {
    /// Returns the size of the weights on disk, in bytes.
    pub fn n_bytes<'p>(&self, params: impl IntoIterator<Item = &'p ParamSpec>) -> u64 {
        params.into_iter().map(|param| self.shard_tensor(None, param).n_bytes(self.dtype)).sum()
    }

    /// Writes `params`. `fetch` returns one value at a time. The folder appears atomically once all files are on disk.
    pub fn save<'p>(
        &self,
        params: impl IntoIterator<Item = &'p ParamSpec>,
        fetch: impl FnMut(&ParamSpec) -> candle_core::Result<Tensor>,
    ) -> Result<(), ModelError> {
        self.save_with(None, params, fetch)
    }

    /// Writes `params`, and the carried tensors of a multimodal model in files of their own, as [`CheckpointExport::save`]
    /// does.
    ///
    /// # Errors
    /// If a file cannot be written, or a multimodal model has no `carried` tensors.
    pub fn save_with<'p>(
        &self,
        carried: Option<&CarriedTensors>,
        params: impl IntoIterator<Item = &'p ParamSpec>,
        fetch: impl FnMut(&ParamSpec) -> candle_core::Result<Tensor>,
    ) -> Result<(), ModelError> {
        let staging = StagingFolder::begin(self.folder)?;
        CheckpointExport { folder: staging.folder(), ..self.clone() }.write(carried, params, fetch)?;
        staging.commit()
    }

    /// Writes the files of `params` and of the carried tensors into the folder, which must exist. `fetch` returns one value at a
    /// time.
    pub(crate) fn write<'p>(
        &self,
        carried: Option<&CarriedTensors>,
        params: impl IntoIterator<Item = &'p ParamSpec>,
        mut fetch: impl FnMut(&ParamSpec) -> candle_core::Result<Tensor>,
    ) -> Result<(), ModelError> {
        let layout = self.layout(carried)?;
        let tensors = params.into_iter().map(|param| self.shard_tensor(layout, param)).collect();
        let shards = split(tensors, self.dtype, self.shard_bytes);
        let carried = carried.map_or(Vec::new(), |carried| carried.shards(self.shard_bytes));
        let n_files = shards.len() + carried.len();
        let mut weight_map = Map::new();
        for (shard_idx, shard) in shards.iter().enumerate() {
            let file = shard_name(shard_idx, n_files);
            write_shard(&self.folder.join(&file), shard, self.dtype, &mut fetch)?;
            let names = shard.iter().flat_map(ShardTensor::stored_tensors).map(|(name, _)| name);
            weight_map.extend(names.map(|name| (name, Value::from(file.as_str()))));
        }
        for (shard_idx, shard) in carried.iter().enumerate() {
            let file = shard_name(shards.len() + shard_idx, n_files);
            shard.write(&self.folder.join(&file))?;
            weight_map.extend(shard.names().map(|name| (name.to_owned(), Value::from(file.as_str()))));
        }
        if n_files > 1 {
            let of_params: u64 = shards.iter().flatten().map(|tensor| tensor.n_bytes(self.dtype)).sum();
            let total = of_params + carried.iter().map(CarriedShard::n_bytes).sum::<u64>();
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            write_json(&self.folder.join("model.safetensors.index.json"), &index)?;
        }
        write_json(&self.folder.join("config.json"), &self.config.to_json_as(self.dtype))?;
        self.auxiliary_files.copy_into(self.folder)
    }

    /// Returns the layout of a multimodal model's names; `None` for a text model.
    fn layout(&self, carried: Option<&CarriedTensors>) -> Result<Option<&'static NameLayout>, ModelError> {
        let family = self.config.family();
        if carried.is_none() && family.is_multimodal() {
            let problem = format!(
                "a {} has tensors besides those of its text, and their source is not given; it cannot be written",
                family.title()
            );
            return Err(ModelError::mismatch(self.folder, problem));
        }
        Ok(carried.map(CarriedTensors::layout))
    }

    fn shard_tensor<'p>(&self, layout: Option<&'static NameLayout>, param: &'p ParamSpec) -> ShardTensor<'p> {
        let copies = copies_in_mtp_layers(self.config, &param.name);
        let names = layout.map_or(StoredNames::Own, StoredNames::Layout);
        ShardTensor { names, param, expert_tensors: self.expert_tensors, copies }
    }
}

/// Returns the dtype of a parameter on disk. Parameters that are stored in f32 stay in f32.
pub(crate) fn dtype_on_disk(param: &ParamSpec, dtype: DType) -> DType {
    if param.storage == WeightStorage::F32 { DType::F32 } else { dtype }
}

/// Splits tensors into shards of at most `limit` bytes, in order. A larger tensor gets a shard of its own.
fn split(tensors: Vec<ShardTensor>, dtype: DType, limit: u64) -> Vec<Vec<ShardTensor>> {
    let mut shards = vec![Vec::new()];
    let mut room = limit;
    for tensor in tensors {
        let n_bytes = tensor.n_bytes(dtype);
        if n_bytes > room && shards.last().is_some_and(|shard| !shard.is_empty()) {
            shards.push(Vec::new());
            room = limit;
        }
        room = room.saturating_sub(n_bytes);
        if let Some(shard) = shards.last_mut() {
            shard.push(tensor);
        }
    }
    shards
}

fn shard_name(shard_idx: usize, n_files: usize) -> String {
    match n_files {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{n_files:05}.safetensors", shard_idx + 1),
    }
}

/// Names of tensors in a file.
#[derive(Clone, Copy)]
enum StoredNames {
    /// Names of the parameters.
    Own,
    /// Names of a multimodal model.
    Layout(&'static NameLayout),
    /// Names of an adapter.
    Adapter(fn(&str) -> String),
}

/// A parameter and its tensors in the file.
pub(crate) struct ShardTensor<'a> {
    names: StoredNames,
    pub(crate) param: &'a ParamSpec,
    expert_tensors: ExpertTensors,
    /// Names of copies of the parameter.
    copies: Vec<String>,
}

impl<'a> ShardTensor<'a> {
    /// Creates the tensor of a LoRA factor, of which `stored_name` returns the name in the file.
    pub(crate) fn of_factor(stored_name: fn(&str) -> String, param: &'a ParamSpec) -> Self {
        let names = StoredNames::Adapter(stored_name);
        Self { names, param, expert_tensors: ExpertTensors::Separate, copies: Vec::new() }
    }

    fn stored_name(&self, name: &str) -> String {
        match self.names {
            StoredNames::Own => name.to_owned(),
            StoredNames::Layout(layout) => layout.stored_name(name),
            StoredNames::Adapter(stored_name) => stored_name(name),
        }
    }

    fn n_bytes(&self, dtype: DType) -> u64 {
        let n_bytes = self.param.numel() * dtype_on_disk(self.param, dtype).size_in_bytes();
        (n_bytes * (1 + self.copies.len())) as u64
    }

    /// Returns names and shapes of the tensors in the file that hold the parameter, in the order of its elements: those of the
    /// Hub, if they are several. Copies follow.
    fn stored_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let named = |name: &str, shape| (self.stored_name(name), shape);
        let shape = &self.param.shape;
        match self.param.hub.as_deref() {
            None => {
                let names = [&self.param.name].into_iter().chain(&self.copies);
                names.map(|name| named(name, shape.clone())).collect()
            }
            Some(HubTensors { fused_shape, .. }) if self.expert_tensors == ExpertTensors::Fused => {
                vec![named(&self.param.name, fused_shape.clone())]
            }
            Some(HubTensors { tensors, layout, .. }) => {
                let of_rows = |tensor: &HubTensor| named(&tensor.name, layout.shape(tensor.rows.len(), shape));
                tensors.iter().map(of_rows).collect()
            }
        }
    }

    /// Returns the header's entries of the parameter; `None` if weights cannot be stored in `dtype`.
    fn entries(&self, dtype: DType) -> Option<Vec<HeaderEntry>> {
        let dtype = disk_dtype(dtype_on_disk(self.param, dtype))?;
        let tensors = self.stored_tensors().into_iter();
        Some(tensors.map(|(name, shape)| HeaderEntry { name, dtype, shape }).collect())
    }

    /// Returns the elements in the order of the file.
    fn stored(&self, value: Tensor) -> candle_core::Result<Tensor> {
        self.param.hub.as_deref().map_or(HubLayout::Rows, |hub| hub.layout).write(value)
    }
}

/// Writes one safetensors file, a tensor at a time, and flushes it to disk.
pub(crate) fn write_shard(
    path: &Path,
    tensors: &[ShardTensor],
    dtype: DType,
    mut fetch: impl FnMut(&ParamSpec) -> candle_core::Result<Tensor>,
) -> Result<(), ModelError> {
    let io = |e| ModelError::io("write", path)(e);
    let mut out = BufWriter::with_capacity(1 << 20, DurableFile::create_new(path).map_err(io)?);
    let entries: Option<Vec<_>> = tensors.iter().map(|tensor| tensor.entries(dtype)).collect();
    let unsupported = || format!("weights cannot be saved as {dtype:?}; use F32, BF16 or F16");
    let entries = entries.ok_or_else(|| ModelError::mismatch(path, unsupported()))?;
    out.write_all(&encode_header(&[("format", "pt".to_owned())], entries.into_iter().flatten())).map_err(io)?;
    for tensor in tensors {
        let ShardTensor { param, .. } = tensor;
        let (value, name) = (fetch(param)?, &param.name);
        if value.dims() != param.shape {
            let problem = format!("tensor `{name}` has shape {:?}, want {:?}", value.dims(), param.shape);
            return Err(ModelError::mismatch(path, problem));
        }
        let stored = tensor.stored(value)?;
        for _ in 0..=tensor.copies.len() {
            write_elements(path, &mut out, param, &stored, dtype)?;
        }
    }
    out.into_inner().map_err(|e| io(e.into_error()))?.sync().map_err(io)
}

/// Writes the elements of a tensor.
fn write_elements(
    path: &Path,
    out: &mut impl Write,
    param: &ParamSpec,
    stored: &Tensor,
    dtype: DType,
) -> Result<(), ModelError> {
    let mut failed = None;
    let encoded = element::encode(stored, dtype_on_disk(param, dtype), |bytes| {
        out.write_all(bytes).map_err(|e| {
            let kind = e.kind();
            failed = Some(e);
            kind.into()
        })
    });
    match (failed, encoded) {
        (Some(e), _) => Err(ModelError::io("write", path)(e)),
        (None, Err(e)) => Err(ModelError::mismatch(path, format!("tensor `{}`: {e}", param.name))),
        (None, Ok(())) => Ok(()),
    }
}

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<(), ModelError> {
    fs::write(path, format!("{value:#}\n")).map_err(ModelError::io("write", path))
}

impl AuxiliaryFiles<'_> {
    /// Checks that no file to copy is a link that points outside of its folder.
    ///
    /// # Errors
    /// If one does.
    pub fn check(&self) -> Result<(), ModelError> {
        self.sources().try_for_each(|(_, source)| refuse_link_outside(&source))
    }

    /// Returns the source of a file. Tokenizer files come from one folder, so that no foreign chat template overrides
    /// the tokenizer's.
    fn source_of(&self, name: &str) -> Option<PathBuf> {
        let first_with = |name: &str| self.folders.iter().find(|folder| folder.join(name).is_file());
        let of_tokenizer = first_with("tokenizer.json").filter(|_| name != GENERATION_CONFIG);
        let folder = of_tokenizer.or_else(|| first_with(name))?;
        Some(folder.join(name)).filter(|path| path.is_file())
    }

    /// Copies the files into a folder, which must exist.
    pub fn copy_into(&self, folder: &Path) -> Result<(), ModelError> {
        for (name, source) in self.sources() {
            refuse_link_outside(&source)?;
            fs::copy(&source, folder.join(name)).map_err(ModelError::io("copy", &source))?;
        }
        let template = self.chat_template.map(|template| ("chat_template.jinja", template));
        for (name, text) in template.into_iter().chain(self.files.iter().copied()) {
            let path = folder.join(name);
            fs::write(&path, text).map_err(ModelError::io("write", &path))?;
        }
        Ok(())
    }

    /// Returns the name and source path of each file to copy.
    fn sources(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        let is_replaced = |name: &str| self.chat_template.is_some() && name.starts_with("chat_template");
        let names = COMPANIONS.iter().filter(move |name| !is_replaced(name));
        names.filter_map(|name| Some((*name, self.source_of(name)?)))
    }
}

/// Rejects a link that points outside of its folder. Links of the Hub cache into its `blobs` folder are allowed.
fn refuse_link_outside(file: &Path) -> Result<(), ModelError> {
    let real = |path: &Path| fs::canonicalize(path).map_err(ModelError::io("read", path));
    let target = real(file)?;
    let folder = real(file.parent().unwrap_or(Path::new(".")))?;
    let snapshots = folder.ancestors().find(|folder| folder.ends_with("snapshots"));
    let blobs = snapshots.map(|snapshots| snapshots.with_file_name("blobs"));
    if target.starts_with(&folder) || blobs.is_some_and(|blobs| target.starts_with(blobs)) {
        return Ok(());
    }
    let problem =
        format!("a link to {}, outside of its folder, is not exported; replace it by a copy", target.display());
    Err(ModelError::OutputPath { path: file.to_path_buf(), problem })
}
