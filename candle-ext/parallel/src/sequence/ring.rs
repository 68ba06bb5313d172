//! Ring attention (Liu et al., 2023; <https://arxiv.org/abs/2310.01889>) with balanced causal work: a rank has two chunks of the
//! tokens (`places`), and keys and values come to it round by round from the other ranks, while it computes with those of the
//! round before.
//!
//! In round i a rank gets those of the rank i places before it, from that rank itself: as many bytes as if they were handed on
//! from neighbour to neighbour, and what a rank sees nothing of is not sent at all. The way back is the same: keys and values
//! come again, and their gradients are sent home in f32.
//!
//! t tokens of a rank, c tokens of a chunk, h query heads, g key heads, k head dim

use std::rc::Rc;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candlewick_comm::{Collective, Pending, Recv};
use candlewick_model::AttentionExchange;
use candlewick_ops::{
    self as ops, AttentionHeads, AttentionSpec, BackwardContext, Partial, Piece, PieceInputs, Seqs, attention_piece,
    attention_piece_backward, compute_or_replay, record,
};

use super::places::Places;

/// The ranks that send each other keys and values.
#[derive(Clone)]
pub(super) struct Ring {
    ranks: Arc<dyn Collective>,
}

/// Something of a rank's early and late chunk each; `None` where nobody asks.
type Chunks<T> = [Option<T>; 2];

/// Chunks in transit.
type PendingChunks = [Pending<Option<Tensor>>; 2];

/// What this rank does, round by round.
struct Course {
    rounds: Vec<Round>,
    /// Tokens of the early and of the late chunk.
    lens: [usize; 2],
    spec: AttentionSpec,
}

struct Round {
    /// Whose keys and values come.
    from: usize,
    /// Who gets this rank's.
    to: usize,
    /// What is computed: a chunk of this rank's queries, a chunk of their keys.
    work: Vec<(usize, usize, Piece)>,
    /// Which of this rank's chunks are seen over there.
    sent: [bool; 2],
}

/// What the forward leaves to the backward.
struct Saved {
    q: Tensor,
    kv: [Tensor; 2],
    out: Tensor,
    lse: Rc<Tensor>,
}

/// Returns the bytes that ring attention allocates on a rank with `n_tokens` tokens.
///
/// Forward: the f32 sum of queries; keys and values of this rank, of the current round and of the next. Backward: dq in f32;
/// dk and dv in f32 of this rank, of the current round, on their way and received; keys and values of two rounds.
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

    /// Attention of this rank's queries to the keys of all ranks: q [t, h, k], k and v [t, g, k] -> [t, h, k].
    pub(super) fn attend(&self, [q, k, v]: [&Tensor; 3], seqs: &Seqs, spec: &AttentionSpec) -> Result<Tensor> {
        if q.dim(0)? == seqs.n_tokens() {
            // All is here: whatever computes attention elsewhere will do.
            return ops::attention(q, k, v, seqs, spec);
        }
        let course = self.course(seqs, spec)?;
        let saved_q = q.contiguous()?;
        let kv = course.packed(k, v)?;
        let (out, lse) = compute_or_replay("ring_attention", || {
            let sum = self.forward(&course, &saved_q, &kv)?;
            Ok((sum.out().to_dtype(q.dtype())?, sum.lse().clone()))
        })?;
        let saved = Saved { q: saved_q, kv, out: out.clone(), lse };
        let ring = self.clone();
        let backward =
            move |d_out: &Tensor, _: &mut BackwardContext<'_>| Ok(ring.backward(&course, &saved, d_out)?.map(Some));
        Ok(record("ring_attention", [q.into(), k.into(), v.into()], out, backward))
    }

    fn course(&self, seqs: &Seqs, spec: &AttentionSpec) -> Result<Course> {
        let (me, n) = (self.ranks.rank(), self.ranks.size());
        let places = Places::new(seqs.n_tokens(), n, 1);
        let rounds = (0..n).map(|round| {
            let (from, to) = ((me + n - round) % n, (me + round) % n);
            let (work, theirs) = (work(&places, seqs, spec, me, from)?, work(&places, seqs, spec, to, me)?);
            Ok(Round { from, to, work, sent: seen(&theirs) })
        });
        let lens = places.chunks(me).map(|chunk| chunk.len());
        Ok(Course { rounds: rounds.collect::<Result<_>>()?, lens, spec: *spec })
    }

    fn forward(&self, course: &Course, q: &Tensor, kv: &[Tensor; 2]) -> Result<Partial> {
        let sum = Partial::nothing(q)?;
        self.rounds(course, kv, |round, here| {
            for (queries, keys, piece) in &round.work {
                let (first, n) = course.rows(*queries);
                let [k, v] = course.keys_and_values(here, *keys)?;
                sum.rows(first, n)?.merge(&attention_piece(&q.narrow(0, first, n)?, &k, &v, piece, &course.spec)?)?;
            }
            Ok(())
        })?;
        Ok(sum)
    }

    /// Returns dq, dk and dv.
    fn backward(&self, course: &Course, saved: &Saved, d_out: &Tensor) -> Result<[Tensor; 3]> {
        let Saved { q, kv, out, lse } = saved;
        let dq = zeros_like(q)?;
        let mut own = [zeros_like(&kv[0])?, zeros_like(&kv[1])?];
        let mut going_home = None;
        self.rounds(course, kv, |round, here| {
            let is_own = round.from == self.ranks.rank();
            let sums = match is_own {
                true => own.each_ref().map(|own| Some(own.clone())),
                false => zeros_for(here)?,
            };
            for (queries, keys, piece) in &round.work {
                let (first, n) = course.rows(*queries);
                let rows = |x: &Tensor| x.narrow(0, first, n);
                let [k, v] = course.keys_and_values(here, *keys)?;
                let [dk, dv] = course.keys_and_values(&sums, *keys)?;
                let (q, out, lse, d_out) = (&rows(q)?, &rows(out)?, &rows(lse)?, &rows(d_out)?);
                let inputs = PieceInputs { q, k: &k, v: &v, out, lse, d_out };
                attention_piece_backward(&inputs, piece, &course.spec, [&rows(&dq)?, &dk, &dv])?;
            }
            if !is_own {
                let before = going_home.replace(self.start_home(round, sums, &own)?);
                add_arrived(&mut own, before)?;
            }
            Ok(())
        })?;
        add_arrived(&mut own, going_home.take())?;
        let [dk, dv] = course.unpacked(&own)?;
        Ok([dq.to_dtype(q.dtype())?, dk.to_dtype(q.dtype())?, dv.to_dtype(q.dtype())?])
    }

    /// Goes through the rounds with the keys and values that are here in each, while those of the next are on their way.
    fn rounds(
        &self,
        course: &Course,
        kv: &[Tensor; 2],
        mut compute: impl FnMut(&Round, &Chunks<Tensor>) -> Result<()>,
    ) -> Result<()> {
        let mut here = kv.each_ref().map(|kv| Some(kv.clone()));
        for (i, round) in course.rounds.iter().enumerate() {
            let coming = course.rounds.get(i + 1).map(|next| self.start(next, kv)).transpose()?;
            compute(round, &here)?;
            if let Some(coming) = coming {
                here = arrived(coming)?;
            }
        }
        Ok(())
    }

    /// Starts to send this rank's chunks to those who see them, and to receive what it sees itself.
    fn start(&self, round: &Round, kv: &[Tensor; 2]) -> Result<PendingChunks> {
        let seen = seen(&round.work);
        let one = |chunk: usize| {
            let x = round.sent[chunk].then_some(&kv[chunk]);
            // Chunks of one place are of one size on all ranks.
            let recv = seen[chunk].then(|| Recv::like(&kv[chunk], round.from));
            self.ranks.start_send_recv(x, x.map(|_| round.to), recv)
        };
        Ok([one(0)?, one(1)?])
    }

    /// Starts to send the gradients of what was seen to its rank, and to receive those of this rank's chunks.
    fn start_home(&self, round: &Round, sums: Chunks<Tensor>, own: &[Tensor; 2]) -> Result<PendingChunks> {
        let one = |chunk: usize| {
            let x = sums[chunk].as_ref();
            let recv = round.sent[chunk].then(|| Recv::like(&own[chunk], round.to));
            self.ranks.start_send_recv(x, x.map(|_| round.from), recv)
        };
        Ok([one(0)?, one(1)?])
    }
}

impl Course {
    /// Where a chunk's tokens begin among this rank's, and how many they are.
    fn rows(&self, chunk: usize) -> (usize, usize) {
        [(0, self.lens[0]), (self.lens[0], self.lens[1])][chunk]
    }

    /// Keys and values of each chunk together, to travel as one: [2c, g, k].
    fn packed(&self, k: &Tensor, v: &Tensor) -> Result<[Tensor; 2]> {
        let one = |chunk: usize| {
            let (first, n) = self.rows(chunk);
            Tensor::cat(&[k.narrow(0, first, n)?, v.narrow(0, first, n)?], 0)
        };
        Ok([one(0)?, one(1)?])
    }

    /// Keys and values, of all chunks again.
    fn unpacked(&self, kv: &[Tensor; 2]) -> Result<[Tensor; 2]> {
        let part = |which: usize, chunk: usize| kv[chunk].narrow(0, which * self.lens[chunk], self.lens[chunk]);
        Ok([Tensor::cat(&[part(0, 0)?, part(0, 1)?], 0)?, Tensor::cat(&[part(1, 0)?, part(1, 1)?], 0)?])
    }

    /// Views of the keys and of the values of a chunk that is here.
    fn keys_and_values(&self, here: &Chunks<Tensor>, chunk: usize) -> Result<[Tensor; 2]> {
        let (kv, n) = (here[chunk].as_ref().expect("what is worked on was asked for"), self.lens[chunk]);
        Ok([kv.narrow(0, 0, n)?, kv.narrow(0, n, n)?])
    }
}

/// What a rank computes with the keys of another: each pair of chunks of which some query sees some key.
fn work(
    places: &Places,
    seqs: &Seqs,
    spec: &AttentionSpec,
    rank: usize,
    other: usize,
) -> Result<Vec<(usize, usize, Piece)>> {
    let mut work = Vec::new();
    for (queries, of_queries) in places.chunks(rank).into_iter().enumerate() {
        for (keys, of_keys) in places.chunks(other).into_iter().enumerate() {
            let piece = seqs.piece(of_queries.clone(), of_keys)?;
            if !piece.is_hidden(spec) {
                work.push((queries, keys, piece));
            }
        }
    }
    Ok(work)
}

/// Which chunks of keys there is work with.
fn seen(work: &[(usize, usize, Piece)]) -> [bool; 2] {
    [0, 1].map(|chunk| work.iter().any(|(_, keys, _)| *keys == chunk))
}

fn arrived([early, late]: PendingChunks) -> Result<Chunks<Tensor>> {
    Ok([early.wait()?, late.wait()?])
}

/// Adds the gradients that came home to this rank's chunks.
fn add_arrived(own: &mut [Tensor; 2], coming: Option<PendingChunks>) -> Result<()> {
    let Some(coming) = coming else { return Ok(()) };
    for (own, added) in own.iter_mut().zip(arrived(coming)?) {
        if let Some(added) = added {
            *own = ops::add(own, &added)?;
        }
    }
    Ok(())
}

fn zeros_for(chunks: &Chunks<Tensor>) -> Result<Chunks<Tensor>> {
    let [early, late] = chunks.each_ref().map(|chunk| chunk.as_ref().map(zeros_like).transpose());
    Ok([early?, late?])
}

/// f32, whatever the format of x.
fn zeros_like(x: &Tensor) -> Result<Tensor> {
    Tensor::zeros(x.shape(), DType::F32, x.device())
}
