//! Qwen2.5-VL: the text part is that of Qwen2-VL.

use super::multimodal::{Multimodal, QWEN_LAYOUTS};
use super::{FamilySpec, qwen2_vl};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen2.5-VL",
    examples: "Qwen2.5-VL 3B to 72B, trained on text",
    model_type: "qwen2_5_vl",
    architecture: "Qwen2_5_VLForConditionalGeneration",
    multimodal: Some(&Multimodal { text_type: "qwen2_5_vl_text", layouts: QWEN_LAYOUTS }),
    ..qwen2_vl::SPEC
};
