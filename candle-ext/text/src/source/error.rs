//! Errors of data sets, with location and remedy.

use std::path::{Path, PathBuf};

/// Error of a data set that cannot be found, selected or read. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The operating system reports an error.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The data set specification cannot be parsed.
    #[error("parse the data set name {spec:?}: {problem}")]
    InvalidSpec {
        /// The specification as given.
        spec: String,
        /// The problem and a valid example.
        problem: String,
    },
    /// The data set exists, but lacks the requested split, configuration, file or rows.
    #[error("open {place}: {problem}")]
    NotAvailable {
        /// File, folder or Hub id.
        place: String,
        /// The available names and the remedy.
        problem: String,
    },
    /// A row or a file is malformed.
    #[error("read {place}: {problem}; {fix}")]
    InvalidData {
        /// File and line, or file and row.
        place: String,
        /// The problem.
        problem: String,
        /// The remedy.
        fix: String,
    },
    /// The data set has no rows.
    #[error("read {place}: {problem}")]
    Empty {
        /// File, folder or Hub id.
        place: String,
        /// Reason why there are no rows.
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
