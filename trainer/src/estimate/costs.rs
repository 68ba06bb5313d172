//! The sizes of a setup on one rank, from which the allocating crates compute their costs.

use candlewick_model::{AttentionExchange, ExpertExchange, LayerCost, LayerSizes, LayerSpec};
use candlewick_ops::{AttentionHeads, CrossEntropyCost, DeviceKind, LOGITS_BYTES_ON_CPU, logits_bytes_on_gpu};
use candlewick_parallel::{HeadCost, OffloadMemory, StepCost, ring_exchange};

use super::Setup;
use crate::plan::{Fp8RecipePlan, checkpointing, dtype};
use crate::recipe::TokenDispatcherType;

/// Returns the sizes of the steps of this rank.
pub(super) fn step(setup: &Setup) -> StepCost<'_> {
    StepCost {
        layers: (0..setup.model.n_blocks()).map(|layer_idx| layer(setup, layer_idx)).collect(),
        mtp_layers: mtp_layers(setup).map(|layer_idx| layer(setup, layer_idx)).collect(),
        head: head(setup),
        checkpointing: checkpointing(setup.modes.activations, setup.model.n_blocks()),
        offload_memory: match setup.compute_device {
            DeviceKind::Gpu => OffloadMemory::Host,
            DeviceKind::Cpu if setup.offloads_to_ram => OffloadMemory::Device,
            DeviceKind::Cpu => OffloadMemory::Files,
        },
        layout: &setup.layout,
        schedule: setup.schedule,
        stage: setup.stage,
        n_micros: setup.n_micros,
    }
}

/// Returns the indices of the MTP layers' decoder layers.
fn mtp_layers(setup: &Setup) -> std::ops::Range<usize> {
    let n_blocks = setup.model.n_blocks();
    n_blocks..n_blocks + setup.model.config().n_mtp_layers()
}

/// Returns the sizes of a layer, or of the decoder layer of an MTP layer.
pub(super) fn layer(setup: &Setup, layer_idx: usize) -> LayerCost<'_> {
    let layer = setup.model.units()[layer_idx + 1].layer().expect("the units between embedding and head are layers");
    let sizes = LayerSizes {
        hidden_size: layer.hidden_size,
        n_slices: setup.ranks.tensor,
        n_tokens: setup.n_micro_batch_tokens(),
        n_residual_tokens: setup.n_residual_tokens(),
        longest: setup.row_tokens,
        dtype: dtype(setup.compute),
        residual: setup.residual(),
        grad: setup.base_grad(),
        device: setup.compute_device,
        attention: setup.attention,
        tiled_mlp: setup.modes.tiled_mlp(),
        exchange: exchange(setup, layer),
        experts: expert_exchange(setup),
        n_expert_ranks: setup.ranks.n_expert_ranks(),
        padded_capacity_factor: setup.padded_capacity_factor,
        router: setup.router,
        fp8_grad_copies: if matches!(setup.fp8_recipe, Some(Fp8RecipePlan::Blockwise(_))) { 2 } else { 1 },
    };
    LayerCost { layer, sizes }
}

/// Returns the sizes of the head.
pub(super) fn head(setup: &Setup) -> HeadCost {
    let config = setup.model.config();
    let loss = CrossEntropyCost {
        n_tokens: setup.n_micro_batch_tokens(),
        n_vocab: config.vocab_size().div_ceil(setup.ranks.tensor) as u64,
        n_in: config.hidden_size() as u64,
        logits_bytes: match setup.compute_device {
            DeviceKind::Cpu => LOGITS_BYTES_ON_CPU,
            DeviceKind::Gpu => logits_bytes_on_gpu(setup.gpu_bytes),
        },
        dtype: dtype(setup.compute),
        device: setup.compute_device,
        grad: setup.base_grad(),
    };
    let (n_slices, n_residual_tokens) = (setup.ranks.tensor, setup.n_residual_tokens());
    HeadCost { n_slices, n_residual_tokens, residual: setup.residual(), loss }
}

/// Returns the exchange of tokens between the ranks of the experts.
fn expert_exchange(setup: &Setup) -> ExpertExchange {
    let (n_ranks, n_shards) = (setup.ranks.n_expert_ranks() as u64, setup.ranks.expert_tensor as u64);
    match (n_ranks, setup.ranks.token_dispatcher) {
        (1, _) => ExpertExchange::None,
        (_, TokenDispatcherType::AllToAll) => ExpertExchange::Rows { n_shards },
        (_, TokenDispatcherType::AllGather) => ExpertExchange::Tokens { n_ranks, n_shards },
    }
}

/// Returns the bytes of ring attention's key and value exchange; zero on one rank, and without attention.
fn exchange(setup: &Setup, layer: &LayerSpec) -> AttentionExchange {
    let tensor = setup.ranks.tensor;
    match layer.mixer.attention_shape() {
        Some(shape) if setup.ranks.context > 1 => {
            let (n_query, n_kv) = (shape.n_heads / tensor, shape.n_kv_heads / tensor);
            let heads = AttentionHeads { n_query, n_kv, dim: shape.head_dim };
            ring_exchange(setup.n_micro_batch_tokens(), heads, dtype(setup.compute))
        }
        _ => AttentionExchange::default(),
    }
}
