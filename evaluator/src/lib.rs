//! Evaluates language models: held-out loss, token scores and generation.

pub mod about;
pub mod allocator;
pub mod answer;
pub mod chat;
pub mod chat_session;
pub mod cli;
pub mod cores;
mod environment;
pub mod error_file;
pub mod exit;
pub mod generate;
pub mod held_out;
pub mod lm;
pub mod messages;
pub mod output;
pub mod parts;
pub mod progress;
pub mod questions;
pub mod ranks;
pub mod request;
pub mod results;
pub mod task;
pub mod text_stream;
pub mod weights;
