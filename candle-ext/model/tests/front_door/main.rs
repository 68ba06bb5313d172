//! The crate through its public API, against fixtures that transformers and peft made (tests/reference/tiny_models.py).

#![allow(clippy::unwrap_used, missing_docs)]

mod adapters;
mod candle_transformers;
mod checkpoints;
mod parity;
mod tiny;
