//! Text side of training and evaluation: Hub downloads, tokenizers, chat templates, conversations and data sources.

mod catch_panic;
pub mod conversation;
pub mod files;
pub mod format;
pub mod hub;
pub mod long_integer;
pub mod printable;
pub mod quantity;
pub mod render;
mod response_body;
pub mod sample_warning;
pub mod snowflake;
pub mod source;
pub mod suggestion;
pub mod template;
pub mod tokenizer;
pub mod yaml;
