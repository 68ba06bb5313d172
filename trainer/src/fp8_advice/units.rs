//! Linear layers that a run computes together, by size.

use std::collections::BTreeMap;

use candlewick_model::{Dim, LayerSpec, LinearFusion, LinearGroup, LinearSpec, Model};

/// Output and input features of a linear layer on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LinearSize {
    pub(super) n_out: usize,
    pub(super) n_in: usize,
    /// True if the layer multiplies in FP8.
    pub(super) fp8: bool,
}

/// Linear layers that are measured as one, because a run shares work among them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MeasuredUnit {
    /// An MLP of which all layers multiply in FP8. A GPU quantizes its activations where it computes them.
    Mlp {
        /// Width of input and output.
        hidden_size: usize,
        /// Output features of gate and up.
        intermediate_size: usize,
    },
    /// Layers that read one tensor: q, k and v, or gate and up. Those in FP8 quantize it once, and add up its gradient.
    SharedInput(SharedInputLinears),
    /// A layer that reads a tensor alone.
    Single(LinearSize),
}

/// Layers that read one tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SharedInputLinears {
    pub(super) layers: Vec<LinearSize>,
    /// True if one matmul computes them without FP8.
    pub(super) join: bool,
    /// True if a GPU quantizes the norm before them as forward computes it.
    pub(super) quantize_norm: bool,
}

/// Units of a model, with the names of the layers that multiply in FP8.
pub(super) type ModulesByUnit = BTreeMap<MeasuredUnit, Vec<String>>;

impl MeasuredUnit {
    /// Returns the sizes of the layers in forward order.
    pub(super) fn sizes(&self) -> Vec<LinearSize> {
        match self {
            Self::Mlp { hidden_size: d, intermediate_size: f } => {
                [[*f, *d], [*f, *d], [*d, *f]].map(|[n_out, n_in]| LinearSize { n_out, n_in, fp8: true }).to_vec()
            }
            Self::SharedInput(linears) => linears.layers.clone(),
            Self::Single(layer) => vec![*layer],
        }
    }
}

/// Returns the units with layers that multiply in FP8, on one of `n_slices` tensor parallel ranks.
pub(super) fn units(model: &Model, n_slices: usize) -> ModulesByUnit {
    let mut all = ModulesByUnit::new();
    for (unit, layers) in model.layers().flat_map(|layer| units_of_layer(layer, n_slices)) {
        let names = layers.into_iter().filter(|linear| linear.fp8).map(|linear| linear.module.clone());
        let names: Vec<String> = names.collect();
        if !names.is_empty() {
            all.entry(unit).or_default().extend(names);
        }
    }
    all
}

fn units_of_layer(layer: &LayerSpec, n_slices: usize) -> Vec<(MeasuredUnit, Vec<&LinearSpec>)> {
    let groups = layer.mixer.linear_groups().into_iter().chain(layer.mlp.linear_groups());
    let units = groups.flat_map(|LinearGroup { linears, fusion }| unit_of_group(linears, fusion, n_slices));
    units.collect()
}

/// Returns the unit of a group; a unit for each layer if they share no work.
fn unit_of_group(
    linears: Vec<&LinearSpec>,
    fusion: LinearFusion,
    n_slices: usize,
) -> Vec<(MeasuredUnit, Vec<&LinearSpec>)> {
    let size = |linear: &LinearSpec| size_on_rank(linear, n_slices);
    let layers: Vec<LinearSize> = linears.iter().map(|linear| size(linear)).collect();
    let unit = match fusion {
        LinearFusion::None => {
            return linears.into_iter().map(|linear| (MeasuredUnit::Single(size(linear)), vec![linear])).collect();
        }
        LinearFusion::GatedMlp => {
            let LinearSize { n_out, n_in, .. } = layers[0];
            MeasuredUnit::Mlp { hidden_size: n_in, intermediate_size: n_out }
        }
        LinearFusion::SharedInput { joined: join, quantizes_norm: quantize_norm } => {
            MeasuredUnit::SharedInput(SharedInputLinears { layers, join, quantize_norm })
        }
    };
    vec![(unit, linears)]
}

/// Returns output and input features on a tensor parallel rank. A layer whose input is not the residual stream is row-parallel.
fn size_on_rank(spec: &LinearSpec, n_slices: usize) -> LinearSize {
    let [n_out, n_in] = match spec.input.dim {
        Dim::Embed => [spec.out.len / n_slices, spec.input.len],
        _ => [spec.out.len, spec.input.len / n_slices],
    };
    LinearSize { n_out, n_in, fp8: spec.fp8 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_model::{Config, LoraConfig};
    use serde_json::{Value, json};

    use super::*;

    /// Returns the units of a model of one layer that multiplies in FP8 apart from `excluded` modules, and the names.
    fn units_of(settings: Value, adapted: Option<&str>, excluded: &[&str]) -> Vec<(MeasuredUnit, Vec<String>)> {
        let mut config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 16,
            "rms_norm_eps": 1e-6,
        });
        config.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        let adapter = adapted.map(|module| {
            LoraConfig::from_json(&json!({"r": 2, "lora_alpha": 4, "target_modules": [module]})).unwrap()
        });
        let model = Model::new(Config::from_json(config).unwrap(), adapter).unwrap();
        let names = model.layers().flat_map(LayerSpec::linears).map(|linear| linear.module.clone());
        let names: Vec<String> = names.filter(|name| !excluded.iter().any(|text| name.contains(text))).collect();
        let of_layer = |name: String| name.trim_start_matches("model.layers.0.").to_owned();
        units(&model.with_fp8(&names), 1)
            .into_iter()
            .map(|(unit, names)| (unit, names.into_iter().map(of_layer).collect()))
            .collect()
    }

    fn size(n_out: usize, n_in: usize) -> LinearSize {
        LinearSize { n_out, n_in, fp8: true }
    }

    fn dense(n_out: usize, n_in: usize) -> LinearSize {
        LinearSize { fp8: false, ..size(n_out, n_in) }
    }

    fn linears(layers: &[LinearSize], join: bool, quantize_norm: bool) -> MeasuredUnit {
        MeasuredUnit::SharedInput(SharedInputLinears { layers: layers.to_vec(), join, quantize_norm })
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    const MLP: [&str; 3] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];

    fn of_mlp() -> (MeasuredUnit, Vec<String>) {
        (MeasuredUnit::Mlp { hidden_size: 32, intermediate_size: 48 }, names(&MLP))
    }

    fn of_o() -> (MeasuredUnit, Vec<String>) {
        (MeasuredUnit::Single(size(32, 64)), names(&["self_attn.o_proj"]))
    }

    /// Queries, keys and values are one matmul without FP8, unless they have biases or adapters.
    #[test]
    fn layers_that_read_one_tensor_are_one_unit() {
        let sizes = [size(64, 32), size(32, 32), size(32, 32)];
        let of =
            |name: &str, family: &str| json!({"architectures": [format!("{name}ForCausalLM")], "model_type": family});
        let llama = of("Llama", "llama");
        for (settings, adapted, join) in [
            (of("Qwen3", "qwen3"), None, true),
            (of("Qwen2", "qwen2"), None, false),
            (llama.clone(), None, true),
            (llama, Some("k_proj"), false),
        ] {
            let qkv = (linears(&sizes, join, adapted.is_none()), names(&QKV));
            assert_eq!(units_of(settings.clone(), adapted, &[]), [of_mlp(), qkv, of_o()], "{settings} {adapted:?}");
        }
    }

    /// A layer that is not in FP8 is computed with the others, and a unit without FP8 is not measured.
    #[test]
    fn excluded_layers_stay_in_their_unit_without_fp8() {
        let qkv = linears(&[size(64, 32), dense(32, 32), size(32, 32)], true, true);
        let of_qv = (qkv, names(&["self_attn.q_proj", "self_attn.v_proj"]));
        assert_eq!(units_of(json!({}), None, &["k_proj"]), [of_mlp(), of_qv, of_o()]);
        assert_eq!(units_of(json!({}), None, &["self_attn"]), [of_mlp()]);
        assert_eq!(units_of(json!({}), None, &["mlp", "q_proj", "k_proj", "v_proj"]), [of_o()]);
    }

    /// Gate and up of an MLP that is not fused quantize their input once.
    #[test]
    fn gate_and_up_are_one_unit_if_the_mlp_is_not_fused() {
        let gate_up = |join| (linears(&[size(48, 32); 2], join, false), names(&MLP[..2]));
        let down = (MeasuredUnit::Single(size(32, 48)), names(&MLP[2..]));
        assert_eq!(units_of(json!({}), None, &["self_attn", "down_proj"]), [gate_up(true)]);
        assert_eq!(units_of(json!({}), Some("down_proj"), &["self_attn"]), [gate_up(true), down.clone()]);
        assert_eq!(units_of(json!({}), Some("up_proj"), &["self_attn"]), [gate_up(false), down]);
    }
}
