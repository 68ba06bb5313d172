//! A loaded model that answers: scores of texts, generation and sampling, chats, and lists of requests on one rank or several.
//!
//! [`lm::Lm`] is a model with its tokenizer. [`answer`] answers many requests at once, [`generate`] and [`chat_session`] one at a
//! time. [`command`] holds the commands of programs that chat and
//! generate, with options for their command lines. Nothing here reads the environment or the command line.

pub mod answer;
pub mod chat_session;
pub mod command;
pub mod eval_loss;
pub mod generate;
pub mod lm;
pub mod messages;
pub mod parallel_config;
pub mod ranks;
pub mod request;
pub mod text_stream;
pub mod weights;
