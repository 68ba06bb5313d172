//! Model families: one decoder, and a table of differences for each family.
//!
//! To add a family, add a file and its name in `families!`. rustfmt does not find modules declared by a macro;
//! `scripts/check` formats them by name.

use std::fmt;

pub(crate) mod multimodal;
mod unsupported;

use multimodal::Multimodal;
use unsupported::{MISSING_FAMILIES, unsupported, unsupported_text};

use crate::ModelError;

/// Declares the families: one file each, which defines its `SPEC`.
macro_rules! families {
    ($($family:ident),* $(,)?) => {
        $(mod $family;)*

        impl Family {
            /// The supported families.
            pub const ALL: &[Self] = &[$(Self(&$family::SPEC)),*];
        }
    };
}

families![
    llama, mistral, mistral3, qwen2, qwen2_vl, qwen2_5_vl, qwen3, qwen3_vl, mixtral, qwen2_moe, qwen3_moe, olmoe,
    dots1, glm4_moe,
];

/// A supported model family.
#[derive(Clone, Copy)]
pub struct Family(&'static FamilySpec);

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Definition of a family: names, defaults of config.json keys, and flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FamilySpec {
    /// Name in documents.
    pub(crate) title: &'static str,
    /// Names of some models.
    pub(crate) examples: &'static str,
    pub(crate) model_type: &'static str,
    pub(crate) architecture: &'static str,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) vocab_size: usize,
    pub(crate) n_layers: usize,
    pub(crate) n_heads: usize,
    /// `None` for as many as query heads.
    pub(crate) n_kv_heads: Option<usize>,
    /// `None` for hidden_size / n_heads.
    pub(crate) head_dim: Option<usize>,
    pub(crate) max_positions: usize,
    pub(crate) rms_norm_eps: f64,
    pub(crate) rope_theta: f64,
    /// Default of `partial_rotary_factor`; `None` if all elements of a head are rotated.
    pub(crate) partial_rotary: Option<f64>,
    pub(crate) bos_id: Option<u32>,
    pub(crate) eos_id: Option<u32>,
    pub(crate) qkv_bias: Bias,
    pub(crate) o_bias: Bias,
    pub(crate) mlp_bias: Bias,
    pub(crate) qk_norm: QkNorm,
    /// Key of config.json that switches the QK norm on; `None` if it is always there.
    pub(crate) qk_norm_key: Option<&'static str>,
    pub(crate) window: Window,
    /// True if hidden_size must be a multiple of the heads even if head_dim is set.
    pub(crate) divisible_hidden: bool,
    /// Mixture of experts; `None` for a dense family.
    pub(crate) moe: Option<&'static MoeFamily>,
    /// Model type of the family of experts with this attention, to which a dense checkpoint can be upcycled.
    pub(crate) upcycles_to: Option<&'static str>,
    /// Names in checkpoints of a multimodal family, whose text part the other fields define; `None` for a text model.
    pub(crate) multimodal: Option<&'static Multimodal>,
}

/// RMS norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// None.
    None,
    /// A norm of each head, with one weight for all heads (Qwen3).
    PerHead,
    /// A norm of all heads of a token together (OLMoE).
    AllHeads,
}

/// Definition of a family's mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MoeFamily {
    /// Key and default of the number of experts.
    pub(crate) n_experts: (&'static str, usize),
    /// Key and default of the intermediate size of an expert.
    pub(crate) expert_size: (&'static str, usize),
    /// Default of `num_experts_per_tok`.
    pub(crate) top_k: usize,
    /// True for sigmoid scores, false for softmax.
    pub(crate) sigmoid: bool,
    pub(crate) normalization: TopKNormalization,
    /// True if the family reads `n_group`, `topk_group` and `routed_scaling_factor`.
    pub(crate) has_groups: bool,
    /// True if the router has `e_score_correction_bias`.
    pub(crate) expert_bias: bool,
    pub(crate) shared_expert: SharedExpertFamily,
    pub(crate) layers: MoeLayers,
    /// Default of `router_aux_loss_coef`.
    pub(crate) aux_loss_coefficient: f64,
    /// Names in Hub checkpoints.
    pub(crate) names: HubExpertNames,
}

/// Normalization of the scores of the selected experts to a sum of 1.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TopKNormalization {
    Always,
    /// As `norm_topk_prob` says, with this default.
    Key(bool),
}

/// Shared expert of a family.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SharedExpertFamily {
    None,
    /// One expert of `shared_expert_intermediate_size` with a sigmoid gate.
    Gated {
        default: usize,
    },
    /// `n_shared_experts` experts, computed as one.
    Plain {
        default: usize,
    },
}

/// Layers whose MLP is a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MoeLayers {
    All,
    /// Every `decoder_sparse_step`-th layer, except for `mlp_only_layers`.
    SparseStep,
    /// The layers from `first_k_dense_replace` on.
    FirstDense {
        default: usize,
    },
}

/// Names of an MoE layer's tensors in Hub checkpoints.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HubExpertNames {
    /// Module of the MoE layer: `mlp`, or `block_sparse_moe` in Mixtral.
    pub(crate) module: &'static str,
    /// Modules of an expert: gate, up and down projection.
    pub(crate) linears: [&'static str; 3],
    /// Module of the shared expert.
    pub(crate) shared_expert: &'static str,
}

/// Biases of linear layers.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bias {
    Always,
    Never,
    /// As set by this key of config.json; false if absent.
    Key(&'static str),
    /// As set by this key of config.json; true if absent.
    KeyOrTrue(&'static str),
}

/// Layers with sliding window attention.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Window {
    None,
    /// All layers, unless `sliding_window` is null. The number is the key's default.
    Every(usize),
    /// All layers if `sliding_window` is set.
    IfSet,
    /// Layers listed in `layer_types`, or those of a rule.
    Some {
        /// Default of `sliding_window`.
        window: usize,
        /// True if the window needs `use_sliding_window`.
        needs_flag: bool,
        layers: WindowLayers,
    },
}

/// Layers with a sliding window if config.json has no `layer_types`. The number is the default of `max_window_layers`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WindowLayers {
    All,
    /// The layers from `max_window_layers` on.
    From(usize),
    /// Layers of even index below `max_window_layers`.
    EvenBelow(usize),
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type() == other.model_type()
    }
}

impl Eq for Family {}

impl Family {
    pub(crate) fn spec(self) -> &'static FamilySpec {
        self.0
    }

    /// Returns the display name, such as "Qwen2".
    pub fn name(self) -> &'static str {
        let architecture = self.architecture();
        architecture.split("For").next().unwrap_or(architecture)
    }

    /// Returns the name in documents, such as "Qwen2-MoE".
    pub fn title(self) -> &'static str {
        self.0.title
    }

    /// Returns the names of some models of the family.
    pub fn examples(self) -> &'static str {
        self.0.examples
    }

    /// Returns true if the family's checkpoints have tensors that are carried, such as a vision tower.
    pub fn is_multimodal(self) -> bool {
        self.0.multimodal.is_some()
    }

    /// Returns true if the family's layers have routed experts.
    pub fn has_experts(self) -> bool {
        self.0.moe.is_some()
    }

    /// Returns the names of families in demand that are missing.
    pub fn missing() -> impl Iterator<Item = &'static str> {
        MISSING_FAMILIES.iter().map(|family| family.name)
    }

    /// Returns config.json's `model_type`, such as "qwen2".
    pub fn model_type(self) -> &'static str {
        self.0.model_type
    }

    /// Returns config.json's `architectures` entry, such as "Qwen2ForCausalLM".
    pub fn architecture(self) -> &'static str {
        self.0.architecture
    }

    /// Finds the family by `architectures` and `model_type` of config.json, which must agree.
    pub(crate) fn find(architectures: &[&str], model_type: Option<&str>) -> Result<Family, ModelError> {
        let by_architecture = Self::ALL.iter().copied().find(|f| architectures.contains(&f.architecture()));
        let by_type = Self::ALL.iter().copied().find(|f| model_type == Some(f.model_type()));
        match (by_architecture, by_type) {
            (Some(family), Some(same)) if family == same => Ok(family),
            (Some(family), None) if model_type.is_none() => Ok(family),
            (None, Some(family)) if architectures.is_empty() => Ok(family),
            _ => {
                let supported: Vec<_> = Self::ALL.iter().map(|f| (f.architecture(), f.model_type())).collect();
                Err(unsupported(architectures, model_type, &supported))
            }
        }
    }

    /// Verifies the `model_type` of a multimodal model's `text_config`.
    ///
    /// # Errors
    /// If the text part is a model of another family.
    pub(crate) fn check_text_type(self, found: Option<&str>) -> Result<(), ModelError> {
        match (found, self.0.multimodal) {
            (Some(found), Some(multimodal)) if found != multimodal.text_type => {
                Err(unsupported_text(self.architecture(), found, multimodal.text_type))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_found_by_either_name() {
        let found = |architectures: &[&str], model_type| Family::find(architectures, model_type).unwrap().model_type();
        assert_eq!(found(&["Qwen2ForCausalLM"], None), "qwen2");
        assert_eq!(found(&[], Some("mistral")), "mistral");
        assert_eq!(found(&["LlamaForCausalLM"], Some("llama")), "llama");
    }

    #[test]
    fn no_multimodal_family_is_upcycled() {
        for family in Family::ALL.iter().filter(|family| family.is_multimodal()) {
            assert_eq!(family.spec().upcycles_to, None, "{family:?}");
        }
    }

    #[test]
    fn a_config_without_names_is_refused() {
        assert!(Family::find(&[], None).unwrap_err().to_string().contains("names neither"));
    }

    #[test]
    fn a_classifier_and_a_contradiction_are_refused() {
        assert!(Family::find(&["LlamaForSequenceClassification"], Some("llama")).is_err());
        assert!(Family::find(&["LlamaForCausalLM"], Some("qwen2")).is_err());
        assert!(Family::find(&["LlamaForCausalLM"], Some("granite")).is_err());
    }
}
