//! PEFT's adapter_config.json and a recipe's `peft_config`. Unsupported keys are errors.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value, json};

use super::names::{Names, list};
use crate::{
    ModelError,
    config::json::{Keys, shorten},
    family::multimodal::name_in_text_model,
};

/// LoRA configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    pub(super) r: usize,
    pub(super) lora_alpha: f64,
    pub(super) lora_dropout: f64,
    pub(super) use_rslora: bool,
    pub(super) target_modules: Names,
    /// Full parameter names, or suffixes after a dot.
    pub(super) target_parameters: Vec<String>,
    /// True if factors of 3-D parameters have inputs and outputs exchanged, as PEFT before 0.19.1 saved them.
    pub(crate) has_exchanged_parameters: bool,
    /// True if the adapter folder has no tensors of single experts. In transformers 5, names of modules match only those
    /// of shared experts and dense layers.
    pub(crate) skips_expert_modules: bool,
    pub(super) exclude_modules: Option<Names>,
    pub(super) layers_to_transform: Option<Vec<usize>>,
    /// Rank by module name or regular expression; the first match applies (PEFT's `rank_pattern`).
    pub(super) rank_pattern: Vec<(String, usize)>,
    pub(super) alpha_pattern: Vec<(String, f64)>,
    pub(super) base_model: Option<String>,
}

/// Supported keys.
const READ: &[&str] = &[
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "base_model_name_or_path",
];

/// Keys without effect on training.
const INERT: &[&str] = &[
    "auto_mapping",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// Unsupported keys of PEFT, which must be null, false, 0 or empty.
const PEFT: &[&str] = &[
    "alora_invocation_tokens",
    "arrow_config",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "layer_replication",
    "loftq_config",
    "lora_bias",
    "lora_ga_config",
    "megatron_config",
    "modules_to_save",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];

/// Keys with a single supported value, and the reason.
const FIXED: &[(&str, &str, &str)] = &[
    ("peft_type", "LORA", "LORA is the only adapter"),
    ("task_type", "CAUSAL_LM", "only CAUSAL_LM models are trained"),
    ("bias", "none", "biases are not trained together with an adapter; use none"),
    ("init_lora_weights", "true", "PEFT's default is the only initialization; use true"),
];

/// Keys about tensors that an adapter folder has besides its factors, and a recipe does not train.
const KEYS_OF_REPLACEMENTS: [&str; 2] = ["modules_to_save", "bias"];

/// Remedy of an adapter folder that needs an unsupported key.
const MERGE_WITH_PEFT: &str = "; merge the adapter with PEFT (`merge_and_unload`), and use the merged model";

/// First version of PEFT with inputs and outputs of 3-D parameters in the order of these adapter folders.
const PARAMETERS_VERSION: [u32; 3] = [0, 19, 1];

impl LoraConfig {
    /// Parses a recipe's `peft_config`.
    pub fn from_json(value: &Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => {
                map.keys().try_for_each(|key| refuse_unknown(key))?;
                Self::from_map(map, "")
            }
            other => Err(ModelError::lora("peft_type", format!("expected an object, found {}", shorten(other)))),
        }
    }

    /// Parses PEFT's adapter_config.json, such as [`LoraConfig::to_json`] returns.
    pub fn from_peft_json(value: &Value) -> Result<Self, ModelError> {
        match value {
            Value::Object(map) => Self::from_folder(map),
            other => Err(ModelError::lora("peft_type", format!("expected an object, found {}", shorten(other)))),
        }
    }

    /// Parses the keys of an adapter folder, whose tensors show the replaced modules and biases.
    pub(super) fn from_folder(map: &Map<String, Value>) -> Result<Self, ModelError> {
        let mut map = map.clone();
        map.retain(|key, _| !KEYS_OF_REPLACEMENTS.contains(&key.as_str()));
        Self::from_map(&map, MERGE_WITH_PEFT)
    }

    /// Parses the keys of a recipe or of an adapter folder. An error about an unsupported key has the remedy.
    fn from_map(map: &Map<String, Value>, remedy: &str) -> Result<Self, ModelError> {
        map.iter().try_for_each(|(key, value)| refuse_unsupported(key, value, remedy))?;
        let keys = Keys::new(map);
        let target_parameters = parameters(keys)?;
        // PEFT's default for these model families, without target_parameters.
        let default =
            if target_parameters.is_empty() { vec!["q_proj".to_owned(), "v_proj".to_owned()] } else { vec![] };
        let config = Self {
            r: rank("r", keys.count("r")?.unwrap_or(8))?,
            lora_alpha: alpha("lora_alpha", keys.number("lora_alpha")?.unwrap_or(8.0))?,
            lora_dropout: dropout(keys.number("lora_dropout")?.unwrap_or(0.0))?,
            use_rslora: keys.flag("use_rslora")?.unwrap_or(false),
            target_modules: Names::read(keys, "target_modules")?.unwrap_or(Names::List(default)).of_text_model(),
            target_parameters: target_parameters.iter().map(|name| name_in_text_model(name)).collect(),
            has_exchanged_parameters: false,
            skips_expert_modules: false,
            exclude_modules: Names::read(keys, "exclude_modules")?
                .filter(|names| !names.is_empty())
                .map(Names::of_text_model),
            layers_to_transform: layers(keys)?,
            rank_pattern: pattern(keys, "rank_pattern", |v| v.as_u64().and_then(|n| n.try_into().ok()))?,
            alpha_pattern: pattern(keys, "alpha_pattern", Value::as_f64)?,
            base_model: keys.text("base_model_name_or_path")?.map(str::to_string),
        };
        config.rank_pattern.iter().try_for_each(|(_, r)| rank("rank_pattern", *r).map(drop))?;
        config.alpha_pattern.iter().try_for_each(|(_, a)| alpha("alpha_pattern", *a).map(drop))?;
        match (&config.target_modules, &config.layers_to_transform) {
            (Names::Regex(_) | Names::AllLinear, Some(_)) => Err(ModelError::lora(
                "layers_to_transform",
                "needs target_modules to be a list of names, as in PEFT; or name the layers in the expression",
            )),
            (_, Some(_)) if !config.target_parameters.is_empty() => Err(ModelError::lora(
                "layers_to_transform",
                "PEFT applies it to target_modules alone; name the layers in target_parameters, such as \
                 layers.1.mlp.experts.down_proj",
            )),
            _ => Ok(config),
        }
    }

    /// Returns the dropout probability of the adapters' inputs.
    pub fn dropout(&self) -> f64 {
        self.lora_dropout
    }

    /// Returns true if `target_parameters` selects adapters.
    pub fn targets_parameters(&self) -> bool {
        !self.target_parameters.is_empty()
    }

    /// Returns the rules with modules of single experts; `None` unless a folder without tensors of them was read.
    pub(crate) fn with_expert_modules(&self) -> Option<Self> {
        self.skips_expert_modules.then(|| Self { skips_expert_modules: false, ..self.clone() })
    }

    /// Sets the base model's name for adapter_config.json.
    pub fn with_base_model(mut self, name_or_path: &str) -> Self {
        self.base_model = Some(name_or_path.to_string());
        self
    }

    /// Returns the base model's name, if it is known.
    pub fn base_model(&self) -> Option<&str> {
        self.base_model.as_deref()
    }

    /// Returns the configuration in the format of PEFT's adapter_config.json.
    pub fn to_json(&self) -> Value {
        let peft_version = (!self.target_parameters.is_empty()).then_some(PARAMETERS_VERSION);
        json!({
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "inference_mode": true,
            "r": self.r,
            "lora_alpha": whole(self.lora_alpha),
            "lora_dropout": self.lora_dropout,
            "use_rslora": self.use_rslora,
            "target_modules": self.target_modules.to_json(),
            "target_parameters": Some(&self.target_parameters).filter(|list| !list.is_empty()),
            "peft_version": peft_version.map(|version| version.map(|n| n.to_string()).join(".")),
            "exclude_modules": self.exclude_modules.as_ref().map(Names::to_json),
            "layers_to_transform": self.layers_to_transform,
            "layers_pattern": null,
            "rank_pattern": object(&self.rank_pattern, |r| json!(r)),
            "alpha_pattern": object(&self.alpha_pattern, |alpha| whole(*alpha)),
            "bias": "none",
            "fan_in_fan_out": false,
            "init_lora_weights": true,
            "modules_to_save": null,
            "use_dora": false,
        })
    }
}

/// Returns true if the folder's factors of 3-D parameters have inputs and outputs exchanged. PEFT 0.17 saved no version.
pub(super) fn exchanges_parameters(map: &Map<String, Value>) -> bool {
    let version = map.get("peft_version").and_then(Value::as_str).unwrap_or_default();
    let number = |part: &str| part.parse::<u32>().unwrap_or(0);
    let found: Vec<u32> = version.split(['.', '@', '+']).take(3).map(number).collect();
    found.as_slice() < PARAMETERS_VERSION.as_slice()
}

/// Reads the list of `target_parameters`.
fn parameters(keys: Keys) -> Result<Vec<String>, ModelError> {
    match keys.get("target_parameters") {
        None => Ok(Vec::new()),
        Some(value) => list("target_parameters", value, "a list of parameter names"),
    }
}

/// Rejects an unknown key of a recipe. Unknown keys in a file of a newer PEFT are accepted.
fn refuse_unknown(key: &str) -> Result<(), ModelError> {
    let known = READ.iter().chain(INERT).chain(PEFT).copied();
    let known: Vec<&str> = known.chain(FIXED.iter().map(|(key, ..)| *key)).collect();
    if known.contains(&key) {
        return Ok(());
    }
    let hint = did_you_mean(key, known);
    Err(ModelError::lora(key, format!("not supported{hint}")))
}

fn refuse_unsupported(key: &str, value: &Value, remedy: &str) -> Result<(), ModelError> {
    let neutral = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) => false,
    };
    if READ.contains(&key) || INERT.contains(&key) || (neutral && key != "init_lora_weights") {
        return Ok(());
    }
    if let Some((_, only, reason)) = FIXED.iter().find(|(name, ..)| *name == key) {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
        return match text == *only {
            true => Ok(()),
            false => Err(ModelError::lora(key, format!("{} is not supported: {reason}{remedy}", shorten(value)))),
        };
    }
    let problem = match PEFT.contains(&key) {
        true => format!("{} is not supported{remedy}", shorten(value)),
        false => format!("not supported{}{remedy}", did_you_mean(key, READ.iter().copied())),
    };
    Err(ModelError::lora(key, problem))
}

fn rank(key: &str, r: usize) -> Result<usize, ModelError> {
    match r {
        1..=65536 => Ok(r),
        _ => Err(ModelError::lora(key, format!("expected a rank of 1 to 65536, found {r}"))),
    }
}

fn alpha(key: &str, alpha: f64) -> Result<f64, ModelError> {
    match alpha.is_finite() && alpha != 0.0 {
        true => Ok(alpha),
        false => {
            Err(ModelError::lora(key, format!("expected a number other than 0, found {alpha}: nothing would train")))
        }
    }
}

fn dropout(p: f64) -> Result<f64, ModelError> {
    match (0.0..1.0).contains(&p) {
        true => Ok(p),
        false => Err(ModelError::lora("lora_dropout", format!("expected a probability from 0 to below 1, found {p}"))),
    }
}

fn layers(keys: Keys) -> Result<Option<Vec<usize>>, ModelError> {
    if let Some(pattern) = keys.get("layers_pattern")
        && !["\"layers\"", "[\"layers\"]", "\"\"", "[]"].contains(&pattern.to_string().as_str())
    {
        let problem = format!("expected \"layers\", the name of these models' list, found {}", shorten(pattern));
        return Err(ModelError::lora("layers_pattern", problem));
    }
    let Some(value) = keys.get("layers_to_transform") else { return Ok(None) };
    let index = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let list = match value {
        Value::Array(list) => list.iter().map(index).collect(),
        one => index(one).map(|index| vec![index]),
    };
    match list {
        Some(list) => Ok(Some(list).filter(|list| !list.is_empty())),
        None => Err(ModelError::lora(
            "layers_to_transform",
            format!("expected a layer index or a list of them, found {}", shorten(value)),
        )),
    }
}

fn pattern<T>(keys: Keys, key: &str, get: impl Fn(&Value) -> Option<T>) -> Result<Vec<(String, T)>, ModelError> {
    let Some(map) = keys.object(key)? else { return Ok(Vec::new()) };
    map.iter()
        .map(|(name, value)| match get(value) {
            Some(value) => Ok((name.clone(), value)),
            None => Err(ModelError::lora(key, format!("`{name}`: expected a number, found {}", shorten(value)))),
        })
        .collect()
}

fn object<T>(pairs: &[(String, T)], value: impl Fn(&T) -> Value) -> Value {
    Value::Object(pairs.iter().map(|(name, v)| (name.clone(), value(v))).collect())
}

/// Returns an integer as JSON integer: PEFT declares `lora_alpha` an integer.
fn whole(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}
