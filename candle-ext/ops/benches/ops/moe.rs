//! Benchmark cases of a mixture-of-experts layer and of the dense MLP with equal active FLOPs.
//!
//! t tokens, d model, e experts, k experts per token, f inner width of an expert

use candle_core::{Device, Result, Tensor};
use candlewick_ops::{
    GroupedCall, GroupedGemmImpl, OutputDtype, RouterSpec, ScoreFunction, TokensPerCall, TopKOrder, Weight,
    grouped_linear, linear, permute, permute_weights, route, swiglu_joined, unpermute, weighted_swiglu,
};

use crate::cases::{BF16, BenchCase, BenchCost, Graph, both, randn, trainable};

/// Sizes of a layer.
#[derive(Clone, Copy)]
pub(crate) struct MoeLayer {
    pub(crate) t: usize,
    pub(crate) d: usize,
    pub(crate) f: usize,
    pub(crate) e: usize,
    pub(crate) k: usize,
}

/// A layer of Qwen3-30B-A3B.
pub(crate) const QWEN3_30B_A3B: MoeLayer = MoeLayer { t: 16_384, d: 2048, f: 768, e: 128, k: 8 };
pub(crate) const TINY: MoeLayer = MoeLayer { t: 96, d: 64, f: 32, e: 8, k: 2 };

/// Weights of a layer: router [e, d], gate and up projections [e * 2f, d], down projections [e * d, f].
struct Experts {
    router: Weight,
    gate_up: Weight,
    down: Weight,
    top_k: usize,
    implementation: GroupedGemmImpl,
}

impl Experts {
    fn new(MoeLayer { d, f, e, k, .. }: MoeLayer, implementation: GroupedGemmImpl, device: &Device) -> Result<Self> {
        Ok(Self {
            router: trainable(&[e, d], device)?,
            gate_up: trainable(&[e * 2 * f, d], device)?,
            down: trainable(&[e * d, f], device)?,
            top_k: k,
            implementation,
        })
    }

    /// Computes the router and the experts: [t, d] -> [t, d].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let spec = RouterSpec {
            top_k: self.top_k,
            score: ScoreFunction::Softmax,
            order: TopKOrder::ScoreFirst,
            normalize: true,
            groups: None,
            scaling: 1.0,
        };
        let routing = route(&linear(x, &self.router, None, OutputDtype::F32)?, None, spec)?;
        let assignment = &routing.assignment;
        let weights = permute_weights(&routing.weights, assignment)?;
        let call = GroupedCall { tokens: TokensPerCall::Many, implementation: self.implementation };
        let product = |x: &Tensor, w: &Weight| grouped_linear(x, w, &assignment.offsets, call);
        let gated = weighted_swiglu(&product(&permute(x, assignment)?, &self.gate_up)?, &weights)?;
        unpermute(&product(&gated, &self.down)?, assignment)
    }
}

/// Returns forward and backward of the layer, under this name, and of its dense twin.
pub(crate) fn layers(name: &'static str, layer: MoeLayer, experts: GroupedGemmImpl) -> Vec<BenchCase> {
    let MoeLayer { t, d, f, e, k } = layer;
    let shape = vec![("t", t), ("d", d), ("f", f), ("e", e), ("k", k)];
    let moe = both(name, shape, costs(layer), move |device| {
        let experts = Experts::new(layer, experts, device)?;
        Ok(Graph::new([randn((t, d), device)?], move |x| experts.forward(&x[0])))
    });
    let twin = MoeLayer { f: f * k, e: 1, k: 1, ..layer };
    let dense = both("dense mlp", vec![("t", t), ("d", d), ("f", twin.f)], costs(twin), move |device| {
        let [gate_up, down] = [trainable(&[2 * twin.f, d], device)?, trainable(&[d, twin.f], device)?];
        Ok(Graph::new([randn((t, d), device)?], move |x| {
            let gated = swiglu_joined(&linear(&x[0], &gate_up, None, OutputDtype::SameAsInput)?)?;
            linear(&gated, &down, None, OutputDtype::SameAsInput)
        }))
    });
    moe.into_iter().chain(dense).collect()
}

/// Returns the costs of forward and backward: three matmuls per row and expert, and twice as many backward.
fn costs(MoeLayer { t, d, f, e, k }: MoeLayer) -> [BenchCost; 2] {
    let flops = 2.0 * (t * k) as f64 * (3 * d * f) as f64;
    let weights = BF16 * (e * 3 * d * f) as f64;
    let rows = BF16 * (2 * t * d) as f64;
    [BenchCost { bytes: weights + rows, flops }, BenchCost { bytes: 5.0 * weights + 2.0 * rows, flops: 2.0 * flops }]
}
