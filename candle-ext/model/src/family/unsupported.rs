//! Model families in demand that are missing.

use crate::ModelError;
use candlewick_text::suggestion::nearest;

/// A missing model family.
pub(super) struct MissingFamily {
    /// Name of its models.
    pub(super) name: &'static str,
    /// Values of `model_type` in config.json. A vision wrapper has one of its own.
    model_types: &'static [&'static str],
}

/// The missing families, those in demand first.
pub(super) const MISSING_FAMILIES: &[MissingFamily] = &[
    missing("Qwen3.5", &["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]),
    missing("Qwen3-Next", &["qwen3_next"]),
    missing("Qwen3-VL with experts and Qwen-Omni", &["qwen3_vl_moe", "qwen2_5_omni", "qwen3_omni_moe"]),
    missing("Gemma", &["gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"]),
    missing("gpt-oss", &["gpt_oss"]),
    missing("Phi-3 and Phi-4", &["phi", "phi3", "phi3small", "phi4mm", "phi4_multimodal", "phimoe"]),
    missing("Ministral and Pixtral", &["ministral", "ministral3", "mistral4", "pixtral"]),
    missing("Llama 4 and Llama 3.2 Vision", &["llama4", "llama4_text", "mllama"]),
    missing("DeepSeek", &["deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25"]),
    missing("OLMo", &["olmo", "olmo2", "olmo3"]),
    missing("SmolLM3", &["smollm3"]),
    missing("GLM-4 and GLM-5", &["glm", "glm4", "glm4v", "glm4v_moe", "chatglm", "glm4_moe_lite", "glm_moe_dsa"]),
    missing("Granite", &["granite", "granitemoe", "granitemoeshared", "granitemoehybrid"]),
    missing("Command", &["cohere", "cohere2"]),
    missing("Falcon", &["falcon", "falcon_h1", "falcon_mamba"]),
    missing("Nemotron", &["nemotron", "nemotron_h", "deci", "nemotron-nas"]),
    missing("MiniMax", &["minimax", "minimax_m2"]),
    missing("LFM2", &["lfm2", "lfm2_moe"]),
    missing("EXAONE", &["exaone", "exaone4"]),
    missing(
        "GPT-2, GPT-NeoX and StableLM",
        &["gpt2", "gpt_neo", "gpt_neox", "gptj", "stablelm", "mpt", "bloom", "opt"],
    ),
];

const fn missing(name: &'static str, model_types: &'static [&'static str]) -> MissingFamily {
    MissingFamily { name, model_types }
}

impl MissingFamily {
    /// Finds the family by config.json's `model_type`, or by a class name such as `Phi3ForCausalLM`.
    fn find(architectures: &[&str], model_type: Option<&str>) -> Option<&'static Self> {
        let plain = |name: &str| name.to_lowercase().replace(['_', '-'], "");
        let of_class = |class: &str| plain(class.split("For").next().unwrap_or(class));
        let names: Vec<String> =
            model_type.map(plain).into_iter().chain(architectures.iter().map(|a| of_class(a))).collect();
        let is_named = |family: &&Self| family.model_types.iter().any(|own| names.contains(&plain(own)));
        MISSING_FAMILIES.iter().find(is_named)
    }
}

/// Returns the error for a config.json of no supported family. It lists the supported ones.
pub(super) fn unsupported(architectures: &[&str], model_type: Option<&str>, supported: &[(&str, &str)]) -> ModelError {
    let found = match (architectures, model_type) {
        ([], None) => "config.json names neither `architectures` nor `model_type`".to_owned(),
        ([], Some(model_type)) => format!("model_type `{model_type}` is not supported"),
        (list, None) => format!("architecture `{}` is not supported", list.join(", ")),
        (list, Some(model_type)) => {
            format!("architecture `{}` with model_type `{model_type}` is not supported", list.join(", "))
        }
    };
    let why = match MissingFamily::find(architectures, model_type) {
        Some(family) => format!(": the family {} is missing", family.name),
        None => misspelling(architectures, model_type, supported),
    };
    let supported =
        supported.iter().map(|(architecture, model_type)| format!("{architecture} (model_type {model_type})"));
    ModelError::Unsupported(format!("{found}{why}; supported: {}", supported.collect::<Vec<_>>().join(", ")))
}

/// Returns the error for a text part of another family than that of the multimodal model `architecture`.
pub(super) fn unsupported_text(architecture: &str, found: &str, supported: &str) -> ModelError {
    let why = MissingFamily::find(&[], Some(found)).map(|family| format!(": the family {} is missing", family.name));
    let why = why.unwrap_or_default();
    let problem = format!("`{found}` is not supported as text part of {architecture}{why}; supported: {supported}");
    ModelError::key("text_config.model_type", problem)
}

/// Suggests the supported name of which one of the names is a misspelling.
fn misspelling(architectures: &[&str], model_type: Option<&str>, supported: &[(&str, &str)]) -> String {
    let is_supported = |name: &str| supported.iter().any(|names| names.0 == name || names.1 == name);
    let architecture = architectures.first().filter(|name| !is_supported(name));
    let near = architecture.and_then(|name| nearest(name, supported.iter().map(|names| names.0)));
    let model_type = model_type.filter(|name| !is_supported(name));
    let near = near.or_else(|| model_type.and_then(|name| nearest(name, supported.iter().map(|names| names.1))));
    near.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Family;

    #[track_caller]
    fn check(architecture: &str, model_type: &str, wanted: &str) {
        let supported: Vec<_> = Family::ALL.iter().map(|f| (f.architecture(), f.model_type())).collect();
        let message = unsupported(&[architecture], Some(model_type), &supported).to_string();
        assert!(
            message.contains(wanted) && message.contains("supported: LlamaForCausalLM (model_type llama)"),
            "{message}"
        );
        assert_eq!(message.contains("did you mean"), wanted.contains("did you mean"), "{message}");
    }

    #[test]
    fn a_known_family_is_named_as_missing() {
        check("SmolLM3ForCausalLM", "smollm3", "the family SmolLM3 is missing");
        check("Phi3ForCausalLM", "phi3", "the family Phi-3 and Phi-4 is missing");
        check("Qwen3NextForCausalLM", "qwen3_next", "the family Qwen3-Next is missing");
        check("Qwen3_5ForConditionalGeneration", "qwen3_5", "the family Qwen3.5 is missing");
        check("Gemma3ForConditionalGeneration", "gemma3", "the family Gemma is missing");
        check("GptOssForCausalLM", "gpt_oss", "the family gpt-oss is missing");
        check("Ministral3ForCausalLM", "ministral3", "the family Ministral and Pixtral is missing");
        check("Olmo2ForCausalLM", "olmo2", "the family OLMo is missing");
        check("Llama4ForConditionalGeneration", "llama4", "the family Llama 4 and Llama 3.2 Vision is missing");
        check("DeepseekV3ForCausalLM", "deepseek_v3", "the family DeepSeek is missing");
    }

    #[test]
    fn only_a_misspelling_gets_a_hint() {
        check("Qwen3ForCasualLM", "qwen3", "did you mean `Qwen3ForCausalLM`?");
        check("SomethingForCausalLM", "something", "is not supported; supported");
        check("LlamaForSequenceClassification", "llama", "is not supported; supported");
    }

    #[test]
    fn no_supported_family_is_listed_as_missing() {
        for family in Family::ALL {
            assert!(MissingFamily::find(&[family.architecture()], Some(family.model_type())).is_none(), "{family:?}");
        }
    }
}
