//! What can go wrong with a data set, told with the place and the way out.

use std::path::{Path, PathBuf};

/// A data set that cannot be found, chosen or read. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The operating system refused.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The words that name a data set make no sense.
    #[error("understand the data set {spec:?}: {problem}")]
    InvalidSpec {
        /// What was written.
        spec: String,
        /// Why it cannot be used, and what would do.
        problem: String,
    },
    /// The data set exists, but what was asked of it does not.
    #[error("open {place}: {problem}")]
    NotAvailable {
        /// File, folder or Hub id.
        place: String,
        /// What is there and what to write instead.
        problem: String,
    },
    /// A row or a file is not what its name promises.
    #[error("read {place}: {problem}; {fix}")]
    InvalidData {
        /// File and line, or file and row.
        place: String,
        /// What was found.
        problem: String,
        /// What to do about it.
        fix: String,
    },
    /// There is nothing in it.
    #[error("read {place}: {problem}")]
    Empty {
        /// File, folder or Hub id.
        place: String,
        /// Why there are no rows.
        problem: String,
    },
}

impl SourceError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn not_available(place: impl ToString, problem: impl Into<String>) -> Self {
        Self::NotAvailable { place: place.to_string(), problem: problem.into() }
    }

    pub(crate) fn empty(place: impl ToString, problem: impl Into<String>) -> Self {
        Self::Empty { place: place.to_string(), problem: problem.into() }
    }

    pub(crate) fn invalid_data(place: impl ToString, problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::InvalidData { place: place.to_string(), problem: problem.into(), fix: fix.into() }
    }
}
