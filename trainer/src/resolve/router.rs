//! Resolution of the keys of routers.

use std::path::PathBuf;

use candlewick_model::{Config, Model, MoeConfig, RouterLoss};
use candlewick_ops::MAX_CUDA_TOP_K;

use super::backend::is_on_gpu;
use super::resolver::{Resolver, check_coefficient, short};
use crate::plan::{ModelPlan, RouterLossTerm, RouterPlan, RoutingReplayPlan, WeightInit};
use crate::recipe::{
    HumanFloat, LoadBalancingType, MoeBenchmarkSection, MoeRouterDtype, RoutingReplaySection, TokenDropPolicy,
    ValueOrList,
};

const TYPE: &str = "moe.router_load_balancing_type";
const COEFF: &str = "moe.aux_loss_coeff";
const Z_COEFF: &str = "moe.z_loss_coeff";
const BIAS_RATE: &str = "moe.router_bias_update_rate";
const CAPACITY: &str = "moe.expert_capacity_factor";
const DROP_POLICY: &str = "moe.token_drop_policy";
const PADDING: &str = "moe.pad_expert_input_to_capacity";
const JITTER: &str = "moe.input_jitter_eps";
const DTYPE: &str = "moe.router_dtype";
const BENCHMARK: &str = "moe.benchmark";
const TOP_K: &str = "num_experts_per_tok";
const ROUTING_REPLAY: &str = "moe.routing_replay";

/// Returns the settings of the routers of a model with experts.
pub(super) fn resolve(resolver: &mut Resolver, model: &ModelPlan, moe: &MoeConfig) -> RouterPlan {
    let types = load_balancing_types(resolver);
    let mut losses = balancing_losses(resolver, model, moe, &types);
    let z_loss_coeff = resolver.coefficient(Z_COEFF, resolver.recipe().moe.z_loss_coeff, 0.0);
    losses.push(RouterLossTerm { loss: RouterLoss::Z, coefficient: z_loss_coeff });
    losses.retain(|term| term.coefficient > 0.0);
    let sinkhorn = types == [LoadBalancingType::Sinkhorn];
    if sinkhorn && moe.expert_bias {
        let message = format!("{TYPE}: sinkhorn ignores the expert biases of this model");
        resolver.report_with_advice(&[TYPE], message, "use another type");
    }
    if trains_routers(model) {
        let constant = model.config.as_ref().and_then(Config::constant_weights);
        constant.into_iter().for_each(|problem| resolver.note(problem));
    }
    let (capacity_factor, drop_policy) = capacity(resolver);
    let jitter = resolver.recipe().moe.input_jitter_eps;
    let input_jitter_eps = resolver.number(JITTER, jitter, 0.0, 0.0, 0.99);
    let dtype = resolver.pick(DTYPE, resolver.recipe().moe.router_dtype, MoeRouterDtype::default());
    RouterPlan {
        capacity_factor,
        drop_policy,
        pads_to_capacity: pads_to_capacity(resolver),
        input_jitter_eps,
        dtype,
        benchmark: benchmark(resolver),
        routing_replay: routing_replay(resolver, sinkhorn),
        losses,
        sinkhorn,
        n_layers: n_layers(model, moe),
        bias_update_rate: bias_update_rate(resolver, model, moe),
    }
}

/// Reports more experts per token than the kernels of a GPU select.
pub(super) fn report_top_k(resolver: &mut Resolver, moe: &MoeConfig) {
    let top_k = moe.router.top_k;
    if is_on_gpu(resolver) && top_k > MAX_CUDA_TOP_K {
        let keys = ["model.hf_config_kwargs", "model.config"].map(|section| format!("{section}.{TOP_K}"));
        let message =
            format!("{TOP_K}: a GPU selects at most {MAX_CUDA_TOP_K} experts for a token, and the model {top_k}");
        let advice = format!("use at most {MAX_CUDA_TOP_K}, or device: cpu");
        resolver.report_with_advice(&[&keys[0], &keys[1], "model.config", "model.name_or_path"], message, advice);
    }
}

/// Returns the number of layers with experts. MTP layers have experts if the last layer has.
fn n_layers(model: &ModelPlan, moe: &MoeConfig) -> usize {
    let n_mtp_layers = model.mtp.map_or(0, |mtp| mtp.n_layers);
    let of_mtp = if moe.layers.last() == Some(&true) { n_mtp_layers } else { 0 };
    moe.layers.iter().filter(|is_moe| **is_moe).count() + of_mtp
}

/// Returns the names of set keys that need a model with experts.
pub(super) fn set_keys(resolver: &Resolver) -> Vec<&'static str> {
    let moe = &resolver.recipe().moe;
    let keys = [
        (TYPE, moe.router_load_balancing_type.is_some()),
        (COEFF, moe.aux_loss_coeff.is_some()),
        (Z_COEFF, moe.z_loss_coeff.is_some()),
        (BIAS_RATE, moe.router_bias_update_rate.is_some()),
        (CAPACITY, moe.expert_capacity_factor.is_some()),
        (DROP_POLICY, moe.token_drop_policy.is_some()),
        (PADDING, moe.pad_expert_input_to_capacity.is_some()),
        (JITTER, moe.input_jitter_eps.is_some()),
        (DTYPE, moe.router_dtype.is_some()),
        (BENCHMARK, moe.benchmark != MoeBenchmarkSection::default()),
        (ROUTING_REPLAY, moe.routing_replay != RoutingReplaySection::default()),
    ];
    keys.into_iter().filter(|(_, is_set)| *is_set).map(|(key, _)| key).collect()
}

/// Returns true if the run trains the routers: without LoRA, or if they have adapters.
fn trains_routers(model: &ModelPlan) -> bool {
    match (&model.adapter, &model.config) {
        (Some(lora), Some(config)) => {
            Model::new(config.clone(), Some(lora.clone())).is_ok_and(|adapted| adapted.adapts_routers())
        }
        (adapter, _) => adapter.is_none(),
    }
}

/// Returns the capacity factor and the drop policy.
fn capacity(resolver: &mut Resolver) -> (Option<f64>, TokenDropPolicy) {
    let (factor, policy) = (resolver.recipe().moe.expert_capacity_factor, resolver.recipe().moe.token_drop_policy);
    let factor = resolver.pick(CAPACITY, factor.map(Some), None).map(|HumanFloat(factor)| factor);
    if let Some(factor) = factor.filter(|factor| *factor <= 0.0) {
        resolver.report(&[CAPACITY], format!("{CAPACITY}: expected a number above 0, found {factor}"));
    }
    if factor.is_none() && policy.is_some() {
        let message = format!("{DROP_POLICY}: no token is dropped without {CAPACITY}");
        resolver.report_with_advice(&[DROP_POLICY], message, format!("remove the key, or set {CAPACITY}"));
    }
    (factor, resolver.pick(DROP_POLICY, policy, TokenDropPolicy::Probs))
}

/// Returns true if experts are padded to their capacity, which they then need.
fn pads_to_capacity(resolver: &mut Resolver) -> bool {
    let moe = &resolver.recipe().moe;
    let (pads, has_capacity) = (moe.pad_expert_input_to_capacity, moe.expert_capacity_factor.is_some());
    if pads == Some(true) && !has_capacity {
        let message = format!("{PADDING}: experts have no capacity without {CAPACITY}");
        resolver.report_with_advice(&[PADDING], message, format!("set {CAPACITY}, or remove the key"));
    }
    resolver.pick(PADDING, pads, false)
}

/// Returns the forced load of a benchmark.
fn benchmark(resolver: &mut Resolver) -> MoeBenchmarkSection {
    let section = resolver.recipe().moe.benchmark.clone();
    if section.router_force_load_balancing == Some(true) && section.router_force_biased.is_some() {
        let message = format!("{BENCHMARK}: router_force_load_balancing and router_force_biased exclude each other");
        resolver.report_with_advice(&[BENCHMARK], message, "remove one of them");
    }
    if let Some(HumanFloat(std)) = section.router_force_biased.filter(|HumanFloat(std)| *std <= 0.0) {
        let key = "moe.benchmark.router_force_biased";
        resolver.report(&[key], format!("{key}: expected a number above 0, found {std}"));
    }
    section
}

/// Returns the record of experts to write or to replay.
fn routing_replay(resolver: &mut Resolver, sinkhorn: bool) -> Option<RoutingReplayPlan> {
    let RoutingReplaySection { record, replay } = &resolver.recipe().moe.routing_replay;
    let (key, dir, plan): (_, _, fn(PathBuf) -> _) = match (record, replay) {
        (None, None) => return None,
        (Some(_), Some(_)) => {
            let message = format!("{ROUTING_REPLAY}: record and replay exclude each other");
            resolver.report_with_advice(&[ROUTING_REPLAY], message, "remove one of them");
            return None;
        }
        (Some(dir), None) => ("moe.routing_replay.record", dir, RoutingReplayPlan::Record),
        (None, Some(dir)) => ("moe.routing_replay.replay", dir, RoutingReplayPlan::Replay),
    };
    if dir.is_empty() {
        resolver.report(&[key], format!("{key}: expected a folder, found an empty name"));
    }
    if sinkhorn || resolver.recipe().moe.benchmark.is_on() {
        let other = if sinkhorn { format!("{TYPE}: sinkhorn") } else { BENCHMARK.to_owned() };
        let message = format!("{key}: the experts do not come from the routers with {other}");
        resolver.report_with_advice(&[key], message, "remove one of the keys");
    }
    let origin = resolver.loaded.origin(&[key]);
    Some(plan(resolver.record(key, PathBuf::from(dir), origin)))
}

/// Returns the load-balancing types. A list may hold different losses only.
fn load_balancing_types(resolver: &mut Resolver) -> Vec<LoadBalancingType> {
    let given = resolver.recipe().moe.router_load_balancing_type.clone();
    let types = resolver.pick(TYPE, given, ValueOrList::Value(LoadBalancingType::AuxLoss));
    let ValueOrList::List(types) = types else { return types.values().to_vec() };
    let is_repeated = |i: usize| types[..i].contains(&types[i]);
    if types.is_empty() || types.iter().any(|kind| loss(*kind).is_none()) || (0..types.len()).any(is_repeated) {
        let message = format!("{TYPE}: expected a list of different losses");
        resolver.report_with_advice(
            &[TYPE],
            message,
            "list aux_loss, seq_aux_loss, global_aux_loss or transformers_aux_loss, each once",
        );
        return Vec::new();
    }
    types
}

/// Returns the loss of a load-balancing type.
fn loss(kind: LoadBalancingType) -> Option<RouterLoss> {
    match kind {
        LoadBalancingType::AuxLoss => Some(RouterLoss::LoadBalancing),
        LoadBalancingType::SeqAuxLoss => Some(RouterLoss::SequenceLoadBalancing),
        LoadBalancingType::GlobalAuxLoss => Some(RouterLoss::GlobalLoadBalancing),
        LoadBalancingType::TransformersAuxLoss => Some(RouterLoss::TransformersLoadBalancing),
        LoadBalancingType::Sinkhorn | LoadBalancingType::None => None,
    }
}

/// Returns the load-balancing losses with their coefficients.
fn balancing_losses(
    resolver: &mut Resolver,
    model: &ModelPlan,
    moe: &MoeConfig,
    types: &[LoadBalancingType],
) -> Vec<RouterLossTerm> {
    let given = resolver.recipe().moe.aux_loss_coeff.clone();
    let losses: Vec<RouterLoss> = types.iter().copied().filter_map(loss).collect();
    if losses.is_empty() {
        if given.is_some_and(|coeff| coeff.values().iter().any(|HumanFloat(c)| *c != 0.0)) {
            let message = format!("{COEFF}: {TYPE} names no loss");
            resolver.report_with_advice(&[COEFF], message, "remove the key, or choose a loss");
        }
        return Vec::new();
    }
    let default = match losses[..] {
        [loss] if trains_routers(model) => default_coefficient(loss, moe),
        _ => 0.0,
    };
    let coefficients = resolver.pick(COEFF, given.clone(), ValueOrList::Value(HumanFloat(default)));
    let coefficients = coefficients.values();
    let wrong = coefficients.iter().find_map(|HumanFloat(c)| check_coefficient(*c).err().map(|expected| (c, expected)));
    match (wrong, &given) {
        (None, _) => {}
        (Some((wrong, expected)), Some(_)) => {
            resolver.report(&[COEFF], format!("{COEFF}: expected {expected}, found {}", short(*wrong)));
        }
        (Some((_, expected)), None) => {
            let found = short(moe.aux_loss_coefficient);
            let message = format!("{COEFF}: router_aux_loss_coef in the model's config.json is {found}");
            resolver.report_with_advice(&["model.name_or_path"], message, format!("set {COEFF} to {expected}"));
        }
    }
    if coefficients.len() != losses.len() {
        let (n, n_given) = (losses.len(), given.map_or(0, |given| given.values().len()));
        let (named, advice) = match n {
            1 => ("one loss".to_owned(), "give one number".to_owned()),
            n => (format!("{n} losses"), format!("set {COEFF} to a list of {n}")),
        };
        let message = format!("{COEFF}: {TYPE} names {named}, and there are {n_given} coefficients");
        resolver.report_with_advice(&[COEFF, TYPE], message, advice);
    }
    let terms = losses.into_iter().zip(coefficients);
    terms.map(|(loss, HumanFloat(coefficient))| RouterLossTerm { loss, coefficient: *coefficient }).collect()
}

/// Returns the coefficient of a loss that equals the model's coefficient of transformers' loss, if the load is balanced.
///
/// transformers' loss is then k, over all layers. Ours is 1, for each layer.
fn default_coefficient(loss: RouterLoss, moe: &MoeConfig) -> f64 {
    let n_layers = moe.layers.iter().filter(|is_moe| **is_moe).count().max(1);
    match loss {
        RouterLoss::TransformersLoadBalancing => moe.aux_loss_coefficient,
        _ => moe.aux_loss_coefficient * moe.router.top_k as f64 / n_layers as f64,
    }
}

/// Returns the update rate of the expert biases; 0 for a model without them.
fn bias_update_rate(resolver: &mut Resolver, model: &ModelPlan, moe: &MoeConfig) -> f64 {
    let value = resolver.recipe().moe.router_bias_update_rate;
    if !moe.expert_bias {
        if value.is_some() {
            let message = format!("{BIAS_RATE}: the routers of this model have no expert bias");
            resolver.report_with_advice(&[BIAS_RATE], message, "remove the key, or balance with moe.aux_loss_coeff");
        }
        return 0.0;
    }
    // Pretrained biases fit the pretraining data, and transformers' fine-tuning keeps them.
    let is_fresh = model.adapter.is_none() && model.init == WeightInit::Random;
    let rate = resolver.number(BIAS_RATE, value, if is_fresh { 1e-3 } else { 0.0 }, 0.0, f64::MAX);
    if model.adapter.is_some() && rate > 0.0 {
        let message = format!("{BIAS_RATE}: an adapter cannot store the updated biases");
        resolver.report_with_advice(&[BIAS_RATE], message, "remove the key, or train without an adapter");
        return 0.0;
    }
    rate
}
