//! Errors of a tokenizer and its folder.

use std::io;
use std::path::PathBuf;

use crate::template::TemplateError;

/// An error of loading or using a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The folder has no `tokenizer.json`.
    #[error(
        "load a tokenizer from {directory}: there is no tokenizer.json{found}. Fix: point to a \
         folder that holds tokenizer.json and tokenizer_config.json (save one with transformers' \
         AutoTokenizer.from_pretrained(...).save_pretrained(...))"
    )]
    Missing {
        /// Where it was looked for.
        directory: PathBuf,
        /// What stands there instead.
        found: String,
    },
    /// A file is there but cannot be read.
    #[error("read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("parse {path}: {message}")]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and where.
        message: String,
    },
    /// A key holds a value of the wrong kind.
    #[error("read {path}: key `{key}` is {found}, expected {expected}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What it holds.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A special token is named that the vocabulary lacks.
    #[error(
        "load a tokenizer from {directory}: {key} is {text:?}, which tokenizer.json has no id \
         for. Fix: the files are of two different tokenizers, or the token has to be added"
    )]
    UnknownToken {
        /// The folder.
        directory: PathBuf,
        /// `bos_token`, `eos_token`, `pad_token` or `unk_token`.
        key: &'static str,
        /// How it is written.
        text: String,
    },
    /// There is no chat template of this name.
    #[error("find chat template {name:?} in {directory}: it has {available}")]
    NoTemplate {
        /// The folder.
        directory: PathBuf,
        /// What was asked for.
        name: String,
        /// What is there.
        available: String,
    },
    /// The chat template is broken.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokenizer refused a text or ids.
    #[error("{action} with the tokenizer of {directory}: {message}")]
    Run {
        /// The folder.
        directory: PathBuf,
        /// `encode` or `decode`.
        action: &'static str,
        /// What it said.
        message: String,
    },
}
