//! Router of a mixture of experts: the family's, changed by keys of config.json with Megatron-LM's names.
//!
//! transformers does not read the keys of Megatron-LM. So a key is an error if the family has one with this meaning.

use candlewick_ops::{GroupLimit, RouterSpec, ScoreFunction, TopKOrder};
use candlewick_text::suggestion::did_you_mean;

use super::json::{Keys, size};
use crate::ModelError;
use crate::family::{MoeFamily, TopKNormalization};

pub(crate) const SCORE_FUNCTION: &str = "moe_router_score_function";
/// Key that divides the weights of a token by their sum.
pub(super) const NORMALIZE: &str = "norm_topk_prob";
pub(super) const PRE_SOFTMAX: &str = "moe_router_pre_softmax";
pub(crate) const EXPERT_BIAS: &str = "moe_router_enable_expert_bias";
pub(super) const SCALING: &str = "moe_router_topk_scaling_factor";
pub(super) const N_GROUPS: &str = "moe_router_num_groups";
pub(super) const N_SELECTED_GROUPS: &str = "moe_router_group_topk";

/// Keys of config.json with Megatron-LM's names, without its dashes.
pub(crate) const ROUTER_KEYS: [&str; 6] =
    [SCORE_FUNCTION, PRE_SOFTMAX, EXPERT_BIAS, SCALING, N_GROUPS, N_SELECTED_GROUPS];

/// Values of `moe_router_score_function`.
const SCORE_FUNCTIONS: [(&str, ScoreFunction); 3] = [
    ("softmax", ScoreFunction::Softmax),
    ("sigmoid", ScoreFunction::Sigmoid),
    ("sqrtsoftplus", ScoreFunction::SqrtSoftplus),
];

/// Router of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RouterConfig {
    pub(super) spec: RouterSpec,
    /// True if the router has an expert bias.
    pub(super) expert_bias: bool,
    /// Key that makes the router differ from the family's.
    pub(super) unlike_family: Option<&'static str>,
}

/// Sizes that limit a router's settings.
#[derive(Clone, Copy)]
pub(super) struct RouterSizes {
    pub(super) n_experts: usize,
    /// Selected experts of a token.
    pub(super) top_k: usize,
}

/// Reads the router of a family.
pub(super) fn router(keys: Keys, family: &MoeFamily, sizes: RouterSizes) -> Result<RouterConfig, ModelError> {
    let score = score(keys)?.unwrap_or(family_score(family));
    let order = order(keys, score, sizes)?;
    let spec = RouterSpec {
        top_k: sizes.top_k,
        score,
        order,
        normalize: normalize(keys, family, score, order, sizes)?,
        groups: groups(keys, family, sizes)?,
        scaling: scaling(keys, family)?,
    };
    let expert_bias = expert_bias(keys, family, score)?;
    let router = RouterConfig { spec, expert_bias, unlike_family: None };
    Ok(RouterConfig { unlike_family: router.unlike(family), ..router })
}

impl RouterConfig {
    /// Returns the first key that makes the router differ from the family's, which transformers computes.
    fn unlike(&self, family: &MoeFamily) -> Option<&'static str> {
        let spec = &self.spec;
        // Softmax of the selected logits is the normalized softmax of all.
        let normalizes = spec.normalize || spec.order == TopKOrder::TopKFirst;
        [
            (SCORE_FUNCTION, spec.score != family_score(family)),
            (PRE_SOFTMAX, matches!(family.normalization, TopKNormalization::Always) && !normalizes),
            (EXPERT_BIAS, self.expert_bias && !family.expert_bias),
            (SCALING, !family.has_groups && spec.scaling != 1.0),
            (N_GROUPS, !family.has_groups && spec.groups.is_some()),
        ]
        .into_iter()
        .find_map(|(key, differs)| differs.then_some(key))
    }
}

/// Returns the value of `moe_router_score_function`.
pub(crate) fn score_name(score: ScoreFunction) -> &'static str {
    SCORE_FUNCTIONS.iter().find(|(_, known)| *known == score).map_or("softmax", |(name, _)| *name)
}

fn family_score(family: &MoeFamily) -> ScoreFunction {
    if family.sigmoid { ScoreFunction::Sigmoid } else { ScoreFunction::Softmax }
}

fn score(keys: Keys) -> Result<Option<ScoreFunction>, ModelError> {
    let Some(name) = keys.text(SCORE_FUNCTION)? else { return Ok(None) };
    match SCORE_FUNCTIONS.iter().find(|(known, _)| *known == name) {
        Some((_, score)) => Ok(Some(*score)),
        None => {
            let names = SCORE_FUNCTIONS.map(|(name, _)| name);
            let problem = format!("`{name}` is none of {}{}", names.join(", "), did_you_mean(name, names));
            Err(keys.error(SCORE_FUNCTION, problem))
        }
    }
}

fn order(keys: Keys, score: ScoreFunction, sizes: RouterSizes) -> Result<TopKOrder, ModelError> {
    match keys.flag(PRE_SOFTMAX)? {
        Some(true) if score != ScoreFunction::Softmax => {
            Err(keys.error(PRE_SOFTMAX, format!("it needs softmax scores; remove it or {SCORE_FUNCTION}")))
        }
        Some(false) if score == ScoreFunction::Softmax && sizes.top_k == 1 => {
            let problem =
                "with num_experts_per_tok 1 each weight would be 1, and routers would not learn; set it to true";
            Err(keys.error(PRE_SOFTMAX, problem))
        }
        Some(false) if score == ScoreFunction::Softmax => Ok(TopKOrder::TopKFirst),
        _ => Ok(TopKOrder::ScoreFirst),
    }
}

/// Returns true if the weights of a token are divided by their sum.
///
/// For the score function of the family, the family's rule holds. For others it is Megatron-LM's.
fn normalize(
    keys: Keys,
    family: &MoeFamily,
    score: ScoreFunction,
    order: TopKOrder,
    sizes: RouterSizes,
) -> Result<bool, ModelError> {
    let (written, family_default) = match family.normalization {
        TopKNormalization::Always => (None, true),
        TopKNormalization::Key(default) => (keys.flag(NORMALIZE)?, default),
    };
    if order == TopKOrder::TopKFirst {
        return match written.unwrap_or(family_default || score != family_score(family)) {
            true => Ok(false),
            false => Err(keys.error(
                PRE_SOFTMAX,
                "with false the weights of a token sum to 1; set norm_topk_prob to true, which transformers reads",
            )),
        };
    }
    let default = match keys.flag(PRE_SOFTMAX)? {
        Some(true) => false,
        _ if score == family_score(family) => family_default,
        _ => score == ScoreFunction::Softmax || sizes.top_k > 1,
    };
    Ok(written.unwrap_or(default))
}

/// Reads the group limit of the selection.
fn groups(keys: Keys, family: &MoeFamily, sizes: RouterSizes) -> Result<Option<GroupLimit>, ModelError> {
    let names = if family.has_groups { ["n_group", "topk_group"] } else { [N_GROUPS, N_SELECTED_GROUPS] };
    if family.has_groups {
        refuse_synonyms(keys, &[(N_GROUPS, names[0]), (N_SELECTED_GROUPS, names[1])])?;
    } else {
        need_each_other(keys, names)?;
    }
    let n_groups = size(keys, names[0], 1, sizes.n_experts)?;
    let n_selected = match size(keys, names[1], 1, sizes.n_experts)? {
        n if n > n_groups => {
            return Err(keys.error(names[1], format!("{n} is more than the {n_groups} groups ({})", names[0])));
        }
        n => n,
    };
    let RouterSizes { n_experts, top_k } = sizes;
    if !n_experts.is_multiple_of(n_groups) {
        return Err(keys.error(names[0], format!("{n_experts} experts cannot be divided into {n_groups} groups")));
    }
    let group_size = n_experts / n_groups;
    if n_selected * group_size < top_k {
        let problem = format!("{n_selected} groups of {group_size} experts are fewer than num_experts_per_tok {top_k}");
        return Err(keys.error(names[1], problem));
    }
    if n_groups == 1 {
        return Ok(None);
    }
    let n_scores_per_group = match family.has_groups {
        // DeepSeek-V3 scores a group by its two best experts.
        true if group_size < 2 => {
            let problem = format!("{n_groups} groups leave one expert each; at least 2 are needed");
            return Err(keys.error(names[0], problem));
        }
        true => 2,
        false if top_k < n_selected => {
            let problem = format!("it is more than num_experts_per_tok {top_k}, so a group would have no score");
            return Err(keys.error(names[1], problem));
        }
        false => top_k / n_selected,
    };
    Ok(Some(GroupLimit { n_groups, n_selected, n_scores_per_group }))
}

fn scaling(keys: Keys, family: &MoeFamily) -> Result<f64, ModelError> {
    const OF_FAMILY: &str = "routed_scaling_factor";
    if family.has_groups {
        refuse_synonyms(keys, &[(SCALING, OF_FAMILY)])?;
        return Ok(keys.number(OF_FAMILY)?.unwrap_or(1.0));
    }
    match keys.number(SCALING)?.unwrap_or(1.0) {
        factor if factor > 0.0 => Ok(factor),
        factor => Err(keys.error(SCALING, format!("expected a number above 0, found {factor}"))),
    }
}

fn expert_bias(keys: Keys, family: &MoeFamily, score: ScoreFunction) -> Result<bool, ModelError> {
    let has_bias = keys.flag(EXPERT_BIAS)?.unwrap_or(family.expert_bias);
    if has_bias && score == ScoreFunction::Softmax {
        let problem = "an expert bias needs sigmoid or sqrtsoftplus scores, as in Megatron-LM; set it to false";
        return Err(keys.error(EXPERT_BIAS, problem));
    }
    Ok(has_bias)
}

/// Refuses keys of Megatron-LM for which the family has keys of its own.
fn refuse_synonyms(keys: Keys, synonyms: &[(&str, &str)]) -> Result<(), ModelError> {
    match synonyms.iter().find(|(key, _)| keys.get(key).is_some()) {
        Some((key, of_family)) => Err(keys.error(key, format!("this family has the key {of_family}; set that"))),
        None => Ok(()),
    }
}

fn need_each_other(keys: Keys, names: [&str; 2]) -> Result<(), ModelError> {
    match names.map(|name| keys.get(name).is_some()) {
        [true, false] => Err(keys.error(names[0], format!("it needs {}, the number of selected groups", names[1]))),
        [false, true] => Err(keys.error(names[1], format!("it needs {}, the number of groups", names[0]))),
        _ => Ok(()),
    }
}
