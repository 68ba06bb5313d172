//! Qwen2-VL: the text part is a Qwen2. The positions of texts are equal in all three axes of its rotation.

use super::multimodal::{Multimodal, QWEN_LAYOUTS};
use super::{FamilySpec, Window, WindowLayers, qwen2};

pub(super) const SPEC: FamilySpec = FamilySpec {
    title: "Qwen2-VL",
    examples: "Qwen2-VL 2B to 72B, trained on text",
    model_type: "qwen2_vl",
    architecture: "Qwen2VLForConditionalGeneration",
    hidden_size: 8192,
    intermediate_size: 29568,
    vocab_size: 152_064,
    n_layers: 80,
    n_heads: 64,
    n_kv_heads: Some(8),
    rms_norm_eps: 1e-5,
    rope_theta: 1e6,
    bos_id: Some(151_643),
    eos_id: Some(151_645),
    window: Window::Some { window: 4096, needs_flag: true, layers: WindowLayers::From(80) },
    upcycles_to: None,
    multimodal: Some(&Multimodal { text_type: "qwen2_vl_text", layouts: QWEN_LAYOUTS }),
    ..qwen2::SPEC
};
