//! What can go wrong between here and the Hub, told to a person who wants it to go right.

use std::path::PathBuf;
use std::time::Duration;

use super::repo::{RepoId, RepoIdError, RepoKind};
use crate::source::SourceError;

/// A repository or file that cannot be had. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The id cannot be one.
    #[error(transparent)]
    InvalidId(#[from] RepoIdError),
    /// A folder on this machine that cannot serve as a model.
    #[error("use {name} as a model: {problem}")]
    NotAModel {
        /// The name as it was written.
        name: String,
        /// The missing files, and the remedy.
        problem: String,
    },
    /// A path that leads nowhere.
    #[error("find the model {name}: it is neither a folder here nor a Hub id{near} {advice}")]
    PathNotFound {
        /// The name as it was written.
        name: String,
        /// The end of the sentence: the most similar path, if there is one.
        near: String,
        /// The remedy.
        advice: &'static str,
    },
    /// An id that is no folder here, and that the Hub does not give.
    #[error("find the model {name}: it is no folder here{near} The Hub does not give it either: failed to {source}")]
    NotFound {
        /// The name as it was written.
        name: String,
        /// The end of the sentence: the most similar path, if there is one.
        near: String,
        /// The Hub's error.
        source: Box<HubError>,
    },
    /// The base model of an adapter that cannot be found.
    #[error(
        "find the base model of the adapter {}: failed to {source}; correct base_model_name_or_path in its \
         adapter_config.json, or merge the adapter with `trainer merge --base MODEL`",
        adapter.display()
    )]
    BaseModel {
        /// The adapter's folder.
        adapter: PathBuf,
        /// Why there is none.
        source: Box<HubError>,
    },
    /// The Hub wants to know who asks, or knows and refuses.
    #[error("download {id}: access is refused ({status}); {advice}")]
    AccessDenied {
        /// The repository.
        id: String,
        /// 401 or 403.
        status: u16,
        /// The remedy.
        advice: String,
    },
    /// There is no such repository.
    #[error(
        "find the {} {id}: the Hub has none of that name, or it is private; check the spelling \
         (owner/name), or set HF_TOKEN if it is yours",
        kind.name()
    )]
    RepoNotFound {
        /// The repository.
        id: String,
        /// What was looked for.
        kind: RepoKind,
    },
    /// The repository has no such branch, tag or commit.
    #[error("find revision {revision:?} of {id}: there is no such branch, tag or commit")]
    RevisionNotFound {
        /// The repository.
        id: String,
        /// The revision.
        revision: String,
    },
    /// The repository has no such file.
    #[error("find {file} in {id}: revision {revision:?} does not hold it")]
    FileNotFound {
        /// The repository.
        id: String,
        /// The revision.
        revision: String,
        /// The file.
        file: String,
    },
    /// Too many requests, and waiting did not help.
    #[error("download {id}: the Hub answers \"too many requests\" ({}); {}", tried(*n_tries), later(*wait))]
    RateLimited {
        /// The repository.
        id: String,
        /// How often it was tried.
        n_tries: usize,
        /// How long the Hub wants us to wait.
        wait: Option<Duration>,
    },
    /// No answer.
    #[error(
        "reach {endpoint}: {reason}; check the network, or set HF_ENDPOINT to a mirror, or \
         HF_HUB_OFFLINE=1 to use only what is cached"
    )]
    Unreachable {
        /// The Hub's address.
        endpoint: String,
        /// What the network said.
        reason: String,
    },
    /// An answer that is no use.
    #[error("download {id}: {url} answers {status}{message}")]
    HttpStatus {
        /// The repository.
        id: String,
        /// What was asked.
        url: String,
        /// The status code.
        status: u16,
        /// What the server said, with a colon before it.
        message: String,
    },
    /// The connection broke again and again without a byte more, or was too slow.
    #[error("download {file} of {id}: {problem}")]
    Interrupted {
        /// The repository.
        id: String,
        /// The file.
        file: String,
        /// How far it came, and whether that was kept.
        problem: String,
    },
    /// What arrived is not what was announced, twice.
    #[error("download {file} of {id}: {problem}; try again later")]
    CorruptDownload {
        /// The repository.
        id: String,
        /// The file.
        file: String,
        /// Size or hash, announced and found.
        problem: String,
    },
    /// Offline, and the cache does not have it.
    #[error(
        "load {id} offline: {missing}; fetch it once with a network: unset HF_HUB_OFFLINE, or run \
         `{prefetch}`"
    )]
    Offline {
        /// The repository.
        id: String,
        /// What the cache lacks, as a sentence.
        missing: String,
        /// A command that fetches it.
        prefetch: String,
    },
    /// The repository does not hold what it should.
    #[error("use {id}: {problem}")]
    WrongContents {
        /// The repository.
        id: String,
        /// What is there and what is not.
        problem: String,
    },
    /// The cache cannot be read or written.
    #[error("use the cache {}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Rows could not be read after all files were here.
    #[error(transparent)]
    Source(#[from] SourceError),
}

impl HubError {
    pub(crate) fn offline(repo: &RepoId, revision: &str, missing: String) -> Self {
        let kind = match repo.kind() {
            RepoKind::Model => "",
            RepoKind::Dataset => " --repo-type dataset",
        };
        let revision = match revision {
            "main" => String::new(),
            other => format!(" --revision {other}"),
        };
        let prefetch = format!("hf download {repo}{kind}{revision}");
        Self::Offline { id: repo.to_string(), missing, prefetch }
    }

    /// Whether the Hub is to blame and not the question: what the cache holds may stand in.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::RateLimited { .. } => true,
            Self::HttpStatus { status, .. } => *status >= 500,
            _ => false,
        }
    }

    pub(crate) fn cache(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Cache { path: path.into(), source }
    }
}

/// Returns the last cause of an error, such as "connection refused".
pub(crate) fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

fn tried(n_tries: usize) -> String {
    match n_tries {
        1 => "tried once".into(),
        n => format!("tried {n} times"),
    }
}

fn later(wait: Option<Duration>) -> String {
    match wait {
        Some(wait) => format!("it asks to wait {} s", wait.as_secs()),
        None => "try again later".into(),
    }
}
