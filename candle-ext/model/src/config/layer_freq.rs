//! Layers whose MLP is a mixture of experts: the rule of the family, changed by Megatron-LM's `moe_layer_freq`.
//!
//! transformers does not read this key. So a pattern that the keys of the family express is written into them.

use std::str::FromStr;

use serde_json::{Map, Value};

use super::json::{Keys, shorten, size};
use super::list_expression::{ExpressionError, evaluate_list};
use crate::ModelError;
use crate::family::MoeLayers;

/// Key of config.json with Megatron-LM's name.
pub(crate) const LAYER_FREQ: &str = "moe_layer_freq";
pub(super) const FIRST_DENSE: &str = "first_k_dense_replace";
pub(super) const SPARSE_STEP: &str = "decoder_sparse_step";
pub(super) const DENSE_LAYERS: &str = "mlp_only_layers";

/// Layers with experts, as in Megatron-LM's `--moe-layer-freq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoeLayerFreq {
    /// Each layer whose index is a multiple of this number.
    Every(usize),
    /// For each layer, true if it has experts.
    Pattern(Vec<bool>),
}

impl MoeLayerFreq {
    /// Returns true if layer `layer_idx` has experts.
    fn has_experts(&self, layer_idx: usize) -> bool {
        match self {
            Self::Every(n) => layer_idx.is_multiple_of(*n),
            Self::Pattern(layers) => layers[layer_idx],
        }
    }

    /// Returns the value of `moe_layer_freq`.
    pub(crate) fn to_json(&self) -> Value {
        match self {
            Self::Every(n) => Value::from(*n),
            Self::Pattern(layers) => layers.iter().map(|has_experts| u8::from(*has_experts)).collect(),
        }
    }

    /// Reads the key for a model of `n_layers` layers.
    fn read(keys: Keys, n_layers: usize) -> Result<Option<Self>, ModelError> {
        match keys.get(LAYER_FREQ) {
            None => Ok(None),
            Some(Value::Number(_)) => Ok(Some(Self::Every(size(keys, LAYER_FREQ, 1, usize::MAX)?))),
            Some(value) => {
                let freq = match value {
                    Value::String(text) => text.parse(),
                    list => pattern(list).map(Self::Pattern).ok_or_else(|| expected(&shorten(list))),
                };
                freq.and_then(|freq| freq.for_layers(n_layers)).map(Some).map_err(|e| keys.error(LAYER_FREQ, e))
            }
        }
    }

    /// Returns the value for a model of `n_layers` layers, which a pattern must have.
    fn for_layers(self, n_layers: usize) -> Result<Self, String> {
        match &self {
            Self::Pattern(layers) if layers.len() != n_layers => {
                Err(format!("{} entries for {n_layers} layers (num_hidden_layers)", layers.len()))
            }
            _ => Ok(self),
        }
    }
}

/// Parses an integer such as `2`, a list such as `[1,0,1,0]`, or a Python expression of a list such as `([1]+[0])*2`.
impl FromStr for MoeLayerFreq {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('[') {
            return text.trim().parse().ok().filter(|n| *n >= 1).map(Self::Every).ok_or_else(|| expected(&quote(text)));
        }
        let describe = |ExpressionError { column, problem }| {
            let lists = "lists of 0 and 1 may have +, * and parentheses, such as ([1]*3+[0])*2";
            format!("column {column} of {}: {problem}; {lists}", quote(text))
        };
        evaluate_list(text).map(Self::Pattern).map_err(describe)
    }
}

/// Returns a text in quotes, shortened.
fn quote(text: &str) -> String {
    shorten(&Value::from(text))
}

fn pattern(value: &Value) -> Option<Vec<bool>> {
    let has_experts = |value: &Value| match value.as_u64()? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    };
    value.as_array()?.iter().map(has_experts).collect()
}

fn expected(found: &str) -> String {
    let list = "a list with 0 or 1 for each layer such as [1,0,1,0] or \"([1]+[0])*2\"";
    format!("expected an integer of at least 1, or {list}, found {found}")
}

/// Returns true for each layer with experts. There is at least one if `moe_layer_freq` is set.
pub(super) fn layers(
    keys: Keys,
    raw: &Map<String, Value>,
    rule: MoeLayers,
    n_layers: usize,
) -> Result<Vec<bool>, ModelError> {
    let of_family = layers_of_family(keys, raw, rule, n_layers)?;
    let Some(freq) = MoeLayerFreq::read(keys, n_layers)? else { return Ok(of_family) };
    let of_freq: Vec<bool> = (0..n_layers).map(|layer_idx| freq.has_experts(layer_idx)).collect();
    // DeepSeek-V2 and vLLM define the integer of these families by both keys.
    let is_joint = matches!((rule, &freq), (MoeLayers::FirstDense { .. }, MoeLayerFreq::Every(_)));
    let layers = match is_joint {
        true => of_family.iter().zip(&of_freq).map(|(of_family, of_freq)| *of_family && *of_freq).collect(),
        false => refuse_conflict(keys, rule, &of_family, &of_freq).map(|()| of_freq)?,
    };
    match layers.contains(&true) {
        true => Ok(layers),
        false => {
            let problem = "no layer has experts; for a dense model set the number of experts to 0";
            Err(keys.error(LAYER_FREQ, problem))
        }
    }
}

/// Fails if the keys of the family, as far as they are set, select other layers than `moe_layer_freq`.
fn refuse_conflict(keys: Keys, rule: MoeLayers, of_family: &[bool], of_freq: &[bool]) -> Result<(), ModelError> {
    let problem = match rule {
        MoeLayers::FirstDense { .. } if keys.get(FIRST_DENSE).is_some() => {
            let conflict = of_freq.iter().zip(of_family).position(|(of_freq, of_family)| *of_freq && !of_family);
            conflict.map(|idx| format!("layer {idx} has experts here, but is dense by {FIRST_DENSE}; set that to 0"))
        }
        MoeLayers::SparseStep if of_family.contains(&false) && of_family != of_freq => {
            Some(format!("it conflicts with {SPARSE_STEP} or {DENSE_LAYERS}; remove one of them"))
        }
        _ => None,
    };
    problem.map_or(Ok(()), |problem| Err(keys.error(LAYER_FREQ, problem)))
}

/// Returns true for each layer with experts by the keys of the family.
fn layers_of_family(
    keys: Keys,
    raw: &Map<String, Value>,
    rule: MoeLayers,
    n_layers: usize,
) -> Result<Vec<bool>, ModelError> {
    match rule {
        MoeLayers::All => Ok(vec![true; n_layers]),
        MoeLayers::FirstDense { default } => {
            let n_dense = keys.count(FIRST_DENSE)?.unwrap_or(default);
            Ok((0..n_layers).map(|i| i >= n_dense).collect())
        }
        MoeLayers::SparseStep => {
            let step = size(keys, SPARSE_STEP, 1, usize::MAX)?;
            let dense = dense_layers(keys, raw, n_layers)?;
            Ok((0..n_layers).map(|i| (i + 1).is_multiple_of(step) && !dense.contains(&i)).collect())
        }
    }
}

fn dense_layers(keys: Keys, raw: &Map<String, Value>, n_layers: usize) -> Result<Vec<usize>, ModelError> {
    let index = |value: &Value| match value.as_u64().map(|i| i as usize) {
        Some(i) if i < n_layers => Ok(i),
        _ => Err(keys.error(DENSE_LAYERS, format!("{value} is not the index of a layer; there are {n_layers}"))),
    };
    match raw.get(DENSE_LAYERS) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(index).collect(),
        Some(other) => Err(keys.error(DENSE_LAYERS, format!("expected a list of layer indices, found {other}"))),
    }
}

/// Returns the keys of the family that select its layers with experts.
pub(super) fn layers_keys(rule: MoeLayers) -> &'static str {
    match rule {
        MoeLayers::All => LAYER_FREQ,
        MoeLayers::FirstDense { .. } => FIRST_DENSE,
        MoeLayers::SparseStep => "decoder_sparse_step and mlp_only_layers",
    }
}

/// Returns true if no key of the family expresses the layers with experts.
pub(super) fn is_unlike_family(layers: &[bool], rule: MoeLayers) -> bool {
    match rule {
        MoeLayers::All => layers.contains(&false),
        MoeLayers::FirstDense { .. } => !layers.is_sorted(),
        MoeLayers::SparseStep => false,
    }
}

/// Writes `moe_layer_freq` of a config into the keys of the family, which transformers reads. Other programs read no text,
/// so an expression that stays becomes its value.
pub(super) fn write_family_keys(raw: &mut Map<String, Value>, layers: &[bool], rule: MoeLayers) {
    let Some(freq) = raw.get_mut(LAYER_FREQ).filter(|freq| !freq.is_null()) else { return };
    if let Some(Ok(parsed)) = freq.as_str().map(str::parse::<MoeLayerFreq>) {
        *freq = parsed.to_json();
    }
    if is_unlike_family(layers, rule) {
        return;
    }
    let dense: Vec<usize> = (0..layers.len()).filter(|layer_idx| !layers[*layer_idx]).collect();
    match rule {
        MoeLayers::All => {}
        MoeLayers::FirstDense { .. } => {
            raw.insert(FIRST_DENSE.to_owned(), dense.len().into());
            // vLLM needs the key.
            raw.insert(LAYER_FREQ.to_owned(), 1.into());
        }
        MoeLayers::SparseStep => {
            raw.remove(LAYER_FREQ);
            raw.insert(SPARSE_STEP.to_owned(), 1.into());
            raw.insert(DENSE_LAYERS.to_owned(), dense.into());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Config;

    const FAMILIES: [&str; 6] = ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "dots1", "glm4_moe"];

    fn read(model_type: &str, n_layers: usize, keys: Value) -> Result<Config, String> {
        let mut config = json!({"model_type": model_type, "head_dim": 128, "num_hidden_layers": n_layers});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        Config::from_handwritten(config.as_object().unwrap()).map_err(|error| error.to_string())
    }

    fn layers(config: &Config) -> Vec<bool> {
        (0..config.n_layers()).map(|layer_idx| config.layer(layer_idx).n_experts().is_some()).collect()
    }

    /// Patterns of megatron-core, written by `tests/reference/moe_layer_freq.py`. The config that is saved has them, too.
    #[test]
    fn layers_with_experts_are_those_of_megatron() {
        let cases: Value = serde_json::from_str(include_str!("../../tests/fixtures/moe_layer_freq.json")).unwrap();
        let cases = cases.as_array().unwrap();
        assert_eq!(cases.len(), 7);
        for (family, case) in FAMILIES.iter().flat_map(|family| cases.iter().map(move |case| (family, case))) {
            let want: Vec<bool> = serde_json::from_value(case["layers"].clone()).unwrap();
            // The default of GLM-4.5 is 1.
            let first_dense = matches!(*family, "dots1" | "glm4_moe") && case["moe_layer_freq"].is_u64();
            let keys = match first_dense {
                true => json!({"moe_layer_freq": case["moe_layer_freq"], "first_k_dense_replace": 0}),
                false => json!({"moe_layer_freq": case["moe_layer_freq"]}),
            };
            let config = read(family, want.len(), keys).unwrap();
            assert_eq!(layers(&config), want, "{family} {case}");
            let again = Config::from_json(config.to_json()).unwrap();
            assert_eq!((layers(&again), again.to_json()), (want, config.to_json()), "{family} {case}");
        }
    }

    /// The rule of DeepSeek-V2 and vLLM: index >= first_k_dense_replace and index % moe_layer_freq == 0.
    #[test]
    fn an_integer_applies_after_the_first_dense_layers_of_deepseeks_families() {
        for (first_dense, freq, want) in [
            (0, 2, [true, false, true, false, true, false]),
            (1, 2, [false, false, true, false, true, false]),
            (3, 2, [false, false, false, false, true, false]),
            (2, 3, [false, false, false, true, false, false]),
            (2, 1, [false, false, true, true, true, true]),
        ] {
            let keys = json!({"first_k_dense_replace": first_dense, "moe_layer_freq": freq});
            let config = read("dots1", 6, keys.clone()).unwrap();
            assert_eq!(layers(&config), want, "{keys}");
            assert_eq!(config.to_json()["moe_layer_freq"], freq, "vLLM reads the key");
        }
        assert_eq!(layers(&read("glm4_moe", 4, json!({"moe_layer_freq": 2})).unwrap()), [false, false, true, false]);
    }

    #[test]
    fn a_pattern_that_the_family_expresses_is_written_in_its_keys() {
        for (family, freq, want) in [
            ("qwen3_moe", json!(2), json!({"decoder_sparse_step": 1, "mlp_only_layers": [1, 3]})),
            ("qwen2_moe", json!([0, 1, 1, 0]), json!({"decoder_sparse_step": 1, "mlp_only_layers": [0, 3]})),
            ("qwen3_moe", json!(1), json!({"decoder_sparse_step": 1, "mlp_only_layers": []})),
            ("dots1", json!([0, 0, 1, 1]), json!({"first_k_dense_replace": 2, "moe_layer_freq": 1})),
            ("glm4_moe", json!([1, 1, 1, 1]), json!({"first_k_dense_replace": 0, "moe_layer_freq": 1})),
        ] {
            let config = read(family, 4, json!({"moe_layer_freq": freq})).unwrap();
            assert_eq!(config.transformers_warning(), None, "{family} {freq}");
            let saved = config.to_json();
            want.as_object().unwrap().iter().for_each(|(key, value)| assert_eq!(saved[key], *value, "{family} {key}"));
            assert_eq!(saved.get(LAYER_FREQ), want.get(LAYER_FREQ), "{family}");
        }
    }

    #[test]
    fn a_pattern_that_transformers_cannot_express_is_kept_with_a_warning() {
        for (family, freq) in [("mixtral", json!(2)), ("olmoe", json!([0, 1, 1, 1])), ("dots1", json!([0, 1, 0, 1]))] {
            let config = read(family, 4, json!({"moe_layer_freq": freq})).unwrap();
            assert!(config.transformers_warning().unwrap().contains("moe_layer_freq"), "{family}");
            assert_eq!(config.to_json()["moe_layer_freq"], freq);
        }
        for (family, freq) in [("mixtral", json!(1)), ("olmoe", json!([1, 1, 1, 1])), ("dots1", json!(1))] {
            assert_eq!(read(family, 4, json!({"moe_layer_freq": freq})).unwrap().transformers_warning(), None);
        }
    }

    #[test]
    fn a_text_has_the_layers_of_its_list_or_integer_and_is_saved_as_one() {
        for (text, freq) in [
            ("([1]*1+[0]*1)*2", json!([1, 0, 1, 0])),
            ("[0]*2+[1]*2", json!([0, 0, 1, 1])),
            ("[1,0,0,1]", json!([1, 0, 0, 1])),
            (" 2 ", json!(2)),
        ] {
            for family in FAMILIES {
                let [by_text, by_freq] = [json!(text), freq.clone()].map(|freq| {
                    let keys = json!({"moe_layer_freq": freq, "first_k_dense_replace": null});
                    read(family, 4, keys).unwrap()
                });
                assert_eq!(
                    (layers(&by_text), by_text.to_json()),
                    (layers(&by_freq), by_freq.to_json()),
                    "{family} {text}"
                );
            }
        }
    }

    #[test]
    fn impossible_and_conflicting_patterns_are_refused() {
        for (family, keys, parts) in [
            ("mixtral", json!({"moe_layer_freq": 0}), ["moe_layer_freq", "at least 1"]),
            ("mixtral", json!({"moe_layer_freq": "0"}), ["moe_layer_freq", "found \"0\""]),
            ("mixtral", json!({"moe_layer_freq": "2+2"}), ["moe_layer_freq", "a list with 0 or 1"]),
            (
                "mixtral",
                json!({"moe_layer_freq": "([1]*3+[0]"}),
                ["`moe_layer_freq`: column 11", "such as ([1]*3+[0])*2"],
            ),
            (
                "mixtral",
                json!({"moe_layer_freq": "[1]*99999"}),
                ["`moe_layer_freq`: column 5", "more than 10000 entries"],
            ),
            ("mixtral", json!({"moe_layer_freq": "([1]+[0])*3"}), ["6 entries for 4 layers", "num_hidden_layers"]),
            ("mixtral", json!({"moe_layer_freq": true}), ["moe_layer_freq", "found true"]),
            ("mixtral", json!({"moe_layer_freq": [1, 0, 2, 0]}), ["moe_layer_freq", "a list with 0 or 1"]),
            ("mixtral", json!({"moe_layer_freq": [1, 0]}), ["2 entries for 4 layers", "num_hidden_layers"]),
            ("mixtral", json!({"moe_layer_freq": [0, 0, 0, 0]}), ["no layer has experts", "number of experts to 0"]),
            (
                "dots1",
                json!({"moe_layer_freq": 4, "first_k_dense_replace": 1}),
                ["moe_layer_freq", "no layer has experts"],
            ),
            (
                "dots1",
                json!({"moe_layer_freq": [1, 1, 0, 1], "first_k_dense_replace": 2}),
                ["layer 0 has experts", "first_k_dense_replace; set that to 0"],
            ),
            ("qwen3_moe", json!({"moe_layer_freq": 2, "decoder_sparse_step": 2}), ["conflicts", "decoder_sparse_step"]),
            ("qwen3_moe", json!({"moe_layer_freq": 2, "mlp_only_layers": [0]}), ["conflicts", "mlp_only_layers"]),
            ("llama", json!({"moe_layer_freq": 2}), ["moe_layer_freq", "no effect on a llama model"]),
        ] {
            let message = read(family, 4, keys).unwrap_err();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        let equal = json!({"moe_layer_freq": [0, 1, 0, 1], "decoder_sparse_step": 2});
        assert_eq!(layers(&read("qwen3_moe", 4, equal).unwrap()), [false, true, false, true]);
    }

    #[test]
    fn the_command_line_takes_an_integer_a_list_or_an_expression() {
        assert_eq!("2".parse(), Ok(MoeLayerFreq::Every(2)));
        for text in ["[1, 0,1]", "[1]+[0]+[1]"] {
            assert_eq!(text.parse(), Ok(MoeLayerFreq::Pattern(vec![true, false, true])));
        }
        for wrong in ["0", "-1", "1.5", "[1,2]", "1,0", "([0]*3+[1]*5", "true", ""] {
            assert!(wrong.parse::<MoeLayerFreq>().unwrap_err().contains(wrong), "{wrong}");
        }
    }
}
