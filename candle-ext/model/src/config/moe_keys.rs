//! Keys of mixture-of-experts models in a recipe: those that the family reads, and its keys for those that it does not.

use serde_json::{Map, Value};

use super::json::Keys;
use super::layer_freq::{DENSE_LAYERS, FIRST_DENSE, LAYER_FREQ, SPARSE_STEP};
use super::router::{N_GROUPS, N_SELECTED_GROUPS, NORMALIZE, PRE_SOFTMAX, SCALING, SCORE_FUNCTION};
use crate::ModelError;
use crate::family::{MoeFamily, MoeLayers, SharedExpertFamily, TopKNormalization};

pub(super) const TOP_K: &str = "num_experts_per_tok";
const EXPERT_SIZE: &str = "moe_intermediate_size";
const SHARED_SIZE: &str = "shared_expert_intermediate_size";
pub(super) const N_SHARED: &str = "n_shared_experts";
const N_LOCAL_EXPERTS: &str = "num_local_experts";
const N_EXPERTS: &str = "num_experts";

/// Names of the number of experts. An override of one of them changes the key of the family.
pub(super) const EXPERTS_KEYS: [&str; 3] = [N_LOCAL_EXPERTS, N_EXPERTS, "n_routed_experts"];

/// Keys of mixture-of-experts models, without those of Megatron-LM's routers.
pub(super) const MOE_KEYS: &[&str] = &[
    "clip_qkv",
    SPARSE_STEP,
    FIRST_DENSE,
    DENSE_LAYERS,
    "moe_apply_probs_on_input",
    EXPERT_SIZE,
    LAYER_FREQ,
    "n_group",
    "n_routed_experts",
    N_SHARED,
    NORMALIZE,
    N_EXPERTS,
    TOP_K,
    N_LOCAL_EXPERTS,
    "output_router_logits",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "scoring_func",
    SHARED_SIZE,
    "topk_group",
];

/// Keys of config.json for flags of Megatron-LM that are no keys of config.json.
pub(super) const OF_MEGATRON: [(&str, &str); 3] = [
    ("moe_router_topk", TOP_K),
    ("moe_ffn_hidden_size", EXPERT_SIZE),
    ("moe_shared_expert_intermediate_size", SHARED_SIZE),
];

/// A key that a family does not read.
pub(super) struct UnreadKey {
    /// The keys of the family with this meaning, if it has any.
    pub(super) instead: Option<&'static str>,
}

/// Returns a key of a mixture of experts that the family does not read, unless its value has no effect.
pub(super) fn unread_key(family: &MoeFamily, key: &str, value: &Value) -> Option<UnreadKey> {
    let (is_read, is_neutral, instead) = match key {
        EXPERT_SIZE => (family.expert_size.0 == EXPERT_SIZE, false, Some(family.expert_size.0)),
        SHARED_SIZE => (
            matches!(family.shared_expert, SharedExpertFamily::Gated { .. }),
            is(value, 0.0),
            shared_expert_key(family),
        ),
        N_SHARED => (
            matches!(family.shared_expert, SharedExpertFamily::Plain { .. }),
            is(value, 0.0),
            shared_expert_key(family),
        ),
        SPARSE_STEP => (matches!(family.layers, MoeLayers::SparseStep), is(value, 1.0), layers_remedy(family)),
        DENSE_LAYERS => {
            let is_empty = value.as_array().is_some_and(Vec::is_empty);
            (matches!(family.layers, MoeLayers::SparseStep), is_empty, layers_remedy(family))
        }
        FIRST_DENSE => (matches!(family.layers, MoeLayers::FirstDense { .. }), is(value, 0.0), layers_remedy(family)),
        "n_group" => (family.has_groups, is(value, 1.0), Some(N_GROUPS)),
        "topk_group" => (family.has_groups, is(value, 1.0), Some(N_SELECTED_GROUPS)),
        "routed_scaling_factor" => (family.has_groups, is(value, 1.0), Some(SCALING)),
        NORMALIZE => {
            let is_read = matches!(family.normalization, TopKNormalization::Key(_));
            // Mixtral always normalizes.
            (is_read, *value == Value::Bool(true), Some(NOT_NORMALIZED))
        }
        // dots.llm1 calls its scores `noaux_tc`.
        "scoring_func" => {
            let names: &[&str] = if family.sigmoid { &["sigmoid", "noaux_tc"] } else { &["softmax"] };
            (false, value.as_str().is_some_and(|name| names.contains(&name)), Some(SCORE_FUNCTION))
        }
        _ => (true, true, None),
    };
    (!is_read && !is_neutral && !value.is_null()).then_some(UnreadKey { instead })
}

/// Setting of Mixtral's weights without normalization.
const NOT_NORMALIZED: &str = "moe_router_pre_softmax: true";

fn is(value: &Value, number: f64) -> bool {
    value.as_f64() == Some(number)
}

fn shared_expert_key(family: &MoeFamily) -> Option<&'static str> {
    match family.shared_expert {
        SharedExpertFamily::None => None,
        SharedExpertFamily::Gated { .. } => Some(SHARED_SIZE),
        SharedExpertFamily::Plain { .. } => Some(N_SHARED),
    }
}

/// Returns the keys that select the layers with experts of this family, as a remedy.
fn layers_remedy(family: &MoeFamily) -> Option<&'static str> {
    Some(match family.layers {
        MoeLayers::All => LAYER_FREQ,
        MoeLayers::SparseStep => "mlp_only_layers or moe_layer_freq",
        MoeLayers::FirstDense { .. } => "first_k_dense_replace or moe_layer_freq",
    })
}

/// Returns the setting that keeps the router's weights as they are, without a division by their sum.
pub(super) fn without_normalization(family: &MoeFamily) -> &'static str {
    match family.normalization {
        TopKNormalization::Always => NOT_NORMALIZED,
        TopKNormalization::Key(_) => "norm_topk_prob: false",
    }
}

/// Keys that a recipe may set so that all weights of a router are 1.
pub(super) const WEIGHT_KEYS: [&str; 4] = [TOP_K, NORMALIZE, SCORE_FUNCTION, PRE_SOFTMAX];

/// Writes the number of experts into the key of the family, which transformers reads.
pub(super) fn rename_expert_count(map: &mut Map<String, Value>, family: &MoeFamily) -> Result<(), ModelError> {
    let own = family.n_experts.0;
    let names: Vec<&str> = [own].into_iter().chain(EXPERTS_KEYS).collect();
    refuse_different_counts(Keys::new(map), &names)?;
    if let Some(count) = EXPERTS_KEYS.iter().find_map(|key| map.get(*key).filter(|count| !count.is_null()).cloned()) {
        EXPERTS_KEYS.iter().filter(|key| **key != own).for_each(|key| _ = map.remove(*key));
        map.insert(own.to_owned(), count);
    }
    Ok(())
}

/// Removes the numbers of experts of a config that overrides replace.
pub(super) fn remove_replaced_counts(raw: &mut Map<String, Value>, overrides: &Map<String, Value>) {
    if EXPERTS_KEYS.iter().any(|key| overrides.get(*key).is_some_and(|count| !count.is_null())) {
        EXPERTS_KEYS.iter().for_each(|key| _ = raw.remove(*key));
    }
}

/// Writes the keys of a model without experts for transformers, which reads the number of experts in some families only.
pub(super) fn write_dense_layers(raw: &mut Map<String, Value>, family: &MoeFamily, n_layers: usize) {
    if matches!(family.layers, MoeLayers::FirstDense { .. }) {
        raw.insert(FIRST_DENSE.to_owned(), n_layers.into());
    }
}

/// Refuses two numbers of experts that transformers reads as the same key.
pub(super) fn refuse_ambiguous_count(keys: Keys, family: &MoeFamily) -> Result<(), ModelError> {
    let own = family.n_experts.0;
    let alias = if own == N_LOCAL_EXPERTS { N_EXPERTS } else { N_LOCAL_EXPERTS };
    refuse_different_counts(keys, &[own, alias])
}

/// Refuses numbers of experts that differ. The first name is the family's.
fn refuse_different_counts(keys: Keys, names: &[&str]) -> Result<(), ModelError> {
    let mut given = names.iter().filter_map(|name| Some((name, keys.get(name)?)));
    let Some((first, count)) = given.next() else { return Ok(()) };
    match given.find(|(_, other)| *other != count) {
        Some((second, other)) => {
            let problem = format!("{other} experts, but {first} is {count}; set {} alone", names[0]);
            Err(keys.error(second, problem))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Config;

    const FAMILIES: [(&str, &str); 6] = [
        ("mixtral", "num_local_experts"),
        ("olmoe", "num_experts"),
        ("qwen2_moe", "num_experts"),
        ("qwen3_moe", "num_experts"),
        ("dots1", "n_routed_experts"),
        ("glm4_moe", "n_routed_experts"),
    ];

    fn map(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    /// Returns a config of two layers with these keys.
    fn of_family(family: &str, keys: &Value) -> Map<String, Value> {
        let mut config = map(json!({"model_type": family, "head_dim": 128, "num_hidden_layers": 2}));
        config.extend(map(keys.clone()));
        config
    }

    fn written(family: &str, keys: &Value) -> Result<Config, String> {
        Config::from_handwritten(&of_family(family, keys)).map_err(|error| error.to_string())
    }

    fn overridden(family: &str, keys: &Value) -> Result<Config, String> {
        let mut config = Config::from_json(Value::Object(of_family(family, &json!({})))).unwrap();
        config.apply_overrides(&map(keys.clone())).map_err(|error| error.to_string())?;
        Ok(config)
    }

    /// Checks that both ways of writing these keys are refused with the parts.
    #[track_caller]
    fn refused(family: &str, keys: Value, parts: &[&str]) {
        for result in [written(family, &keys), overridden(family, &keys)] {
            let message = result.expect_err(&format!("{family} accepts {keys}"));
            assert!(parts.iter().all(|part| message.contains(part)), "{family} {keys}: {message}");
        }
    }

    #[track_caller]
    fn accepted(family: &str, keys: Value) -> Config {
        overridden(family, &keys).unwrap();
        written(family, &keys).unwrap()
    }

    #[test]
    fn a_key_of_another_family_is_refused_with_the_key_of_this_one() {
        for (family, keys, instead) in [
            ("qwen3_moe", json!({"n_shared_experts": 1}), "remove the key"),
            ("qwen3_moe", json!({"shared_expert_intermediate_size": 64}), "remove the key"),
            ("qwen3_moe", json!({"first_k_dense_replace": 1}), "use mlp_only_layers or moe_layer_freq"),
            ("qwen3_moe", json!({"n_group": 4}), "use moe_router_num_groups"),
            ("qwen3_moe", json!({"topk_group": 2}), "use moe_router_group_topk"),
            ("qwen3_moe", json!({"routed_scaling_factor": 2.5}), "use moe_router_topk_scaling_factor"),
            ("qwen3_moe", json!({"scoring_func": "sigmoid"}), "use moe_router_score_function"),
            ("qwen2_moe", json!({"n_shared_experts": 2}), "use shared_expert_intermediate_size"),
            ("dots1", json!({"shared_expert_intermediate_size": 64}), "use n_shared_experts"),
            ("dots1", json!({"decoder_sparse_step": 2}), "use first_k_dense_replace or moe_layer_freq"),
            ("glm4_moe", json!({"mlp_only_layers": [0]}), "use first_k_dense_replace or moe_layer_freq"),
            ("dots1", json!({"scoring_func": "softmax"}), "use moe_router_score_function"),
            ("mixtral", json!({"moe_intermediate_size": 64}), "use intermediate_size"),
            ("olmoe", json!({"moe_intermediate_size": 64}), "use intermediate_size"),
            ("mixtral", json!({"decoder_sparse_step": 2}), "use moe_layer_freq"),
            ("mixtral", json!({"mlp_only_layers": [1]}), "use moe_layer_freq"),
            ("olmoe", json!({"first_k_dense_replace": 1}), "use moe_layer_freq"),
            ("mixtral", json!({"n_shared_experts": 1}), "remove the key"),
            ("mixtral", json!({"norm_topk_prob": false}), "use moe_router_pre_softmax: true"),
            ("mixtral", json!({"n_group": 2, "topk_group": 1}), "use moe_router_num_groups"),
        ] {
            let key = keys.as_object().unwrap().keys().next().unwrap();
            refused(family, keys.clone(), &[key, &format!("has no effect on a {family} model"), instead]);
        }
    }

    #[test]
    fn a_key_of_another_family_is_accepted_with_a_value_without_effect() {
        for family in ["mixtral", "olmoe", "qwen3_moe"] {
            for keys in [
                json!({"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
                json!({"first_k_dense_replace": 0, "n_shared_experts": 0, "scoring_func": "softmax"}),
                json!({"decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": null}),
                json!({"norm_topk_prob": true, "router_jitter_noise": 0.0, "clip_qkv": null}),
            ] {
                accepted(family, keys);
            }
        }
        accepted("dots1", json!({"scoring_func": "noaux_tc"}));
    }

    /// The fixture is written by `tests/reference/config_keys.py`.
    #[test]
    fn configs_of_transformers_are_accepted_as_written() {
        let configs: Vec<Map<String, Value>> =
            serde_json::from_str(include_str!("../../tests/fixtures/config_keys.json")).unwrap();
        assert_eq!(configs.len(), FAMILIES.len());
        for config in configs {
            let mut loaded = Config::from_json(Value::Object(config.clone())).unwrap();
            assert!(loaded.moe().is_some(), "{config:?}");
            assert_eq!(loaded.apply_overrides(&config).unwrap(), Vec::<String>::new());
            assert_eq!(Config::from_handwritten(&config).unwrap().typed, loaded.typed);
        }
    }

    #[test]
    fn a_file_may_have_keys_that_its_family_ignores() {
        for keys in [
            json!({"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "routed_scaling_factor": 2.5}),
            json!({"num_experts": 8, "n_routed_experts": 4, "scoring_func": "sigmoid"}),
        ] {
            let config = Config::from_json(Value::Object(of_family("qwen3_moe", &keys))).unwrap();
            let (key, value) = keys.as_object().unwrap().iter().next_back().unwrap();
            assert_eq!(config.to_json()[key], *value, "it is exported");
        }
    }

    #[test]
    fn every_name_of_the_number_of_experts_changes_the_key_of_the_family() {
        for ((family, own), name) in FAMILIES.iter().flat_map(|family| EXPERTS_KEYS.map(|name| (*family, name))) {
            for config in [written(family, &json!({name: 16})), overridden(family, &json!({name: 16}))] {
                let (config, saved) = (config.clone().unwrap(), config.unwrap().to_json());
                assert_eq!(config.moe().unwrap().n_experts, 16, "{family} {name}");
                let names: Vec<&str> = EXPERTS_KEYS.into_iter().filter(|key| saved.get(key).is_some()).collect();
                assert_eq!((names, &saved[own]), (vec![own], &json!(16)), "{family} {name}");
            }
            let dense = accepted(family, json!({name: 0}));
            assert!(dense.moe().is_none(), "{family} {name}");
        }
        let mut of_file = Config::from_json(json!({"model_type": "mixtral", "num_local_experts": 8})).unwrap();
        assert_eq!(of_file.apply_overrides(&map(json!({"num_experts": 4}))).unwrap(), ["num_experts"]);
        assert_eq!(of_file.to_json()["num_local_experts"], 4);
        assert_eq!(of_file.to_json().get("num_experts"), None);
    }

    #[test]
    fn two_numbers_of_experts_are_refused_unless_they_are_equal() {
        let problem = ["`num_local_experts`: 4 experts, but num_experts is 8", "set num_experts alone"];
        refused("qwen3_moe", json!({"num_experts": 8, "num_local_experts": 4}), &problem);
        refused("dots1", json!({"n_routed_experts": 8, "num_experts": 0}), &["set n_routed_experts alone"]);
        accepted("qwen3_moe", json!({"num_experts": 16, "num_local_experts": 16}));
        let keys = json!({"num_experts": 8, "num_local_experts": 4});
        let file = Config::from_json(Value::Object(of_family("qwen3_moe", &keys)));
        assert!(file.unwrap_err().to_string().contains("set num_experts alone"), "transformers reads both");
    }

    #[test]
    fn transformers_reads_a_model_without_experts_where_its_layers_may_be_dense() {
        let dense = |family| accepted(family, json!({"num_experts": 0}));
        assert_eq!(dense("glm4_moe").to_json()["first_k_dense_replace"], 2);
        assert_eq!(dense("dots1").to_json()["first_k_dense_replace"], 2);
        for family in ["dots1", "glm4_moe", "qwen2_moe", "qwen3_moe"] {
            assert_eq!(dense(family).transformers_warning(), None);
        }
        for (family, key) in [("mixtral", "num_local_experts 0"), ("olmoe", "num_experts 0")] {
            assert!(dense(family).transformers_warning().unwrap().contains(key));
        }
    }

    #[test]
    fn weights_that_are_always_1_are_refused_in_a_recipe_and_reported_in_a_file() {
        for (family, keys, setting) in [
            ("mixtral", json!({"num_experts_per_tok": 1}), "set moe_router_pre_softmax: true"),
            ("qwen3_moe", json!({"num_experts_per_tok": 1, "norm_topk_prob": true}), "set norm_topk_prob: false"),
            ("glm4_moe", json!({"num_experts_per_tok": 1}), "set norm_topk_prob: false"),
        ] {
            refused(family, keys.clone(), &["num_experts_per_tok", "each weight is 1", setting]);
            let mut file = Config::from_json(Value::Object(of_family(family, &keys))).unwrap();
            assert!(file.constant_weights().unwrap().contains(setting), "{family}");
            file.apply_overrides(&map(json!({"rope_theta": 5e4}))).unwrap();
        }
        for (family, keys) in [
            ("mixtral", json!({"num_experts_per_tok": 1, "moe_router_pre_softmax": true})),
            ("mixtral", json!({"num_experts_per_tok": 1, "num_local_experts": 1})),
            ("qwen3_moe", json!({"num_experts_per_tok": 1, "norm_topk_prob": false})),
            ("qwen3_moe", json!({"num_experts_per_tok": 2, "norm_topk_prob": true})),
        ] {
            assert_eq!(accepted(family, keys).constant_weights(), None);
        }
    }

    #[test]
    fn a_flag_of_megatron_names_the_key_of_the_config() {
        refused("qwen3_moe", json!({"moe_router_topk": 2}), &["use num_experts_per_tok"]);
        refused("qwen3_moe", json!({"moe_ffn_hidden_size": 2}), &["use moe_intermediate_size"]);
    }
}
