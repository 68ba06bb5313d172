//! A model's folder: configuration, tokenizer and safetensors, nothing else of the repository.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Hub, HubError, Listing, RepoId, RepoKind};

/// How much of a model is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelPart {
    /// With its weights.
    Whole,
    /// Configuration and tokenizer only.
    WithoutWeights,
}

const CONFIG: &str = "config.json";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// Taken where they are there.
const SMALL: [&str; 13] = [
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
    INDEX,
];

impl Hub {
    /// The folder of a model: `name` itself if it is a folder here, else the Hub's model of that
    /// id, downloaded as far as `part` says.
    pub fn model(&self, name: &str, revision: Option<&str>, part: ModelPart) -> Result<PathBuf, HubError> {
        if Path::new(name).is_dir() {
            return Ok(PathBuf::from(name));
        }
        let repo = RepoId::parse(RepoKind::Model, name)?;
        let revision = revision.unwrap_or("main");
        self.with_listing(&repo, revision, |listing| {
            let folder = self.cache.snapshot(&repo, &listing.commit);
            self.fetch(listing, &small_files(listing, part)?)?;
            if part == ModelPart::Whole {
                self.fetch(listing, &self.weights(listing, &folder)?)?;
            }
            Ok(folder)
        })
    }

    /// The safetensors files: one, or those that the index names, or an adapter's.
    fn weights(&self, listing: &Listing, folder: &Path) -> Result<Vec<String>, HubError> {
        if listing.has(WEIGHTS) {
            return Ok(vec![WEIGHTS.into()]);
        }
        if listing.has(INDEX) {
            let shards = shards_of(&folder.join(INDEX)).map_err(|p| listing.unfit(p))?;
            if let Some(missing) = shards.iter().find(|shard| !listing.has(shard)) {
                return Err(listing.lacks(missing));
            }
            return Ok(shards);
        }
        if listing.has(ADAPTER_WEIGHTS) {
            return Ok(vec![ADAPTER_WEIGHTS.into()]);
        }
        match listing.is_cached {
            true => Err(listing.lacks(WEIGHTS)),
            false => Err(listing.unfit(no_weights(&listing.paths()))),
        }
    }
}

fn small_files(listing: &Listing, part: ModelPart) -> Result<Vec<String>, HubError> {
    // An index beside a whole file would promise shards that are not fetched.
    let takes_index = part == ModelPart::Whole && !listing.has(WEIGHTS);
    let is_wanted = |path: &&str| takes_index || **path != *INDEX;
    let found: Vec<String> =
        SMALL.iter().filter(|path| listing.has(path) && is_wanted(path)).map(ToString::to_string).collect();
    if part == ModelPart::Whole && !listing.has(CONFIG) && !listing.has(ADAPTER_CONFIG) {
        return Err(match listing.is_cached {
            true => listing.lacks(CONFIG),
            false => listing.unfit(no_config(&listing.paths())),
        });
    }
    match found.is_empty() {
        true => Err(listing.lacks(CONFIG)),
        false => Ok(found),
    }
}

/// The shards that an index names, each once.
fn shards_of(index: &Path) -> Result<Vec<String>, String> {
    let text = std::fs::read_to_string(index).map_err(|e| format!("{INDEX}: {e}"))?;
    let index: Value = serde_json::from_str(&text).map_err(|e| format!("{INDEX}: {e}"))?;
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
