//! `route` on CUDA: launches of `router.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use super::spec::{GroupLimit, MAX_CUDA_TOP_K, RouterSpec, ScoreFunction, Selection, TopKOrder};
use super::statistics::{Chosen, Columns, CountedExperts, RouterStatistics, RouterStatisticsSpec};
use crate::cuda::{Arg, Blocks, DeviceAddress, Gpu, Out, address, gpu};
use crate::moe::KERNELS;

const OP: &str = "route";
/// Tokens of a block, one per warp.
const WARPS: usize = 4;
/// Most experts: each lane of a warp marks 32 of them.
const MAX_EXPERTS: usize = 1024;
/// Most experts with statistics, whose sums are in shared memory.
const MAX_COUNTED_EXPERTS: usize = 512;
/// Most blocks with statistics.
const MAX_BLOCKS: usize = 512;

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

/// Launches the router, and for statistics the sum over its blocks.
pub(super) fn route(
    logits: &Tensor,
    selection: Option<Selection<'_>>,
    spec: &RouterSpec,
    counted: Option<RouterStatisticsSpec<'_>>,
) -> Result<Chosen> {
    let (t, e) = logits.dims2()?;
    check(e, spec)?;
    let (on, k) = (gpu(OP, logits)?, spec.top_k);
    let given = match selection {
        Some(Selection::Bias(tensor) | Selection::Given(tensor)) => Some(tensor.contiguous()?),
        None => None,
    };
    let given_at: DeviceAddress = given.as_ref().map_or(Ok(0), |given| address(OP, given))?;
    let (experts, weights) = (Out::new(on, DType::U32, t * k)?, Out::new(on, DType::F32, t * k)?);
    let statistics = counted.map(|counted| StatisticsOut::new(on, counted, [t, e, k])).transpose()?;
    let of_statistics = statistics.as_ref().map_or(Ok([0; 3]), StatisticsOut::addresses)?;
    let [n_groups, n_selected, n_scores] = spec.groups.map_or([0; 3], |limit| {
        let GroupLimit { n_groups, n_selected, n_scores_per_group } = limit;
        [n_groups, n_selected, n_scores_per_group]
    });
    let outputs = [address(OP, logits)?, given_at, experts.address, weights.address].map(Arg::Address);
    let is_given = matches!(selection, Some(Selection::Given(_)));
    let sizes = [Arg::I32(t as i32), Arg::I32(e as i32), Arg::I32(i32::from(is_given)), Arg::F64(spec.scaling)];
    let groups = [n_groups, n_selected, n_scores].map(|n| Arg::I32(n as i32));
    let args = [&outputs[..], &of_statistics.map(Arg::Address), &sizes, &settings(spec), &groups].concat();
    let of_sums = if statistics.is_some() { WARPS * e * size_of::<f64>() + 2 * e * size_of::<u32>() } else { 0 };
    let blocks = Blocks {
        grid: [statistics.as_ref().map_or(t.div_ceil(WARPS), |out| out.n_blocks), 1, 1],
        threads: WARPS * 32,
        shared_bytes: WARPS * (e + n_groups) * logits.dtype().size_in_bytes() + of_sums,
    };
    let name = format!("route_{}", logits_suffix(logits.dtype()));
    // SAFETY: logits are [t, e], the bias is [e] or the selection [t, e], the outputs are [t, k], the token mask is [t], and there are
    // sums for each block. Shared memory has a value per expert and group of each warp, and with statistics their sums.
    unsafe { KERNELS.launch_blocks(on, &name, blocks, &args)? };
    let experts = experts.into_tensor((t, k));
    let statistics = statistics.map(|out| out.sum(spec.score, &experts)).transpose()?;
    Ok(Chosen { weights: weights.into_tensor((t, k)), experts, statistics })
}

/// Buffers of statistics.
struct StatisticsOut<'a> {
    on: Gpu<'a>,
    columns: Columns,
    n_blocks: usize,
    token_mask: Option<Tensor>,
    /// Best experts [t, k], if they are a second choice.
    best: Option<Out>,
    /// Sums of each block.
    partial: Out,
}

impl<'a> StatisticsOut<'a> {
    fn new(on: Gpu<'a>, counted: RouterStatisticsSpec<'_>, [t, e, k]: [usize; 3]) -> Result<Self> {
        if e > MAX_COUNTED_EXPERTS {
            bail!("{OP}: on CUDA statistics are of at most {MAX_COUNTED_EXPERTS} experts, not {e}")
        }
        let columns = Columns::new(e, counted.experts);
        let n_blocks = t.div_ceil(WARPS).clamp(1, MAX_BLOCKS);
        let has_best = counted.experts == CountedExperts::TopScores;
        Ok(Self {
            on,
            columns,
            n_blocks,
            token_mask: counted.token_mask.map(Tensor::contiguous).transpose()?,
            best: has_best.then(|| Out::new(on, DType::U32, t * k)).transpose()?,
            partial: Out::new(on, DType::F64, n_blocks * columns.len())?,
        })
    }

    /// Returns the addresses of the token mask, best experts and sums of blocks.
    fn addresses(&self) -> Result<[DeviceAddress; 3]> {
        let token_mask = self.token_mask.as_ref().map_or(Ok(0), |token_mask| address(OP, token_mask))?;
        Ok([token_mask, self.best.as_ref().map_or(0, |best| best.address), self.partial.address])
    }

    /// Sums the statistics of the blocks. `experts` are the chosen ones, u32 [t, k].
    fn sum(self, score: ScoreFunction, experts: &Tensor) -> Result<RouterStatistics> {
        let n = self.columns.len();
        let (sums, rounded) = (Out::new(self.on, DType::F64, n)?, Out::new(self.on, DType::F32, n)?);
        let addresses = [self.partial.address, sums.address, rounded.address].map(Arg::Address);
        let args = [&addresses[..], &[Arg::I32(self.n_blocks as i32), Arg::I32(n as i32)]].concat();
        // SAFETY: there are n sums of each block, and n outputs.
        unsafe {
            KERNELS.launch(self.on, "sum_router_statistics", [n.div_ceil(WARPS), 1, 1], WARPS * 32, &args)?;
        }
        let best = self.best.map_or_else(|| experts.clone(), |best| best.into_tensor(experts.shape()));
        Ok(RouterStatistics::new(score, self.columns, [sums.into_tensor(n), rounded.into_tensor(n)], best))
    }
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
    if n_experts > MAX_EXPERTS || spec.top_k > MAX_CUDA_TOP_K {
        bail!(
            "{OP}: on CUDA at most {MAX_EXPERTS} experts and {MAX_CUDA_TOP_K} per token, not {n_experts} and {}",
            spec.top_k
        )
    }
    Ok(())
}
