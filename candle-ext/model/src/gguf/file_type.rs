//! Types of the weights in a GGUF file.

use std::fmt;

use candle_core::quantized::GgmlDType;

use super::tensor::GgufTensor;
use crate::Config;

/// Types of the weights in a GGUF file. Norms, biases and routers are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// All f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// Q8_0: 8 bits, with a scale for 32 elements.
    Q8_0,
    /// llama.cpp's Q4_K_M: Q4_K, and Q6_K for the output layer and half of attn_v and ffn_down.
    Q4KM,
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl GgufType {
    /// All types.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4KM];

    /// Returns llama.cpp's name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4KM => "q4_k_m",
        }
    }

    /// Returns the value of `general.file_type`: llama.cpp's `LLAMA_FTYPE`.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Q4KM => 15,
            Self::Bf16 => 32,
        }
    }

    /// Returns the type of a tensor.
    pub(super) fn dtype_of(self, tensor: &GgufTensor, config: &Config) -> GgmlDType {
        let is_router =
            [".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight"].iter().any(|end| tensor.name.ends_with(end));
        let is_norm = tensor.name.ends_with("_norm.weight");
        if tensor.shape.len() < 2 || is_norm || is_router || !tensor.name.ends_with(".weight") {
            return GgmlDType::F32;
        }
        let wanted = match self {
            Self::F32 => GgmlDType::F32,
            Self::F16 => GgmlDType::F16,
            Self::Bf16 => GgmlDType::BF16,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q4KM => q4_k_m(tensor, config),
        };
        let n_columns = tensor.shape.last().copied().unwrap_or(1);
        [wanted, fallback(wanted)]
            .into_iter()
            .find(|dtype| n_columns.is_multiple_of(dtype.block_size()))
            .unwrap_or(GgmlDType::F16)
    }
}

/// Returns the type of a tensor in llama.cpp's mixture (`llama_tensor_get_type` in src/llama-quant.cpp).
fn q4_k_m(tensor: &GgufTensor, config: &Config) -> GgmlDType {
    let n_columns = tensor.shape.last().copied().unwrap_or(1);
    let has_8_experts = config.moe().is_some_and(|moe| moe.n_experts == 8);
    let is_70b = config.n_layers() == 80 && config.n_heads() != config.n_kv_heads();
    let has_more_bits = tensor.layer_idx.is_some_and(|layer_idx| has_more_bits(layer_idx, config.n_layers()));
    let name = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
    match name.rsplit('.').next().unwrap_or(name) {
        "output" => output_dtype(n_columns),
        "token_embd" if config.tied() => output_dtype(n_columns),
        "attn_v" | "attn_k" if has_8_experts => GgmlDType::Q8_0,
        "attn_output" if has_8_experts => GgmlDType::Q5K,
        "attn_v" if has_more_bits => GgmlDType::Q6K,
        "attn_v" if is_70b => GgmlDType::Q5K,
        "ffn_down" | "ffn_down_exps" | "ffn_down_shexp" if has_more_bits => GgmlDType::Q6K,
        _ => GgmlDType::Q4K,
    }
}

fn output_dtype(n_columns: usize) -> GgmlDType {
    if n_columns.is_multiple_of(GgmlDType::Q4K.block_size()) { GgmlDType::Q6K } else { GgmlDType::Q8_0 }
}

/// Returns true for the first and last eighth of the layers, and for every third layer between.
fn has_more_bits(layer_idx: usize, n_layers: usize) -> bool {
    let eighth = n_layers / 8;
    layer_idx < eighth || layer_idx >= 7 * n_layers / 8 || (layer_idx - eighth) % 3 == 2
}

/// Returns the type for rows that are no multiple of a K-quant's 256 elements.
fn fallback(dtype: GgmlDType) -> GgmlDType {
    match dtype {
        GgmlDType::Q4K => GgmlDType::Q5_0,
        GgmlDType::Q5K => GgmlDType::Q5_1,
        GgmlDType::Q6K => GgmlDType::Q8_0,
        other => other,
    }
}
