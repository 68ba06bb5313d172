//! The formats of rows: one variant for each.

use super::alpaca::Alpaca;
use super::document::Document;
use super::error::{Fault, FormatError};
use super::mapped::RoleMapping;
use super::messages::Messages;
use super::pairs::Pairs;
use super::sharegpt::ShareGpt;
use super::text::TextColumn;
use crate::source::{Row, Source};

/// The format of one data set's rows.
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

    pub(super) fn parse(&self, row: &Row) -> Result<Document, Fault> {
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
