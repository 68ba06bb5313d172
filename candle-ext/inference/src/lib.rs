//! Inference with a loaded model: log-likelihoods, generation, chat and batches of lm-eval requests, on one rank or
//! several.
//!
//! [`lm::Lm`] is a model with its tokenizer. [`answer`] runs batches of requests, [`generate`] and [`chat_session`] one
//! generation at a time. [`serve`] is an HTTP server. [`command`] has the command-line options and loops of `chat`,
//! `generate` and `serve`. This crate reads neither environment nor command line.

pub mod answer;
pub mod chat_session;
pub mod command;
pub mod constraint;
pub mod eval_loss;
pub mod generate;
pub mod lm;
pub mod logits_check;
pub mod messages;
pub mod parallel_config;
pub mod ranks;
pub mod reasoning;
pub mod request;
pub mod sampler;
pub mod serve;
pub mod text_stream;
pub mod tool_calls;
pub mod weights;
