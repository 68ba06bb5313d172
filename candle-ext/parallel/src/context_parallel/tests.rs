//! Context parallel attention compared with single-rank attention, and its communication volume.

use std::time::Duration;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_comm::{Options, World, threads};
use candlewick_model::AttentionCall;
use candlewick_model::SequenceMixing;
use candlewick_ops::{
    AttentionChoice, AttentionSpec, CuSeqlens, OutputsToSave, SavedOutputs, Tape, attention, save_outputs,
};

use super::{ContextParallel, partition::TokenPartition, select};

const HEADS: (usize, usize, usize) = (4, 2, 8);

fn spec(window: Option<usize>) -> AttentionSpec {
    AttentionSpec { scale: 0.3, causal: true, window, choice: AttentionChoice::default() }
}

fn packed(lens: &[usize]) -> CuSeqlens {
    let ends = lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    CuSeqlens::packed(std::iter::once(0).chain(ends).collect()).unwrap()
}

/// Returns q, k, v and a gradient of the output for n tokens.
fn inputs(n: usize, dtype: DType) -> [Tensor; 4] {
    let (h, g, k) = HEADS;
    let values = |seed: usize, heads: usize| {
        let value = |i: usize| ((i * (7 + 4 * seed) + 13 * seed) as f32 * 0.37).sin();
        let values: Vec<f32> = (0..n * heads * k).map(value).collect();
        Tensor::from_vec(values, (n, heads, k), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    };
    [values(1, h), values(2, g), values(3, g), values(4, h)]
}

/// Returns the output and the gradients of q, k and v.
fn results(
    x: &[Tensor; 4],
    saved: SavedOutputs,
    attend: impl FnOnce([&Tensor; 3]) -> Result<Tensor>,
) -> Result<Vec<Tensor>> {
    let [q, k, v, d_out] = x;
    let tape = Tape::replay(saved, &[q, k, v], || attend([q, k, v]))?;
    let out = tape.output().clone();
    let grads = tape.backward(d_out)?;
    Ok([vec![out], [q, k, v].map(|x| grads.get(x).unwrap().clone()).to_vec()].concat())
}

/// Number of forwards before a backward.
#[derive(Clone, Copy, PartialEq)]
enum Forwards {
    One,
    /// A forward that saves attention's output, and another that replays it.
    Two,
}

/// Computes the same on `cp` times `sp` ranks and gathers the results; also returns the bytes that each rank sent to
/// single peers.
fn on_ranks(
    (cp, sp): (usize, usize),
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    dtype: DType,
    forwards: Forwards,
) -> (Vec<Tensor>, Vec<Vec<usize>>) {
    let n_ranks = cp * sp;
    let x = inputs(seqs.n_tokens(), dtype);
    let options = Options { timeout: Duration::from_secs(60), record: true };
    let ranks = threads::run(n_ranks, options, |world: &World| -> Result<_> {
        let mesh = Mesh::new(Degrees { cp, sp, ..Degrees::default() }, n_ranks).unwrap();
        let [context, heads] = [Axis::Cp, Axis::Sp].map(|axis| mesh.group(&*world.group(), &[axis]));
        let sequence = ContextParallel::new(context?, heads?);
        let partition = TokenPartition::new(seqs.n_tokens(), cp, sp);
        let rows = partition.rows(mesh.coordinate(world.rank(), Axis::Cp), mesh.coordinate(world.rank(), Axis::Sp));
        let [q, k, v, d_out] = x.each_ref().map(|x| select(x, &rows));
        let own = [q?, k?, v?, d_out?];
        let attend = |[q, k, v]: [&Tensor; 3]| sequence.attention(&AttentionCall { layer_idx: 0, q, k, v, seqs, spec });
        let saved = match forwards {
            Forwards::One => SavedOutputs::default(),
            Forwards::Two => save_outputs(OutputsToSave::All, || attend([&own[0], &own[1], &own[2]]))?.1,
        };
        let results = results(&own, saved, attend)?;
        let all = results.iter().map(|x| sequence.join(x, seqs.n_tokens())).collect::<Result<Vec<_>>>()?;
        let sends = world.calls().into_iter().filter(|call| call.op.name() == "send_recv");
        let bytes = sends.map(|call| {
            let n: usize = call.shape.iter().product();
            call.dtype.map_or(0, |dtype| n * dtype.size_in_bytes())
        });
        Ok((all, bytes.collect()))
    });
    let (mut all, bytes): (Vec<_>, Vec<_>) = ranks.unwrap().into_iter().unzip();
    (all.remove(0), bytes)
}

/// Returns the norm of the elements.
fn norm(x: &Tensor) -> f64 {
    x.to_dtype(DType::F64).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap().sqrt()
}

#[track_caller]
fn check(ranks: (usize, usize), lens: &[usize], window: Option<usize>, dtype: DType, bound: f64) {
    let (seqs, spec) = (packed(lens), spec(window));
    let want =
        results(&inputs(seqs.n_tokens(), dtype), SavedOutputs::default(), |[q, k, v]| attention(q, k, v, &seqs, &spec))
            .unwrap();
    let (got, _) = on_ranks(ranks, &seqs, &spec, dtype, Forwards::One);
    // With one key each, dq and dk are zero except for rounding.
    let floor = 0.1 * norm(&want[0]);
    for (what, (got, want)) in ["out", "dq", "dk", "dv"].iter().zip(got.iter().zip(&want)) {
        assert_eq!(got.dtype(), dtype);
        let [got, want] = [got, want].map(|x| x.to_dtype(DType::F64).unwrap());
        let error = norm(&(got - &want).unwrap()) / norm(&want).max(floor);
        assert!(error <= bound, "{what} of {lens:?} on {ranks:?}, window {window:?}, {dtype:?}: {error:e}");
    }
}

#[test]
fn attention_over_ranks_is_attention() {
    for ranks in [(2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 2), (3, 2), (2, 4)] {
        let n = ranks.0 * ranks.1;
        for lens in [vec![24 * n], vec![5, 8 * n - 7, 1, 0, 16 * n + 1], vec![3; 4 * n], vec![1; n]] {
            for window in [None, Some(1), Some(7), Some(30)] {
                check(ranks, &lens, window, DType::F32, 2e-6);
            }
        }
    }
}

/// Accumulation is in f32; the output and each gradient are rounded once.
#[test]
fn sixteen_bits_are_summed_in_f32() {
    for ranks in [(3, 1), (2, 2)] {
        check(ranks, &[50, 7, 15], None, DType::BF16, 2f64.powi(-9));
    }
}

/// Compares the sent bytes with docs/distributed.md: a causal mask needs 3/4 of all KV chunks, averaged over ranks.
#[test]
fn ring_attention_sends_three_quarters_of_all_kv_chunks() {
    let (_, g, k) = HEADS;
    for n in [2, 3, 4, 6] {
        let t = 8 * n;
        let kv = |tokens: usize, dtype: DType| 2 * tokens * g * k * dtype.size_in_bytes();
        let (_, bytes) = on_ranks((n, 1), &packed(&[t]), &spec(None), DType::BF16, Forwards::One);
        // Keys and values in forward and backward, and f32 gradients: half a rank's tokens per pair of ranks in one
        // direction, all of them in the other.
        let tokens = 3 * (n - 1) * t / 4;
        let want = 2 * kv(tokens, DType::BF16) + kv(tokens, DType::F32);
        assert_eq!(bytes.iter().flatten().sum::<usize>(), want, "{n} ranks");
        // Later ranks see early chunks; earlier ranks see both chunks.
        let first: usize = (n - 1) * t / n / 2;
        assert_eq!(bytes[0].iter().take(2 * (n - 1)).sum::<usize>(), kv(first, DType::BF16), "{n} ranks");
    }
}

/// Sequences that end with chunks, and sliding windows: chunks that no query sees are not sent.
#[test]
fn chunks_that_are_masked_everywhere_are_not_sent() {
    let n_messages = |lens: &[usize], window| -> Vec<usize> {
        let (_, bytes) = on_ranks((4, 1), &packed(lens), &spec(window), DType::F32, Forwards::One);
        bytes.iter().map(|bytes| bytes.iter().filter(|n| **n > 0).count()).collect()
    };
    assert_eq!(n_messages(&[8; 8], None), [0; 4]);
    // Each chunk sees the end of the previous one: of the chunks 0 1 2 3 | 3 2 1 0, all but one pair are on different
    // ranks. Keys are sent twice and gradients once.
    let sent = n_messages(&[64], Some(2));
    assert_eq!(sent.iter().sum::<usize>(), 3 * 6);
}

#[test]
fn a_second_forward_that_finds_its_output_sends_nothing() {
    for ranks in [(3, 1), (2, 2)] {
        let (seqs, spec) = (packed(&[50, 7, 15]), spec(None));
        let [once, twice] =
            [Forwards::One, Forwards::Two].map(|forwards| on_ranks(ranks, &seqs, &spec, DType::F32, forwards));
        let bits = |all: &[Tensor]| -> Vec<Vec<f32>> {
            all.iter().map(|x| x.flatten_all().unwrap().to_vec1().unwrap()).collect()
        };
        assert_eq!(bits(&once.0), bits(&twice.0));
        assert_eq!(once.1, twice.1);
    }
}
