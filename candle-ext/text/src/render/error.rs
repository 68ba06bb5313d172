//! Errors of rendering.

use std::path::PathBuf;

use crate::template::TemplateError;
use crate::tokenizer::TokenizerError;

/// Error of rendering a document to token ids.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// The chat template fails.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A message must be masked, but the template's generation blocks do not show its text.
    #[error(
        "leave out message {message} (it is empty, not rendered or of weight 0): chat template {template} has generation blocks that are \
         not printed in their own message's turn; put each inside the loop over the messages"
    )]
    CannotMaskMessage {
        /// Index of the first message to mask.
        message: usize,
        /// File or argument of the template.
        template: String,
    },
    /// The tokenizer has no chat template for a chat.
    #[error("render a chat: {} has no chat template; use the model's chat version, or choose a chat template (chatml, llama3, ...)", .0.display())]
    NoTemplate(PathBuf),
    /// A conversation in data that are rendered without a chat template.
    #[error("render a chat without its template: the row has a list of messages; remove `apply_chat_template: false`")]
    TemplateOff,
    /// BOS is requested, but the tokenizer has no `bos_token`.
    #[error("add BOS to a text: the tokenizer names no bos_token; remove `data.add_bos_token`")]
    NoBosToken,
    /// The tokenizer drops all characters of the text.
    #[error(
        "tokenize {text:?}: the tokenizer has no token for any of its characters; the vocabulary of its \
         tokenizer.json may be empty or of another model"
    )]
    OnlyUnknownCharacters {
        /// Beginning of the text.
        text: String,
    },
    /// A tokenized row has an id that the tokenizer lacks.
    #[error("use token id {id}: the tokenizer in {} has no such token; tokenize the data with it", .folder.display())]
    UnknownTokenId {
        /// The id.
        id: u32,
        /// The tokenizer's folder.
        folder: PathBuf,
    },
    /// A tokenized row of a chat has no loss mask.
    #[error(
        "find targets: the tokenized row has no column `labels`; add it, or set `data.mask_inputs: false` to train on all tokens"
    )]
    NoLabels,
    /// The tokenizer fails.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

pub(super) fn no_tokens(text: &str) -> RenderError {
    RenderError::OnlyUnknownCharacters { text: text.chars().take(40).collect() }
}
