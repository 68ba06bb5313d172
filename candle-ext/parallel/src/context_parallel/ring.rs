//! Ring attention (Liu et al., 2023; <https://arxiv.org/abs/2310.01889>) with balanced causal work (see `partition`).
//!
//! Communication of keys and values overlaps with computation. In step i a rank receives those of the rank i places
//! before it, directly, and chunks that no query sees are not sent. Backward receives keys and values again, and sends
//! their gradients in f32.
//!
//! Dimensions: t tokens of a rank, c tokens of a chunk, h query heads, g KV heads, k head size

use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candlewick_comm::{Collective, Pending, Recv};
use candlewick_model::AttentionExchange;
use candlewick_ops::{
    self as ops, AttentionChunk, AttentionHeads, AttentionSpec, BackwardContext, ChunkInputs, CuSeqlens,
    PartialSoftmax, ReplayedOutput, attention_chunk, attention_chunk_backward, compute_or_replay, record,
};

use super::partition::TokenPartition;

/// Ring of context parallel ranks.
#[derive(Clone)]
pub(super) struct Ring {
    ranks: Arc<dyn Collective>,
}

/// A value for the early and the late chunk; `None` for a chunk that no rank needs.
type PerChunk<T> = [Option<T>; 2];

/// Receives of the early and the late chunk.
type PendingChunks = [Pending<Option<Tensor>>; 2];

/// Steps of this rank.
struct RingPlan {
    steps: Vec<RingStep>,
    /// Lengths of the early and the late chunk, in tokens.
    lens: [usize; 2],
    spec: AttentionSpec,
}

struct RingStep {
    /// Rank that sends its keys and values.
    from: usize,
    /// Rank that receives this rank's keys and values.
    to: usize,
    /// Attention chunks to compute: query chunk, key chunk, and mask.
    work: Vec<(usize, usize, AttentionChunk)>,
    /// True for each chunk that `to` needs.
    sent: [bool; 2],
}

/// Tensors saved between forward and backward.
struct Saved {
    q: Tensor,
    kv: [Tensor; 2],
    out: Tensor,
    lse: Rc<Tensor>,
}

/// Returns the bytes that ring attention allocates on a rank with `n_tokens` tokens.
///
/// Forward: an f32 output; keys and values of this rank, of the current and of the next step. Backward: dq in f32; f32
/// dk and dv of this rank, of the current step, in flight and received; keys and values of two steps.
pub fn ring_exchange(n_tokens: u64, heads: AttentionHeads, dtype: DType) -> AttentionExchange {
    let bytes = |n_elements: usize, dtype: DType| n_tokens * (n_elements * dtype.size_in_bytes()) as u64;
    let (q, kv) = (heads.n_query * heads.dim, 2 * heads.n_kv * heads.dim);
    AttentionExchange {
        forward_bytes: bytes(q, DType::F32) + bytes(3 * kv, dtype),
        backward_bytes: bytes(q + 4 * kv, DType::F32) + bytes(2 * kv, dtype),
    }
}

impl Ring {
    pub(super) fn new(ranks: Arc<dyn Collective>) -> Self {
        Self { ranks }
    }

    /// Computes attention of this rank's queries over the keys of all ranks: q [t, h, k], k and v [t, g, k] -> [t, h,
    /// k].
    pub(super) fn attend(&self, [q, k, v]: [&Tensor; 3], seqs: &CuSeqlens, spec: &AttentionSpec) -> Result<Tensor> {
        if q.dim(0)? == seqs.n_tokens() {
            // Without other ranks, any attention implementation will do.
            return ops::attention(q, k, v, seqs, spec);
        }
        let plan = self.plan(seqs, spec)?;
        let saved_q = q.contiguous()?;
        let kv = plan.packed(k, v)?;
        let (out, lse) = compute_or_replay("ring_attention", ReplayedOutput::Activation, || {
            let sum = self.forward(&plan, &saved_q, &kv)?;
            Ok((sum.out().to_dtype(q.dtype())?, sum.lse().clone()))
        })?;
        let saved = Saved { q: saved_q, kv, out: out.clone(), lse };
        let ring = self.clone();
        let backward =
            move |d_out: &Tensor, _: &mut BackwardContext<'_>| Ok(ring.backward(&plan, &saved, d_out)?.map(Some));
        Ok(record("ring_attention", [q.into(), k.into(), v.into()], out, backward))
    }

    fn plan(&self, seqs: &CuSeqlens, spec: &AttentionSpec) -> Result<RingPlan> {
        let (me, n) = (self.ranks.rank(), self.ranks.size());
        let partition = TokenPartition::new(seqs.n_tokens(), n, 1);
        let steps = (0..n).map(|step| {
            let (from, to) = ((me + n - step) % n, (me + step) % n);
            let (work, theirs) = (work(&partition, seqs, spec, me, from)?, work(&partition, seqs, spec, to, me)?);
            Ok(RingStep { from, to, work, sent: seen(&theirs) })
        });
        let lens = partition.chunks(me).map(|chunk| chunk.len());
        Ok(RingPlan { steps: steps.collect::<Result<_>>()?, lens, spec: *spec })
    }

    fn forward(&self, plan: &RingPlan, q: &Tensor, kv: &[Tensor; 2]) -> Result<PartialSoftmax> {
        let sum = PartialSoftmax::empty(q)?;
        self.steps(plan, kv, |step, here| {
            for (queries, keys, piece) in &step.work {
                let (first, n) = plan.rows(*queries);
                let [k, v] = plan.keys_and_values(here, *keys)?;
                sum.rows(first, n)?.merge(&attention_chunk(&q.narrow(0, first, n)?, &k, &v, piece, &plan.spec)?)?;
            }
            Ok(())
        })?;
        Ok(sum)
    }

    /// Returns dq, dk and dv.
    fn backward(&self, plan: &RingPlan, saved: &Saved, d_out: &Tensor) -> Result<[Tensor; 3]> {
        let Saved { q, kv, out, lse } = saved;
        let dq = zeros_like(q)?;
        let mut own = [zeros_like(&kv[0])?, zeros_like(&kv[1])?];
        let mut grads_in_flight = None;
        self.steps(plan, kv, |step, here| {
            let is_own = step.from == self.ranks.rank();
            let sums = match is_own {
                true => own.each_ref().map(|own| Some(own.clone())),
                false => zeros_for(here)?,
            };
            for (queries, keys, piece) in &step.work {
                let (first, n) = plan.rows(*queries);
                let rows = |x: &Tensor| x.narrow(0, first, n);
                let [k, v] = plan.keys_and_values(here, *keys)?;
                let [dk, dv] = plan.keys_and_values(&sums, *keys)?;
                let (q, out, lse, d_out) = (&rows(q)?, &rows(out)?, &rows(lse)?, &rows(d_out)?);
                let inputs = ChunkInputs { q, k: &k, v: &v, out, lse, d_out };
                attention_chunk_backward(&inputs, piece, &plan.spec, [&rows(&dq)?, &dk, &dv])?;
            }
            if !is_own {
                let before = grads_in_flight.replace(self.start_send_grads(step, sums, &own)?);
                add_received(&mut own, before)?;
            }
            Ok(())
        })?;
        add_received(&mut own, grads_in_flight.take())?;
        let [dk, dv] = plan.unpacked(&own)?;
        Ok([dq.to_dtype(q.dtype())?, dk.to_dtype(q.dtype())?, dv.to_dtype(q.dtype())?])
    }

    /// Runs each step on its keys and values, while those of the next step are received.
    fn steps(
        &self,
        plan: &RingPlan,
        kv: &[Tensor; 2],
        mut compute: impl FnMut(&RingStep, &PerChunk<Tensor>) -> Result<()>,
    ) -> Result<()> {
        let mut here = kv.each_ref().map(|kv| Some(kv.clone()));
        for (i, step) in plan.steps.iter().enumerate() {
            let coming = plan.steps.get(i + 1).map(|next| self.start(next, kv)).transpose()?;
            compute(step, &here)?;
            if let Some(coming) = coming {
                here = received(coming)?;
            }
        }
        Ok(())
    }

    /// Starts sending this rank's chunks and receiving those of the next step.
    fn start(&self, step: &RingStep, kv: &[Tensor; 2]) -> Result<PendingChunks> {
        let seen = seen(&step.work);
        let one = |chunk: usize| {
            let x = step.sent[chunk].then_some(&kv[chunk]);
            // Early chunks have one size on all ranks, and so have late chunks.
            let recv = seen[chunk].then(|| Recv::like(&kv[chunk], step.from));
            self.ranks.start_send_recv(x, x.map(|_| step.to), recv)
        };
        Ok([one(0)?, one(1)?])
    }

    /// Starts sending gradients of received chunks to their owner, and receiving those of this rank's chunks.
    fn start_send_grads(&self, step: &RingStep, sums: PerChunk<Tensor>, own: &[Tensor; 2]) -> Result<PendingChunks> {
        let one = |chunk: usize| {
            let x = sums[chunk].as_ref();
            let recv = step.sent[chunk].then(|| Recv::like(&own[chunk], step.to));
            self.ranks.start_send_recv(x, x.map(|_| step.from), recv)
        };
        Ok([one(0)?, one(1)?])
    }
}

impl RingPlan {
    /// Returns the first row and the length of a chunk among this rank's tokens.
    fn rows(&self, chunk: usize) -> (usize, usize) {
        [(0, self.lens[0]), (self.lens[0], self.lens[1])][chunk]
    }

    /// Packs keys and values of each chunk into one tensor [2c, g, k].
    fn packed(&self, k: &Tensor, v: &Tensor) -> Result<[Tensor; 2]> {
        let one = |chunk: usize| {
            let (first, n) = self.rows(chunk);
            Tensor::cat(&[k.narrow(0, first, n)?, v.narrow(0, first, n)?], 0)
        };
        Ok([one(0)?, one(1)?])
    }

    /// Unpacks keys and values of both chunks.
    fn unpacked(&self, kv: &[Tensor; 2]) -> Result<[Tensor; 2]> {
        let part = |which: usize, chunk: usize| kv[chunk].narrow(0, which * self.lens[chunk], self.lens[chunk]);
        Ok([Tensor::cat(&[part(0, 0)?, part(0, 1)?], 0)?, Tensor::cat(&[part(1, 0)?, part(1, 1)?], 0)?])
    }

    /// Returns views of the keys and values of a received chunk.
    fn keys_and_values(&self, here: &PerChunk<Tensor>, chunk: usize) -> Result<[Tensor; 2]> {
        let (kv, n) = (here[chunk].as_ref().expect("what is worked on was queries for"), self.lens[chunk]);
        Ok([kv.narrow(0, 0, n)?, kv.narrow(0, n, n)?])
    }
}

/// Returns the attention chunks between two ranks' tokens: pairs of chunks of which some query sees some key.
fn work(
    partition: &TokenPartition,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    rank: usize,
    other: usize,
) -> Result<Vec<(usize, usize, AttentionChunk)>> {
    let mut work = Vec::new();
    for (queries, of_queries) in partition.chunks(rank).into_iter().enumerate() {
        for (keys, of_keys) in partition.chunks(other).into_iter().enumerate() {
            let piece = seqs.chunk(of_queries.clone(), of_keys)?;
            if !piece.is_fully_masked(spec) {
                work.push((queries, keys, piece));
            }
        }
    }
    Ok(work)
}

/// Returns true for each key chunk that appears in `work`.
fn seen(work: &[(usize, usize, AttentionChunk)]) -> [bool; 2] {
    [0, 1].map(|chunk| work.iter().any(|(_, keys, _)| *keys == chunk))
}

fn received([early, late]: PendingChunks) -> Result<PerChunk<Tensor>> {
    Ok([early.wait()?, late.wait()?])
}

/// Adds received gradients to those of this rank's chunks.
fn add_received(own: &mut [Tensor; 2], coming: Option<PendingChunks>) -> Result<()> {
    let Some(coming) = coming else { return Ok(()) };
    for (own, added) in own.iter_mut().zip(received(coming)?) {
        if let Some(added) = added {
            *own = ops::add(own, &added)?;
        }
    }
    Ok(())
}

fn zeros_for(chunks: &PerChunk<Tensor>) -> Result<PerChunk<Tensor>> {
    let [early, late] = chunks.each_ref().map(|chunk| chunk.as_ref().map(zeros_like).transpose());
    Ok([early?, late?])
}

/// Returns f32 zeros of the shape of x.
fn zeros_like(x: &Tensor) -> Result<Tensor> {
    Tensor::zeros(x.shape(), DType::F32, x.device())
}
