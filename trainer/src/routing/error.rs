//! Errors of routing records. Each names the file and the recipe key.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why the experts of a run cannot be recorded or replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RoutingError {
    /// A file of a record cannot be written.
    #[error("{action} {} (moe.routing_replay.record)", path.display())]
    Write {
        /// The operation, such as "write".
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A folder that holds another record.
    #[error("record into {} (moe.routing_replay.record): {problem}", path.display())]
    Occupied {
        /// The folder or file.
        path: PathBuf,
        /// The contents, and the remedy.
        problem: String,
    },
    /// A file of a record cannot be read.
    #[error("read {} (moe.routing_replay.replay)", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A record that does not fit this run, or a damaged file.
    #[error("replay {} (moe.routing_replay.replay): {problem}", path.display())]
    Unusable {
        /// The file or folder.
        path: PathBuf,
        /// The difference or the damage.
        problem: String,
    },
}

impl RoutingError {
    pub(super) fn write(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write { action, path: path.to_path_buf(), source }
    }

    pub(super) fn read(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Read { path: path.to_path_buf(), source }
    }

    pub(super) fn occupied(path: &Path, problem: impl Into<String>) -> Self {
        Self::Occupied { path: path.to_path_buf(), problem: problem.into() }
    }

    pub(super) fn unusable(path: &Path, problem: impl Into<String>) -> Self {
        Self::Unusable { path: path.to_path_buf(), problem: problem.into() }
    }
}
