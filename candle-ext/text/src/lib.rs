//! Hub access, tokenizers, chat templates, conversations, data sources.

pub mod conversation;
pub mod files;
pub mod findings;
pub mod format;
pub mod hub;
mod panics;
pub mod printable;
pub mod render;
pub mod source;
pub mod suggestion;
pub mod template;
pub mod tokenizer;
pub mod yaml;
