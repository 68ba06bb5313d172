//! Reference attention in plain tensor operations: all scores of a sequence at once, differentiated by candle.

use candle_core::{D, DType, Device, Result, Tensor, Var};

use super::cu_seqlens::{CuSeqlens, SequenceRange};
use super::layout::HeadCounts;
use super::spec::AttentionSpec;
use crate::recording::{OpInput, record, requires_grad};

/// Computes [`super::attention`] in f32, whatever the inputs' dtype.
pub(super) fn attention(
    inputs: [&Tensor; 3],
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> Result<Tensor> {
    if !inputs.iter().any(|x| requires_grad(x)) {
        return forward(inputs, seqs, spec, heads);
    }
    let [q, k, v] = inputs;
    let leaves = [Var::from_tensor(q)?, Var::from_tensor(k)?, Var::from_tensor(v)?];
    let y = forward(leaves.each_ref().map(|leaf| leaf.as_tensor()), seqs, spec, heads)?;
    let output = y.detach();
    Ok(record("attention", inputs.map(OpInput::from), output, move |dy, _| {
        let mut grads = (y * dy)?.sum_all()?.backward()?;
        Ok(leaves.each_ref().map(|leaf| grads.remove(leaf)))
    }))
}

fn forward([q, k, v]: [&Tensor; 3], seqs: &CuSeqlens, spec: &AttentionSpec, heads: HeadCounts) -> Result<Tensor> {
    let outputs = seqs.spans().filter(|span| !span.q.is_empty()).map(|span| {
        let q = by_group(q, span.q.start, span.q.len(), heads.group)?;
        let k = by_group(k, span.k.start, span.k.len(), 1)?;
        let v = by_group(v, span.k.start, span.k.len(), 1)?;
        let o = (probabilities(&q, &k, &span, spec)?.matmul(&v))?;
        let o = o.reshape((heads.n_kv, span.q.len(), heads.group, heads.dim))?.transpose(0, 1)?;
        o.reshape((span.q.len(), heads.n_kv * heads.group, heads.dim))
    });
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    // Without queries the output is empty, and so is q.
    if outputs.is_empty() { q.affine(0.0, 0.0) } else { Tensor::cat(&outputs, 0)?.to_dtype(q.dtype()) }
}

/// Regroups the rows of one sequence by KV head: [t, n_kv group, k] to f32 [n_kv, t group, k].
fn by_group(x: &Tensor, start: usize, len: usize, group: usize) -> Result<Tensor> {
    let (_, heads, dim) = x.dims3()?;
    let x = x.narrow(0, start, len)?.to_dtype(DType::F32)?.reshape((len, heads / group, group, dim))?;
    x.transpose(0, 1)?.reshape((heads / group, len * group, dim))
}

/// Returns the attention probabilities of one sequence, f32 [n_kv, t group, s].
fn probabilities(q: &Tensor, k: &Tensor, span: &SequenceRange, spec: &AttentionSpec) -> Result<Tensor> {
    let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * f64::from(spec.scale))?;
    let group = q.dim(1)? / span.q.len();
    let mask = mask(span, group, spec, q.device())?.broadcast_as(scores.shape())?;
    let hidden = Tensor::full(f32::NEG_INFINITY, scores.shape(), q.device())?;
    let scores = mask.where_cond(&scores, &hidden)?;
    let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
    scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)
}

/// Returns the mask, u8 [t group, s]: 1 if the query sees the key.
fn mask(span: &SequenceRange, group: usize, spec: &AttentionSpec, device: &Device) -> Result<Tensor> {
    let (n_queries, n_keys) = (span.q.len(), span.k.len());
    let sees = |query: usize, key: usize| {
        let position = query + n_keys - n_queries;
        let is_near = spec.window.is_none_or(|window| position < key.saturating_add(window));
        u8::from(is_near && (!spec.causal || key <= position))
    };
    let rows = (0..n_queries * group).map(|row| row / group);
    let values: Vec<u8> = rows.flat_map(|query| (0..n_keys).map(move |key| sees(query, key))).collect();
    Tensor::from_vec(values, (n_queries * group, n_keys), device)
}
