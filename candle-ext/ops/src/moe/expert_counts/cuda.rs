//! `expert_counts` on CUDA: launches of `expert_counts.cuh`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Out, address, gpu};
use crate::moe::KERNELS;

const OP: &str = "expert_counts";
const THREADS: usize = 256;

/// Returns the counts, f32 [s, e].
pub(super) fn counts(experts: &Tensor, sequences: Option<&Tensor>, [s, e]: [usize; 2]) -> Result<Tensor> {
    let (on, n) = (gpu(OP, experts)?, experts.elem_count());
    let counts = Out::new(on, DType::F32, s * e)?;
    let sequences = sequences.map_or(Ok(0), |sequences| address(OP, sequences))?;
    let addresses = [address(OP, experts)?, sequences, counts.address].map(Arg::Address);
    let sizes = [n, experts.dims()[1], e].map(|size| Arg::I32(size as i32));
    let (zero, args) = ([addresses[2], Arg::I32((s * e) as i32)], [&addresses[..], &sizes].concat());
    // SAFETY: there are n = t * k experts, t sequences below s, and s * e counts.
    unsafe {
        KERNELS.launch(on, "zero_counts", [(s * e).div_ceil(THREADS), 1, 1], THREADS, &zero)?;
        KERNELS.launch(on, "count_by_sequence", [n.div_ceil(THREADS), 1, 1], THREADS, &args)?;
    }
    Ok(counts.into_tensor((s, e)))
}
