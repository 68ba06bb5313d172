//! Mixture-of-experts keys of config.json, by the definitions of the family.

use candlewick_ops::RouterSpec;
use serde_json::{Map, Value};

use super::json::{Keys, MAX_SIZE, size};
use super::layer_freq::{LAYER_FREQ, is_unlike_family, layers};
use super::moe_keys::{EXPERTS_KEYS, N_SHARED, TOP_K, refuse_ambiguous_count};
use super::router::{RouterSizes, router};
use crate::ModelError;
use crate::family::{MoeFamily, SharedExpertFamily};

/// Key of config.json with Megatron-LM's name.
pub(crate) const ON_INPUT: &str = "moe_apply_probs_on_input";

/// Maximum number of experts of a layer.
pub(crate) const MAX_EXPERTS: usize = 512;

/// Mixture of experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Number of routed experts of a layer.
    pub n_experts: usize,
    /// Intermediate size of one routed expert.
    pub expert_size: usize,
    /// Router settings.
    pub router: RouterSpec,
    /// True if the router has an expert bias (`e_score_correction_bias`), which is added for the selection only.
    pub expert_bias: bool,
    /// Shared expert, which every token uses.
    pub shared_expert: Option<SharedExpertConfig>,
    /// Coefficient of the load-balancing loss (`router_aux_loss_coef`), if config.json or the family has one.
    pub aux_loss_coefficient: f64,
    /// True for each layer whose MLP is a mixture of experts.
    pub layers: Vec<bool>,
    /// Place where the weight of an expert multiplies.
    pub weighting: ExpertWeighting,
    /// Key of config.json that makes the layers differ from the family's. transformers does not read it.
    pub unlike_family: Option<&'static str>,
}

/// Place where the router's weight of an expert multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertWeighting {
    /// The expert's output.
    #[default]
    Output,
    /// The expert's input (Megatron-LM's `moe_apply_probs_on_input`).
    Input,
}

/// Shared expert of an MoE layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedExpertConfig {
    /// Intermediate size.
    pub intermediate_size: usize,
    /// True if a sigmoid gate multiplies the output, as in Qwen2-MoE.
    pub gated: bool,
}

/// Reads the mixture-of-experts keys of a family. Zero experts make a dense model, the dense twin of a comparison.
pub(super) fn moe(
    keys: Keys,
    raw: &Map<String, Value>,
    family: &MoeFamily,
    n_layers: usize,
) -> Result<Option<MoeConfig>, ModelError> {
    refuse_ambiguous_count(keys, family)?;
    let (experts_key, default) = family.n_experts;
    // transformers renames the key between its versions.
    let experts_key = [experts_key].into_iter().chain(EXPERTS_KEYS).find(|key| keys.get(key).is_some());
    let n_experts = experts_key.map_or(Ok(default), |key| match keys.count(key)? {
        Some(0) => Ok(0),
        _ => size(keys, key, default, MAX_EXPERTS),
    })?;
    if n_experts == 0 {
        return Ok(None);
    }
    let (size_key, default) = family.expert_size;
    let expert_size = size(keys, size_key, default, MAX_SIZE)?;
    let top_k = top_k(keys, family, n_experts)?;
    let router = router(keys, family, RouterSizes { n_experts, top_k })?;
    let weighting = weighting(keys, top_k)?;
    let layers = layers(keys, raw, family.layers, n_layers)?;
    let unlike_layers = is_unlike_family(&layers, family.layers).then_some(LAYER_FREQ);
    let unlike_weighting = (weighting == ExpertWeighting::Input).then_some(ON_INPUT);
    refuse_unsupported(keys)?;
    Ok(Some(MoeConfig {
        n_experts,
        expert_size,
        router: router.spec,
        expert_bias: router.expert_bias,
        shared_expert: shared_expert(keys, family, expert_size)?,
        aux_loss_coefficient: keys.number("router_aux_loss_coef")?.unwrap_or(family.aux_loss_coefficient),
        layers,
        weighting,
        unlike_family: unlike_weighting.or(router.unlike_family).or(unlike_layers),
    }))
}

/// Reads the number of selected experts of a token.
fn top_k(keys: Keys, family: &MoeFamily, n_experts: usize) -> Result<usize, ModelError> {
    let given = keys.count(TOP_K)?;
    match given.unwrap_or(family.top_k) {
        0 => Err(keys.error(TOP_K, "expected at least 1, found 0")),
        top_k if top_k > n_experts => {
            let origin = if given.is_none() { ", the family's default," } else { "" };
            Err(keys.error(TOP_K, format!("{top_k}{origin} is more than the {n_experts} experts of a layer")))
        }
        top_k => Ok(top_k),
    }
}

/// Reads the place of the experts' weights. transformers has no such key.
fn weighting(keys: Keys, top_k: usize) -> Result<ExpertWeighting, ModelError> {
    if keys.flag(ON_INPUT)? != Some(true) {
        return Ok(ExpertWeighting::Output);
    }
    match top_k {
        1 => Ok(ExpertWeighting::Input),
        _ => {
            Err(keys.error(ON_INPUT, format!("it needs num_experts_per_tok 1, as in Megatron-LM, but that is {top_k}")))
        }
    }
}

fn shared_expert(keys: Keys, family: &MoeFamily, expert_size: usize) -> Result<Option<SharedExpertConfig>, ModelError> {
    match family.shared_expert {
        SharedExpertFamily::None => Ok(None),
        SharedExpertFamily::Gated { default } => {
            let intermediate_size = size(keys, "shared_expert_intermediate_size", default, MAX_SIZE)?;
            Ok(Some(SharedExpertConfig { intermediate_size, gated: true }))
        }
        SharedExpertFamily::Plain { default } => match keys.count(N_SHARED)?.unwrap_or(default) {
            0 => Ok(None),
            n => match n.checked_mul(expert_size).filter(|width| *width <= MAX_SIZE) {
                Some(intermediate_size) => Ok(Some(SharedExpertConfig { intermediate_size, gated: false })),
                None => {
                    let problem =
                        format!("{n} experts of {expert_size} are absurd: at most {MAX_SIZE} in all are supported");
                    Err(keys.error(N_SHARED, problem))
                }
            },
        },
    }
}

fn refuse_unsupported(keys: Keys) -> Result<(), ModelError> {
    for (key, remedy) in [
        ("router_jitter_noise", "moe.input_jitter_eps of a recipe replaces it; set it to 0"),
        ("clip_qkv", "clipping of queries, keys and values is not supported; set it to null"),
    ] {
        if keys.number(key)?.is_some_and(|x| x != 0.0) {
            return Err(keys.error(key, remedy));
        }
    }
    Ok(())
}
