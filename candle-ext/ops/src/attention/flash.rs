//! Attention forward by the candle-flash-attn crate (FlashAttention 2).

use candle_core::{Device, Result, Tensor};

use super::cu_seqlens::CuSeqlens;
use super::spec::AttentionSpec;
use crate::transfer::upload;

/// Computes attention. Shapes as in [`super::attention`]; bf16 or f16.
pub(super) fn attention([q, k, v]: [&Tensor; 3], seqs: &CuSeqlens, spec: &AttentionSpec) -> Result<Tensor> {
    if seqs.n_tokens() == 0 {
        return q.zeros_like();
    }
    let (cu_q, longest_q) = sequences(seqs.cu_seqlens_q(), q.device())?;
    let (cu_k, longest_k) = sequences(seqs.cu_seqlens_k(), q.device())?;
    let before = spec.window.map(|window| window - 1);
    let after = spec.causal.then_some(0);
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    candle_flash_attn::flash_attn_varlen_windowed(
        &q, &k, &v, &cu_q, &cu_k, longest_q, longest_k, spec.scale, before, after,
    )
}

/// Uploads cumulative sequence lengths. Also returns the length of the longest sequence.
fn sequences(cumulative: &[usize], device: &Device) -> Result<(Tensor, usize)> {
    let longest = cumulative.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
    let starts: Vec<u32> = cumulative.iter().map(|&start| start as u32).collect();
    Ok((upload(&starts, starts.len(), device)?, longest))
}
