//! Rows into documents: what the columns of a data set mean.
//!
//! A [`Format`] is found once for a data set, from what the recipe says or from the first rows,
//! and then reads every row into a [`Document`]. One file holds one format; `detect` lists them.

mod alpaca;
mod chat;
mod detect;
mod document;
mod error;
mod hints;
mod known;
mod mapped;
mod messages;
mod pairs;
mod row_format;
mod sharegpt;
mod text;

pub use alpaca::Alpaca;
pub use chat::message_from_fields;
pub use detect::{FormatRequest, Purpose};
pub use document::Document;
pub use error::FormatError;
pub use hints::Roles;
pub use known::{known_role_mapping, known_split_mapping};
pub use mapped::{RoleMapping, RolePath};
pub use messages::Messages;
pub use pairs::Pairs;
pub use row_format::Format;
pub use sharegpt::ShareGpt;
pub use text::TextColumn;
