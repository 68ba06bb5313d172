//! Model downloads: configuration, tokenizer and safetensors, without the repository's other files.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::local::{
    ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, INDEX, LocalModel, LocalModelKind, WEIGHTS, base_of, local_model, near,
    shorten,
};
use super::{Hub, HubError, Listing, RepoId, RepoKind};
use crate::files::{MAX_GENERATED_FILE_BYTES, read_regular_text_file, without_bom};

/// Files of a model to download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelFiles {
    /// Configuration, tokenizer and weights.
    All,
    /// Configuration and tokenizer only.
    WithoutWeights,
}

/// Local folders of a model and its adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelAndAdapter {
    /// Folder of the model.
    pub model: PathBuf,
    /// Folder of the adapter, if there is one.
    pub adapter: Option<PathBuf>,
    /// Log lines that name the selected folders, where the name was ambiguous.
    pub notes: Vec<String>,
}

/// Optional small files of a model.
const SMALL: [&str; 16] = [
    CONFIG,
    ADAPTER_CONFIG,
    "generation_config.json",
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
    INDEX,
];

impl Hub {
    /// Returns the folder of a model or adapter.
    ///
    /// A local folder takes precedence, see [`local_model`]. Otherwise downloads `part` of the Hub model with this
    /// id.
    pub fn model(&self, name: &str, revision: Option<&str>, part: ModelFiles) -> Result<PathBuf, HubError> {
        Ok(self.find_model(name, revision, part)?.folder)
    }

    /// Returns the folders of a model, or of an adapter with the base model that it names.
    pub fn model_and_adapter(&self, name: &str, revision: Option<&str>) -> Result<ModelAndAdapter, HubError> {
        let found = self.find_model(name, revision, ModelFiles::All)?;
        let note = found.note("model");
        let base = match found.contents {
            LocalModelKind::Model => return Ok(ModelAndAdapter { model: found.folder, adapter: None, notes: note }),
            LocalModelKind::Adapter { base } => base,
        };
        let Some(base) = base else {
            let problem = format!(
                "it is an adapter whose {ADAPTER_CONFIG} names no base_model_name_or_path; give the base as --model and \
                 the adapter as --adapter"
            );
            return Err(HubError::NotAModel { name: shorten(name), problem });
        };
        let model = self.base_model(&found.folder, &base)?;
        let base_note = format!("base model: {}, named by the adapter {}", model.display(), found.folder.display());
        let notes = note.into_iter().chain([base_note]).collect();
        Ok(ModelAndAdapter { model, adapter: Some(found.folder), notes })
    }

    /// Returns the folder of an adapter, and a log line if it is one of several exports.
    pub fn adapter(&self, name: &str) -> Result<(PathBuf, Option<String>), HubError> {
        let found = self.find_model(name, None, ModelFiles::All)?;
        let note = found.note("adapter").pop();
        match found.contents {
            LocalModelKind::Adapter { .. } => Ok((found.folder, note)),
            LocalModelKind::Model => {
                let problem = format!("it is no adapter: it has no {ADAPTER_CONFIG}; name a PEFT adapter folder");
                Err(HubError::NotAModel { name: shorten(name), problem })
            }
        }
    }

    /// Returns the folder of the base model that an adapter names. Fails if that is an adapter too.
    ///
    /// A relative path starts at the current folder, as in PEFT, or else at the adapter's folder.
    pub fn base_model(&self, adapter: &Path, base: &str) -> Result<PathBuf, HubError> {
        let beside = adapter.join(base);
        let name = match !Path::new(base).is_dir() && beside.is_dir() {
            true => beside.to_string_lossy().into_owned(),
            false => base.to_owned(),
        };
        let found = self
            .find_model(&name, None, ModelFiles::All)
            .map_err(|error| HubError::BaseModel { adapter: adapter.to_path_buf(), source: Box::new(error) })?;
        match found.contents {
            LocalModelKind::Model => Ok(found.folder),
            LocalModelKind::Adapter { .. } => {
                let problem = "it is an adapter itself, and one adapter on another is not supported".to_owned();
                Err(HubError::NotAModel { name: shorten(base), problem })
            }
        }
    }

    /// Finds a local model or adapter. Otherwise downloads `part` of it from the Hub.
    pub fn find_model(&self, name: &str, revision: Option<&str>, part: ModelFiles) -> Result<LocalModel, HubError> {
        if let Some(found) = local_model(name)? {
            return Ok(found);
        }
        if self.is_missing_path(name, revision) {
            let advice = match RepoId::parse(RepoKind::Model, name) {
                Ok(_) => "For the Hub's model of this id, give a revision, such as main",
                Err(_) => "Relative paths start at the current folder",
            };
            return Err(HubError::PathNotFound { name: shorten(name), near: near(name), advice });
        }
        let folder = self.download(name, revision, part).map_err(|error| match error {
            HubError::Unreachable { .. } | HubError::Offline { .. } | HubError::RepoNotFound { .. } => {
                HubError::NotFound { name: shorten(name), near: near(name), source: Box::new(error) }
            }
            error => error,
        })?;
        let is_adapter = folder.join(ADAPTER_CONFIG).is_file() && !folder.join(CONFIG).is_file();
        let contents =
            if is_adapter { LocalModelKind::Adapter { base: base_of(&folder) } } else { LocalModelKind::Model };
        Ok(LocalModel { folder, contents, choice: None })
    }

    /// Returns true if a name without a local folder means a path: it looks like one, or its first part is a folder.
    ///
    /// A revision, or a copy in the cache, makes `owner/name` an id even if a folder `owner` exists.
    fn is_missing_path(&self, name: &str, revision: Option<&str>) -> bool {
        let looks_like_a_path = name.starts_with(['.', '/', '~']) || name.ends_with('/') || name.contains('\\');
        let has_slashes =
            name.matches('/').count() > 1 && !name.contains("://") && RepoId::suggestion_for(name).is_none();
        let begins_here = || name.split_once('/').is_some_and(|(first, _)| Path::new(first).is_dir());
        let is_cached = || {
            let repo = RepoId::parse(RepoKind::Model, name).ok();
            repo.is_some_and(|repo| self.is_locked(&repo) || self.cache.commit_of(&repo, "main").is_some())
        };
        looks_like_a_path || has_slashes || (revision.is_none() && begins_here() && !is_cached())
    }

    fn download(&self, name: &str, revision: Option<&str>, part: ModelFiles) -> Result<PathBuf, HubError> {
        let repo = RepoId::parse(RepoKind::Model, name)?;
        let revision = revision.unwrap_or("main");
        self.with_listing(&repo, revision, |listing| {
            let folder = self.cache.snapshot(&repo, &listing.commit);
            self.fetch(listing, &small_files(listing, part)?)?;
            if part == ModelFiles::All {
                self.fetch(listing, &self.weights(listing, &folder)?)?;
            }
            Ok(folder)
        })
    }

    /// Returns the safetensors files: one, those in the index, or an adapter's.
    fn weights(&self, listing: &Listing, folder: &Path) -> Result<Vec<String>, HubError> {
        if listing.has(WEIGHTS) {
            return Ok(vec![WEIGHTS.into()]);
        }
        if listing.has(INDEX) {
            let shards = shards_of(&folder.join(INDEX)).map_err(|p| listing.unusable(p))?;
            if let Some(missing) = shards.iter().find(|shard| !listing.has(shard)) {
                return Err(listing.missing_file(missing));
            }
            return Ok(shards);
        }
        if listing.has(ADAPTER_WEIGHTS) {
            return Ok(vec![ADAPTER_WEIGHTS.into()]);
        }
        match listing.is_cached() {
            true => Err(listing.missing_file(WEIGHTS)),
            false => Err(listing.unusable(no_weights(&listing.paths()))),
        }
    }
}

fn small_files(listing: &Listing, part: ModelFiles) -> Result<Vec<String>, HubError> {
    // An index next to a single weight file lists shards that are not downloaded.
    let takes_index = part == ModelFiles::All && !listing.has(WEIGHTS);
    let is_wanted = |path: &&str| takes_index || **path != *INDEX;
    let found: Vec<String> =
        SMALL.iter().filter(|path| listing.has(path) && is_wanted(path)).map(ToString::to_string).collect();
    if part == ModelFiles::All && !listing.has(CONFIG) && !listing.has(ADAPTER_CONFIG) {
        return Err(match listing.is_cached() {
            true => listing.missing_file(CONFIG),
            false => listing.unusable(no_config(&listing.paths())),
        });
    }
    match found.is_empty() {
        true => Err(listing.missing_file(CONFIG)),
        false => Ok(found),
    }
}

/// Returns the distinct shards that an index names.
fn shards_of(index: &Path) -> Result<Vec<String>, String> {
    let text = read_regular_text_file(index, MAX_GENERATED_FILE_BYTES).map_err(|e| format!("{INDEX}: {e}"))?;
    let index: Value = serde_json::from_slice(without_bom(text.as_bytes())).map_err(|e| format!("{INDEX}: {e}"))?;
    let map = index.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| format!("{INDEX} has no weight_map"))?;
    let mut shards = map
        .values()
        .map(|shard| shard.as_str().map(str::to_owned))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| format!("{INDEX}: a shard in weight_map is not a text"))?;
    shards.sort();
    shards.dedup();
    Ok(shards)
}

fn no_weights(paths: &[String]) -> String {
    let others = |end: &str| paths.iter().filter(|path| path.ends_with(end)).count();
    match (others(".bin"), others(".gguf")) {
        (0, 0) => format!("it holds neither {WEIGHTS} nor {INDEX}"),
        (n, 0) => format!("its weights are {n} pickled .bin files; only safetensors are read"),
        (_, n) => format!("its weights are {n} .gguf files; only safetensors are read"),
    }
}

fn no_config(paths: &[String]) -> String {
    let near = match paths.iter().any(|path| path.ends_with(".gguf")) {
        true => "; it holds .gguf files, name the repository they were made from",
        false => "",
    };
    format!("it has no {CONFIG}, so it is no transformers model{near}")
}
