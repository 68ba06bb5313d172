//! Features of other trainers that this one lacks. Errors, `trainer config explain` and the README read this table.

/// A feature that is missing.
#[derive(Debug)]
pub struct MissingFeature {
    /// The feature, as the subject of a sentence.
    pub name: &'static str,
    /// The replacement, in the imperative or as a noun.
    pub instead: &'static str,
    /// Keys, values and words that mean it, in lower case with `_`.
    words: &'static [&'static str],
    /// Paths of keys that mean it only there.
    paths: &'static [&'static str],
}

/// The missing features.
pub const MISSING_FEATURES: &[MissingFeature] = &[
    MissingFeature {
        name: "preference training, reinforcement learning and reward models (DPO, KTO, GRPO, PPO)",
        instead: "`type: sft` here, then TRL on the exported folder",
        words: &[
            "dpo",
            "ipo",
            "kto",
            "orpo",
            "cpo",
            "simpo",
            "grpo",
            "ppo",
            "rloo",
            "rl",
            "rlhf",
            "reward",
            "reward_model",
            "reward_modeling",
            "rm",
            "preference",
            "prm",
            "online_dpo",
            "dpo_beta",
            "ref_model",
            "reference_model_deepspeed",
            "dpo_prompt_truncation_mode",
            "trl",
        ],
        paths: &["beta"],
    },
    MissingFeature {
        name: "QLoRA (frozen weights in 4 bits)",
        instead: "`model.quantize_base: fp8`, which stores the frozen weights of an adapter run in a byte each",
        words: &[
            "qlora",
            "nf4",
            "fp4",
            "int4",
            "int8",
            "bitsandbytes",
            "bnb",
            "bnb_4bit_quant_type",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_use_double_quant",
            "gptq",
            "awq",
            "hqq",
            "aqlm",
            "double_quantization",
            "4bit",
            "8bit",
            "4_bit",
            "8_bit",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "DoRA",
        instead: "LoRA, with `use_rslora: true` at high ranks",
        words: &["dora", "use_dora", "peft_use_dora", "qdora"],
        paths: &[],
    },
    MissingFeature {
        name: "biases of an adapter, and repeated layers",
        instead: "`bias: none`, or full fine-tuning",
        words: &["lora_only", "lora_bias", "train_bias", "layer_replication"],
        paths: &["model.peft_config.bias"],
    },
    MissingFeature {
        name: "offload to NVMe disks (ZeRO-Infinity)",
        instead: "`device: cpu` for the optimizer and the weights, or ZeRO stage 3 on more ranks",
        words: &["nvme", "nvme_path", "zero_infinity", "aio"],
        paths: &[],
    },
    MissingFeature {
        name: "averages of weights over steps (EMA, SWA)",
        instead: "the best checkpoint by `metric_for_best_model`",
        words: &["ema", "ema_decay", "swa", "use_ema"],
        paths: &[],
    },
    MissingFeature {
        name: "attention to a part of the tokens (shifted sparse attention, LongLoRA)",
        instead: "`context_parallel_size`, which divides a long row over ranks",
        words: &["s2_attention", "shift_attn", "longlora", "sparse_attention"],
        paths: &[],
    },
    MissingFeature {
        name: "speculative decoding and beam search",
        instead: "`trainer serve`, or the exported model in vLLM",
        words: &["speculative_decoding", "assisted_generation", "beam_search", "num_beams"],
        paths: &[],
    },
    MissingFeature {
        name: "other adapters and their initializations (PiSSA, LoftQ, IA3, prefix tuning)",
        instead: "LoRA, or rsLoRA",
        words: &[
            "pissa",
            "pissa_init",
            "loftq",
            "loftq_config",
            "olora",
            "corda",
            "eva",
            "ia3",
            "prefix_tuning",
            "prompt_tuning",
            "p_tuning",
            "vera",
            "adalora",
            "loha",
            "lokr",
            "oft",
            "boft",
            "prompt_encoder",
            "gaussian",
            "orthogonal",
            "relora",
            "lisa",
            "galore",
            "use_galore",
            "badam",
            "use_badam",
            "llama_pro",
            "lora_fa",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "whole modules trained next to an adapter (`modules_to_save`)",
        instead: "full fine-tuning, or LoRA on more `target_modules`",
        words: &[
            "modules_to_save",
            "lora_modules_to_save",
            "peft_modules_to_save",
            "additional_target",
            "trainable_token_indices",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "new tokens and resized embeddings",
        instead: "`add_tokens` and `resize_token_embeddings` of transformers, saved to a folder that you then train, or a chat \
                  template whose markers the tokenizer has",
        words: &[
            "add_special_tokens",
            "added_tokens",
            "add_tokens",
            "new_tokens",
            "new_special_tokens",
            "special_tokens",
            "pad_token",
            "eos_token",
            "bos_token",
            "additional_special_tokens",
            "resize_vocab",
            "resize_token_embeddings",
            "resize_token_embeddings_to_32x",
            "clone_chat_template",
            "added_tokens_overrides",
            "mean_resizing_embeddings",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "optimizers besides AdamW (8-bit AdamW, Muon, Adafactor, Lion)",
        instead: "AdamW, with ZeRO or `offload_optimizer` to save memory",
        words: &[
            "adamw_8bit",
            "adamw_bnb_8bit",
            "paged_adamw",
            "paged_adamw_8bit",
            "paged_adamw_32bit",
            "ao_adamw_8bit",
            "ao_adamw_4bit",
            "ao_adamw_fp8",
            "adamw_torch_8bit",
            "adamw_torch_4bit",
            "adam8bit",
            "adamw8bit",
            "muon",
            "use_muon",
            "adafactor",
            "lion",
            "lion_8bit",
            "lion_32bit",
            "sgd",
            "rmsprop",
            "adagrad",
            "sophia",
            "shampoo",
            "soap",
            "apollo",
            "apollo_adamw",
            "galore_adamw",
            "galore_adamw_8bit",
            "schedule_free_adamw",
            "schedule_free_radam",
            "optimi_adamw",
            "adopt_adamw",
            "came_pytorch",
            "lomo",
            "adalomo",
            "grokadamw",
            "lamb",
            "onebitadam",
            "adam_mini",
            "use_adam_mini",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "freezing by name",
        instead: "`model.peft_config`, which trains only an adapter",
        words: &[
            "unfrozen_parameters",
            "freeze",
            "freeze_trainable_layers",
            "freeze_trainable_modules",
            "freeze_extra_modules",
            "frozen_parameters",
            "unfreeze",
            "trainable_layers",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "NEFTune (noise on embeddings)",
        instead: "`lora_dropout`, or fewer epochs",
        words: &["neftune", "neftune_noise_alpha", "noisy_embedding_alpha"],
        paths: &[],
    },
    MissingFeature {
        name: "knowledge distillation and classification heads",
        instead: "`type: sft` on answers of the teacher, or on labels as text",
        words: &[
            "distillation",
            "distill",
            "kd",
            "kd_alpha",
            "kd_ce_alpha",
            "kd_trainer",
            "gkd",
            "minillm",
            "sequence_classification",
            "classification",
            "num_labels",
            "token_classification",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "images, audio and video",
        instead: "the text part of the data",
        words: &[
            "vision",
            "multimodal",
            "vlm",
            "image",
            "images",
            "image_size",
            "freeze_vision_tower",
            "image_max_pixels",
            "video",
            "audio",
            "is_multimodal",
        ],
        paths: &[],
    },
    MissingFeature {
        name: "GPUs of Apple, AMD and Intel (mps, ROCm, XPU)",
        instead: "`device: cpu`, or an NVIDIA GPU with `device: cuda`",
        words: &["mps", "metal", "rocm", "hip", "xpu", "npu", "hpu", "tpu", "xla", "use_ipex", "use_mps_device"],
        paths: &[],
    },
];

/// Returns advice about a key, a value or a word of a missing feature.
pub(crate) fn missing_feature_advice(word: &str) -> Option<String> {
    let path = search_word(word);
    let name = path.rsplit('.').next().unwrap_or(&path);
    let means = |feature: &&MissingFeature| feature.words.contains(&name) || feature.paths.contains(&path.as_str());
    let feature = MISSING_FEATURES.iter().find(means)?;
    Some(format!("{}: not supported; use {}", feature.name, feature.instead))
}

/// Returns a word as the tables of keys and features have it: `Flash-Attention` is `flash_attention`.
pub(super) fn search_word(word: &str) -> String {
    word.trim().to_lowercase().replace(['-', ' '], "_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_word_means_one_missing_feature() {
        let words: Vec<&str> = MISSING_FEATURES.iter().flat_map(|feature| feature.words).copied().collect();
        assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len());
        assert!(words.iter().all(|word| *word == search_word(word)));
    }

    #[test]
    fn a_missing_feature_is_found_by_its_words() {
        for (word, part) in [
            ("dpo", "TRL"),
            ("model.peft_config.use_dora", "DoRA: not supported; use LoRA"),
            ("adamw-8bit", "AdamW"),
            ("QLoRA", "quantize_base"),
            ("mps", "NVIDIA"),
        ] {
            assert!(missing_feature_advice(word).is_some_and(|advice| advice.contains(part)), "{word}");
        }
        assert_eq!(missing_feature_advice("epochs"), None);
    }

    #[test]
    fn a_common_name_means_a_missing_feature_only_in_its_section() {
        for (path, part) in [("beta", "TRL"), ("model.peft_config.bias", "use `bias: none`")] {
            assert!(missing_feature_advice(path).is_some_and(|advice| advice.contains(part)), "{path}");
        }
        for path in ["optimizer.beta", "bias", "model.bias"] {
            assert_eq!(missing_feature_advice(path), None);
        }
    }
}
