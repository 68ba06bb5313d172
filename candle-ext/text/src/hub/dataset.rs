//! Data sets: local if the path exists, otherwise downloaded from the Hub.

use std::path::Path;

use super::{Hub, HubError, Listing, RepoId, RepoKind};
use crate::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use crate::format::known_split_mapping;
use crate::source::{
    DatasetCard, DatasetSpec, FileFormat, FileSelector, LocalRequest, ReadOptions, RowSource, SourceFiles,
    SourceWithFiles, SplitQuery, SplitSlice, data_files, join, near_sibling, open_files, open_local, patterns_of,
    select_split_files, slice,
};
use crate::suggestion::nearest;

/// Request for the rows of a data set.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetRequest {
    /// Name, splits and row ranges.
    pub spec: DatasetSpec,
    /// Branch, tag or commit. `None` for `main`.
    pub revision: Option<String>,
    /// Configuration (subset).
    pub config: Option<String>,
    /// Split that is used if none is given: `train` or `eval`.
    pub default_split: String,
    /// Names of splits in this data set, such as `train` to `train_sft`.
    pub split_mapping: Vec<(String, String)>,
    /// Glob patterns of the files, each for one split or for all.
    pub data_files: Vec<(Option<String>, String)>,
    /// Rule that selects the files of a split in a local folder.
    pub files: FileSelector,
    /// Options for reading the files.
    pub read: ReadOptions,
}

impl DatasetRequest {
    /// Parses `name`, `name:split` or `name:split[10:20]`.
    pub fn parse(spec: &str, default_split: &str) -> Result<Self, HubError> {
        Ok(Self {
            spec: DatasetSpec::parse(spec, |path| Path::new(path).exists())?,
            revision: None,
            config: None,
            default_split: default_split.to_owned(),
            split_mapping: Vec::new(),
            data_files: Vec::new(),
            files: FileSelector::default(),
            read: ReadOptions::default(),
        })
    }

    /// Returns the repository and the revision, unless the data set is local.
    pub fn hub_repo(&self) -> Option<(RepoId, String)> {
        let repo = RepoId::parse(RepoKind::Dataset, &self.spec.name).ok().filter(|_| !self.is_local())?;
        Some((repo, self.revision.as_deref().unwrap_or("main").to_owned()))
    }

    /// Returns the requested splits, under the names that the data set has for them.
    fn parts(&self) -> Vec<SplitSlice> {
        let default = SplitSlice { split: self.default_split.clone(), slice: Default::default() };
        let mut parts = match self.spec.parts.is_empty() {
            true => vec![default],
            false => self.spec.parts.clone(),
        };
        for part in &mut parts {
            part.split = self.mapped(&part.split);
        }
        parts
    }

    fn mapped(&self, split: &str) -> String {
        let own = self.split_mapping.iter().map(|(from, to)| (from.as_str(), to.as_str()));
        let known = known_split_mapping(&self.spec.name).iter().copied();
        let mapping: Vec<_> = match self.split_mapping.is_empty() {
            true => known.collect(),
            false => own.collect(),
        };
        let to = mapping.iter().find(|(from, _)| *from == split).map(|(_, to)| *to);
        to.unwrap_or(split).to_owned()
    }

    fn local(&self) -> LocalRequest {
        let written = !self.spec.parts.is_empty();
        LocalRequest {
            path: self.spec.name.clone(),
            config: self.config.clone(),
            parts: if written { self.parts() } else { Vec::new() },
            default_split: self.mapped(&self.default_split),
            data_files: self.data_files.clone(),
            is_pattern_list: self.is_loader(),
            files: self.files.clone(),
            read: self.read.clone(),
        }
    }

    /// Returns true if the name is a loader of `datasets`, such as `json`, and `data_files` has the paths.
    fn is_loader(&self) -> bool {
        !self.data_files.is_empty() && ["json", "csv", "parquet", "text"].contains(&self.spec.name.as_str())
    }

    /// Returns true if the name is a local path, or is similar to one.
    fn is_local(&self) -> bool {
        let name = &self.spec.name;
        self.is_loader()
            || Path::new(name).exists()
            || name.starts_with(['.', '/', '~'])
            // A dangling link is meant as a file.
            || std::fs::symlink_metadata(name).is_ok()
            || name.contains(['*', '?', '[', '{'])
            || FileFormat::from_path(name).is_some()
            || name.matches('/').count() > 1
            || (name.contains('/') && near_sibling(Path::new(name)).is_some())
            || is_near_data_file(Path::new("."), name)
    }
}

impl Hub {
    /// Opens a data set. An existing path takes precedence over a Hub id.
    pub fn dataset(&self, request: &DatasetRequest) -> Result<Box<dyn RowSource>, HubError> {
        if request.is_local() {
            return Ok(open_local(&request.local())?);
        }
        let repo = RepoId::parse(RepoKind::Dataset, &request.spec.name)?;
        let revision = request.revision.as_deref().unwrap_or("main");
        let rows = self.with_listing(&repo, revision, |listing| self.rows(listing, request));
        rows.map_err(|error| match error {
            HubError::Unreachable { endpoint, reason } => {
                let name = &request.spec.name;
                let reason = format!("{reason} (and no file or folder here has the name {name})");
                HubError::Unreachable { endpoint, reason }
            }
            error => error,
        })
    }

    fn rows(&self, listing: &Listing, request: &DatasetRequest) -> Result<Box<dyn RowSource>, HubError> {
        let card = self.card(listing);
        let mut sources = Vec::new();
        for part in request.parts() {
            let patterns =
                patterns_of(&request.data_files, &part.split).map_err(|problem| listing.unusable(problem))?;
            let query = SplitQuery {
                split: &part.split,
                is_default: request.spec.parts.is_empty(),
                config: request.config.as_deref(),
                data_files: &patterns,
            };
            let selection = select_split_files(&listing.paths(), card.as_ref(), &query)
                .map_err(|problem| listing.unusable(problem))?;
            selection.warn_of_stand_in(&request.spec.name, &query);
            let inner = open_files(&self.fetch(listing, &selection.files)?, &request.read)?;
            let files = SourceFiles {
                place: Some(request.spec.name.clone()),
                paths: selection.files,
                n_available: data_files(listing.paths()).len(),
                split: Some(selection.split),
            };
            sources.push(slice(Box::new(SourceWithFiles { inner, files }), &part)?);
        }
        Ok(join(sources))
    }

    /// Returns the dataset card, if the repository has a readable README.
    fn card(&self, listing: &Listing) -> Option<DatasetCard> {
        let readme = "README.md".to_owned();
        let places = listing.has(&readme).then(|| self.fetch(listing, &[readme]))?;
        let place = places.inspect_err(|error| tracing::warn!("the README is ignored: {error}")).ok()?.remove(0);
        DatasetCard::parse(&read_regular_text_file(&place, MAX_CONFIG_FILE_BYTES).ok()?)
    }
}

/// Returns true if `name` has an extension and is very similar to a data file's name in `folder`.
fn is_near_data_file(folder: &Path, name: &str) -> bool {
    // A Hub id seldom has an extension: next to `gsm8k.jsonl`, `gsm8k` may still be a Hub id.
    if name.contains('/') || !name.contains('.') {
        return false;
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    let others = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    nearest(name, others.filter(|other| FileFormat::from_path(other).is_some())).is_some()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_data_file_is_not_taken_for_a_hub_id() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["id.jsonl", "gsm8k_test.jsonl", "notes.md"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        for (name, want) in [
            ("id.jsnl", true),
            ("gsm8k_tset.jsonl", true),
            ("gsm8k_test", false),
            ("notes.mdd", false),
            ("owner/id.jsnl", false),
        ] {
            assert_eq!(is_near_data_file(folder.path(), name), want, "{name}");
        }
    }
}
