//! Mistral 3, with vision: the text part is a Mistral.

use super::multimodal::{LLAVA_LAYOUTS, Multimodal};
use super::{FamilySpec, mistral};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Mistral 3",
    examples: "Mistral Small 3.1 and 3.2, trained on text",
    model_type: "mistral3",
    architecture: "Mistral3ForConditionalGeneration",
    upcycles_to: None,
    multimodal: Some(&Multimodal { text_type: "mistral", layouts: LLAVA_LAYOUTS }),
    ..mistral::SPEC
};
