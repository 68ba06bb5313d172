//! Decoder layers, model families and Hugging Face checkpoints.
//!
//! A model is a list of [`FsdpUnit`]s (embedding, layers, MTP layers, head). Each has parameter specifications and forward
//! functions. The weights are owned by the caller, which may shard them. Start at [`Model`]; [`checkpoint`] reads and
//! writes files.

pub mod checkpoint;

mod config;
mod context;
mod dropout;
mod error;
mod export;
mod family;
mod fp8_scales;
mod gguf;
mod io_cause;
mod layer;
mod layer_cost;
mod layer_sizes;
mod linear;
mod linear_group;
mod linear_spec;
mod lora;
mod mixer;
mod mlp;
mod model;
mod mtp;
mod norm;
mod norm_placement;
mod param;
mod rope;
mod router;
mod side_outputs;
mod spec_object;
mod tiled_mlp;
mod unit;
mod upcycle;
mod weights;

pub use config::{Config, ExpertWeighting, MoeConfig, MoeLayerFreq, SharedExpertConfig};
pub use context::{
    AttentionCall, ForwardContext, ParallelOps, SequenceMixing, SingleDevice, TokenExchange, TokenParallel,
};
pub use dropout::{DropoutScope, ExpertDropout};
pub use error::ModelError;
pub use export::{MergeReport, MergedModel, ParamValues, SafetensorsExport, TensorCallback};
pub use family::{Family, QkNorm};
pub use fp8_scales::{FP8_SCALES, fp8_scales_to_json, read_fp8_scales};
pub use gguf::{GgufExport, GgufFile, GgufType};
pub use io_cause::io_cause;
pub use layer::{Layer, LayerSpec};
pub use layer_cost::LayerCost;
pub use layer_sizes::{AttentionExchange, LayerSizes};
pub use linear::{Adapter, Linear};
pub use linear_group::{LinearFusion, LinearGroup};
pub use linear_spec::LinearSpec;
pub use lora::{
    AdapterFolder, AdapterNames, AdapterSpec, BASE_MODEL_RECORD, BaseModelRecord, Lora, LoraConfig, LoraTargets,
    merge_lora,
};
pub use mixer::{AttentionShape, Mixer, MixerCost, MixerSpec, MixerSpecObject, MixerSplit, SelfAttentionSpec};
pub use mlp::{
    ExpertAdapterSpec, ExpertCall, ExpertExchange, ExpertMatrixSpec, ExpertPadding, ExpertTokens, Experts, Mlp,
    MlpCost, MlpSpec, MlpSpecObject, MoeSpec, SharedExpertSpec, SwiGluSpec, swiglu_mlp,
};
pub use model::Model;
pub use mtp::MtpLayer;
pub use norm_placement::NormPlacement;
pub use param::{
    Dim, DimSize, HubLayout, HubTensor, HubTensors, Init, ParamGroupKind, ParamScope, ParamSpec, WeightLookup,
};
pub use rope::LengthClass;
pub use router::{
    ExpertCapacity, ExpertCountsSummedOverLayers, ExpertSelection, ForcedExpertLoad, GlobalExpertCounts, ROUTER_TOTALS,
    ReplayedExperts, RouterContext, RouterDtype, RouterLoss, RouterRows, RouterSettings, RouterTotal, RoutingRecord,
};
pub use side_outputs::{LayerOutputSpec, LayerOutputs};
pub use tiled_mlp::TiledMlp;
pub use unit::{FsdpUnit, FsdpUnitKind, TiedParam};
pub use upcycle::{UpcycledExperts, UpcycledRouter, Upcycling, UpcyclingOutput, UpcyclingReport};
pub use weights::{EmbeddingTable, LmHead, UnitWeights};
