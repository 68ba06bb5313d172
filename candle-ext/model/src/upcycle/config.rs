//! config.json of an upcycled model, in the family of mixtures of experts with the dense model's attention.

use candlewick_ops::ScoreFunction;
use serde_json::{Map, Value, json};

use crate::config::{EXPERT_BIAS, LAYER_FREQ, MAX_EXPERTS, SCORE_FUNCTION, Typed, score_name};
use crate::family::{Bias, Family, MoeFamily, MoeLayers, SharedExpertFamily, TopKNormalization, Window, WindowLayers};
use crate::{Config, ModelError, MoeLayerFreq};

/// Sizes of the mixture of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpcycledExperts {
    /// Number of routed experts of a layer.
    pub n_experts: usize,
    /// Number of selected experts of a token.
    pub top_k: usize,
    /// Number of slices of the dense MLP. Each expert is a copy of one slice.
    pub granularity: usize,
    /// Layers with experts. The others stay dense.
    pub layer_freq: MoeLayerFreq,
    /// Router.
    pub router: UpcycledRouter,
}

/// Router of the upcycled model. The weights of a token sum to 1 with every score function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpcycledRouter {
    /// Score function.
    pub score: ScoreFunction,
    /// True for expert biases, zeros at the start.
    pub expert_bias: bool,
}

impl Default for UpcycledRouter {
    fn default() -> Self {
        Self { score: ScoreFunction::Softmax, expert_bias: false }
    }
}

/// Returns the config of the mixture of experts.
///
/// All keys are explicit, because the two families have other defaults. Unknown keys are preserved.
///
/// # Errors
/// If the dense model has no family of experts with its attention, or if the sizes do not divide.
pub(super) fn moe_config(dense: &Config, experts: &UpcycledExperts) -> Result<Config, ModelError> {
    let family = moe_family(dense)?;
    let moe = family.spec().moe.ok_or_else(|| not_supported(dense))?;
    let mut raw = dense.raw().clone();
    raw.extend(explicit_keys(dense, family));
    raw.extend(expert_keys(dense, moe, experts));
    raw.extend(window_keys(dense, family.spec().window));
    make_theta_explicit(&mut raw, dense.typed.rope_theta);
    let config = Config::from_json(Value::Object(raw))?;
    check_equal(dense, &config)?;
    Ok(config)
}

/// Returns the family of the upcycled model.
fn moe_family(dense: &Config) -> Result<Family, ModelError> {
    let family = dense.family();
    if family.spec().moe.is_some() {
        let problem = format!("{} is a mixture of experts already; upcycle a dense model", family.name());
        return Err(ModelError::Unsupported(problem));
    }
    if dense.typed.mlp_bias {
        let problem = "experts have no biases; upcycle a model whose MLP has none";
        return Err(ModelError::key("mlp_bias", problem));
    }
    let found = |model_type| Family::ALL.iter().copied().find(|family| family.model_type() == model_type);
    family.spec().upcycles_to.and_then(found).ok_or_else(|| not_supported(dense))
}

fn not_supported(dense: &Config) -> ModelError {
    let supported =
        Family::ALL.iter().filter(|family| family.spec().upcycles_to.is_some() && family.spec().moe.is_none());
    let supported: Vec<_> = supported.map(|family| family.name()).collect();
    let name = dense.family().name();
    ModelError::Unsupported(format!(
        "{name} has no family of experts with its attention; models that can be upcycled: {}",
        supported.join(", ")
    ))
}

/// Fails unless a mixture with these sizes exists and computes the function of the dense model. The errors name the options, not a
/// file.
pub(super) fn check_experts(dense: &Config, experts: &UpcycledExperts) -> Result<(), ModelError> {
    let UpcycledExperts { n_experts, top_k, granularity, router, .. } = *experts;
    let refuse = |problem: String| Err(ModelError::Unsupported(problem));
    if n_experts > MAX_EXPERTS {
        return refuse(format!("num_experts {n_experts} must be at most {MAX_EXPERTS}"));
    }
    if router.expert_bias && router.score == ScoreFunction::Softmax {
        let problem = "expert biases need the router score function sigmoid or sqrtsoftplus, as in Megatron-LM";
        return refuse(problem.to_owned());
    }
    if top_k == 0 || top_k > n_experts {
        return refuse(format!("num_experts_per_tok {top_k} must be between 1 and num_experts {n_experts}"));
    }
    if top_k == 1 && router.score != ScoreFunction::Softmax {
        let name = score_name(router.score);
        return refuse(format!(
            "{name} scores need num_experts_per_tok of at least 2: the weight of one expert is not 1"
        ));
    }
    if granularity == 0 {
        return refuse("granularity 0 must be at least 1".to_owned());
    }
    check_granularity(dense, experts)?;
    check_layer_freq(dense, experts)
}

/// Fails unless a list of layers with experts has an entry for each layer, and the family expresses the dense layers.
fn check_layer_freq(dense: &Config, experts: &UpcycledExperts) -> Result<(), ModelError> {
    let n_layers = dense.n_layers();
    let problem = match &experts.layer_freq {
        MoeLayerFreq::Pattern(layers) if layers.len() != n_layers => format!(
            "the list has {} entries, but the model has {n_layers} layers; write one entry for each layer",
            layers.len()
        ),
        MoeLayerFreq::Pattern(layers) if !layers.contains(&true) => {
            "no layer has experts; write a 1 for each layer with experts".to_owned()
        }
        freq => match narrow_family(dense, experts).filter(|_| has_dense_layers(freq, n_layers)) {
            None => return Ok(()),
            Some(family) => format!(
                "{} has one width for experts and dense layers; use --granularity 1, or experts in all layers",
                family.name()
            ),
        },
    };
    Err(ModelError::Unsupported(format!("--moe-layer-freq: {problem}")))
}

fn has_dense_layers(freq: &MoeLayerFreq, n_layers: usize) -> bool {
    match freq {
        MoeLayerFreq::Every(n) => *n > 1 && n_layers > 1,
        MoeLayerFreq::Pattern(layers) => layers.contains(&false),
    }
}

/// Returns the family of the upcycled model if its dense layers would have the width of a slice: Mixtral has one key for
/// them and its experts.
fn narrow_family(dense: &Config, experts: &UpcycledExperts) -> Option<Family> {
    let family = moe_family(dense).ok()?;
    let has_one_width = family.spec().moe?.expert_size.0 == "intermediate_size";
    (has_one_width && experts.granularity > 1).then_some(family)
}

/// Fails unless the dense MLP can be cut into slices, and the experts of a layer and of a token are whole copies of it.
fn check_granularity(dense: &Config, experts: &UpcycledExperts) -> Result<(), ModelError> {
    let UpcycledExperts { n_experts, top_k, granularity, .. } = *experts;
    let width = dense.intermediate_size();
    let problem = if !width.is_multiple_of(granularity) {
        format!("the dense MLP's intermediate_size {width} cannot be divided into {granularity} equal slices")
    } else if !n_experts.is_multiple_of(granularity) {
        format!("--num-experts {n_experts} is not a multiple of {granularity}, the slices of one copy of the dense MLP")
    } else if !top_k.is_multiple_of(granularity) {
        format!(
            "--num-experts-per-tok {top_k} is not a multiple of {granularity}: a token uses whole copies of the dense MLP, of \
             {granularity} slices each"
        )
    } else {
        return Ok(());
    };
    Err(ModelError::Unsupported(format!("--granularity {granularity}: {problem}")))
}

fn explicit_keys(dense: &Config, family: Family) -> Map<String, Value> {
    let typed = &dense.typed;
    let eos = match typed.eos_ids[..] {
        [] => Value::Null,
        [id] => json!(id),
        ref ids => json!(ids),
    };
    let keys = json!({
        "architectures": [family.architecture()],
        "model_type": family.model_type(),
        "vocab_size": typed.vocab_size,
        "hidden_size": typed.hidden_size,
        "num_hidden_layers": typed.n_layers,
        "num_attention_heads": typed.n_heads,
        "num_key_value_heads": typed.n_kv_heads,
        "head_dim": typed.head_dim,
        "max_position_embeddings": typed.max_positions,
        "rms_norm_eps": typed.rms_norm_eps,
        "initializer_range": typed.initializer_range,
        "tie_word_embeddings": typed.tied,
        "bos_token_id": typed.bos_id,
        "eos_token_id": eos,
        "pad_token_id": typed.pad_id,
    });
    let mut keys = into_map(keys);
    if let Bias::Key(key) | Bias::KeyOrTrue(key) = family.spec().qkv_bias {
        keys.insert(key.to_owned(), typed.qkv_bias.into());
    }
    keys
}

fn expert_keys(dense: &Config, moe: &MoeFamily, experts: &UpcycledExperts) -> Map<String, Value> {
    let UpcycledExperts { n_experts, top_k, granularity, ref layer_freq, router } = *experts;
    let mut keys = into_map(json!({
        "intermediate_size": dense.intermediate_size(),
        "num_experts_per_tok": top_k,
        "router_aux_loss_coef": moe.aux_loss_coefficient,
    }));
    keys.insert(moe.n_experts.0.to_owned(), n_experts.into());
    // In Mixtral this is the key `intermediate_size`.
    keys.insert(moe.expert_size.0.to_owned(), (dense.intermediate_size() / granularity).into());
    if let TopKNormalization::Key(_) = moe.normalization {
        keys.insert("norm_topk_prob".to_owned(), true.into());
    }
    if router.score != ScoreFunction::Softmax {
        keys.insert(SCORE_FUNCTION.to_owned(), score_name(router.score).into());
    }
    if router.expert_bias {
        keys.insert(EXPERT_BIAS.to_owned(), true.into());
    }
    if let SharedExpertFamily::Gated { .. } = moe.shared_expert {
        keys.insert("shared_expert_intermediate_size".to_owned(), dense.intermediate_size().into());
    }
    if let MoeLayers::SparseStep = moe.layers {
        keys.extend(into_map(json!({"decoder_sparse_step": 1, "mlp_only_layers": []})));
    }
    if *layer_freq != MoeLayerFreq::Every(1) {
        keys.insert(LAYER_FREQ.to_owned(), layer_freq.to_json());
    }
    keys
}

/// Returns the keys of the sliding windows of a family of experts. A family that cannot express them gets others, and
/// [`check_equal`] refuses them.
fn window_keys(dense: &Config, window: Window) -> Map<String, Value> {
    let windows = &dense.typed.windows;
    let width = windows.iter().copied().flatten().next();
    let layer_type = |window: &Option<usize>| if window.is_some() { "sliding_attention" } else { "full_attention" };
    into_map(match window {
        Window::None => json!({}),
        Window::Every(_) | Window::IfSet => json!({"sliding_window": width}),
        // transformers reads no `layer_types` in these families.
        Window::Some { layers: WindowLayers::All, .. } => {
            json!({"use_sliding_window": width.is_some(), "sliding_window": width, "layer_types": null})
        }
        Window::Some { .. } => json!({
            "use_sliding_window": width.is_some(),
            "sliding_window": width,
            "layer_types": windows.iter().map(layer_type).collect::<Vec<_>>(),
        }),
    })
}

/// Sets `rope_theta` where transformers reads it, if it is absent.
fn make_theta_explicit(raw: &mut Map<String, Value>, theta: f64) {
    let has_theta = |value: &Value| value.get("rope_theta").is_some_and(|theta| !theta.is_null());
    let nested = ["rope_scaling", "rope_parameters"].iter().any(|key| raw.get(*key).is_some_and(has_theta));
    if nested || raw.get("rope_theta").is_some_and(|theta| !theta.is_null()) {
        return;
    }
    match raw.get_mut("rope_parameters").and_then(Value::as_object_mut).filter(|map| !map.is_empty()) {
        Some(parameters) => parameters.insert("rope_theta".to_owned(), theta.into()),
        None => raw.insert("rope_theta".to_owned(), theta.into()),
    };
}

/// Refuses a config that differs from the dense one in more than the MLP.
fn check_equal(dense: &Config, config: &Config) -> Result<(), ModelError> {
    let name = config.family().name();
    let (before, after) = (&dense.typed, &config.typed);
    if (before.qkv_bias, before.o_bias) != (after.qkv_bias, after.o_bias) {
        let problem =
            format!("{name}, the family of the upcycled model, has no such biases; upcycle a model without them");
        return Err(ModelError::key("attention_bias", problem));
    }
    if before.windows != after.windows {
        let problem = format!(
            "{name}, the family of the upcycled model, has the same window in all layers; set it in all layers or in none"
        );
        return Err(ModelError::key("sliding_window", problem));
    }
    let expected = Typed {
        family: after.family,
        moe: after.moe.clone(),
        intermediate_size: after.intermediate_size,
        ..before.clone()
    };
    if expected == *after {
        return Ok(());
    }
    let problem = format!("config.json has values that {name}, the family of the upcycled model, cannot express");
    Err(ModelError::Unsupported(problem))
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
