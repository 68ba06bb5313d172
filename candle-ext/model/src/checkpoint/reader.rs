//! Memory-mapped checkpoints: lookup of tensors and conversion to a dtype.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use candlewick_text::files::is_present;
use half::{bf16, f16};
use memmap2::Mmap;
#[cfg(target_os = "linux")]
use memmap2::UncheckedAdvice;

use super::{
    element::{self, Element},
    header::{self, StoredTensor},
    index,
};
use crate::config::json::read_bytes;
use crate::family::multimodal::{Multimodal, NameLayout};
use crate::unit::{EMBEDDING, FINAL_NORM, LM_HEAD};
use crate::{Config, HubLayout, HubTensor, HubTensors, ModelError, ParamSpec};

/// The memory-mapped safetensors files of a folder.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    files: Vec<MappedShard>,
    /// File and entry of each tensor, by name.
    tensors: BTreeMap<String, (usize, StoredTensor)>,
    /// Index of the file whose tensors replace those of the others.
    replacement: Option<usize>,
    /// Names of a multimodal model's tensors on disk; `None` for a text model.
    layout: Option<&'static NameLayout>,
    /// File and entry of each carried tensor of a multimodal model, by its name on disk.
    carried: BTreeMap<String, (usize, StoredTensor)>,
}

/// A tensor as it is on disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskTensor<'a> {
    pub(super) name: &'a str,
    pub(super) dtype: safetensors::Dtype,
    pub(super) shape: &'a [usize],
    pub(super) bytes: &'a [u8],
}

#[derive(Debug)]
pub(super) struct MappedShard {
    path: PathBuf,
    pub(super) bytes: Mmap,
}

impl MappedShard {
    /// Removes the pages of bytes that were read from the process's memory. The page cache keeps them.
    pub(super) fn release(&self, bytes: &Range<usize>) {
        #[cfg(target_os = "linux")]
        // SAFETY: the map is shared and read-only, so a later access reads the same bytes from the file again.
        let released =
            unsafe { self.bytes.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
        // The advice only saves memory.
        #[cfg(target_os = "linux")]
        drop(released);
    }
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards of `model.safetensors.index.json`, in a model folder.
    pub fn open(folder: &Path) -> Result<Self, ModelError> {
        let (single, index) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
        match (is_present(&single), is_present(&index)) {
            (true, _) => Self::open_file(&single),
            (false, true) => Self::open_shards(folder, &index),
            (false, false) => Err(ModelError::mismatch(folder, what_is_there(folder))),
        }
    }

    /// Opens the weights of a model with this config. Tensors of a multimodal model's text have the names of a text model.
    pub fn of_model(folder: &Path, config: &Config) -> Result<Self, ModelError> {
        let checkpoint = Self::open(folder)?;
        Ok(match config.family().spec().multimodal {
            Some(multimodal) => checkpoint.with_layout_of(multimodal),
            None => checkpoint,
        })
    }

    /// Opens config and weights of a model folder, as [`Checkpoint::of_model`].
    pub fn open_with_config(folder: &Path) -> Result<(Config, Self), ModelError> {
        let config = Config::read(folder)?;
        let checkpoint = Self::of_model(folder, &config)?;
        Ok((config, checkpoint))
    }

    /// Renames the tensors of the text, and sets the carried ones apart.
    fn with_layout_of(mut self, multimodal: &Multimodal) -> Self {
        let has_norm = |layout: &&NameLayout| self.tensors.contains_key(&layout.stored_name(FINAL_NORM));
        let Some(layout) = multimodal.layouts.iter().find(has_norm) else { return self };
        let (carried, text): (BTreeMap<_, _>, BTreeMap<_, _>) =
            self.tensors.into_iter().partition(|(name, _)| layout.carries(name));
        let own_name = |name: String| layout.own_name(&name).unwrap_or(name);
        self.tensors = text.into_iter().map(|(name, place)| (own_name(name), place)).collect();
        Self { layout: Some(layout), carried, ..self }
    }

    /// Opens one safetensors file.
    pub fn open_file(path: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self::empty(path.parent().unwrap_or(Path::new(".")));
        for entry in checkpoint.map(path.to_path_buf())? {
            checkpoint.tensors.insert(entry.name.clone(), (0, entry));
        }
        Ok(checkpoint)
    }

    fn open_shards(folder: &Path, index_path: &Path) -> Result<Self, ModelError> {
        let bytes = read_bytes(index_path)?;
        let weight_map = index::parse(index_path, &bytes)?;
        let mut checkpoint = Self::empty(folder);
        for file in weight_map.values().collect::<BTreeSet<_>>() {
            let path = folder.join(file);
            if !path.is_file() {
                let problem = format!("it names the shard `{file}`, which is not in the folder; download it again");
                return Err(ModelError::malformed(index_path, problem));
            }
            let file_idx = checkpoint.files.len();
            for entry in checkpoint.map(path)? {
                if weight_map.get(&entry.name) == Some(file) {
                    checkpoint.tensors.insert(entry.name.clone(), (file_idx, entry));
                }
            }
        }
        match weight_map.iter().find(|(name, _)| !checkpoint.tensors.contains_key(*name)) {
            Some((name, file)) => {
                Err(ModelError::malformed(index_path, format!("`{name}` should be in {file}, but is not")))
            }
            None => Ok(checkpoint),
        }
    }

    fn empty(folder: &Path) -> Self {
        let (files, tensors, carried) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Self { folder: folder.to_path_buf(), files, tensors, replacement: None, layout: None, carried }
    }

    fn map(&mut self, path: PathBuf) -> Result<Vec<StoredTensor>, ModelError> {
        // Opening a pipe would wait for its writer.
        if std::fs::metadata(&path).is_ok_and(|file| !file.is_file()) {
            return Err(ModelError::malformed(&path, "it is no regular file"));
        }
        let file = File::open(&path).map_err(ModelError::io("open", &path))?;
        // SAFETY: the map is read-only and private to this process. If another process truncates the file, this process
        // gets SIGBUS, as with every memory-mapped file; checkpoint writes never truncate in place.
        let bytes = unsafe { Mmap::map(&file) }.map_err(ModelError::io("map", &path))?;
        let entries = header::parse(&path, &bytes)?;
        self.files.push(MappedShard { path, bytes });
        Ok(entries)
    }

    /// Renames all tensors.
    pub(crate) fn rename(mut self, new_name: impl Fn(&str) -> String) -> Self {
        self.tensors = self.tensors.into_iter().map(|(name, place)| (new_name(&name), place)).collect();
        self
    }

    /// Replaces tensors by those of the same names in a checkpoint of one file. `old` are removed first.
    pub(crate) fn replace(&mut self, old: &[&str], new: &Checkpoint, names: &[&str]) -> Result<(), ModelError> {
        let file_idx = self.files.len();
        self.map(new.files[0].path.clone())?;
        self.tensors.retain(|name, _| !old.contains(&name.as_str()));
        let entry = |name: &str| new.tensors.get(name).map(|(_, entry)| (name.to_owned(), (file_idx, entry.clone())));
        self.tensors.extend(names.iter().filter_map(|name| entry(name)));
        self.replacement = Some(file_idx);
        Ok(())
    }

    /// Returns the shape of a tensor.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|(_, entry)| entry.shape.as_slice())
    }

    /// Returns the checkpoint's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns all tensors, sorted by name.
    pub(super) fn contents(&self) -> impl Iterator<Item = DiskTensor<'_>> {
        self.bytes_of(&self.tensors)
    }

    /// Returns the carried tensors of a multimodal model, sorted by name.
    pub(super) fn carried(&self) -> impl Iterator<Item = DiskTensor<'_>> {
        self.bytes_of(&self.carried)
    }

    fn bytes_of<'t>(
        &'t self,
        tensors: &'t BTreeMap<String, (usize, StoredTensor)>,
    ) -> impl Iterator<Item = DiskTensor<'t>> {
        tensors.iter().map(|(name, (file_idx, entry))| {
            let bytes = &self.files[*file_idx].bytes[entry.bytes.clone()];
            DiskTensor { name, dtype: entry.dtype, shape: &entry.shape, bytes }
        })
    }

    /// Returns the layout of a multimodal model's names; `None` for a text model.
    pub(super) fn layout(&self) -> Option<&'static NameLayout> {
        self.layout
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the dtype of the first tensor (by name) with a supported floating-point dtype. Replaced tensors do not count.
    pub fn float_dtype(&self) -> Option<DType> {
        let known = [DType::F32, DType::BF16, DType::F16];
        let of =
            |entry: &StoredTensor| known.into_iter().find(|dtype| element::disk_dtype(*dtype) == Some(entry.dtype));
        let own = self.tensors.values().filter(|(file_idx, _)| Some(*file_idx) != self.replacement);
        own.map(|(_, entry)| entry).find_map(of)
    }

    /// Returns the number of bytes of all tensors.
    pub fn n_bytes(&self) -> usize {
        self.tensors.values().map(|(_, entry)| entry.bytes.len()).sum()
    }

    /// Checks that the checkpoint contains every one of `params` with its shape and a supported dtype. Tied embeddings must
    /// be equal if both are stored: only then are values read.
    ///
    /// Returns warnings about unused tensors.
    pub fn check<'a>(&self, params: impl IntoIterator<Item = &'a ParamSpec>) -> Result<Vec<String>, ModelError> {
        let unexpected = self.unexpected(params)?;
        if unexpected.contains(&LM_HEAD) {
            self.check_tied()?;
        }
        Ok(notes(unexpected))
    }

    /// Checks that the checkpoint of an adapter contains every one of `factors` with its shape and a supported dtype, and no
    /// other tensor except `others`.
    pub(crate) fn check_adapter<'a>(
        &self,
        factors: impl IntoIterator<Item = &'a ParamSpec>,
        others: &[&str],
    ) -> Result<(), ModelError> {
        let mut unexpected = self.unexpected(factors)?;
        unexpected.retain(|name| !others.contains(name));
        if unexpected.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "{} no LoRA factor of this model: {}; without it the adapter computes another function. Merge the adapter with \
             PEFT (`merge_and_unload`), and use the merged model",
            count(unexpected.len(), "tensor"),
            first_names(&unexpected)
        );
        Err(ModelError::mismatch(&self.folder, problem))
    }

    /// Returns the names of the tensors that hold none of `params`.
    ///
    /// # Errors
    /// If one of `params` is missing, or has another shape or an unsupported dtype.
    fn unexpected<'a>(&self, params: impl IntoIterator<Item = &'a ParamSpec>) -> Result<Vec<&str>, ModelError> {
        let (mut missing, mut expected) = (Vec::new(), BTreeSet::new());
        for param in params {
            for (name, shape, _) in self.sources(param) {
                match (self.tensors.contains_key(name), expected.insert(name)) {
                    (true, true) => self.entry(name, &shape).map(drop)?,
                    (false, _) => missing.push(name),
                    // The output layer is stored, but it is not tied.
                    (true, false) => missing.push(EMBEDDING),
                }
            }
        }
        match missing.is_empty() {
            true => Ok(self.names().filter(|name| !expected.contains(name)).collect()),
            false => Err(ModelError::mismatch(&self.folder, self.lacking(&missing))),
        }
    }

    /// Returns true if the checkpoint contains the parameter.
    pub fn has(&self, param: &ParamSpec) -> bool {
        self.sources(param).iter().all(|(name, ..)| self.tensors.contains_key(*name))
    }

    fn lacking(&self, missing: &[&str]) -> String {
        let hint = match missing {
            ["lm_head.weight"] => "; if the output layer is the embedding, set tie_word_embeddings to true",
            [first, ..] if crate::AdapterSpec::owns(first) => {
                "; the adapter must belong to this base model, and adapter_config.json to adapter_model.safetensors"
            }
            _ => "; config.json and the weights must belong together",
        };
        format!("{} missing: {}{hint}", count(missing.len(), "tensor"), first_names(missing))
    }

    pub(super) fn entry(&self, name: &str, shape: &[usize]) -> Result<(&MappedShard, &StoredTensor), ModelError> {
        let Some((file_idx, entry)) = self.tensors.get(name) else {
            return Err(ModelError::mismatch(&self.folder, format!("tensor `{name}` is missing")));
        };
        let file = &self.files[*file_idx];
        let wrong = |problem: String| ModelError::mismatch(&file.path, format!("tensor `{name}` {problem}"));
        if entry.shape != shape {
            let source = if crate::AdapterSpec::owns(name) { "adapter_config.json" } else { "config.json" };
            let hint = shape_hint(name, &entry.shape, shape);
            return Err(wrong(format!("has shape {:?}, but {source} makes it {shape:?}{hint}", entry.shape)));
        }
        let known = [DType::F32, DType::BF16, DType::F16].map(element::disk_dtype);
        match known.contains(&Some(entry.dtype)) {
            true => Ok((file, entry)),
            false => Err(wrong(format!("is of type {:?}; supported: F32, BF16, F16", entry.dtype))),
        }
    }

    /// Returns name, shape and elements of the tensors that hold a parameter: one of its own name, or those of the Hub.
    fn sources<'p>(&self, param: &'p ParamSpec) -> Vec<(&'p str, Vec<usize>, Range<usize>)> {
        let own = |shape: &[usize]| vec![(self.own_name(param), shape.to_vec(), 0..param.numel())];
        let Some(HubTensors { fused_shape, tensors, layout }) = param.hub.as_deref() else { return own(&param.shape) };
        if self.is_fused(param) {
            return own(fused_shape);
        }
        let width: usize = param.shape[1..].iter().product();
        let source = |HubTensor { name, rows }: &'p HubTensor| {
            (name.as_str(), layout.shape(rows.len(), &param.shape), rows.start * width..rows.end * width)
        };
        tensors.iter().map(source).collect()
    }

    /// Returns true if a tensor of the parameter's own name holds it as a whole.
    fn is_fused(&self, param: &ParamSpec) -> bool {
        self.tensors.contains_key(&param.name)
    }

    /// Reads a parameter as f32, bf16 or f16, from one tensor or from the several of a Hub checkpoint.
    pub fn param(&self, param: &ParamSpec, dtype: DType, device: &Device) -> Result<Tensor, ModelError> {
        match dtype {
            DType::BF16 => self.typed_param::<bf16>(param, device),
            DType::F16 => self.typed_param::<f16>(param, device),
            _ => Ok(self.typed_param::<f32>(param, device)?.to_dtype(dtype)?),
        }
    }

    fn typed_param<T: Element + candle_core::WithDType>(
        &self,
        param: &ParamSpec,
        device: &Device,
    ) -> Result<Tensor, ModelError> {
        let sources = self.sources(param);
        sources.iter().try_for_each(|(name, shape, _)| self.entry(name, shape).map(drop))?;
        let mut values = vec![T::from_f32(0.0); param.numel()];
        for (name, shape, elements) in sources {
            self.read_into(name, &shape, &mut values[elements])?;
        }
        if param.is_buffer() && values.iter().any(|value| value.to_f32().is_nan()) {
            let problem =
                format!("tensor `{}` has NaN, with which a router selects any expert; download it again", param.name);
            return Err(ModelError::mismatch(&self.folder, problem));
        }
        let stored = Tensor::from_vec(values, param.shape.as_slice(), device)?;
        let layout = param.hub.as_deref().filter(|_| !self.is_fused(param)).map_or(HubLayout::Rows, |hub| hub.layout);
        Ok(layout.read(stored, &param.shape)?)
    }

    /// Reads tensor `name` of the given shape into `out`, converting its dtype.
    ///
    /// The mapped pages leave the process's memory, so that a model is not in it twice while it is loaded.
    pub fn read_into<T: Element>(&self, name: &str, shape: &[usize], out: &mut [T]) -> Result<(), ModelError> {
        let (file, entry) = self.entry(name, shape)?;
        assert_eq!(out.len(), shape.iter().product::<usize>(), "the buffer of {name} has its shape");
        element::decode(entry.dtype, &file.bytes[entry.bytes.clone()], out);
        file.release(&entry.bytes);
        Ok(())
    }

    /// Reads a tensor of the given shape as f32, bf16 or f16.
    pub fn tensor(&self, name: &str, shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor, ModelError> {
        match dtype {
            DType::BF16 => self.typed_tensor::<bf16>(name, shape, device),
            DType::F16 => self.typed_tensor::<f16>(name, shape, device),
            _ => Ok(self.typed_tensor::<f32>(name, shape, device)?.to_dtype(dtype)?),
        }
    }

    fn typed_tensor<T: Element + candle_core::WithDType>(
        &self,
        name: &str,
        shape: &[usize],
        device: &Device,
    ) -> Result<Tensor, ModelError> {
        self.entry(name, shape)?;
        let mut values = vec![T::from_f32(0.0); shape.iter().product()];
        self.read_into(name, shape, &mut values)?;
        Ok(Tensor::from_vec(values, shape, device)?)
    }
}

/// Returns the usual reason for a wrong shape of a 3-D parameter's factor whose ranks are right, or an empty string.
fn shape_hint(name: &str, found: &[usize], expected: &[usize]) -> &'static str {
    let is_parameter = name.contains(".experts.lora_") || name.contains(".experts.base_layer.lora_");
    let of_ranks = usize::from(name.contains(".lora_B"));
    if is_parameter && found.get(of_ranks) == expected.get(of_ranks) {
        "; PEFT before 0.19.1 exchanged inputs and outputs of experts"
    } else {
        ""
    }
}

/// Describes the contents of a folder without safetensors, and the remedy.
fn what_is_there(folder: &Path) -> String {
    if !folder.is_dir() {
        return "there is no such folder".to_string();
    }
    let wanted = "neither model.safetensors nor model.safetensors.index.json is in this folder";
    match folder.join("pytorch_model.bin").exists() || folder.join("pytorch_model.bin.index.json").exists() {
        true => format!("{wanted}; it has pytorch_model.bin: load it with transformers and save it again"),
        false => wanted.to_string(),
    }
}

/// Ends of the names of tensors that no model needs: angles of RoPE that are computed, and copies of embedding and output
/// layer in MTP layers.
const UNUSED: [&str; 3] = [".rotary_emb.inv_freq", ".shared_head.head.weight", ".embed_tokens.weight"];

/// Returns a warning about unused tensors of a base model. A copy of a tied embedding is harmless.
fn notes(unexpected: Vec<&str>) -> Vec<String> {
    let is_harmless =
        |name: &str| name == LM_HEAD || (name != EMBEDDING && UNUSED.iter().any(|end| name.ends_with(end)));
    let unknown: Vec<&str> = unexpected.into_iter().filter(|name| !is_harmless(name)).collect();
    match unknown.is_empty() {
        true => Vec::new(),
        false => vec![format!("{} not used: {}", count(unknown.len(), "tensor"), first_names(&unknown))],
    }
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { " is" } else { "s are" })
}

/// Returns the first few names, followed by "..." if there are more.
pub(crate) fn first_names(names: &[&str]) -> String {
    let shown = names[..names.len().min(5)].join(", ");
    if names.len() > 5 { format!("{shown}, ...") } else { shown }
}
