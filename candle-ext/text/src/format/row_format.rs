//! The formats of rows: one variant for each.

use super::alpaca::Alpaca;
use super::document::Document;
use super::error::{FormatError, RowProblem};
use super::messages::Messages;
use super::prompt_completion::PromptCompletionColumns;
use super::role_mapping::RoleMapping;
use super::sharegpt::ShareGpt;
use super::text_column::TextColumn;
use crate::source::{Row, RowSource};

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
    PromptCompletion(PromptCompletionColumns),
    /// Roles taken from columns as the recipe says.
    RoleMapping(RoleMapping),
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
            Self::PromptCompletion(_) => "prompt/completion",
            Self::RoleMapping(_) => "role_mapping",
            Self::Text(_) => "text",
        }
    }

    /// Reads row `row_idx` of `source`.
    pub fn read(&self, source: &dyn RowSource, row_idx: usize) -> Result<Document, FormatError> {
        let row = source.row(row_idx)?;
        self.parse(&row).map_err(|fault| FormatError::InvalidRow {
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
        matches!(self, Self::RoleMapping(mapping) if mapping.has_role(role))
    }

    pub(super) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        match self {
            Self::Messages(format) => format.parse(row),
            Self::ShareGpt(format) => format.parse(row),
            Self::Alpaca(format) => format.parse(row),
            Self::PromptCompletion(format) => format.parse(row),
            Self::RoleMapping(format) => format.parse(row),
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
            Self::PromptCompletion(format) => vec![format.prompt.clone(), format.completion.clone()],
            Self::RoleMapping(format) => format.describe(),
            Self::Text(format) => vec![format.column.clone()],
        }
    }
}
