//! Errors of tasks, with file, line, key and remedy.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use candlewick_text::hub::HubError;
use candlewick_text::source::SourceError;
use candlewick_text::template::TemplateError;

/// Location in a file. Lines and columns start at 1; 0 is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceLocation {
    /// The file.
    pub file: Arc<PathBuf>,
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

/// Error in a task file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Location, if it is known.
    pub place: Option<SourceLocation>,
    /// Problem, with the key.
    pub message: String,
}

/// Error of a task: its file, data, prompts or scores. Messages complete "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// Invalid or unsupported task file.
    #[error("read a task: {0}")]
    Config(ConfigError),
    /// Unreadable task file or folder.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// I/O error.
        source: std::io::Error,
    },
    /// Unknown task, group or tag.
    #[error("find {0}")]
    Unknown(String),
    /// Conflicting selections.
    #[error("select tasks: {0}")]
    Selection(String),
    /// Unavailable data.
    #[error("load the data of task {task}: {source}")]
    Hub {
        /// The task.
        task: String,
        /// Reason.
        source: HubError,
    },
    /// Unreadable row.
    #[error("load the data of task {task}: {source}")]
    Source {
        /// The task.
        task: String,
        /// Reason.
        source: SourceError,
    },
    /// Row that the task cannot process.
    #[error("ask {task} about {place}: {problem}")]
    Document {
        /// The task.
        task: String,
        /// File and line, or document number.
        place: String,
        /// Expected content.
        problem: String,
    },
    /// Error of the chat template.
    #[error("write the prompt of task {task}: {source}")]
    Chat {
        /// The task.
        task: String,
        /// Reason.
        source: TemplateError,
    },
    /// Refused operation that needs an explicit option.
    #[error("run task {task}: {problem}")]
    Refused {
        /// The task.
        task: String,
        /// Refused operation, and the option that allows it.
        problem: String,
    },
    /// Error of a metric or filter.
    #[error("score task {task}: {problem}")]
    Score {
        /// The task.
        task: String,
        /// Reason.
        problem: String,
    },
}

impl ConfigError {
    /// Creates an error at a location.
    pub fn at(place: SourceLocation, message: impl Into<String>) -> Self {
        Self { place: Some(place), message: message.into() }
    }

    /// Adds a remedy to the message.
    #[must_use]
    pub fn note(mut self, note: impl AsRef<str>) -> Self {
        self.message.push_str("; ");
        self.message.push_str(note.as_ref());
        self
    }
}

impl From<ConfigError> for TaskError {
    fn from(fault: ConfigError) -> Self {
        Self::Config(fault)
    }
}

impl TaskError {
    /// Returns true for errors of the command line or a task file, false for errors of the data.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Config(_) | Self::Unknown(_) | Self::Selection(_) | Self::Refused { .. })
    }
}

impl fmt::Display for SourceLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}", self.file.display()),
            line => write!(f, "{}:{line}:{}", self.file.display(), self.column),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(place) = &self.place {
            write!(f, "{place}: ")?;
        }
        f.write_str(&self.message)
    }
}
