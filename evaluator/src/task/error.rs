//! What can be wrong with a task, told with file, line and key, and with the way out.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use candlewick_text::hub::HubError;
use candlewick_text::source::SourceError;
use candlewick_text::template::TemplateError;

/// Where something was written. Lines and columns count from one; 0 is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceLocation {
    /// The file.
    pub file: Arc<PathBuf>,
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

/// One thing that is wrong in a task file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Where, if one place is to blame.
    pub place: Option<SourceLocation>,
    /// What is wrong, with the key in it.
    pub message: String,
}

/// A task that cannot be read, or not be asked. Completes "failed to ...".
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A task file is not one, or says what cannot be done.
    #[error("read a task: {0}")]
    Config(ConfigError),
    /// A task file or folder cannot be read.
    #[error("read {}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// There is no such task, group or tag.
    #[error("find {0}")]
    Unknown(String),
    /// Two things that were asked for do not go together.
    #[error("select tasks: {0}")]
    Selection(String),
    /// The data cannot be had.
    #[error("load the data of task {task}: {source}")]
    Hub {
        /// The task.
        task: String,
        /// Why.
        source: HubError,
    },
    /// A row cannot be read.
    #[error("load the data of task {task}: {source}")]
    Source {
        /// The task.
        task: String,
        /// Why.
        source: SourceError,
    },
    /// A row is there, but the task cannot ask it.
    #[error("ask {task} about {place}: {problem}")]
    Document {
        /// The task.
        task: String,
        /// File and line, or document number.
        place: String,
        /// What was expected.
        problem: String,
    },
    /// The chat template cannot print the prompt.
    #[error("write the prompt of task {task}: {source}")]
    Chat {
        /// The task.
        task: String,
        /// Why.
        source: TemplateError,
    },
    /// The task asks for something that must be allowed first.
    #[error("run task {task}: {problem}")]
    Refused {
        /// The task.
        task: String,
        /// What, and how to allow it.
        problem: String,
    },
    /// Answers cannot be scored.
    #[error("score task {task}: {problem}")]
    Score {
        /// The task.
        task: String,
        /// Why.
        problem: String,
    },
}

impl ConfigError {
    /// Blames a place.
    pub fn at(place: SourceLocation, message: impl Into<String>) -> Self {
        Self { place: Some(place), message: message.into() }
    }

    /// Adds advice.
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
    /// Whether it is the command line or a task file that must change, and not the data.
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
