//! `route` on CUDA: launches of `router.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use super::spec::{GroupLimit, RouterSpec, ScoreFunction, Selection, TopKOrder};
use crate::cuda::{Arg, Blocks, DeviceAddress, Out, address, gpu};
use crate::moe::KERNELS;

const OP: &str = "route";
/// Tokens of a block, one per warp.
const WARPS: usize = 4;
/// Most experts: each lane of a warp marks 32 of them.
const MAX_EXPERTS: usize = 1024;
/// Most experts per token, one per lane.
const MAX_TOP_K: usize = 32;

impl ScoreFunction {
    /// Returns the constant of `scores.cuh`.
    pub(in crate::moe) fn arg(self) -> Arg {
        Arg::I32(match self {
            Self::Softmax => 0,
            Self::Sigmoid => 1,
            Self::SqrtSoftplus => 2,
        })
    }
}

/// Returns the suffix of a kernel for logits of this dtype.
pub(in crate::moe) fn logits_suffix(dtype: DType) -> &'static str {
    if dtype == DType::F64 { "f64" } else { "f32" }
}

/// Returns weights f32 [t, k] and experts u32 [t, k].
pub(super) fn route(logits: &Tensor, selection: Option<Selection<'_>>, spec: &RouterSpec) -> Result<(Tensor, Tensor)> {
    let (t, e) = logits.dims2()?;
    check(e, spec)?;
    let on = gpu(OP, logits)?;
    let given = match selection {
        Some(Selection::Bias(tensor) | Selection::Given(tensor)) => Some(tensor.contiguous()?),
        None => None,
    };
    let given_at: DeviceAddress = given.as_ref().map_or(Ok(0), |given| address(OP, given))?;
    let k = spec.top_k;
    let (experts, weights) = (Out::new(on, DType::U32, t * k)?, Out::new(on, DType::F32, t * k)?);
    let [n_groups, n_selected, n_scores] = spec.groups.map_or([0; 3], |limit| {
        let GroupLimit { n_groups, n_selected, n_scores_per_group } = limit;
        [n_groups, n_selected, n_scores_per_group]
    });
    let addresses = [address(OP, logits)?, given_at, experts.address, weights.address].map(Arg::Address);
    let is_given = matches!(selection, Some(Selection::Given(_)));
    let sizes = [Arg::I32(t as i32), Arg::I32(e as i32), Arg::I32(i32::from(is_given)), Arg::F64(spec.scaling)];
    let groups = [n_groups, n_selected, n_scores].map(|n| Arg::I32(n as i32));
    let args = [&addresses[..], &sizes, &settings(spec), &groups].concat();
    let blocks = Blocks {
        grid: [t.div_ceil(WARPS), 1, 1],
        threads: WARPS * 32,
        shared_bytes: WARPS * (e + n_groups) * logits.dtype().size_in_bytes(),
    };
    let name = format!("route_{}", logits_suffix(logits.dtype()));
    // SAFETY: logits are [t, e], the bias is [e] or the selection [t, e], the outputs are [t, k]; shared memory has a value
    // per expert and group of each warp.
    unsafe { KERNELS.launch_blocks(on, &name, blocks, &args)? };
    Ok((weights.into_tensor((t, k)), experts.into_tensor((t, k))))
}

/// Returns the gradient of the logits.
pub(super) fn backward(logits: &Tensor, experts: &Tensor, d_weights: &Tensor, spec: &RouterSpec) -> Result<Tensor> {
    let (t, e) = logits.dims2()?;
    let on = gpu(OP, logits)?;
    let d_logits = Out::new(on, logits.dtype(), t * e)?;
    let inputs = [address(OP, logits)?, address(OP, experts)?, address(OP, d_weights)?, d_logits.address];
    let sizes = [Arg::I32(t as i32), Arg::I32(e as i32), Arg::F64(spec.scaling)];
    let args = [&inputs.map(Arg::Address)[..], &sizes, &settings(spec)].concat();
    let name = format!("route_backward_{}", logits_suffix(logits.dtype()));
    // SAFETY: logits and their gradient are [t, e], experts and gradients of weights [t, k].
    unsafe { KERNELS.launch(on, &name, [t.div_ceil(WARPS), 1, 1], WARPS * 32, &args)? };
    Ok(d_logits.into_tensor((t, e)))
}

fn settings(spec: &RouterSpec) -> [Arg; 4] {
    let flag = |holds: bool| Arg::I32(i32::from(holds));
    let scores_first = flag(spec.order == TopKOrder::ScoreFirst);
    [Arg::I32(spec.top_k as i32), spec.score.arg(), scores_first, flag(spec.normalize)]
}

fn check(n_experts: usize, spec: &RouterSpec) -> Result<()> {
    if n_experts > MAX_EXPERTS || spec.top_k > MAX_TOP_K {
        bail!(
            "{OP}: on CUDA at most {MAX_EXPERTS} experts and {MAX_TOP_K} per token, not {n_experts} and {}",
            spec.top_k
        )
    }
    Ok(())
}
