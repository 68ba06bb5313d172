//! Errors of Hub access, with the remedy.

use std::path::PathBuf;
use std::time::Duration;

use super::repo::{RepoId, RepoIdError, RepoKind};
use crate::source::SourceError;

/// Error of a repository, model or file that cannot be found, downloaded or read. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The text is not a valid repository id.
    #[error(transparent)]
    InvalidId(#[from] RepoIdError),
    /// A local folder is not usable as a model.
    #[error("use {name} as a model: {problem}")]
    NotAModel {
        /// Name as given by the user.
        name: String,
        /// The missing files and the remedy.
        problem: String,
    },
    /// A local path does not exist.
    #[error("find the model {name}: it is neither a folder here nor a Hub id{near} {advice}")]
    PathNotFound {
        /// Name as given by the user.
        name: String,
        /// End of the message: the most similar path, if there is one.
        near: String,
        /// The remedy.
        advice: &'static str,
    },
    /// The name is neither a local folder nor an accessible Hub repository.
    #[error("find the model {name}: it is no folder here{near} The Hub does not give it either: failed to {source}")]
    NotFound {
        /// Name as given by the user.
        name: String,
        /// End of the message: the most similar path, if there is one.
        near: String,
        /// The Hub's error.
        source: Box<HubError>,
    },
    /// The base model of an adapter cannot be found.
    #[error(
        "find the base model of the adapter {}: failed to {source}; correct base_model_name_or_path in its \
         adapter_config.json, or merge the adapter with `trainer merge --base MODEL`",
        adapter.display()
    )]
    BaseModel {
        /// Folder of the adapter.
        adapter: PathBuf,
        /// Reason why the base model cannot be found.
        source: Box<HubError>,
    },
    /// The Hub denies access, with or without a token.
    #[error("download {id}: access is refused ({status}); {advice}")]
    AccessDenied {
        /// The repository.
        id: String,
        /// 401 or 403.
        status: u16,
        /// The remedy.
        advice: String,
    },
    /// The repository does not exist, or is private.
    #[error(
        "find the {} {id}: the Hub has none of that name, or it is private; check the spelling \
         (owner/name), or set HF_TOKEN if it is yours",
        kind.name()
    )]
    RepoNotFound {
        /// The repository.
        id: String,
        /// Kind of the repository.
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
    /// The Hub answers 429 (too many requests) after all retries.
    #[error("download {id}: the Hub answers \"too many requests\" ({}); {}", tried(*n_tries), later(*wait))]
    RateLimited {
        /// The repository.
        id: String,
        /// Number of attempts.
        n_tries: usize,
        /// Wait that the Hub requests.
        wait: Option<Duration>,
    },
    /// The Hub cannot be reached.
    #[error(
        "reach {endpoint}: {reason}; check the network, or set HF_ENDPOINT to a mirror, or \
         HF_HUB_OFFLINE=1 to use only what is cached"
    )]
    Unreachable {
        /// The Hub's address.
        endpoint: String,
        /// The network error.
        reason: String,
    },
    /// The Hub answers with an unexpected HTTP status.
    #[error("download {id}: {url} answers {status}{message}")]
    HttpStatus {
        /// The repository.
        id: String,
        /// URL of the request.
        url: String,
        /// HTTP status code.
        status: u16,
        /// Message of the server, with a leading colon.
        message: String,
    },
    /// The connection is interrupted repeatedly without progress, or is too slow.
    #[error("download {file} of {id}: {problem}")]
    Interrupted {
        /// The repository.
        id: String,
        /// The file.
        file: String,
        /// Bytes received, and whether they are kept.
        problem: String,
    },
    /// The downloaded file has a wrong size or hash, twice.
    #[error("download {file} of {id}: {problem}; try again later")]
    CorruptDownload {
        /// The repository.
        id: String,
        /// The file.
        file: String,
        /// Expected and received size or hash.
        problem: String,
    },
    /// Offline mode, and the cache lacks the files.
    #[error(
        "load {id} offline: {missing}; fetch it once with a network: unset HF_HUB_OFFLINE, or run \
         `{prefetch}`"
    )]
    Offline {
        /// The repository.
        id: String,
        /// Missing files or revision, as a clause.
        missing: String,
        /// Command that downloads the repository.
        prefetch: String,
    },
    /// A lock file lacks an entry.
    #[error(
        "use {}: it has no entry for {entry}; run `{prefetch}` with a network to add it",
        lock.display()
    )]
    NotLocked {
        /// The lock file.
        lock: PathBuf,
        /// The missing entry: a repository at a revision, or a file of one.
        entry: String,
        /// Command that writes the lock file.
        prefetch: String,
    },
    /// The cache lacks a file of a lock file.
    #[error(
        "load {id} at the commit in {}: {missing}; run `{prefetch}` with a network, or set HF_HOME to the folder that \
         holds the files",
        lock.display()
    )]
    NotPrefetched {
        /// The repository.
        id: String,
        /// The lock file.
        lock: PathBuf,
        /// Missing files, as a clause.
        missing: String,
        /// Command that downloads the files.
        prefetch: String,
    },
    /// A cached file differs from its entry in a lock file.
    #[error("load {file}: {problem}; run `{prefetch}` with a network to download it again")]
    LockedFileDamaged {
        /// The file and its repository.
        file: String,
        /// Found and expected size or hash, with the lock file.
        problem: String,
        /// Command that downloads the file.
        prefetch: String,
    },
    /// A lock file cannot be read.
    #[error("read the lock file {}: {problem}; remove it and run prefetch again", path.display())]
    InvalidLock {
        /// The lock file.
        path: PathBuf,
        /// The problem, with its line or repository.
        problem: String,
    },
    /// A lock file cannot be written.
    #[error("write the lock file {}: {source}", path.display())]
    WriteLock {
        /// The lock file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The Hub no longer has the commit of a lock file.
    #[error(
        "download {id}: the Hub no longer has the commit {commit} of the lock file; run prefetch with --update to lock the \
         current commits"
    )]
    LockedCommitNotFound {
        /// The repository.
        id: String,
        /// The commit.
        commit: String,
    },
    /// The Hub answers with another commit than the requested one.
    #[error(
        "download {id}: the commit {requested} was requested, but the Hub answers with {answered}; check HF_ENDPOINT and the \
         proxies on the way to it"
    )]
    OtherCommit {
        /// The repository.
        id: String,
        /// The requested commit.
        requested: String,
        /// The commit of the answer.
        answered: String,
    },
    /// The file list of a locked commit differs from the lock file.
    #[error("download {id}: {problem}; check HF_ENDPOINT, or run prefetch with --update to lock the current files")]
    DiffersFromLock {
        /// The repository.
        id: String,
        /// The file, and the difference.
        problem: String,
    },
    /// The repository is unusable: required files are missing, or its commit or address is invalid.
    #[error("use {id}: {problem}")]
    WrongContents {
        /// The repository.
        id: String,
        /// The problem, such as present and missing files.
        problem: String,
    },
    /// The Hub cache cannot be read or written.
    #[error("use the cache {}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A folder cannot be uploaded.
    #[error("push to {id}: {problem}")]
    Upload {
        /// The repository.
        id: String,
        /// The problem and the remedy.
        problem: String,
    },
    /// The downloaded data set cannot be read.
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

    /// Returns true for network and server errors, on which the cache is used instead.
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
        Some(wait) => format!("it requests a wait of {} s", wait.as_secs()),
        None => "try again later".into(),
    }
}
