//! The content of a row, apart from its columns' names.

use crate::conversation::{Conversation, Message};

/// The content of a row, whatever its columns were called.
#[derive(Debug, Clone, PartialEq)]
pub enum Document {
    /// A chat. Assistant messages with `"weight": 0` are context, not something to learn.
    Conversation(Conversation),
    /// Two plain texts, the second to be learned.
    PromptCompletion {
        /// The text that is given.
        prompt: String,
        /// The text that must follow.
        completion: String,
    },
    /// Plain text, all of it to be learned.
    Text(String),
}

impl Document {
    /// The document as a chat: a prompt becomes the user's turn, its completion the answer.
    /// Plain text has no turns and stays as it is.
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
