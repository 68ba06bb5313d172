//! Integration tests of the text crate: one binary with one module for each subject.
#![allow(clippy::unwrap_used, missing_docs)]

mod built_in_templates;
mod chat;
mod chat_properties;
mod findings;
mod gguf;
mod hub;
mod masks;
mod rows;
mod template;
mod tokenizer;
