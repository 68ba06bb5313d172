//! The known row formats.

use super::alpaca::Alpaca;
use super::document::Document;
use super::error::{FormatError, RowProblem};
use super::messages::Messages;
use super::prompt_completion::PromptCompletionColumns;
use super::role_mapping::RoleMapping;
use super::sharegpt::ShareGpt;
use super::struct_of_lists::with_lists_of_messages;
use super::text_column::TextColumn;
use super::token_ids::{INPUT_IDS, TokenIds};
use crate::source::{Row, RowSource};

/// Row format of a data set.
#[derive(Debug, Clone, PartialEq)]
pub enum RowFormat {
    /// A list of `{role, content}`.
    Messages(Messages),
    /// A list of `{from, value}`.
    ShareGpt(ShareGpt),
    /// Instruction, input and output.
    Alpaca(Alpaca),
    /// A prompt and its completion.
    PromptCompletion(PromptCompletionColumns),
    /// Roles mapped to columns by the recipe's `role_mapping`.
    RoleMapping(RoleMapping),
    /// One column of text.
    Text(TextColumn),
    /// Token ids.
    TokenIds(TokenIds),
}

impl RowFormat {
    /// Describes the format in one line: "reads as alpaca: instruction, input, output".
    pub fn describe(&self) -> String {
        format!("reads as {}: {}", self.name(), self.columns().join(", "))
    }

    /// Returns the format's name, as a recipe spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Messages(_) => "messages",
            Self::ShareGpt(_) => "sharegpt",
            Self::Alpaca(_) => "alpaca",
            Self::PromptCompletion(_) => "prompt/completion",
            Self::RoleMapping(_) => "role_mapping",
            Self::Text(_) => "text",
            Self::TokenIds(_) => "token_ids",
        }
    }

    /// Reads row `row_idx` of `source` into a document.
    pub fn read(&self, source: &dyn RowSource, row_idx: usize) -> Result<Document, FormatError> {
        let row = source.row(row_idx)?;
        self.parse(&row).map_err(|fault| FormatError::InvalidRow {
            place: source.locate(row_idx),
            format: self.name(),
            problem: fault.problem,
            fix: fault.fix,
        })
    }

    /// Returns true if a message has a role that neither the mapping nor chat templates define.
    pub(crate) fn has_unknown_role(&self, document: &Document) -> bool {
        let is_unknown = |role: &str| !self.maps_role(role);
        matches!(document, Document::Conversation(chat) if chat.unknown_roles().any(is_unknown))
    }

    /// Returns true if the recipe's `role_mapping` has this role.
    fn maps_role(&self, role: &str) -> bool {
        matches!(self, Self::RoleMapping(mapping) if mapping.has_role(role))
    }

    pub(super) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        let row = &*with_lists_of_messages(row)?;
        match self {
            Self::Messages(format) => format.parse(row),
            Self::ShareGpt(format) => format.parse(row),
            Self::Alpaca(format) => format.parse(row),
            Self::PromptCompletion(format) => format.parse(row),
            Self::RoleMapping(format) => format.parse(row),
            Self::Text(format) => format.parse(row),
            Self::TokenIds(format) => format.parse(row),
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
            Self::TokenIds(_) => vec![INPUT_IDS.to_owned()],
        }
    }
}
