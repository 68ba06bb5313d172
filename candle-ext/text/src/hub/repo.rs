//! Names of repositories: `owner/name`, or `name` for the oldest ones.

use std::fmt;

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// Weights and a tokenizer.
    Model,
    /// Rows.
    Dataset,
}

/// A repository's kind and well-formed id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepoId {
    kind: RepoKind,
    id: String,
}

/// A text that cannot be the id of a repository.
#[derive(Debug, thiserror::Error)]
#[error("find the {} {id:?}: {problem}", kind.name())]
pub struct RepoIdError {
    /// The text as it was written.
    pub id: String,
    /// The kind of repository that it was to name.
    pub kind: RepoKind,
    /// Why it is no id, and what may be meant.
    pub problem: String,
}

const MAX_LEN: usize = 96;

impl RepoKind {
    /// `model` or `dataset`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        }
    }
}

impl RepoId {
    /// Checks that `id` can be a Hub id; the error proposes what may be meant.
    pub fn parse(kind: RepoKind, id: &str) -> Result<Self, RepoIdError> {
        match problem_of(id) {
            None => Ok(Self { kind, id: id.to_owned() }),
            Some(problem) => {
                let near = Self::suggestion_for(id).map_or(String::new(), |m| format!("; did you mean {m}?"));
                Err(RepoIdError { id: id.to_owned(), kind, problem: format!("{problem}{near}") })
            }
        }
    }

    /// Returns the id that an address or a folder of the cache stands for.
    pub(crate) fn suggestion_for(id: &str) -> Option<String> {
        let stripped = id.split_once("://").map_or(id, |(_, rest)| rest);
        let stripped = stripped.trim_start_matches("www.").trim_start_matches("huggingface.co/");
        let stripped =
            stripped.trim_start_matches("hf.co/").trim_start_matches("datasets/").trim_start_matches("models/");
        let plain = stripped.replace('\\', "/").replace(' ', "-").replace("--", "/");
        // A path of this machine stands for no id.
        if id.starts_with(['.', '/', '~']) || (stripped == id && id.matches('/').count() > 1) {
            return None;
        }
        let parts: Vec<&str> = plain.split('/').filter(|part| !part.is_empty()).take(2).collect();
        let near = parts.join("/");
        (parts.len() == 2 && problem_of(&near).is_none()).then_some(near)
    }

    /// What it holds.
    pub fn kind(&self) -> RepoKind {
        self.kind
    }

    pub(crate) fn owner_and_name(&self) -> (&str, &str) {
        self.id.split_once('/').unwrap_or(("", &self.id))
    }

    /// The part of a web address that leads to it: `owner/name`, `datasets/owner/name`.
    pub(crate) fn web_path(&self) -> String {
        match self.kind {
            RepoKind::Model => self.id.clone(),
            RepoKind::Dataset => format!("datasets/{}", self.id),
        }
    }

    /// Its folder in the cache: `models--owner--name`.
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
