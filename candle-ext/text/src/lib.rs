//! Hub access, tokenizers, chat templates, conversations, data sources.

pub mod conversation;
pub mod format;
pub mod hub;
pub mod render;
pub mod source;
pub mod template;
pub mod tokenizer;
