//! Multimodal models: a text part that is computed, and tensors that are carried to exports unchanged, such as a vision tower.

/// Prefix of the text part's modules in transformers 5.
const TEXT_MODULE: &str = "model.language_model.";

const MODEL: &str = "model.";
const LM_HEAD: &str = "lm_head.";

/// Definition of the checkpoints of a multimodal family.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Multimodal {
    /// `model_type` of the object `text_config` in config.json.
    pub(crate) text_type: &'static str,
    /// Layouts of names. The first one in which a checkpoint has a final norm applies.
    pub(crate) layouts: &'static [NameLayout],
}

/// Layout of the tensor names in a multimodal checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NameLayout {
    /// Prefix of the text part, without `lm_head`.
    model: &'static str,
    /// Prefix of the output layer.
    lm_head: &'static str,
    /// Prefixes of the carried tensors.
    carried: &'static [&'static str],
}

/// Layouts of Qwen's models: on the Hub and of transformers 5, and of transformers 4.52 and later.
pub(super) const QWEN_LAYOUTS: &[NameLayout] = &[
    NameLayout { model: MODEL, lm_head: LM_HEAD, carried: &["visual."] },
    NameLayout { model: TEXT_MODULE, lm_head: LM_HEAD, carried: &["model.visual."] },
];

/// Layouts of LLaVA's descendants: on the Hub and of transformers 5, and of transformers 4.52 and later.
pub(super) const LLAVA_LAYOUTS: &[NameLayout] = &[
    NameLayout {
        model: "language_model.model.",
        lm_head: "language_model.lm_head.",
        carried: &["vision_tower.", "multi_modal_projector."],
    },
    NameLayout {
        model: TEXT_MODULE,
        lm_head: LM_HEAD,
        carried: &["model.vision_tower.", "model.multi_modal_projector."],
    },
];

impl NameLayout {
    /// Returns the name of a text model's tensor that a checkpoint stores as `stored`; `None` for another tensor.
    pub(crate) fn own_name(&self, stored: &str) -> Option<String> {
        let of = |prefix: &str, own: &str| Some(format!("{own}{}", stored.strip_prefix(prefix)?));
        of(self.model, MODEL).or_else(|| of(self.lm_head, LM_HEAD))
    }

    /// Returns the name under which a checkpoint stores a text model's tensor.
    pub(crate) fn stored_name(&self, own: &str) -> String {
        let of = |prefix: &str, stored: &str| Some(format!("{stored}{}", own.strip_prefix(prefix)?));
        of(MODEL, self.model).or_else(|| of(LM_HEAD, self.lm_head)).unwrap_or_else(|| own.to_owned())
    }

    /// Returns true if a tensor is carried.
    pub(crate) fn carries(&self, stored: &str) -> bool {
        self.carried.iter().any(|prefix| stored.starts_with(prefix))
    }
}

/// Returns the name of a text model's module or parameter, of which a multimodal model of transformers has `name`.
pub(crate) fn name_in_text_model(name: &str) -> String {
    // transformers before 4.52 named the text part of LLaVA's descendants like a model.
    let of_part = |prefix: &str| Some(format!("{MODEL}{}", name.strip_prefix(prefix)?));
    let of_llava = || name.strip_prefix("language_model.").map(str::to_owned);
    of_part(TEXT_MODULE).or_else(of_llava).unwrap_or_else(|| name.to_owned())
}

/// Returns the name that a multimodal model of transformers 5 has for a module or parameter of its text part. Such a name stays.
pub(crate) fn name_in_multimodal_model(own: &str) -> String {
    match own.strip_prefix(MODEL) {
        Some(rest) if !own.starts_with(TEXT_MODULE) => format!("{TEXT_MODULE}{rest}"),
        _ => own.to_owned(),
    }
}
