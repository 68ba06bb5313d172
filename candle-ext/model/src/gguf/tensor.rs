//! Tensors of a GGUF file, each from a parameter.

use candle_core::{Result, Tensor};

use super::architecture::Architecture;
use crate::{Config, HubTensors, ModelError, ParamSpec, rope};

/// A tensor of a GGUF file.
#[derive(Debug)]
pub(super) struct GgufTensor<'a> {
    /// Name, such as `blk.0.attn_q.weight`.
    pub(super) name: String,
    /// Layer; `None` for embedding, final norm and output layer.
    pub(super) layer_idx: Option<usize>,
    /// Shape with the slowest dim first, as in torch. The file lists it in reverse.
    pub(super) shape: Vec<usize>,
    pub(super) source: Source<'a>,
}

/// Source of a tensor's values.
#[derive(Debug)]
pub(super) enum Source<'a> {
    /// A parameter, or some of its rows.
    Param { param: &'a ParamSpec, arrangement: Arrangement },
    /// Values that follow from the config.
    Values(Vec<f32>),
}

/// Arrangement of a parameter's rows in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    /// All rows in order.
    Same,
    /// Rows of each head reordered from halves to adjacent pairs: rows i and i + d/2 become 2i and 2i + 1.
    AdjacentPairs { n_heads: usize },
    /// Rows `part * n / n_parts` to `(part + 1) * n / n_parts` of each expert's n rows.
    Experts { n_experts: usize, part: usize, n_parts: usize },
}

impl Arrangement {
    /// Returns the tensor of `shape` that a parameter's value makes.
    pub(super) fn of(self, value: &Tensor, shape: &[usize]) -> Result<Tensor> {
        match self {
            Self::Same => value.reshape(shape),
            Self::AdjacentPairs { n_heads } => {
                let n_half = value.dim(0)? / n_heads / 2;
                value.reshape((n_heads, 2, n_half, ()))?.transpose(1, 2)?.contiguous()?.reshape(shape)
            }
            Self::Experts { n_experts, part, n_parts } => {
                let (n_rows, n_columns) = value.dims2()?;
                let rows = n_rows / n_experts / n_parts;
                let by_expert = value.reshape((n_experts, n_rows / n_experts, n_columns))?;
                by_expert.narrow(1, part * rows, rows)?.contiguous()
            }
        }
    }
}

/// Names of modules of a layer in Hugging Face checkpoints and in GGUF.
const MODULES: [(&str, &str); 18] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    // Two tensors: ffn_gate_exps and ffn_up_exps.
    (GATE_UP, "ffn_up_exps"),
];

const GATE_UP: &str = "mlp.experts.gate_up_proj";

/// Returns the tensors of a file in the order of the parameters.
pub(super) fn tensors<'a>(
    architecture: Architecture,
    config: &Config,
    params: impl Iterator<Item = &'a ParamSpec>,
) -> std::result::Result<Vec<GgufTensor<'a>>, ModelError> {
    let factors = rope::frequency_factors(config).map(|factors| GgufTensor {
        name: "rope_freqs.weight".to_owned(),
        layer_idx: None,
        shape: vec![factors.len()],
        source: Source::Values(factors),
    });
    let mut tensors = Vec::from_iter(factors);
    for param in params {
        let found = of_param(architecture, config, param);
        let unknown = || ModelError::Unsupported(format!("the parameter {} has no name in GGUF", param.name));
        tensors.extend(found.ok_or_else(unknown)?);
    }
    Ok(tensors)
}

fn of_param<'a>(architecture: Architecture, config: &Config, param: &'a ParamSpec) -> Option<Vec<GgufTensor<'a>>> {
    let tensor = |name: String, layer_idx, shape: Vec<usize>, arrangement| GgufTensor {
        name,
        layer_idx,
        shape,
        source: Source::Param { param, arrangement },
    };
    let whole = |name: &str| vec![tensor(name.to_owned(), None, param.shape.clone(), Arrangement::Same)];
    let Some(rest) = param.name.strip_prefix("model.layers.") else {
        return match param.name.as_str() {
            "model.embed_tokens.weight" => Some(whole("token_embd.weight")),
            "model.norm.weight" => Some(whole("output_norm.weight")),
            "lm_head.weight" => Some(whole("output.weight")),
            _ => None,
        };
    };
    let (layer_idx, rest) = rest.split_once('.')?;
    let layer = layer_idx.parse().ok()?;
    let of_layer =
        |name: &str, shape, arrangement| tensor(format!("blk.{layer}.{name}"), Some(layer), shape, arrangement);
    if let Some(HubTensors { fused_shape, .. }) = param.hub.as_deref().filter(|hub| hub.fused_shape.len() == 3) {
        let n_experts = fused_shape[0];
        let experts = |name: &str, part, n_parts| {
            let shape = vec![n_experts, fused_shape[1] / n_parts, fused_shape[2]];
            of_layer(name, shape, Arrangement::Experts { n_experts, part, n_parts })
        };
        return match rest {
            GATE_UP => Some(vec![experts("ffn_gate_exps.weight", 0, 2), experts("ffn_up_exps.weight", 1, 2)]),
            _ => Some(vec![experts(&format!("{}.weight", gguf_module(rest)?), 0, 1)]),
        };
    }
    let (module, kind) = rest.rsplit_once('.')?;
    let arrangement = match module {
        "self_attn.q_proj" if architecture.rotates_adjacent() => {
            Arrangement::AdjacentPairs { n_heads: config.n_heads() }
        }
        "self_attn.k_proj" if architecture.rotates_adjacent() => {
            Arrangement::AdjacentPairs { n_heads: config.n_kv_heads() }
        }
        _ => Arrangement::Same,
    };
    Some(vec![of_layer(&format!("{}.{kind}", gguf_module(module)?), param.shape.clone(), arrangement)])
}

fn gguf_module(module: &str) -> Option<&'static str> {
    MODULES.iter().find(|(own, _)| *own == module).map(|(_, gguf)| *gguf)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn halves_of_a_head_become_adjacent_pairs() {
        let rows = Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((8, 1)).unwrap();
        let pairs = Arrangement::AdjacentPairs { n_heads: 2 };
        let arranged = pairs.of(&rows, &[8, 1]).unwrap();
        assert_eq!(arranged.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [0., 2., 1., 3., 4., 6., 5., 7.]);
    }

    #[test]
    fn gate_and_up_of_experts_are_separate_tensors() {
        let rows = Tensor::arange(0f32, 8.0, &Device::Cpu).unwrap().reshape((8, 1)).unwrap();
        let up = Arrangement::Experts { n_experts: 2, part: 1, n_parts: 2 }.of(&rows, &[2, 2, 1]).unwrap();
        assert_eq!(up.flatten_all().unwrap().to_vec1::<f32>().unwrap(), [2., 3., 6., 7.]);
    }
}
