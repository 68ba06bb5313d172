//! Errors of configs, checkpoints and adapters. Each names the file, the key and the remedy.

use std::path::{Path, PathBuf};

/// An error in a config, checkpoint or adapter. Each message completes "failed to load the model: ...".
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// Reading or writing failed.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// Attempted operation, such as "read".
        doing: &'static str,
        /// File or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A malformed file: invalid UTF-8, JSON or safetensors.
    #[error("read {}: {problem}", path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Description of the defect, with its position and the remedy.
        problem: String,
    },
    /// An invalid value in config.json or in an override.
    #[error("config key `{key}`: {problem}")]
    ConfigKey {
        /// Key as spelled in config.json.
        key: String,
        /// Description of the defect in the value.
        problem: String,
    },
    /// An unsupported architecture.
    #[error("{0}")]
    Unsupported(String),
    /// An invalid key of a LoRA configuration.
    #[error("peft_config key `{key}`: {problem}")]
    LoraKey {
        /// Key as spelled by PEFT.
        key: String,
        /// Description of the defect in the value.
        problem: String,
    },
    /// A checkpoint whose tensors differ from the model's parameters.
    #[error("{}: {problem}", folder.display())]
    Mismatch {
        /// Folder or file of the checkpoint.
        folder: PathBuf,
        /// Names of the tensors and their differences.
        problem: String,
    },
    /// An output path that must not be overwritten.
    #[error("write {}: {problem}", path.display())]
    OutputPath {
        /// Output folder.
        path: PathBuf,
        /// Reason for the refusal.
        problem: String,
    },
    /// Another error, with the file in which it occurred.
    #[error("{}: {source}", path.display())]
    InFile {
        /// Path of the file.
        path: PathBuf,
        /// Underlying error.
        source: Box<ModelError>,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
    /// Returns the key of config.json with an invalid value.
    pub fn config_key(&self) -> Option<&str> {
        match self {
            Self::ConfigKey { key, .. } | Self::LoraKey { key, .. } => Some(key),
            _ => None,
        }
    }

    pub(crate) fn key(key: &str, problem: impl Into<String>) -> Self {
        Self::ConfigKey { key: key.to_string(), problem: problem.into() }
    }

    pub(crate) fn lora(key: &str, problem: impl Into<String>) -> Self {
        Self::LoraKey { key: key.to_string(), problem: problem.into() }
    }

    pub(crate) fn malformed(path: &Path, problem: impl Into<String>) -> Self {
        Self::Malformed { path: path.to_path_buf(), problem: problem.into() }
    }

    pub(crate) fn mismatch(folder: &Path, problem: impl Into<String>) -> Self {
        Self::Mismatch { folder: folder.to_path_buf(), problem: problem.into() }
    }

    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { doing, path: path.to_path_buf(), source }
    }

    pub(crate) fn in_file(self, path: &Path) -> Self {
        Self::InFile { path: path.to_path_buf(), source: Box::new(self) }
    }
}
