//! Decoder blocks and model families; Hugging Face names in and out.
//!
//! A model is a list of [`Unit`]s (embedding, blocks, head): what its parameters are called, and functions from
//! weights and activations to activations. It owns no weights and knows of no rank: where a weight lives is the
//! caller's business. Start at [`Model`]; files are read and written by [`checkpoint`].

pub mod checkpoint;

mod block;
mod config;
mod dropout;
mod error;
mod family;
mod layer;
mod layer_cost;
mod linear;
mod lora;
mod model;
mod norm;
mod param;
mod rope;
mod unit;
mod weights;

pub use block::{Cx, Layer, MlpRows, OneDevice, Seams};
pub use config::Config;
pub use error::ModelError;
pub use family::Family;
pub use layer::{LayerSpec, LinearSpec, MixerSpec, MlpSpec, SelfAttentionSpec, SwiGluSpec};
pub use layer_cost::{AttentionExchange, LayerCost};
pub use linear::{Adapter, Linear};
pub use lora::{AdapterFolder, AdapterSpec, BASE_RECORD, BaseRecord, Lora, LoraConfig, Merge, Merged, merge};
pub use model::Model;
pub use param::{Dim, DimSize, GroupKind, Init, ParamSpec, Region};
pub use unit::{Shared, Unit, UnitKind};
pub use weights::{Embedding, Head, Weights};
