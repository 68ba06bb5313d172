//! Expert bias of a router, which balances the load of experts without a loss.

use candle_core::{DType, Result, Tensor, bail};

/// Returns the change of an expert bias after a step: rate * sign(mean(counts) - counts), f32 [e].
///
/// `counts`, f32 [e], are the tokens that the router assigned to each expert in the step. The bias of an expert with fewer
/// tokens than the mean grows. The formula is that of DeepSeek-V3 (Wang et al., 2024, <https://arxiv.org/abs/2408.15664>)
/// and of Megatron-LM's `get_updated_expert_bias`. The mean is computed in f64.
pub fn expert_bias_change(counts: &Tensor, rate: f64) -> Result<Tensor> {
    if counts.dtype() != DType::F32 || counts.rank() != 1 || counts.elem_count() == 0 {
        bail!("expert_bias_change: want f32 counts [e], got {:?} {:?}", counts.dtype(), counts.dims())
    }
    let counts = counts.to_dtype(DType::F64)?;
    let mean = counts.mean_all()?;
    counts.broadcast_sub(&mean)?.sign()?.affine(-rate, 0.0)?.to_dtype(DType::F32)
}
