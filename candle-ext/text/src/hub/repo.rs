//! Repository ids: `owner/name`, or `name` for the oldest ones.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a Hub repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RepoKind {
    /// Model repository.
    Model,
    /// Data set repository.
    Dataset,
}

/// Valid repository id with its kind.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoId {
    kind: RepoKind,
    id: String,
}

/// Error of a text that is not a valid repository id.
#[derive(Debug, thiserror::Error)]
#[error("find the {} {id:?}: {problem}", kind.name())]
pub struct RepoIdError {
    /// Text as given by the user.
    pub id: String,
    /// Kind of the requested repository.
    pub kind: RepoKind,
    /// Problem of the id, and a suggestion.
    pub problem: String,
}

const MAX_LEN: usize = 96;

impl RepoKind {
    /// Returns `model` or `dataset`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }
}

impl RepoId {
    /// Validates a repository id. The error suggests a similar valid id.
    pub fn parse(kind: RepoKind, id: &str) -> Result<Self, RepoIdError> {
        match problem_of(id) {
            None => Ok(Self { kind, id: id.to_owned() }),
            Some(problem) => {
                let near = Self::suggestion_for(id).map_or(String::new(), |m| format!("; did you mean {m}?"));
                Err(RepoIdError { id: id.to_owned(), kind, problem: format!("{problem}{near}") })
            }
        }
    }

    /// Suggests the id for a URL or for a folder of the cache.
    pub(crate) fn suggestion_for(id: &str) -> Option<String> {
        let stripped = id.split_once("://").map_or(id, |(_, rest)| rest);
        let stripped = stripped.trim_start_matches("www.").trim_start_matches("huggingface.co/");
        let stripped =
            stripped.trim_start_matches("hf.co/").trim_start_matches("datasets/").trim_start_matches("models/");
        let plain = stripped.replace('\\', "/").replace(' ', "-").replace("--", "/");
        // A local path suggests no id.
        if id.starts_with(['.', '/', '~']) || (stripped == id && id.matches('/').count() > 1) {
            return None;
        }
        let parts: Vec<&str> = plain.split('/').filter(|part| !part.is_empty()).take(2).collect();
        let near = parts.join("/");
        (parts.len() == 2 && problem_of(&near).is_none()).then_some(near)
    }

    /// Returns the kind of the repository.
    pub fn kind(&self) -> RepoKind {
        self.kind
    }

    /// Returns the id as written.
    pub fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn owner_and_name(&self) -> (&str, &str) {
        self.id.split_once('/').unwrap_or(("", &self.id))
    }

    /// Returns the URL path: `owner/name` or `datasets/owner/name`.
    pub(crate) fn web_path(&self) -> String {
        match self.kind {
            RepoKind::Model => self.id.clone(),
            RepoKind::Dataset => format!("datasets/{}", self.id),
        }
    }

    /// Returns the folder in the cache: `models--owner--name`.
    pub(crate) fn folder(&self) -> String {
        format!("{}s--{}", self.kind.name(), self.id.replace('/', "--"))
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.id)
    }
}

fn problem_of(id: &str) -> Option<&'static str> {
    let parts: Vec<&str> = id.split('/').collect();
    let is_plain = |part: &str| {
        let ends = |end: char| part.starts_with(end) || part.ends_with(end);
        let known = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        !part.is_empty() && part.chars().all(known) && !ends('.') && !ends('-')
    };
    match parts.as_slice() {
        _ if id.contains("://") => Some("it is an address"),
        _ if id.starts_with(['.', '/', '~']) => Some("there is no such folder here"),
        [_, _, _, ..] => Some("it has more than one slash, and there is no such folder here"),
        _ if !parts.iter().all(|part| is_plain(part)) => {
            Some("an id is owner/name, of letters, digits, '-', '_' and '.'")
        }
        _ if id.contains("--") || id.contains("..") => Some("an id has no '--' and no '..'"),
        _ if id.len() > MAX_LEN => Some("an id has at most 96 characters"),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn refused(id: &str, want: &str) {
        let error = RepoId::parse(RepoKind::Model, id).unwrap_err().to_string();
        assert!(error.contains(want), "{want:?} is not in {error:?}");
    }

    #[test]
    fn ids_become_cache_folders_and_addresses() {
        let repo = RepoId::parse(RepoKind::Dataset, "openai/gsm8k").unwrap();
        assert_eq!(repo.folder(), "datasets--openai--gsm8k");
        assert_eq!(repo.web_path(), "datasets/openai/gsm8k");
        assert_eq!(RepoId::parse(RepoKind::Model, "gpt2").unwrap().folder(), "models--gpt2");
    }

    #[test]
    fn near_ids_are_proposed() {
        refused("https://huggingface.co/Qwen/Qwen3-0.6B", "did you mean Qwen/Qwen3-0.6B?");
        refused("datasets/openai/gsm8k", "did you mean openai/gsm8k?");
        refused("models--Qwen--Qwen3-0.6B", "did you mean");
        refused("./checkpoints/last", "there is no such folder here");
        refused("a/b/c", "more than one slash");
        refused("Qwen/Qwen 3", "did you mean Qwen/Qwen-3?");
        refused("../../etc", "no such folder");
        refused("", "owner/name");
    }

    proptest! {
        #[test]
        fn an_accepted_id_never_leaves_its_folder(id in ".{0,40}") {
            if let Ok(repo) = RepoId::parse(RepoKind::Model, &id) {
                prop_assert!(!repo.folder().contains("..") && !repo.folder().contains('/'));
            }
        }
    }
}
