//! Formats of an export.

use std::fmt;

use candle_core::DType;
use candlewick_model::GgufType;
use clap::ValueEnum;

/// A format of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// Hugging Face folder: safetensors, config, tokenizer, chat template
    Safetensors,
    /// GGUF, all weights f32
    #[value(name = "gguf-f32")]
    GgufF32,
    /// GGUF, matrices f16
    #[value(name = "gguf-f16")]
    GgufF16,
    /// GGUF, matrices bf16
    #[value(name = "gguf-bf16")]
    GgufBf16,
    /// GGUF, matrices in 8 bits
    #[value(name = "gguf-q8_0")]
    GgufQ8_0,
    /// GGUF, matrices in 4 to 6 bits: llama.cpp's Q4_K_M
    #[value(name = "gguf-q4_k_m")]
    GgufQ4KM,
}

impl fmt::Display for ExportFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.gguf() {
            None => f.write_str("safetensors"),
            Some(file_type) => write!(f, "gguf-{file_type}"),
        }
    }
}

impl ExportFormat {
    /// Returns the types of a GGUF file; `None` for safetensors.
    pub fn gguf(self) -> Option<GgufType> {
        match self {
            Self::Safetensors => None,
            Self::GgufF32 => Some(GgufType::F32),
            Self::GgufF16 => Some(GgufType::F16),
            Self::GgufBf16 => Some(GgufType::Bf16),
            Self::GgufQ8_0 => Some(GgufType::Q8_0),
            Self::GgufQ4KM => Some(GgufType::Q4KM),
        }
    }

    /// Returns an upper bound of the bits of a weight. `safetensors` is the dtype of that format.
    pub(super) fn bits_per_weight(self, safetensors: DType) -> f64 {
        match self.gguf() {
            None => 8.0 * safetensors.size_in_bytes() as f64,
            Some(GgufType::F32) => 32.0,
            Some(GgufType::F16 | GgufType::Bf16) => 16.0,
            // A model whose rows are no multiple of 32 falls back to f16.
            Some(GgufType::Q8_0) => 8.5,
            Some(GgufType::Q4KM) => 6.6,
        }
    }

    /// Returns the largest relative norm of the difference of logits that rounding explains. `safetensors` is the dtype of
    /// that format.
    ///
    /// The bounds are several times what SmolLM2-135M shows ([table](../../../docs/use-your-model.md)). Weights in a wrong order
    /// give 1 or more.
    pub(super) fn tolerance(self, safetensors: Option<DType>) -> f64 {
        match (self.gguf(), safetensors) {
            (None, Some(DType::F16)) | (Some(GgufType::F16), _) => 0.01,
            (None, Some(DType::BF16)) | (Some(GgufType::Bf16), _) => 0.05,
            (None, _) | (Some(GgufType::F32), _) => 1e-3,
            (Some(GgufType::Q8_0), _) => 0.2,
            (Some(GgufType::Q4KM), _) => 0.6,
        }
    }
}
