//! Decoder layers, model families and Hugging Face checkpoints.
//!
//! A model is a list of [`FsdpUnit`]s (embedding, layers, MTP layers, head). Each has parameter specifications and forward
//! functions. The weights are owned by the caller, which may shard them. Start at [`Model`]; [`checkpoint`] reads and
//! writes files.

pub mod checkpoint;

mod block;
mod config;
mod context;
mod dropout;
mod error;
mod expert_adapters_cost;
mod expert_linear;
mod experts;
mod experts_cost;
mod export;
mod family;
mod fp8_scales;
mod gguf;
mod io_cause;
mod layer;
mod layer_cost;
mod linear;
mod linear_spec;
mod lora;
mod model;
mod moe;
mod moe_spec;
mod mtp;
mod norm;
mod param;
mod rope;
mod router;
mod side_outputs;
mod swiglu;
mod tiled_mlp;
mod unit;
mod upcycle;
mod weights;

pub use block::Layer;
pub use config::{Config, ExpertWeighting, MoeConfig, MoeLayerFreq, SharedExpertConfig};
pub use context::{AttentionCall, ForwardContext, ParallelOps, SingleDevice, TokenExchange};
pub use dropout::ExpertDropout;
pub use error::ModelError;
pub use experts::{ExpertCall, ExpertPadding, ExpertTokens, Experts};
pub use experts_cost::ExpertExchange;
pub use export::{MergeReport, MergedModel, ParamValues, SafetensorsExport, TensorCallback};
pub use family::{Family, QkNorm};
pub use fp8_scales::{FP8_SCALES, fp8_scales_to_json, read_fp8_scales};
pub use gguf::{GgufExport, GgufFile, GgufType};
pub use io_cause::io_cause;
pub use layer::{LayerSpec, MixerSpec, MlpSpec, SelfAttentionSpec};
pub use layer_cost::{AttentionExchange, LayerCost};
pub use linear::{Adapter, Linear};
pub use linear_spec::{LinearSpec, SwiGluSpec};
pub use lora::{
    AdapterFolder, AdapterSpec, BASE_MODEL_RECORD, BaseModelRecord, ExpertAdapterSpec, Lora, LoraConfig, merge_lora,
};
pub use model::Model;
pub use moe_spec::{ExpertMatrixSpec, MoeSpec, SharedExpertSpec};
pub use mtp::MtpLayer;
pub use param::{Dim, DimSize, HubLayout, HubTensor, HubTensors, Init, ParamGroupKind, ParamScope, ParamSpec};
pub use rope::LengthClass;
pub use router::{
    ExpertCapacity, ExpertCountsSummedOverLayers, ExpertSelection, ForcedExpertLoad, GlobalExpertCounts, ROUTER_TOTALS,
    ReplayedExperts, RouterContext, RouterDtype, RouterLoss, RouterRows, RouterSettings, RouterTotal, RoutingRecord,
};
pub use side_outputs::{LayerOutputSpec, LayerOutputs};
pub use swiglu::swiglu_mlp;
pub use tiled_mlp::TiledMlp;
pub use unit::{FsdpUnit, FsdpUnitKind, TiedParam};
pub use upcycle::{UpcycledExperts, UpcycledRouter, Upcycling, UpcyclingOutput, UpcyclingReport};
pub use weights::{EmbeddingTable, LmHead, UnitWeights};
