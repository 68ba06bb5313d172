//! Resolution of the keys of mixture-of-experts models.

use candlewick_model::Model;
use candlewick_ops::{FP8_BLOCK, GroupedGemmImpl};
use candlewick_text::quantity::counted;

use super::model::EXPERTS;
use super::resolver::{Resolver, degree_advice, one_of};
use super::router;
use crate::plan::{ModelPlan, RanksPlan, RouterPlan, WeightInit};
use crate::recipe::{ArcticMoe, HumanInt, TokenDispatcherType};

const SIZE: &str = "expert_parallel_size";
pub(super) const TENSOR_SIZE: &str = "expert_tensor_parallel_size";
const DISPATCHER: &str = "moe.token_dispatcher_type";

/// Returns the settings of the routers of a model with experts. Reports keys that the model or the mesh does not allow.
pub(super) fn resolve(resolver: &mut Resolver, model: &ModelPlan, ranks: &RanksPlan) -> Option<RouterPlan> {
    note_keys_without_effect(resolver);
    let config = model.config.as_ref()?;
    config.transformers_warning().into_iter().for_each(|warning| resolver.note(warning));
    let Some(moe) = config.moe() else {
        report_keys_of_experts(resolver, "this model has no experts");
        return None;
    };
    if let Some(keys) = config.keys_without_experts() {
        report_dense_layers(resolver, model, keys);
        return None;
    }
    if ranks.tensor > 1 && !ranks.sequence_parallel {
        let message = "sequence_parallel: with tensor parallelism a mixture of experts needs it, as in Megatron-LM";
        resolver.report_with_advice(&["sequence_parallel"], message, "remove the key or set it to true");
    }
    let sizes = [config.hidden_size(), moe.expert_size / ranks.expert_tensor.max(1)];
    let by_name = match model.experts_implementation {
        GroupedGemmImpl::Cublas => Some("cublas"),
        GroupedGemmImpl::Cutlass => Some("cutlass"),
        GroupedGemmImpl::Auto | GroupedGemmImpl::Fused => None,
    };
    if let Some(name) = by_name.filter(|_| sizes.iter().any(|size| !size.is_multiple_of(8))) {
        let [hidden, width] = sizes;
        let message =
            format!("{EXPERTS}: {name} needs sizes of multiples of 8, but a rank's experts are {hidden} x {width}");
        resolver.report_with_advice(&[EXPERTS], message, "use fused, the default");
    }
    router::report_top_k(resolver, moe);
    report_split_blocks(resolver, model, ranks);
    report_dropout(resolver, model);
    report_megatron_keys(resolver, model);
    let router = router::resolve(resolver, model, moe);
    note_frozen_experts(resolver, model, &router);
    Some(router)
}

/// Notes an adapter that leaves all routed experts and routers frozen, as `all-linear` does.
fn note_frozen_experts(resolver: &mut Resolver, model: &ModelPlan, router: &RouterPlan) {
    let (Some(lora), Some(config)) = (&model.adapter, &model.config) else { return };
    let is_frozen = Model::new(config.clone(), Some(lora.clone()))
        .is_ok_and(|adapted| !adapted.adapts_experts() && !adapted.adapts_routers());
    if resolver.recipe().model.peft_config.is_none() || !is_frozen {
        return;
    }
    let of_losses = match router.losses[..] {
        [] => "no router loss is added",
        _ => "the router losses train no router",
    };
    resolver.note(format!(
        "model.peft_config leaves routed experts and routers frozen, and {of_losses}; to adapt them, set \
         model.peft_config.target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight]"
    ));
}

/// Degrees of the ranks that hold the experts of a stage.
#[derive(Clone, Copy)]
pub(super) struct ExpertRanks {
    /// The expert-parallel degree.
    pub(super) expert: usize,
    /// The expert-tensor-parallel degree.
    pub(super) tensor: usize,
}

/// Returns the degrees of expert ranks; `None` for a dense model. They must divide the experts, the intermediate size of
/// an expert and the ranks of a pipeline stage.
pub(super) fn expert_ranks(resolver: &mut Resolver, model: &ModelPlan, n_in_stage: usize) -> Option<ExpertRanks> {
    let moe = model.config.as_ref()?.moe()?;
    let (n_experts, width) = (moe.n_experts, moe.expert_size);
    let expert = resolver.positive(SIZE, resolver.recipe().expert_parallel_size, 1).max(1);
    let fits = |n: &usize| n_in_stage.is_multiple_of(*n) && n_experts.is_multiple_of(*n);
    if !fits(&expert) {
        let possible = (1..=n_in_stage).filter(fits);
        let (message, advice) = if n_experts.is_multiple_of(expert) {
            let ranks = counted(n_in_stage, "rank");
            let message = format!("{SIZE}: the {ranks} of a pipeline stage cannot be divided by {expert}");
            (message, degree_advice(resolver, possible))
        } else {
            (format!("{SIZE}: {n_experts} experts cannot be divided by {expert}"), one_of(possible))
        };
        resolver.report_with_advice(&[SIZE], message, advice);
        return Some(ExpertRanks { expert: 1, tensor: 1 });
    }
    let tensor = resolver.positive(TENSOR_SIZE, resolver.recipe().expert_tensor_parallel_size, 1).max(1);
    let n_groups = n_in_stage / expert;
    let fits = |n: &usize| n_groups.is_multiple_of(*n) && width.is_multiple_of(*n);
    if !fits(&tensor) {
        let message = if width.is_multiple_of(tensor) {
            format!(
                "{TENSOR_SIZE}: the {} of a pipeline stage cannot be divided into {expert} expert-parallel groups of {tensor}",
                counted(n_in_stage, "rank")
            )
        } else {
            format!("{TENSOR_SIZE}: the intermediate size {width} of an expert cannot be divided by {tensor}")
        };
        let advice = degree_advice(resolver, (1..=n_groups).filter(fits));
        resolver.report_with_advice(&[TENSOR_SIZE], message, advice);
        return Some(ExpertRanks { expert, tensor: 1 });
    }
    Some(ExpertRanks { expert, tensor })
}

/// Returns the exchange of tokens between expert-parallel ranks.
pub(super) fn token_dispatcher(resolver: &mut Resolver) -> TokenDispatcherType {
    let given = resolver.recipe().moe.token_dispatcher_type;
    resolver.pick(DISPATCHER, given, TokenDispatcherType::default())
}

/// Reports ranks that would split the blocks of frozen experts in FP8, each of which has one scale.
fn report_split_blocks(resolver: &mut Resolver, model: &ModelPlan, ranks: &RanksPlan) {
    let Some((config, moe)) = model.config.as_ref().and_then(|config| Some((config, config.moe()?))) else { return };
    let n_expert_ranks = ranks.expert.unwrap_or(1);
    let n_own = moe.n_experts / n_expert_ranks;
    let rows = [2 * moe.expert_size, config.hidden_size()].map(|rows| n_own * rows);
    let is_whole = |size: &usize| size.is_multiple_of(FP8_BLOCK);
    let splits = [
        (
            SIZE,
            n_expert_ranks > 1 && !rows.iter().all(is_whole),
            format!("{} and {} rows of its experts", rows[0], rows[1]),
        ),
        (
            TENSOR_SIZE,
            ranks.expert_tensor > 1 && !is_whole(&(moe.expert_size / ranks.expert_tensor)),
            format!("{} of the intermediate size", moe.expert_size / ranks.expert_tensor),
        ),
    ];
    for (key, _, part) in splits.iter().filter(|(_, is_split, _)| *is_split && model.quantize_base.is_some()) {
        let message =
            format!("{key}: model.quantize_base has a scale for each {FP8_BLOCK} rows, but a rank would have {part}");
        resolver.report_with_advice(&[key], message, "use 1, or remove model.quantize_base");
    }
}

/// Reports dropout of adapters of `target_parameters`. PEFT adds them to weights, which have no input to drop.
fn report_dropout(resolver: &mut Resolver, model: &ModelPlan) {
    if !model.adapter.as_ref().is_some_and(|lora| lora.dropout() > 0.0 && lora.targets_parameters()) {
        return;
    }
    let model = &resolver.recipe().model;
    let key = if model.peft_config.is_some() { "model.peft_config" } else { "model.adapter_name_or_path" };
    let message =
        format!("{key}: PEFT refuses lora_dropout with target_parameters, whose adapters have no input of their own");
    resolver.report_with_advice(&[key], message, "set lora_dropout to 0, or name the modules in target_modules");
}

/// Reports keys of Megatron-LM that an adapter's base model does not have. An adapter folder has no config of its model.
fn report_megatron_keys(resolver: &mut Resolver, model: &ModelPlan) {
    let is_of_megatron = |key: &&String| {
        key.starts_with("moe_router_") || ["moe_apply_probs_on_input", "moe_layer_freq"].contains(&key.as_str())
    };
    let Some(key) = model.hf_config_kwargs.keys().find(is_of_megatron).filter(|_| model.adapter.is_some()) else {
        return;
    };
    let message = format!("model.hf_config_kwargs: an adapter cannot store {key}, so other programs would not know it");
    let advice = "write the key into the config.json of the base model, or train without an adapter";
    resolver.report_with_advice(&["model.hf_config_kwargs"], message, advice);
}

fn note_keys_without_effect(resolver: &mut Resolver) {
    let recipe = resolver.recipe();
    if recipe.enable_arctic_moe_custom_optimization.is_some() {
        resolver.note("enable_arctic_moe_custom_optimization has no effect: the kernels of experts are always fused");
    }
    if recipe.enable_routing_replay.is_some() {
        resolver.note(
            "enable_routing_replay has no effect: a recomputed layer always selects the same experts. moe.routing_replay \
             replays those of another run",
        );
    }
}

/// Reports a model that `config_keys` leave without experts: one with new weights, or one that is trained with keys of experts. A
/// pretrained one is trained as the dense model that it is.
fn report_dense_layers(resolver: &mut Resolver, model: &ModelPlan, config_keys: &str) {
    if model.init == WeightInit::Load {
        let reason = format!("no layer has experts by {config_keys} of config.json");
        report_keys_of_experts(resolver, &reason);
        return resolver.note(format!("{reason}: the model is trained as a dense one"));
    }
    let recipe = &resolver.recipe().model;
    let key = match (recipe.hf_config_kwargs.is_empty(), &recipe.config) {
        (false, _) => "model.hf_config_kwargs",
        (true, Some(_)) => "model.config",
        (true, None) => "model.name_or_path",
    };
    let message = format!("{key}: no layer has experts by {config_keys}");
    resolver.report_with_advice(&[key], message, "change them, or set the number of experts to 0 for a dense model");
}

/// Reports keys that need a model with experts.
fn report_keys_of_experts(resolver: &mut Resolver, reason: &str) {
    let recipe = resolver.recipe();
    let keys = [
        ("arctic_moe", recipe.arctic_moe == Some(ArcticMoe::On)),
        (SIZE, recipe.expert_parallel_size.is_some_and(|HumanInt(n)| n > 1)),
        (TENSOR_SIZE, recipe.expert_tensor_parallel_size.is_some_and(|HumanInt(n)| n > 1)),
        (DISPATCHER, recipe.moe.token_dispatcher_type.is_some()),
        (EXPERTS, recipe.model.experts_implementation.is_some()),
    ];
    let set = keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key);
    for key in set.chain(router::set_keys(resolver)).collect::<Vec<_>>() {
        let advice = match key.starts_with("moe.") {
            true => "remove the key (the argument moe=null removes all of them), or train a mixture-of-experts model",
            false => "remove the key, or train a mixture-of-experts model",
        };
        resolver.report_with_advice(&[key], format!("{key}: {reason}"), advice);
    }
}
