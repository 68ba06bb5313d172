//! Tensors of an upcycled checkpoint, each from tensors of the dense one.
//!
//! Slice s of the dense MLP has rows s f/g to (s + 1) f/g of gate and up, and these columns of down (f intermediate size,
//! g granularity). Expert i holds slice i mod g, as in megatron-core's `upcycling_utils`. The g experts of a group have one
//! router row, so that a token selects all slices of a copy.

use candle_core::{DType, Device, Tensor};

use super::config::UpcycledExperts;
use crate::checkpoint::Checkpoint;
use crate::{Config, LayerSpec, LinearSpec, Model, ModelError, MoeSpec, ParamSpec, SwiGluSpec};

/// A tensor of the upcycled checkpoint.
pub(super) struct UpcycledTensor {
    /// Name and shape.
    pub(super) param: ParamSpec,
    /// Source of the values.
    pub(super) source: TensorSource,
}

/// Source of a tensor's values.
pub(super) enum TensorSource {
    /// A tensor of the dense model.
    Dense(ParamSpec),
    /// A slice of a matrix of the dense model, times a factor.
    Slice(MatrixSlice),
    /// Random rows, each repeated for the experts of a group.
    Router(ParamSpec),
    /// Zeros.
    Zeros,
}

/// A slice of a matrix of the dense model.
pub(super) struct MatrixSlice {
    /// The whole matrix.
    matrix: ParamSpec,
    /// Sliced dimension: 0 for rows, 1 for columns.
    dim: usize,
    /// Index of the slice.
    slice_idx: usize,
    /// Factor on the values.
    factor: f64,
}

/// Factors on the matrices of an expert.
///
/// The selected experts have weights whose sum is 1, and each slice gets a g-th of it. The output of the routed experts is
/// therefore that of the dense MLP if the outputs of the slices are scaled by g. A gated shared expert is a copy of the
/// dense MLP. Its gate is 1/2 at the start, so the routed experts give the other half.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExpertFactors {
    pub(super) up: f64,
    pub(super) down: f64,
}

impl ExpertFactors {
    /// Returns the factors of up and down projections. Their output is scaled exactly.
    ///
    /// Megatron-LM scales gate, up and down by the cube root. SwiGLU is linear in up and down alone, so here the gate keeps
    /// its values. The factor of down is a power of two, which rounds nothing.
    pub(super) fn of(moe: &MoeSpec, granularity: usize) -> Self {
        let has_gate = moe.shared_expert.as_ref().is_some_and(|shared| shared.gate.is_some());
        let scale = granularity as f64 * if has_gate { 0.5 } else { 1.0 };
        let down = scale.sqrt().log2().round().exp2();
        Self { up: scale / down, down }
    }
}

/// Returns the tensors of the upcycled checkpoint in the order of its parameters.
pub(super) fn tensors(dense: &Model, moe: &Model, experts: &UpcycledExperts) -> Vec<UpcycledTensor> {
    let mut tensors = Vec::new();
    for unit in moe.units() {
        let pair = |layer: &LayerSpec| LayerPair::new([dense.config(), moe.config()], layer.layer_idx, experts);
        match unit.layer().and_then(pair) {
            Some(pair) => unit.params.iter().for_each(|param| tensors.extend(pair.tensors(param))),
            None => tensors.extend(unit.params.iter().map(copy)),
        }
    }
    tensors
}

fn copy(param: &ParamSpec) -> UpcycledTensor {
    UpcycledTensor { param: param.clone(), source: TensorSource::Dense(param.clone()) }
}

/// MLPs of a layer before and after.
struct LayerPair {
    dense: SwiGluSpec,
    moe: MoeSpec,
    factors: ExpertFactors,
    granularity: usize,
}

impl LayerPair {
    /// Returns the MLPs of a layer by both configs; `None` if the layer has no experts.
    fn new([dense, config]: [&Config; 2], layer_idx: usize, experts: &UpcycledExperts) -> Option<Self> {
        let like = layer_idx.min(config.n_layers().saturating_sub(1));
        let moe = config.moe_spec(config.moe_of_layer(like)?, layer_idx);
        let (dense, granularity) = (dense.dense_mlp(layer_idx), experts.granularity);
        Some(Self { dense, factors: ExpertFactors::of(&moe, granularity), moe, granularity })
    }

    /// Returns the tensors on disk of a parameter of the upcycled layer.
    fn tensors(&self, param: &ParamSpec) -> Vec<UpcycledTensor> {
        let shared = self.moe.shared_expert.as_ref();
        let of = |source| vec![UpcycledTensor { param: param.clone(), source }];
        let name = param.name.as_str();
        if name == self.moe.router_weight.weight_name() {
            return of(TensorSource::Router(param.clone()));
        }
        if name == self.moe.gate_up.name {
            return self.slices(param, &self.dense.gate_up.each_ref(), &[1.0, self.factors.up]);
        }
        if name == self.moe.down.name {
            return self.slices(param, &[&self.dense.down], &[self.factors.down]);
        }
        if Some(name) == self.moe.bias_name().as_deref() {
            return of(TensorSource::Zeros);
        }
        if shared.and_then(|shared| shared.gate.as_ref()).is_some_and(|gate| gate.weight_name() == name) {
            return of(TensorSource::Zeros);
        }
        match shared.and_then(|shared| self.dense_linear_of(&shared.mlp, name)) {
            Some(linear) => of(TensorSource::Dense(weight(linear))),
            None => of(TensorSource::Dense(param.clone())),
        }
    }

    /// Returns the dense model's linear layer at the position of the shared expert's.
    fn dense_linear_of(&self, shared: &SwiGluSpec, name: &str) -> Option<&LinearSpec> {
        let position = shared.gate_up.iter().chain([&shared.down]).position(|linear| linear.weight_name() == name)?;
        self.dense.gate_up.iter().chain([&self.dense.down]).nth(position)
    }

    /// Returns one tensor for each expert and each of the dense `linears`.
    fn slices(&self, param: &ParamSpec, linears: &[&LinearSpec], factors: &[f64]) -> Vec<UpcycledTensor> {
        // Gate and up projections are sliced by rows, down projections by columns.
        let dim = if linears.len() > 1 { 0 } else { 1 };
        let of_tensor = |(tensor_idx, on_disk): (usize, ParamSpec)| {
            let (expert_idx, linear_idx) = (tensor_idx / linears.len(), tensor_idx % linears.len());
            let slice = MatrixSlice {
                matrix: weight(linears[linear_idx]),
                dim,
                slice_idx: expert_idx % self.granularity,
                factor: factors[linear_idx],
            };
            UpcycledTensor { param: on_disk, source: TensorSource::Slice(slice) }
        };
        param.hub_params().into_iter().enumerate().map(of_tensor).collect()
    }
}

/// Returns the weight of a dense linear layer.
fn weight(linear: &LinearSpec) -> ParamSpec {
    linear.params(0.0).swap_remove(0)
}

impl UpcycledTensor {
    /// Returns the values in f32.
    pub(super) fn value(&self, dense: &Checkpoint, seed: u64, granularity: usize) -> Result<Tensor, ModelError> {
        let read = |param: &ParamSpec| dense.param(param, DType::F32, &Device::Cpu);
        match &self.source {
            TensorSource::Dense(param) => read(param),
            TensorSource::Zeros => Ok(Tensor::zeros(self.param.shape.as_slice(), DType::F32, &Device::Cpu)?),
            TensorSource::Router(router) => repeated_rows(router, seed, granularity),
            TensorSource::Slice(MatrixSlice { matrix, dim, slice_idx, factor }) => {
                let n = self.param.shape[*dim];
                let slice = read(matrix)?.narrow(*dim, slice_idx * n, n)?.contiguous()?;
                Ok(if *factor == 1.0 { slice } else { slice.affine(*factor, 0.0)? })
            }
        }
    }
}

/// Returns the first e/g rows of the router's initial values, each repeated g times.
fn repeated_rows(router: &ParamSpec, seed: u64, granularity: usize) -> Result<Tensor, ModelError> {
    let mut values = vec![0.0; router.numel()];
    router.initialise(seed, &mut values);
    let width: usize = router.shape[1..].iter().product();
    let rows = values.chunks(width).take(router.shape[0] / granularity);
    let repeated: Vec<f32> = rows.flat_map(|row| row.repeat(granularity)).collect();
    Ok(Tensor::from_vec(repeated, router.shape.as_slice(), &Device::Cpu)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Config;

    #[test]
    fn factors_multiply_to_the_scale_and_down_is_a_power_of_two() {
        for (family, fraction) in [("qwen3_moe", 1.0), ("qwen2_moe", 0.5)] {
            let config = Config::from_json(serde_json::json!({"model_type": family})).unwrap();
            let moe = config.moe_spec(config.moe().unwrap(), 0);
            for granularity in [1, 2, 3, 4, 6, 8] {
                let ExpertFactors { up, down } = ExpertFactors::of(&moe, granularity);
                assert_eq!(up * down, granularity as f64 * fraction);
                assert_eq!(down.log2().fract(), 0.0);
                assert!((0.5..=2.0).contains(&(up / down)), "{up} and {down} are balanced");
            }
        }
    }
}
