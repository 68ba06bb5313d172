//! Resolution of the keys of mixture-of-experts models.

use candlewick_model::QkNorm;

use super::resolver::{Resolver, one_of};
use super::router;
use crate::plan::{ModelPlan, RanksPlan, RouterPlan};
use crate::recipe::{ArcticMoe, HumanInt};

const SIZE: &str = "expert_parallel_size";

/// Returns the settings of the routers of a model with experts. Reports keys that the model or the mesh does not allow.
pub(super) fn resolve(resolver: &mut Resolver, model: &ModelPlan, ranks: &RanksPlan) -> Option<RouterPlan> {
    note_keys_without_effect(resolver);
    let config = model.config.as_ref()?;
    if ranks.tensor > 1 && config.qk_norm() == QkNorm::AllHeads {
        let message = "tensor_parallel_size: the QK norm of this model covers all heads, which ranks cannot split";
        resolver.report_with_advice(&["tensor_parallel_size"], message, "use 1");
    }
    let Some(moe) = config.moe() else {
        report_keys_of_experts(resolver);
        return None;
    };
    if ranks.tensor > 1 && !ranks.sequence_parallel {
        let message = "sequence_parallel: with tensor parallelism a mixture of experts needs it, as in Megatron-LM";
        resolver.report_with_advice(&["sequence_parallel"], message, "remove the key or set it to true");
    }
    if model.tiled_mlp {
        let message = "tiled_mlp_compute: experts cannot be computed in tiles of tokens";
        resolver.report_with_advice(&["tiled_mlp_compute"], message, "remove the key");
    }
    if ranks.expert.is_some_and(|size| size > 1) {
        report_keys_of_inference(resolver);
    }
    Some(router::resolve(resolver, model, moe))
}

/// Returns the expert-parallel degree; `None` for a dense model. It must divide the experts and the ranks of a pipeline
/// stage.
pub(super) fn expert_parallel_size(resolver: &mut Resolver, model: &ModelPlan, n_in_stage: usize) -> Option<usize> {
    let n_experts = model.config.as_ref()?.moe()?.n_experts;
    let size = resolver.positive(SIZE, resolver.recipe().expert_parallel_size, 1).max(1);
    let fits = |n: &usize| n_in_stage.is_multiple_of(*n) && n_experts.is_multiple_of(*n);
    if !fits(&size) {
        let message = if n_experts.is_multiple_of(size) {
            format!("{SIZE}: the {n_in_stage} ranks of a pipeline stage cannot be divided by {size}")
        } else {
            format!("{SIZE}: {n_experts} experts cannot be divided by {size}")
        };
        resolver.report_with_advice(&[SIZE], message, one_of((1..=n_in_stage).filter(fits)));
        return Some(1);
    }
    Some(size)
}

fn note_keys_without_effect(resolver: &mut Resolver) {
    let recipe = resolver.recipe();
    if recipe.enable_arctic_moe_custom_optimization.is_some() {
        resolver.note("enable_arctic_moe_custom_optimization has no effect: the kernels of experts are always fused");
    }
    if recipe.enable_routing_replay.is_some() {
        resolver.note("enable_routing_replay has no effect: a recomputed layer always selects the same experts");
    }
}

/// Reports keys that generate text during training: expert-parallel ranks cannot compute different requests.
fn report_keys_of_inference(resolver: &mut Resolver) {
    for key in ["eval.tasks", "generate"] {
        if resolver.loaded.is_set(key) {
            let message = format!("{key}: not supported with expert_parallel_size above 1");
            resolver.report_with_advice(&[key, SIZE], message, "evaluate the exported model instead");
        }
    }
}

/// Reports keys that need a model with experts.
fn report_keys_of_experts(resolver: &mut Resolver) {
    let recipe = resolver.recipe();
    let advice = "remove the key, or train a mixture-of-experts model";
    let keys = [
        ("arctic_moe", recipe.arctic_moe == Some(ArcticMoe::On)),
        (SIZE, recipe.expert_parallel_size.is_some_and(|HumanInt(n)| n > 1)),
    ];
    let set = keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key);
    for key in set.chain(router::set_keys(resolver)).collect::<Vec<_>>() {
        resolver.report_with_advice(&[key], format!("{key}: this model has no experts"), advice);
    }
}
