//! Rows into documents: what the columns of a data set mean.
//!
//! A [`Format`] is found once for a data set, from what the recipe says or from the first rows,
//! and then reads every row into a [`Document`]. One file holds one format; `detect` lists them.

mod alpaca;
mod chat;
mod detect;
mod error;
mod hints;
mod known;
mod mapped;
mod messages;
mod pairs;
mod sharegpt;
mod text;

pub use alpaca::Alpaca;
pub use chat::message_from_fields;
pub use detect::{FormatRequest, Purpose};
pub use error::FormatError;
pub use hints::Roles;
pub use known::{known_role_mapping, known_split_mapping};
pub use mapped::{RoleMapping, RolePath};
pub use messages::Messages;
pub use pairs::Pairs;
pub use sharegpt::ShareGpt;
pub use text::TextColumn;

use crate::conversation::{Conversation, Message};
use crate::source::{Row, Source};
use error::Fault;

/// What a row says, whatever its columns were called.
#[derive(Debug, Clone, PartialEq)]
pub enum Document {
    /// A chat. Assistant messages with `"weight": 0` are context, not something to learn.
    Conversation(Conversation),
    /// Two plain texts, the second to be learned.
    PromptCompletion {
        /// What is given.
        prompt: String,
        /// What must follow.
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

/// How the rows of one data set are read.
#[derive(Debug, Clone, PartialEq)]
pub enum Format {
    /// A list of `{role, content}`.
    Messages(Messages),
    /// A list of `{from, value}`.
    ShareGpt(ShareGpt),
    /// Instruction, input and output.
    Alpaca(Alpaca),
    /// A prompt and its completion.
    Pairs(Pairs),
    /// Roles taken from columns as the recipe says.
    Mapped(RoleMapping),
    /// One column of text.
    Text(TextColumn),
}

impl Format {
    /// Finds how `source` is read: what `request` says, else by its first rows.
    pub fn find(request: &FormatRequest, source: &dyn Source) -> Result<Self, FormatError> {
        detect::find(request, source)
    }

    /// Says in one line how rows are read: "reads as alpaca: instruction, input, output".
    pub fn describe(&self) -> String {
        format!("reads as {}: {}", self.name(), self.columns().join(", "))
    }

    /// The format's name, as a recipe spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Messages(_) => "messages",
            Self::ShareGpt(_) => "sharegpt",
            Self::Alpaca(_) => "alpaca",
            Self::Pairs(_) => "prompt/completion",
            Self::Mapped(_) => "role_mapping",
            Self::Text(_) => "text",
        }
    }

    /// Reads row `row_idx` of `source`.
    pub fn read(&self, source: &dyn Source, row_idx: usize) -> Result<Document, FormatError> {
        let row = source.row(row_idx)?;
        self.parse(&row).map_err(|fault| FormatError::Row {
            place: source.locate(row_idx),
            format: self.name(),
            problem: fault.problem,
            fix: fault.fix,
        })
    }

    /// Tells whether a document has a role that neither this format's mapping nor the chat templates know.
    pub(crate) fn has_unknown_role(&self, document: &Document) -> bool {
        let is_unknown = |role: &str| !self.maps_role(role);
        matches!(document, Document::Conversation(chat) if chat.unknown_roles().any(is_unknown))
    }

    /// Returns true if the recipe's mapping names this role.
    fn maps_role(&self, role: &str) -> bool {
        matches!(self, Self::Mapped(mapping) if mapping.has_role(role))
    }

    fn parse(&self, row: &Row) -> Result<Document, Fault> {
        match self {
            Self::Messages(format) => format.parse(row),
            Self::ShareGpt(format) => format.parse(row),
            Self::Alpaca(format) => format.parse(row),
            Self::Pairs(format) => format.parse(row),
            Self::Mapped(format) => format.parse(row),
            Self::Text(format) => format.parse(row),
        }
    }

    fn columns(&self) -> Vec<String> {
        match self {
            Self::Messages(format) => {
                let key = format.content_key.iter().map(|key| format!("text under {key}"));
                std::iter::once(format.column.clone()).chain(key).collect()
            }
            Self::ShareGpt(format) => vec![format.column.clone()],
            Self::Alpaca(format) => format.columns(),
            Self::Pairs(format) => vec![format.prompt.clone(), format.completion.clone()],
            Self::Mapped(format) => format.describe(),
            Self::Text(format) => vec![format.column.clone()],
        }
    }
}
