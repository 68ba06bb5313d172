//! Errors of tokenizers and their folders.

use std::io;
use std::path::PathBuf;

use crate::template::TemplateError;

/// Error of loading or using a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The folder has no `tokenizer.json`.
    #[error(
        "load a tokenizer from {directory}: there is no tokenizer.json{found}. Fix: point to a \
         folder that holds tokenizer.json and tokenizer_config.json (save one with transformers' \
         AutoTokenizer.from_pretrained(...).save_pretrained(...))"
    )]
    NoTokenizerJson {
        /// The folder or file that was searched.
        directory: PathBuf,
        /// The files that are there instead.
        found: String,
    },
    /// A file exists but cannot be read.
    #[error("read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file has invalid content.
    #[error("parse {path}: {message}")]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// The problem and its location.
        message: String,
    },
    /// A key has a value of the wrong type.
    #[error("read {path}: key `{key}` is {found}, expected {expected}")]
    InvalidValue {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// The value that was found.
        found: String,
        /// The value that was expected.
        expected: &'static str,
    },
    /// The configuration names a special token that the vocabulary lacks.
    #[error(
        "load a tokenizer from {directory}: {key} is {text:?}, which tokenizer.json has no id \
         for. Fix: the files are of two different tokenizers, or the token has to be added"
    )]
    UnknownToken {
        /// The folder.
        directory: PathBuf,
        /// `bos_token`, `eos_token`, `pad_token` or `unk_token`.
        key: &'static str,
        /// The text of the token.
        text: String,
    },
    /// The folder has no chat template of this name.
    #[error("find chat template {name:?} in {directory}: it has {available}")]
    NoTemplate {
        /// The folder.
        directory: PathBuf,
        /// Requested name.
        name: String,
        /// Available names.
        available: String,
    },
    /// The tokenizer has the markers of a built-in chat template, but its model another format.
    #[error(
        "use the chat template {template} with the tokenizer of {directory}: {reason}. Its own template has the right text: \
         {usable}copy chat_template.jinja or tokenizer_config.json of the model's chat version into the folder"
    )]
    OtherMarkerFormat {
        /// The folder.
        directory: PathBuf,
        /// Name of the template.
        template: &'static str,
        /// The difference.
        reason: &'static str,
        /// Advice with the templates that fit, or empty.
        usable: String,
    },
    /// The vocabulary lacks markers of a built-in chat template.
    #[error(
        "use the chat template {template} with the tokenizer of {directory}: it has no token {missing}. Such a marker \
         would become several ordinary tokens, and no token would end a turn. Tokens cannot be added to a model here: \
         {usable}add the tokens with transformers (add_tokens, then resize_token_embeddings) and train that folder"
    )]
    MissingMarkers {
        /// The folder.
        directory: PathBuf,
        /// Name of the template.
        template: &'static str,
        /// The missing tokens.
        missing: String,
        /// Advice with the built-in templates that fit; may be empty.
        usable: String,
    },
    /// The chat template is invalid.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A GGUF file cannot hold the tokenizer.
    #[error("export the tokenizer of {directory} to GGUF: {problem}")]
    NotInGguf {
        /// The folder.
        directory: PathBuf,
        /// The part that llama.cpp does not have.
        problem: String,
    },
    /// The tokenizer fails to encode or decode.
    #[error("{action} with the tokenizer of {directory}: {message}")]
    EncodeOrDecode {
        /// The folder.
        directory: PathBuf,
        /// `encode` or `decode`.
        action: &'static str,
        /// Message of the tokenizer.
        message: String,
    },
}
