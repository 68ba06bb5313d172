//! Row formats: conversion of data set rows to documents.
//!
//! A [`RowFormat`] is chosen once per data set, by the recipe or by the first rows, and reads every row into a
//! [`Document`]. Each file holds one format; `detect` lists them.

mod alpaca;
mod chat;
mod detect;
mod document;
mod error;
mod hints;
mod known_datasets;
mod messages;
mod prompt_completion;
mod role_mapping;
mod row_format;
mod sharegpt;
mod struct_of_lists;
mod text_column;
mod token_ids;

pub use alpaca::Alpaca;
pub use chat::message_from_fields;
pub use detect::{DatasetType, FormatRequest};
pub use document::Document;
pub use error::FormatError;
pub use hints::RoleCounts;
pub use known_datasets::{known_role_mapping, known_split_mapping};
pub use messages::Messages;
pub use prompt_completion::PromptCompletionColumns;
pub use role_mapping::{RoleMapping, RolePath};
pub use row_format::RowFormat;
pub use sharegpt::ShareGpt;
pub use text_column::TextColumn;
pub use token_ids::TokenIds;
