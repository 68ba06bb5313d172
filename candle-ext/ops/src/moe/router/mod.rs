//! Router of a mixture-of-experts layer: chooses k experts per token and their weights.
//!
//! t tokens, e experts, k experts per token

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod given;
pub(super) mod scores;
mod spec;

use candle_core::{DType, Result, Tensor, bail};

use super::assignment::ExpertAssignment;
use crate::cost::{Cost, F32_BYTES};
use crate::device::on_device;
use crate::recording::record;
use crate::replay::compute_or_replay;
use crate::span::span;
use crate::storage::host;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(in crate::moe) use cuda::logits_suffix;
use spec::Selection;
pub use spec::{GroupLimit, RouterSpec, ScoreFunction, TopKOrder};

const OP: &str = "route";

/// Experts of each token and their weights.
#[derive(Clone, Debug)]
pub struct Routing {
    /// Weight of each slot, f32 [t, k], in the order of `assignment.experts`.
    pub weights: Tensor,
    /// Chosen experts, the highest selection score first.
    pub assignment: ExpertAssignment,
}

/// Chooses experts for each row of logits, f32 or f64 [t, e].
///
/// The bias, f32 [e], is added to the scores for the choice only; it gets no gradient. Of equal scores, the expert with
/// the lower index is chosen first. The weights are differentiable; scores are computed in f64 on the CPU.
///
/// The formulas are those of Megatron-LM's `topk_routing_with_score_function`. Backward saves logits and experts.
///
/// The second forward of a replayed block takes experts and weights of the first.
pub fn route(logits: &Tensor, bias: Option<&Tensor>, spec: RouterSpec) -> Result<Routing> {
    let n_experts = check_logits(OP, logits)?;
    check_selection("bias", bias, &[n_experts])?;
    routed(logits, bias.map(Selection::Bias), spec)
}

/// Chooses the experts with the highest `selection`, f32 [t, e], such as [`sinkhorn`](crate::sinkhorn)'s.
///
/// Weights come from the logits, as in [`route`]. The selection gets no gradient.
pub fn route_by(logits: &Tensor, selection: &Tensor, spec: RouterSpec) -> Result<Routing> {
    check_logits(OP, logits)?;
    check_selection("selection", Some(selection), logits.dims())?;
    routed(logits, Some(Selection::Given(selection)), spec)
}

/// Weighs the experts that the caller gives, u32 [t, k], in their order, such as those that another run selected.
///
/// Weights come from the logits, as in [`route`]. Groups do not limit the experts.
///
/// # Errors
///
/// On the CPU, if an expert of a token is not below e, or occurs twice.
pub fn route_to(logits: &Tensor, experts: &Tensor, spec: RouterSpec) -> Result<Routing> {
    let n_experts = check_logits(OP, logits)?;
    let spec = RouterSpec { groups: None, ..spec };
    spec.check(n_experts)?;
    let selection = given::selection(experts, [logits.dims()[0], n_experts], spec.top_k)?;
    routed(logits, Some(Selection::Given(&selection)), spec)
}

fn routed(logits: &Tensor, selection: Option<Selection<'_>>, spec: RouterSpec) -> Result<Routing> {
    let _span = span(OP, "forward");
    let n_experts = logits.dims()[1];
    spec.check(n_experts)?;
    let source = logits.contiguous()?;
    let (weights, assignment) = compute_or_replay(OP, || {
        let (weights, experts) = choose(&source, selection, &spec)?;
        Ok((weights, ExpertAssignment::new(&experts, n_experts)?))
    })?;
    let (assignment, experts) = (assignment.as_ref().clone(), assignment.experts.clone());
    let weights = record(OP, [logits.into()], weights, move |d_weights, _| {
        Ok([Some(grad_logits(&source, &experts, d_weights, &spec)?)])
    });
    Ok(Routing { weights, assignment })
}

/// Returns the cost of `route` for `n_tokens` tokens: f32 logits are saved.
pub fn route_cost(n_tokens: u64, n_experts: u64) -> Cost {
    Cost { saved_bytes: n_tokens * n_experts * F32_BYTES, ..Cost::default() }
}

/// Returns weights f32 [t, k] and experts u32 [t, k].
fn choose(logits: &Tensor, selection: Option<Selection<'_>>, spec: &RouterSpec) -> Result<(Tensor, Tensor)> {
    on_device!(OP, logits, {
        cpu => {
            let tensor = match selection {
                Some(Selection::Bias(tensor) | Selection::Given(tensor)) => Some(tensor.contiguous()?),
                None => None,
            };
            let values = tensor.as_ref().map(|tensor| host(OP, tensor)).transpose()?;
            let values = values.as_ref().map(|values| values.slice::<f32>()).transpose()?;
            let selection = match (selection, values) {
                (Some(Selection::Given(_)), Some(values)) => cpu::SelectionScores::Given(values),
                (_, bias) => cpu::SelectionScores::OfLogits { bias },
            };
            let (t, e) = logits.dims2()?;
            let host = host(OP, logits)?;
            let routed = match logits.dtype() {
                DType::F64 => cpu::route::<f64>(host.slice()?, selection, e, spec),
                _ => cpu::route::<f32>(host.slice()?, selection, e, spec),
            };
            let shape = (t, spec.top_k);
            let weights = Tensor::from_vec(routed.weights, shape, logits.device())?;
            Ok((weights, Tensor::from_vec(routed.experts, shape, logits.device())?))
        },
        cuda => cuda::route(logits, selection, spec),
    })
}

fn grad_logits(logits: &Tensor, experts: &Tensor, d_weights: &Tensor, spec: &RouterSpec) -> Result<Tensor> {
    on_device!(OP, logits, {
        cpu => {
            let e = logits.dims()[1];
            let (source, experts, d_weights) = (host(OP, logits)?, host(OP, experts)?, host(OP, d_weights)?);
            let (experts, d_weights) = (experts.slice()?, d_weights.slice()?);
            match logits.dtype() {
                DType::F64 => {
                    let grad = cpu::backward::<f64>(source.slice()?, experts, d_weights, e, spec);
                    Tensor::from_vec(grad, logits.shape(), logits.device())
                }
                _ => {
                    let grad = cpu::backward::<f32>(source.slice()?, experts, d_weights, e, spec);
                    Tensor::from_vec(grad, logits.shape(), logits.device())
                }
            }
        },
        cuda => cuda::backward(logits, experts, d_weights, spec),
    })
}

/// Fails unless the logits are f32 or f64 [t, e] with an expert. Returns e.
pub(super) fn check_logits(op: &str, logits: &Tensor) -> Result<usize> {
    match (logits.dtype(), logits.dims()) {
        (DType::F32 | DType::F64, &[_, e]) if e > 0 => Ok(e),
        (dtype, dims) => bail!("{op}: want f32 or f64 logits [t, e], got {dtype:?} {dims:?}"),
    }
}

fn check_selection(what: &str, tensor: Option<&Tensor>, shape: &[usize]) -> Result<()> {
    match tensor {
        Some(tensor) if tensor.dtype() != DType::F32 || tensor.dims() != shape => {
            bail!("{OP}: want an f32 {what} {shape:?}, got {:?} {:?}", tensor.dtype(), tensor.dims())
        }
        _ => Ok(()),
    }
}
