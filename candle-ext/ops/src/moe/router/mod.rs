//! Router of a mixture-of-experts layer: chooses k experts per token and their weights.
//!
//! t tokens, e experts, k experts per token

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod given;
pub(super) mod scores;
mod spec;
mod statistics;

use candle_core::{DType, Result, Tensor, bail};

use super::assignment::ExpertAssignment;
use crate::cost::{Cost, F32_BYTES};
use crate::device::on_device;
use crate::recording::record;
use crate::replay::compute_or_replay;
use crate::saved::ReplayedOutput;
use crate::span::span;
use crate::storage::host;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(in crate::moe) use cuda::logits_suffix;
use spec::Selection;
pub use spec::{ExpertChoice, GroupLimit, MAX_CUDA_TOP_K, RouterSpec, ScoreFunction, TopKOrder};
use statistics::{Chosen, Columns, check_token_mask};
pub use statistics::{CountedExperts, RouterStatistics, RouterStatisticsSpec};

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
    Ok(routed(logits, ExpertChoice::ByScore { bias }, spec, None)?.0)
}

/// Chooses the experts with the highest `selection`, f32 [t, e], such as [`sinkhorn`](crate::sinkhorn)'s.
///
/// Weights come from the logits, as in [`route`]. The selection gets no gradient.
pub fn route_by(logits: &Tensor, selection: &Tensor, spec: RouterSpec) -> Result<Routing> {
    Ok(routed(logits, ExpertChoice::BySelection(selection), spec, None)?.0)
}

/// Weighs the experts that the caller gives, u32 [t, k], in their order, such as those that another run selected.
///
/// Weights come from the logits, as in [`route`]. Groups do not limit the experts.
///
/// # Errors
///
/// On the CPU, if an expert of a token is not below e, or occurs twice.
pub fn route_to(logits: &Tensor, experts: &Tensor, spec: RouterSpec) -> Result<Routing> {
    Ok(routed(logits, ExpertChoice::Given(experts), spec, None)?.0)
}

/// Routes as [`route`], [`route_by`] or [`route_to`].
pub fn route_by_choice(logits: &Tensor, choice: ExpertChoice<'_>, spec: RouterSpec) -> Result<Routing> {
    Ok(routed(logits, choice, spec, None)?.0)
}

/// Routes as [`route_by_choice`], and returns statistics of the tokens that count from the same pass.
pub fn route_with_statistics(
    logits: &Tensor,
    choice: ExpertChoice<'_>,
    spec: RouterSpec,
    counted: RouterStatisticsSpec<'_>,
) -> Result<(Routing, RouterStatistics)> {
    let (routing, statistics) = routed(logits, choice, spec, Some(counted))?;
    match statistics {
        Some(statistics) => Ok((routing, statistics)),
        None => bail!("{OP}: the first forward of this block computed no statistics"),
    }
}

fn routed(
    logits: &Tensor,
    choice: ExpertChoice<'_>,
    spec: RouterSpec,
    counted: Option<RouterStatisticsSpec<'_>>,
) -> Result<(Routing, Option<RouterStatistics>)> {
    let _span = span(OP, "forward");
    let e = check_logits(OP, logits)?;
    let t = logits.dims()[0];
    check_token_mask(OP, counted, t)?;
    let spec = if let ExpertChoice::Given(_) = choice { RouterSpec { groups: None, ..spec } } else { spec };
    spec.check(e)?;
    let source = logits.contiguous()?;
    let (weights, state) = compute_or_replay(OP, ReplayedOutput::Routing, || {
        let given = match choice {
            ExpertChoice::Given(experts) => Some(given::selection(experts, [t, e], spec.top_k)?),
            _ => None,
        };
        let selection = selection(choice, given.as_ref(), [t, e])?;
        let Chosen { weights, experts, statistics } = choose(&source, selection, &spec, counted)?;
        Ok((weights, (ExpertAssignment::new(&experts, e)?, statistics)))
    })?;
    let (assignment, statistics) = state.as_ref().clone();
    let experts = assignment.experts.clone();
    let weights = record(OP, [logits.into()], weights, move |d_weights, _| {
        Ok([Some(grad_logits(&source, &experts, d_weights, &spec)?)])
    });
    Ok((Routing { weights, assignment }, statistics))
}

/// Returns the tensor that the choice depends on besides the logits. `given` has the scores of given experts.
fn selection<'a>(
    choice: ExpertChoice<'a>,
    given: Option<&'a Tensor>,
    [t, e]: [usize; 2],
) -> Result<Option<Selection<'a>>> {
    match choice {
        ExpertChoice::ByScore { bias } => {
            check_selection("bias", bias, &[e])?;
            Ok(bias.map(Selection::Bias))
        }
        ExpertChoice::BySelection(selection) => {
            check_selection("selection", Some(selection), &[t, e])?;
            Ok(Some(Selection::Given(selection)))
        }
        ExpertChoice::Given(_) => Ok(given.map(Selection::Given)),
    }
}

/// Returns the cost of `route` for `n_tokens` tokens: f32 logits are saved.
pub fn route_cost(n_tokens: u64, n_experts: u64) -> Cost {
    Cost { saved_bytes: n_tokens * n_experts * F32_BYTES, ..Cost::default() }
}

fn choose(
    logits: &Tensor,
    selection: Option<Selection<'_>>,
    spec: &RouterSpec,
    counted: Option<RouterStatisticsSpec<'_>>,
) -> Result<Chosen> {
    on_device!(OP, logits, {
        cpu => choose_on_cpu(logits, selection, spec, counted),
        cuda => cuda::route(logits, selection, spec, counted),
    })
}

fn choose_on_cpu(
    logits: &Tensor,
    selection: Option<Selection<'_>>,
    spec: &RouterSpec,
    counted: Option<RouterStatisticsSpec<'_>>,
) -> Result<Chosen> {
    let contiguous = |tensor: Option<&Tensor>| tensor.map(Tensor::contiguous).transpose();
    let tensor = contiguous(match selection {
        Some(Selection::Bias(tensor) | Selection::Given(tensor)) => Some(tensor),
        None => None,
    })?;
    let values = tensor.as_ref().map(|tensor| host(OP, tensor)).transpose()?;
    let values = values.as_ref().map(|values| values.slice::<f32>()).transpose()?;
    let selection = match (selection, values) {
        (Some(Selection::Given(_)), Some(values)) => cpu::SelectionScores::Given(values),
        (_, bias) => cpu::SelectionScores::OfLogits { bias },
    };
    let token_mask = contiguous(counted.and_then(|counted| counted.token_mask))?;
    let token_mask = token_mask.as_ref().map(|token_mask| host(OP, token_mask)).transpose()?;
    let token_mask = token_mask.as_ref().map(|token_mask| token_mask.slice::<u32>()).transpose()?;
    let e = logits.dims()[1];
    let counted = counted.map(|RouterStatisticsSpec { experts: best, .. }| cpu::CountedTokens {
        token_mask,
        best,
        columns: Columns::new(e, best),
    });
    let host = host(OP, logits)?;
    let routed = match logits.dtype() {
        DType::F64 => cpu::route::<f64>(host.slice()?, selection, e, spec, counted),
        _ => cpu::route::<f32>(host.slice()?, selection, e, spec, counted),
    };
    chosen(routed, logits, spec, counted)
}

fn chosen(
    routed: cpu::Routed,
    logits: &Tensor,
    spec: &RouterSpec,
    counted: Option<cpu::CountedTokens<'_>>,
) -> Result<Chosen> {
    let (shape, device) = ((logits.dims()[0], spec.top_k), logits.device());
    let experts = Tensor::from_vec(routed.experts, shape, device)?;
    let statistics = match counted {
        None => None,
        Some(cpu::CountedTokens { best, columns, .. }) => {
            let counted_experts = match best {
                CountedExperts::Chosen => experts.clone(),
                CountedExperts::TopScores => Tensor::from_vec(routed.best, shape, device)?,
            };
            let rounded = Tensor::from_iter(routed.sums.iter().map(|sum| *sum as f32), device)?;
            let sums = Tensor::from_vec(routed.sums, columns.len(), device)?;
            Some(RouterStatistics::new(spec.score, columns, [sums, rounded], counted_experts))
        }
    };
    Ok(Chosen { weights: Tensor::from_vec(routed.weights, shape, device)?, experts, statistics })
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
