//! Integration tests of the model crate: one binary, one module for each subject.

#![allow(clippy::unwrap_used, missing_docs)]

mod adapter_embeddings;
mod adapters;
mod candle_transformers;
mod checkpoints;
mod expert_adapters;
mod expert_dropout;
mod expert_weighting;
mod gguf;
mod merging;
mod multimodal;
mod norm_placement;
mod parity;
mod peft_folders;
mod rope;
mod tiny;
mod upcycling;
