//! Attention between some of the queries and some of the keys: what ranks that share sequences compute piece by piece. Records
//! nothing; the outputs of several pieces are merged, and their gradients add up.
//!
//! t queries, s keys, hq query heads, hkv key heads, k head dim

use candle_core::{DType, Result, Tensor, bail};

use super::cu_seqlens::{AttentionChunk, CuSeqlens};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use super::layout::{Heads, add_by_row, by_row};
use super::spec::{AttentionImpl, AttentionSpec};
use super::{backward, forward, merge, tile};
use crate::device::on_device;
use crate::floats::{FloatBuf, FloatsMut};
use crate::span::span;
use crate::storage::{self, host, same_storage, update};

impl AttentionChunk {
    /// Tells whether no query sees any key: there is nothing to compute then.
    pub fn is_fully_masked(&self, spec: &AttentionSpec) -> bool {
        self.0.spans().all(|span| {
            let visible = |query: usize| tile::visible(spec, span.k.len(), span.first + query as isize);
            // From query to query neither end of what is seen goes back.
            span.q.is_empty() || visible(0).start >= visible(span.q.len() - 1).end
        })
    }
}

/// What attention to some of the keys gives: to be merged with what it gives for the others.
pub struct PartialSoftmax {
    out: Tensor,
    lse: Tensor,
}

impl PartialSoftmax {
    /// What queries q [t, hq, k] have before they see a key: f32 zeros, of no weight.
    pub fn empty(q: &Tensor) -> Result<Self> {
        let (t, hq, _) = q.dims3()?;
        let lse = Tensor::full(f32::NEG_INFINITY, (t, hq), q.device())?;
        Ok(Self { out: Tensor::zeros(q.shape(), DType::F32, q.device())?, lse })
    }

    /// The mean of the values seen [t, hq, k]: f32; on a GPU that of one piece is in the queries' format.
    pub fn out(&self) -> &Tensor {
        &self.out
    }

    /// The logarithm of the sum of the exponentials of the scores, f32 [t, hq]: -inf where no key is seen.
    pub fn lse(&self) -> &Tensor {
        &self.lse
    }

    /// A view of some of the queries' rows: what is merged into it is merged into these.
    pub fn rows(&self, first: usize, n: usize) -> Result<Self> {
        Ok(Self { out: self.out.narrow(0, first, n)?, lse: self.lse.narrow(0, first, n)? })
    }

    /// Merges what the same queries give with other keys into this, in place and in f32.
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

/// Attention of the queries of a piece to its keys: q [t, hq, k], k and v [s, hkv, k].
pub fn attention_chunk(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    piece: &AttentionChunk,
    spec: &AttentionSpec,
) -> Result<PartialSoftmax> {
    let _span = span("attention", "piece forward");
    let (seqs, heads) = (&piece.0, Heads::of([q, k, v], &piece.0, spec)?);
    check_choice(spec)?;
    let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
    let (t, n_heads) = (q.dim(0)?, heads.n_queries());
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

/// What the gradients of a piece come from.
pub struct ChunkInputs<'a> {
    /// [t, hq, k]
    pub q: &'a Tensor,
    /// [s, hkv, k]
    pub k: &'a Tensor,
    /// [s, hkv, k]
    pub v: &'a Tensor,
    /// The output over all keys, in the format of q: [t, hq, k]
    pub out: &'a Tensor,
    /// The logarithm of each row's sum over all keys, f32 [t, hq]: finite, as every query must have seen some key.
    pub lse: &'a Tensor,
    /// The gradient of `out`.
    pub d_out: &'a Tensor,
}

/// Adds what a piece gives to the gradients of q, k and v: f32, contiguous.
pub fn attention_chunk_backward(
    inputs: &ChunkInputs<'_>,
    piece: &AttentionChunk,
    spec: &AttentionSpec,
    grads: [&Tensor; 3],
) -> Result<()> {
    const OP: &str = "attention";
    let _span = span(OP, "piece backward");
    let ChunkInputs { q, k, v, out, lse, d_out } = *inputs;
    let (seqs, heads) = (&piece.0, Heads::of([q, k, v], &piece.0, spec)?);
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
    if lse.dims() != [q.dim(0)?, heads.n_queries()] {
        bail!("{OP}: lse is {:?}, want [{}, {}]", lse.dims(), q.dim(0)?, heads.n_queries())
    }
    let inputs = [q, k, v, out, lse, d_out].map(Tensor::contiguous);
    let [q, k, v, out, lse, d_out] = inputs;
    let inputs = [q?, k?, v?, out?, lse?, d_out?];
    on_device!(OP, inputs[0], {
        cpu => backward_cpu(inputs.each_ref(), seqs, spec, heads, grads),
        cuda => {
            let [q, k, v, o, lse, d_o] = inputs.each_ref();
            let state = cuda::ForwardState::new(lse, q, seqs, spec, heads)?;
            let added = cuda::backward(&cuda::Inputs { q, k, v, o, d_o }, &state)?;
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
    heads: Heads,
    grads: [&Tensor; 3],
) -> Result<()> {
    const OP: &str = "attention";
    let [q, k, v, o, lse, d_o] = inputs;
    let hosts = [host(OP, q)?, host(OP, k)?, host(OP, v)?, host(OP, o)?, host(OP, d_o)?];
    let lse = lse.t()?.contiguous()?;
    let lse = host(OP, &lse)?;
    let inputs = backward::Inputs {
        q: hosts[0].floats()?,
        k: hosts[1].floats()?,
        v: hosts[2].floats()?,
        o: hosts[3].floats()?,
        d_o: hosts[4].floats()?,
        lse: lse.slice()?,
    };
    let by_head = backward::run(&inputs, seqs, spec, heads);
    for ((grad, added), n_heads) in grads.into_iter().zip(by_head).zip([heads.n_queries(), heads.n_kv, heads.n_kv]) {
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

/// Pieces have one implementation a device.
fn check_choice(spec: &AttentionSpec) -> Result<()> {
    match spec.choice.implementation {
        AttentionImpl::Auto | AttentionImpl::Fused => Ok(()),
        other => bail!("attention: `{other}` cannot compute a piece of the keys; `fused` can"),
    }
}
