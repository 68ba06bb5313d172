//! Selection scores of experts that the caller gives.
//!
//! t tokens, e experts, k experts per token

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::storage::host;
use crate::transfer::upload;

const OP: &str = "route";

/// Returns selection scores, f32 [t, e], whose highest k select `experts`, u32 [t, k], in their order.
pub(super) fn selection(experts: &Tensor, [t, e]: [usize; 2], top_k: usize) -> Result<Tensor> {
    if experts.dtype() != DType::U32 || experts.dims() != [t, top_k] {
        bail!("{OP}: want u32 experts [{t}, {top_k}], got {:?} {:?}", experts.dtype(), experts.dims())
    }
    let experts = experts.contiguous()?;
    on_device!(OP, experts, {
        cpu => check(host(OP, &experts)?.slice()?, e, top_k)?,
        // The values are on the device, and reading them would wait for it.
        cuda => (),
    });
    let scores = Tensor::zeros((t, e), DType::F32, experts.device())?;
    if t == 0 {
        return Ok(scores);
    }
    let ranks: Vec<f32> = (1..=top_k).rev().map(|rank| rank as f32).collect();
    let ranks = upload(&ranks, (1, top_k), experts.device())?.broadcast_as((t, top_k))?.contiguous()?;
    // In place: the scores are a new tensor, and get no gradient.
    scores.scatter_set(&experts, &ranks, 1)?;
    Ok(scores)
}

/// Fails unless the experts of each token are different and below `n_experts`.
fn check(experts: &[u32], n_experts: usize, top_k: usize) -> Result<()> {
    for (token, experts) in experts.chunks_exact(top_k).enumerate() {
        for (slot, expert) in experts.iter().enumerate() {
            if *expert as usize >= n_experts {
                bail!("{OP}: token {token} has expert {expert}, but there are {n_experts}")
            }
            if experts[..slot].contains(expert) {
                bail!("{OP}: token {token} has expert {expert} twice")
            }
        }
    }
    Ok(())
}
