//! Content of a data set row, independent of its columns.

use crate::conversation::{Conversation, Message};

/// Content of a data set row: a chat, a prompt with its completion, plain text, or tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Document {
    /// A chat. Assistant messages with `"weight": 0` are masked from the loss.
    Conversation(Conversation),
    /// A prompt and its completion as plain text. Only the completion has loss.
    PromptCompletion {
        /// The prompt, without loss.
        prompt: String,
        /// The completion, with loss.
        completion: String,
    },
    /// Plain text. Every token has loss.
    Text(String),
    /// Token ids, which are not rendered.
    Tokens {
        /// Token ids, `[n_tokens]`.
        ids: Vec<u32>,
        /// Loss mask, `[n_tokens]`; `None` if the row has none.
        is_target: Option<Vec<bool>>,
    },
}

impl Document {
    /// Converts a prompt and its completion to a chat of one user and one assistant message. Returns other documents
    /// unchanged.
    #[must_use]
    pub fn into_chat(self) -> Self {
        match self {
            Self::PromptCompletion { prompt, completion } => Self::Conversation(Conversation::new([
                Message::new("user", prompt),
                Message::new("assistant", completion),
            ])),
            other => other,
        }
    }
}
