//! Architectures of llama.cpp that compute the same function as a model family.

use candlewick_ops::TopKOrder;

use crate::config::{LAYER_FREQ, ON_INPUT, RopeKind, Yarn};
use crate::{Config, ExpertWeighting, Family, ModelError};

/// An architecture of llama.cpp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Llama, Mistral and Mixtral.
    Llama,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3.
    Qwen3,
    /// Qwen2-MoE.
    Qwen2Moe,
    /// Qwen3-MoE.
    Qwen3Moe,
}

impl Architecture {
    /// Returns the architecture of a model.
    ///
    /// # Errors
    /// If llama.cpp would compute another function.
    pub(super) fn of(config: &Config) -> Result<Self, ModelError> {
        let family = config.family();
        let Some(architecture) = Self::of_family(family) else {
            let exported = Family::ALL.iter().filter(|family| Self::of_family(**family).is_some());
            let problem = format!(
                "{} is not exported to GGUF; {} are. Export safetensors, and convert that folder with llama.cpp's \
                 convert_hf_to_gguf.py",
                family.architecture(),
                exported.map(|family| family.title()).collect::<Vec<_>>().join(", ")
            );
            return Err(ModelError::Unsupported(problem));
        };
        match architecture.difference(config) {
            Some((key, problem)) => Err(ModelError::key(key, format!("llama.cpp {problem}; export safetensors"))),
            None => Ok(architecture),
        }
    }

    /// Returns the architecture of a family; `None` if GGUF is not written for it.
    pub(super) fn of_family(family: Family) -> Option<Self> {
        match family.model_type() {
            "llama" | "mistral" | "mixtral" => Some(Self::Llama),
            "qwen2" => Some(Self::Qwen2),
            "qwen3" => Some(Self::Qwen3),
            "qwen2_moe" => Some(Self::Qwen2Moe),
            "qwen3_moe" => Some(Self::Qwen3Moe),
            _ => None,
        }
    }

    /// Returns the key and the text of a setting that llama.cpp computes differently.
    fn difference(self, config: &Config) -> Option<(&'static str, String)> {
        let typed = &config.typed;
        if let Some(problem) = self.scaling_difference(&typed.rope) {
            return Some(("rope_scaling", problem));
        }
        if self == Self::Qwen3 && (typed.qkv_bias || typed.o_bias) {
            return Some(("attention_bias", "has no biases of attention in Qwen3".to_owned()));
        }
        if self == Self::Qwen2Moe && config.tied() {
            return Some(("tie_word_embeddings", "needs an output layer of its own in Qwen2-MoE".to_owned()));
        }
        let moe = config.moe()?;
        if moe.weighting == ExpertWeighting::Input {
            return Some((ON_INPUT, "multiplies the outputs of experts with their weights".to_owned()));
        }
        if let Some(key) = moe.unlike_family.filter(|key| *key != LAYER_FREQ) {
            return Some((key, format!("has the router of {} without this key", self.name())));
        }
        let normalizes = self != Self::Qwen2Moe;
        // Softmax of the selected logits is the normalized softmax of all.
        if (moe.router.normalize || moe.router.order == TopKOrder::TopKFirst) != normalizes {
            return Some(("norm_topk_prob", format!("computes {} with {normalizes}", self.name())));
        }
        if moe.layers.contains(&false) {
            let key = moe.unlike_family.unwrap_or("mlp_only_layers");
            return Some((key, format!("has experts in every layer of {}", self.name())));
        }
        None
    }

    /// Returns the text of a scaling of RoPE that llama.cpp computes differently.
    fn scaling_difference(self, rope: &RopeKind) -> Option<String> {
        match rope {
            RopeKind::Llama3 { .. } if self != Self::Llama => {
                Some(format!("has llama3 scaling for Llama alone, not for {}", self.name()))
            }
            RopeKind::Yarn(yarn) => yarn_difference(yarn),
            RopeKind::LongRope(_) => Some(format!("has longrope for Phi-3 and MiniCPM, not for {}", self.name())),
            RopeKind::Dynamic { .. } => Some("has no dynamic scaling".to_owned()),
            RopeKind::Default | RopeKind::Linear { .. } | RopeKind::Llama3 { .. } => None,
        }
    }

    /// Returns the value of `general.architecture`, which is the first part of the other keys.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3Moe => "qwen3moe",
        }
    }

    /// Returns true if llama.cpp rotates adjacent elements of a head: 2i with 2i + 1, instead of i with i + d/2.
    pub(super) fn rotates_adjacent(self) -> bool {
        self == Self::Llama
    }
}

/// Returns the text of a YaRN setting that the file cannot hold: these architectures read the factor and the original context.
fn yarn_difference(yarn: &Yarn) -> Option<String> {
    let default = Yarn::default_attention_factor(yarn.factor);
    if (yarn.attention_factor - default).abs() > 1e-6 {
        let found = yarn.attention_factor;
        return Some(format!(
            "derives YaRN's attention factor from the factor, {default:.4}, but the model has {found:.4}"
        ));
    }
    if (yarn.beta_fast, yarn.beta_slow) != Yarn::DEFAULT_BETAS {
        let (fast, slow) = Yarn::DEFAULT_BETAS;
        return Some(format!("has YaRN with beta_fast {fast} and beta_slow {slow} alone"));
    }
    (!yarn.truncate).then(|| "truncates YaRN's ramp to whole pairs".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(config: serde_json::Value, want: Result<Architecture, &str>) {
        let found = Architecture::of(&Config::from_json(config).unwrap());
        match (found, want) {
            (Ok(found), Ok(want)) => assert_eq!(found, want),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, _) => panic!("{found:?}"),
        }
    }

    #[test]
    fn a_family_has_the_architecture_that_computes_it() {
        check(json!({"model_type": "mistral"}), Ok(Architecture::Llama));
        check(json!({"model_type": "mixtral"}), Ok(Architecture::Llama));
        check(json!({"model_type": "qwen2_moe"}), Ok(Architecture::Qwen2Moe));
        check(json!({"model_type": "olmoe"}), Err("convert_hf_to_gguf.py"));
    }

    #[test]
    fn a_setting_that_llama_cpp_computes_differently_is_refused() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
        check(json!({"model_type": "llama", "rope_scaling": llama3}), Ok(Architecture::Llama));
        check(json!({"model_type": "qwen2", "rope_scaling": llama3}), Err("rope_scaling"));
        check(json!({"model_type": "qwen3", "attention_bias": true}), Err("attention_bias"));
        let yarn = |key: &str, value: serde_json::Value| {
            let mut scaling = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
            scaling[key] = value;
            json!({"model_type": "qwen3", "rope_scaling": scaling})
        };
        check(yarn("beta_fast", json!(32)), Ok(Architecture::Qwen3));
        check(yarn("beta_fast", json!(16)), Err("beta_fast 32"));
        check(yarn("attention_factor", json!(1.0)), Err("attention factor"));
        check(yarn("truncate", json!(false)), Err("truncates"));
        check(json!({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2}}), Err("dynamic"));
        let factors = vec![1.0; 64];
        let long = json!({"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 2});
        check(json!({"model_type": "llama", "rope_scaling": long}), Err("longrope"));
        check(json!({"model_type": "qwen3_moe", "norm_topk_prob": true}), Ok(Architecture::Qwen3Moe));
        check(json!({"model_type": "qwen3_moe", "norm_topk_prob": false}), Err("norm_topk_prob"));
        check(json!({"model_type": "qwen2_moe", "mlp_only_layers": [0]}), Err("mlp_only_layers"));
        check(json!({"model_type": "qwen2_moe", "moe_layer_freq": 2}), Err("mlp_only_layers"));
        check(json!({"model_type": "mixtral", "moe_layer_freq": 2}), Err("moe_layer_freq"));
        check(json!({"model_type": "qwen2_moe", "tie_word_embeddings": true}), Err("tie_word_embeddings"));
    }
}
