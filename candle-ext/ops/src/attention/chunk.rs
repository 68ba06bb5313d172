//! Attention between a chunk of the queries and a chunk of the keys, the building block of ring attention.
//!
//! Nothing is recorded on a tape. Outputs of several chunks are merged; their gradients are summed.
//!
//! t queries, s keys, hq query heads, hkv KV heads, k head dim

use candle_core::{DType, Result, Tensor, bail};

use super::cu_seqlens::{AttentionChunk, CuSeqlens};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use super::layout::{HeadCounts, add_by_row, by_row};
use super::spec::{AttentionImpl, AttentionSpec};
use super::{backward, forward, merge, tile};
use crate::device::on_device;
use crate::floats::{FloatBuf, FloatsMut};
use crate::span::span;
use crate::storage::{self, host, same_storage, update};

impl AttentionChunk {
    /// Returns true if the mask hides every key from every query, so that nothing needs computing.
    pub fn is_fully_masked(&self, spec: &AttentionSpec) -> bool {
        self.0.spans().all(|span| {
            let visible = |query: usize| tile::visible(spec, span.k.len(), span.first + query as isize);
            // Neither end of a query's visible range decreases from one query to the next.
            span.q.is_empty() || visible(0).start >= visible(span.q.len() - 1).end
        })
    }
}

/// Softmax over a subset of the keys: an output and its log-sum-exp, ready to merge with other subsets.
pub struct PartialSoftmax {
    out: Tensor,
    lse: Tensor,
}

impl PartialSoftmax {
    /// Returns the result over no keys for queries q [t, hq, k]: f32 zeros with weight 0.
    pub fn empty(q: &Tensor) -> Result<Self> {
        let (t, hq, _) = q.dims3()?;
        let lse = Tensor::full(f32::NEG_INFINITY, (t, hq), q.device())?;
        Ok(Self { out: Tensor::zeros(q.shape(), DType::F32, q.device())?, lse })
    }

    /// Returns the attention output over the keys so far [t, hq, k]: f32, or the queries' dtype for one chunk on a GPU.
    pub fn out(&self) -> &Tensor {
        &self.out
    }

    /// Returns the log-sum-exp of the scores, f32 [t, hq]; -inf for a fully masked row.
    pub fn lse(&self) -> &Tensor {
        &self.lse
    }

    /// Returns a view of some query rows. Merging into the view updates these rows.
    pub fn rows(&self, first: usize, n: usize) -> Result<Self> {
        Ok(Self { out: self.out.narrow(0, first, n)?, lse: self.lse.narrow(0, first, n)? })
    }

    /// Merges the result of the same queries over other keys into this one, in place and in f32.
    pub fn merge(&self, other: &Self) -> Result<()> {
        const OP: &str = "attention_merge";
        let _span = span("attention", "merge");
        if self.out.shape() != other.out.shape() || self.out.dtype() != DType::F32 {
            let (out, other) = (&self.out, &other.out);
            bail!("{OP}: {:?} {:?} into {:?} {:?}", other.dtype(), other.dims(), out.dtype(), out.dims())
        }
        if same_storage(&self.out, &other.out) {
            bail!("{OP}: the two share their memory")
        }
        on_device!(OP, self.out, {
            cpu => {
                let (other_out, other_lse) = (other.out.to_dtype(DType::F32)?, host(OP, &other.lse)?);
                let (other_out, dim) = (host(OP, &other_out)?, self.out.dim(2)?);
                let (other_out, other_lse) = (other_out.slice()?, other_lse.slice()?);
                update(&self.out, OP, |out| update(&self.lse, OP, |lse| {
                    merge::run(f32s(OP, out)?, f32s(OP, lse)?, other_out, other_lse, dim);
                    Ok(())
                }))
            },
            cuda => cuda::merge([&self.out, &self.lse], [&other.out, &other.lse]),
        })
    }
}

/// Computes attention of a chunk's queries over its keys: q [t, hq, k], k and v [s, hkv, k].
pub fn attention_chunk(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    piece: &AttentionChunk,
    spec: &AttentionSpec,
) -> Result<PartialSoftmax> {
    let _span = span("attention", "piece forward");
    let (seqs, heads) = (&piece.0, HeadCounts::of([q, k, v], &piece.0, spec)?);
    check_choice(spec)?;
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let (t, n_heads) = (q.dim(0)?, heads.n_query_heads());
    on_device!("attention", q, {
        cpu => {
            let mut out = FloatBuf::unwritten(DType::F32, q.elem_count())?;
            let hosts = (host("attention", &q)?, host("attention", &k)?, host("attention", &v)?);
            let inputs = [hosts.0.floats()?, hosts.1.floats()?, hosts.2.floats()?];
            let by_head = forward::run(inputs, out.view(), seqs, spec, heads);
            let mut lse = FloatBuf::unwritten(DType::F32, by_head.len())?;
            by_row(&by_head, lse.view(), n_heads, 1);
            Ok(PartialSoftmax { out: storage::tensor(out, q.shape()), lse: storage::tensor(lse, (t, n_heads)) })
        },
        cuda => {
            let (out, state) = cuda::forward([&q, &k, &v], seqs, spec, heads)?;
            Ok(PartialSoftmax { out: out.into_tensor(q.shape()), lse: state.lse().reshape((t, n_heads))? })
        },
    })
}

/// Inputs of the backward of a chunk.
pub struct ChunkInputs<'a> {
    /// Queries [t, hq, k].
    pub q: &'a Tensor,
    /// Keys [s, hkv, k].
    pub k: &'a Tensor,
    /// Values [s, hkv, k].
    pub v: &'a Tensor,
    /// Merged output over all keys, in the dtype of q: [t, hq, k].
    pub out: &'a Tensor,
    /// Log-sum-exp of each row over all keys, f32 [t, hq]. It must be finite: every query sees some key.
    pub lse: &'a Tensor,
    /// Gradient of `out` [t, hq, k].
    pub d_out: &'a Tensor,
}

/// Adds a chunk's contribution to the gradients of q, k and v, which are f32 and contiguous.
pub fn attention_chunk_backward(
    inputs: &ChunkInputs<'_>,
    piece: &AttentionChunk,
    spec: &AttentionSpec,
    grads: [&Tensor; 3],
) -> Result<()> {
    const OP: &str = "attention";
    let _span = span(OP, "piece backward");
    let ChunkInputs { q, k, v, out, lse, d_out } = *inputs;
    let (seqs, heads) = (&piece.0, HeadCounts::of([q, k, v], &piece.0, spec)?);
    check_choice(spec)?;
    for (name, x, like) in [("out", out, q), ("d_out", d_out, q)] {
        if x.shape() != like.shape() || x.dtype() != like.dtype() {
            bail!("{OP}: {name} is {:?} {:?}, but q {:?} {:?}", x.dtype(), x.dims(), like.dtype(), like.dims())
        }
    }
    for (name, x, like) in [("dq", grads[0], q), ("dk", grads[1], k), ("dv", grads[2], v)] {
        if x.shape() != like.shape() || x.dtype() != DType::F32 {
            bail!("{OP}: {name} is {:?} {:?}, want F32 {:?}", x.dtype(), x.dims(), like.dims())
        }
    }
    if lse.dims() != [q.dim(0)?, heads.n_query_heads()] {
        bail!("{OP}: lse is {:?}, want [{}, {}]", lse.dims(), q.dim(0)?, heads.n_query_heads())
    }
    if q.elem_count() == 0 || k.elem_count() == 0 {
        return Ok(());
    }
    let inputs = [q, k, v, out, lse, d_out].map(Tensor::contiguous);
    let [q, k, v, out, lse, d_out] = inputs;
    let inputs = [q?, k?, v?, out?, lse?, d_out?];
    on_device!(OP, inputs[0], {
        cpu => backward_cpu(inputs.each_ref(), seqs, spec, heads, grads),
        cuda => {
            let [q, k, v, o, lse, d_o] = inputs.each_ref();
            let state = cuda::FusedForwardState::new(lse, q, seqs, spec, heads)?;
            let added = cuda::backward(&cuda::BackwardInputs { q, k, v, o, d_o }, &state)?;
            grads.into_iter().zip(&added).try_for_each(|(grad, added)| {
                crate::copy_into(grad, &(grad + added.to_dtype(DType::F32)?)?)
            })
        },
    })
}

fn backward_cpu(
    inputs: [&Tensor; 6],
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
    grads: [&Tensor; 3],
) -> Result<()> {
    const OP: &str = "attention";
    let [q, k, v, o, lse, d_o] = inputs;
    let hosts = [host(OP, q)?, host(OP, k)?, host(OP, v)?, host(OP, o)?, host(OP, d_o)?];
    let lse = lse.t()?.contiguous()?;
    let lse = host(OP, &lse)?;
    let inputs = backward::CpuBackwardInputs {
        q: hosts[0].floats()?,
        k: hosts[1].floats()?,
        v: hosts[2].floats()?,
        o: hosts[3].floats()?,
        d_o: hosts[4].floats()?,
        lse: lse.slice()?,
    };
    let by_head = backward::run(&inputs, seqs, spec, heads);
    for ((grad, added), n_heads) in grads.into_iter().zip(by_head).zip([heads.n_query_heads(), heads.n_kv, heads.n_kv])
    {
        update(grad, OP, |sums| {
            add_by_row(&added, f32s(OP, sums)?, n_heads, heads.dim);
            Ok(())
        })?;
    }
    Ok(())
}

fn f32s<'a>(op: &str, floats: FloatsMut<'a>) -> Result<&'a mut [f32]> {
    match floats {
        FloatsMut::F32(data) => Ok(data),
        _ => bail!("{op}: what is added to must be f32"),
    }
}

/// Fails unless the fused implementation may compute: chunks have no other.
fn check_choice(spec: &AttentionSpec) -> Result<()> {
    match spec.choice.implementation {
        AttentionImpl::Auto | AttentionImpl::Fused => Ok(()),
        other => bail!("attention: `{other}` cannot compute a chunk of the keys; `fused` can"),
    }
}
