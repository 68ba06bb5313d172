//! Qwen3-VL: the text part is a Qwen3. The positions of texts are equal in all three axes of its rotation.

use super::multimodal::{Multimodal, QWEN_LAYOUTS};
use super::{FamilySpec, Window, qwen3};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen3-VL",
    examples: "Qwen3-VL 2B to 32B, trained on text",
    model_type: "qwen3_vl",
    architecture: "Qwen3VLForConditionalGeneration",
    max_positions: 128_000,
    rope_theta: 5e5,
    window: Window::None,
    upcycles_to: None,
    multimodal: Some(&Multimodal { text_type: "qwen3_vl_text", layouts: QWEN_LAYOUTS }),
    ..qwen3::SPEC
};
