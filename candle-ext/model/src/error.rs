//! What can be wrong with a config, a checkpoint or an adapter: each error names the file, the key and the fix.

use std::path::{Path, PathBuf};

/// Why a config, a checkpoint or an adapter could not be used. Each message completes "failed to load the model: ...".
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused to read or write.
    #[error("{doing} {}: {source}", path.display())]
    Io {
        /// What was attempted, such as "read".
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is not what its name says: not UTF-8, not JSON, not safetensors.
    #[error("read {}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, where, and what to do.
        problem: String,
    },
    /// A key of config.json (or of an override) has a value that cannot be used.
    #[error("config key `{key}`: {problem}")]
    ConfigKey {
        /// The key as config.json spells it.
        key: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// The architecture is not one of the families.
    #[error("{0}")]
    Unsupported(String),
    /// A key of a LoRA configuration cannot be used.
    #[error("peft_config key `{key}`: {problem}")]
    LoraKey {
        /// The key as PEFT spells it.
        key: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// The checkpoint's tensors are not the model's.
    #[error("{}: {problem}", folder.display())]
    Mismatch {
        /// The checkpoint's folder or file.
        folder: PathBuf,
        /// Which tensors, and how they differ.
        problem: String,
    },
    /// The target of a save is something that must not be replaced.
    #[error("write {}: {problem}", path.display())]
    OutputPath {
        /// The folder that was to be written.
        path: PathBuf,
        /// Why it is refused.
        problem: String,
    },
    /// Another error, with the file in which it was found.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        source: Box<ModelError>,
    },
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

impl ModelError {
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
