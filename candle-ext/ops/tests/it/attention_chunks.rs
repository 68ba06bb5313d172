//! Attention chunk by chunk equals attention in one call.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use candlewick_ops::{
    AttentionChoice, AttentionImpl, AttentionSpec, ChunkInputs, CuSeqlens, PartialSoftmax, attention, attention_chunk,
    attention_chunk_backward, record,
};
use rand::Rng;
use rand::rngs::StdRng;

use crate::attention::{AttentionCase, BIDIRECTIONAL, CAUSAL, cumulative, setups, small, window};
use crate::cases::{
    F32, TestDevice, assert_close, assert_close_above, assert_error, bits, check_each, norm, randn, rng, tape, values,
};

/// Positions at which queries and keys are split into chunks.
struct Cuts {
    queries: Vec<Range<usize>>,
    keys: Vec<Range<usize>>,
}

impl Cuts {
    /// Draws `n_cuts` positions each, anywhere: chunks may be empty, or start and end within sequences.
    fn draw(setup: &AttentionCase, n_cuts: usize, rng: &mut StdRng) -> Self {
        let mut cut = |n: usize| {
            let mut ends: Vec<usize> = (0..n_cuts).map(|_| rng.random_range(0..=n)).collect();
            ends.extend([0, n]);
            ends.sort_unstable();
            ends.windows(2).map(|pair| pair[0]..pair[1]).collect()
        };
        Self { queries: cut(setup.queries.iter().sum()), keys: cut(setup.keys.iter().sum()) }
    }

    fn pairs(&self) -> impl Iterator<Item = (&Range<usize>, &Range<usize>)> {
        self.queries.iter().flat_map(|queries| self.keys.iter().map(move |keys| (queries, keys)))
    }
}

fn rows(x: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    x.narrow(0, range.start, range.len())
}

/// Returns the merged outputs of all chunks that are not fully masked.
fn merged(x: &[Tensor], setup: &AttentionCase, cuts: &Cuts) -> Result<PartialSoftmax> {
    let (seqs, sum) = (setup.seqs(), PartialSoftmax::empty(&x[0])?);
    for (queries, keys) in cuts.pairs() {
        let piece = seqs.chunk(queries.clone(), keys.clone())?;
        if !piece.is_fully_masked(&setup.spec) {
            let (q, k, v) = (rows(&x[0], queries)?, rows(&x[1], keys)?, rows(&x[2], keys)?);
            let part = attention_chunk(&q, &k, &v, &piece, &setup.spec)?;
            sum.rows(queries.start, queries.len())?.merge(&part)?;
        }
    }
    Ok(sum)
}

/// Computes attention in chunks, forward and backward, as one op.
fn in_pieces(x: &[Tensor], setup: &AttentionCase, cuts: Cuts) -> Result<Tensor> {
    let sum = merged(x, setup, &cuts)?;
    let out = sum.out().to_dtype(x[0].dtype())?;
    let (setup, saved, all) = (setup.clone(), x.to_vec(), out.clone());
    Ok(record("pieces", [(&x[0]).into(), (&x[1]).into(), (&x[2]).into()], out, move |d_out, _| {
        let [dq, dk, dv] = [0, 1, 2].map(|i| Tensor::zeros(saved[i].shape(), DType::F32, saved[i].device()));
        let grads = [dq?, dk?, dv?];
        for (queries, keys) in cuts.pairs() {
            let piece = setup.seqs().chunk(queries.clone(), keys.clone())?;
            let of_keys = [&saved[1], &saved[2], &grads[1], &grads[2]].map(|x| rows(x, keys));
            let [k, v, dk, dv] = of_keys;
            let of_queries = [&saved[0], &all, sum.lse(), d_out, &grads[0]].map(|x| rows(x, queries));
            let [q, out, lse, d_out, dq] = of_queries;
            let (q, k, v, out, lse, d_out) = (&q?, &k?, &v?, &out?, &lse?, &d_out?);
            let inputs = ChunkInputs { q, k, v, out, lse, d_out };
            attention_chunk_backward(&inputs, &piece, &setup.spec, [&dq?, &dk?, &dv?])?;
        }
        let [dq, dk, dv] = grads.map(|grad| grad.to_dtype(saved[0].dtype()));
        Ok([Some(dq?), Some(dk?), Some(dv?)])
    }))
}

/// Returns the output and the gradients of q, k and v for a random upstream gradient.
fn results(x: &[Tensor], op: impl FnOnce() -> Result<Tensor>) -> Vec<Tensor> {
    let tape = tape(x, op);
    let y = tape.output().clone();
    let grads = tape.backward(&randn(y.shape(), 99)).unwrap();
    std::iter::once(y).chain(x.iter().map(|x| grads.get(x).unwrap().clone())).collect()
}

#[test]
fn chunks_cut_anywhere_equal_the_whole_sequence() {
    check_each(setups().iter().enumerate(), |(seed, setup)| {
        let x = setup.inputs();
        let whole = results(&x, || attention(&x[0], &x[1], &x[2], &setup.seqs(), &setup.spec));
        let floor = 0.1 * norm(&whole[0]);
        for draw in 0..10 {
            let cuts = Cuts::draw(setup, draw as usize % 4, &mut rng(10 * seed as u64 + draw));
            let pieces = results(&x, || in_pieces(&x, setup, cuts));
            for (what, (got, want)) in ["y", "dq", "dk", "dv"].iter().zip(pieces.iter().zip(&whole)) {
                assert_close_above(&format!("{what} of {draw} of {setup:?}"), got, want, F32, floor);
            }
        }
    });
}

#[test]
fn chunks_equal_the_reference_in_every_dtype() {
    let formats = [DType::F32, DType::BF16, DType::F16];
    check_each(small().iter().zip(formats.into_iter().cycle()).enumerate(), |(seed, (setup, dtype))| {
        let op = |x: &[Tensor]| in_pieces(x, setup, Cuts::draw(setup, 1, &mut rng(seed as u64)));
        setup.with_op("pieces", &op, |case| case.check(dtype));
    });
}

#[test]
fn chunks_of_many_tiles_equal_the_reference() {
    check_each(
        [
            (DType::F32, 8, CAUSAL),
            (DType::BF16, 64, window(70)),
            (DType::F16, 96, BIDIRECTIONAL),
            (DType::BF16, 128, CAUSAL),
        ],
        |(dtype, dim, spec)| {
            let spec = AttentionSpec { scale: (dim as f32).powf(-0.5), ..spec };
            let setup = AttentionCase::packed(&[17, 200], (2, 1, dim), spec);
            let op = |x: &[Tensor]| in_pieces(x, &setup, Cuts::draw(&setup, 1, &mut rng(dim as u64)));
            setup.with_op("pieces", &op, |case| case.check(dtype));
        },
    );
}

/// Returns each row's log-sum-exp.
fn log_sum_exp(setup: &AttentionCase, q: &Tensor, k: &Tensor) -> Tensor {
    let (cu_q, cu_k) = (cumulative(&setup.queries), cumulative(&setup.keys));
    let (q, k) = (values(q), values(k));
    let dot = |a: usize, b: usize| (0..setup.dim).map(|i| q[a * setup.dim + i] * k[b * setup.dim + i]).sum::<f64>();
    let mut lse = Vec::new();
    for sequence in 0..setup.queries.len() {
        for query in 0..setup.queries[sequence] {
            for head in 0..setup.hq {
                let score = |key: usize| {
                    let key_head = head / (setup.hq / setup.hkv);
                    let row = (cu_k[sequence] + key) * setup.hkv + key_head;
                    f64::from(setup.spec.scale) * dot((cu_q[sequence] + query) * setup.hq + head, row)
                };
                let seen = (0..setup.keys[sequence]).filter(|key| setup.sees(sequence, query, *key));
                lse.push(seen.map(|key| score(key).exp()).sum::<f64>().ln());
            }
        }
    }
    Tensor::from_vec(lse, (q.len() / setup.hq / setup.dim, setup.hq), &Device::Cpu).unwrap()
}

#[test]
fn the_log_sum_exp_is_that_of_all_chunks() {
    check_each(small().iter().enumerate(), |(seed, setup)| {
        let x = setup.inputs();
        let want = log_sum_exp(setup, &x[0], &x[1]);
        let cuts = Cuts::draw(setup, 2, &mut rng(seed as u64));
        for test_device in TestDevice::all() {
            let x: Vec<Tensor> = x.iter().map(|x| test_device.put(x)).collect();
            let sum = test_device.run(|| merged(&x, setup, &cuts).unwrap());
            assert_close(&format!("{test_device:?} {setup:?}"), sum.lse(), &want, F32);
        }
    });
}

#[test]
fn a_chunk_is_fully_masked_if_no_query_sees_a_key() {
    let mut rng = rng(7);
    let (mut n_hidden, mut n_seen) = (0, 0);
    for setup in setups() {
        let (cu_q, cu_k) = (cumulative(&setup.queries), cumulative(&setup.keys));
        for _ in 0..20 {
            let cuts = Cuts::draw(&setup, 2, &mut rng);
            for (queries, keys) in cuts.pairs() {
                let sees = (0..setup.queries.len()).any(|i| {
                    let mut of_queries = (cu_q[i]..cu_q[i + 1]).filter(|at| queries.contains(at));
                    let of_keys = |query| {
                        let mut of_keys = (cu_k[i]..cu_k[i + 1]).filter(|at| keys.contains(at));
                        of_keys.any(|key| setup.sees(i, query - cu_q[i], key - cu_k[i]))
                    };
                    of_queries.any(of_keys)
                });
                let piece = setup.seqs().chunk(queries.clone(), keys.clone()).unwrap();
                assert_eq!(piece.is_fully_masked(&setup.spec), !sees, "{queries:?} {keys:?} of {setup:?}");
                *(if sees { &mut n_seen } else { &mut n_hidden }) += 1;
            }
        }
    }
    assert!(n_hidden > 1000 && n_seen > 1000, "{n_hidden} {n_seen}");
}

/// Covers the second sequence's keys with the first one's queries, later queries, and queries beyond the window.
#[test]
fn a_fully_masked_chunk_contributes_nothing() {
    let setup = AttentionCase::packed(&[150, 140], (4, 2, 64), window(9));
    check_each([(0..150, 150..290), (0..70, 80..150), (100..150, 0..80), (150..290, 0..150)], |(queries, keys)| {
        for dtype in [DType::F32, DType::BF16] {
            for test_device in TestDevice::all() {
                let x: Vec<Tensor> =
                    setup.inputs().iter().map(|x| test_device.put(&x.to_dtype(dtype).unwrap())).collect();
                let piece = setup.seqs().chunk(queries.clone(), keys.clone()).unwrap();
                assert!(piece.is_fully_masked(&setup.spec));
                let (q, k, v) = (rows(&x[0], &queries), rows(&x[1], &keys), rows(&x[2], &keys));
                let (q, k, v) = (q.unwrap(), k.unwrap(), v.unwrap());
                let part = test_device.run(|| attention_chunk(&q, &k, &v, &piece, &setup.spec)).unwrap();
                assert!(values(part.out()).iter().all(|x| *x == 0.0), "{test_device:?}");
                assert!(values(part.lse()).iter().all(|x| *x == f64::NEG_INFINITY), "{test_device:?}");
                let sum = PartialSoftmax::empty(&q).unwrap();
                test_device.run(|| sum.merge(&part)).unwrap();
                assert!(values(sum.out()).iter().all(|x| *x == 0.0), "{test_device:?}");
                assert!(values(sum.lse()).iter().all(|x| *x == f64::NEG_INFINITY), "{test_device:?}");

                let finite = Tensor::zeros(part.lse().shape(), DType::F32, q.device()).unwrap();
                let inputs = ChunkInputs { q: &q, k: &k, v: &v, out: &q, lse: &finite, d_out: &q };
                let grads = [&q, &k, &v].map(|x| x.ones_like().unwrap().to_dtype(DType::F32).unwrap());
                test_device.run(|| attention_chunk_backward(&inputs, &piece, &setup.spec, grads.each_ref())).unwrap();
                assert!(grads.iter().all(|grad| values(grad).iter().all(|x| *x == 1.0)), "{test_device:?}");
            }
        }
    });
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]
fn a_nan_is_merged() {
    let setup = AttentionCase::packed(&[4], (1, 1, 2), CAUSAL);
    for test_device in TestDevice::all() {
        let x: Vec<Tensor> = setup.inputs().iter().map(|x| test_device.put(x)).collect();
        let k = Tensor::new(&[[[0f32, 0.0]], [[0.0, 0.0]], [[f32::NAN, 0.0]], [[0.0, 0.0]]], x[1].device()).unwrap();
        let cuts = Cuts { queries: vec![0..4], keys: vec![0..2, 2..3, 3..4] };
        let sum = test_device.run(|| merged(&[x[0].clone(), k, x[2].clone()], &setup, &cuts)).unwrap();
        let nan: Vec<bool> = values(sum.out()).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nan, [false, false, false, false, true, true, true, true], "{test_device:?}");
    }
}

#[test]
fn one_chunk_of_the_whole_sequence_gives_the_bits_of_attention() {
    let setup = AttentionCase::packed(&[130, 7, 0, 41], (4, 2, 64), CAUSAL);
    for test_device in TestDevice::all() {
        let x: Vec<Tensor> = setup.inputs().iter().map(|x| test_device.put(x)).collect();
        let run =
            |x: &[Tensor]| attention_chunk(&x[0], &x[1], &x[2], &setup.seqs().chunk(0..178, 0..178)?, &setup.spec);
        let piece = test_device.run(|| run(&x)).unwrap();
        let whole = test_device.run(|| attention(&x[0], &x[1], &x[2], &setup.seqs(), &setup.spec)).unwrap();
        assert_eq!(bits(piece.out()), bits(&whole), "{test_device:?}");
    }
}

#[test]
fn wrong_chunks_are_named() {
    let seqs = CuSeqlens::packed(vec![0, 5]).unwrap();
    assert_error(seqs.chunk(3..6, 0..5), "a chunk of the queries 3..6, but there are 5");
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = seqs.chunk(0..5, 4..2);
    assert_error(reversed, "a chunk of the keys 4..2, but there are 5");
    let (piece, q) = (seqs.chunk(0..5, 0..3).unwrap(), randn((5, 2, 4), 1));
    let k = q.narrow(0, 0, 3).unwrap();
    assert_error(attention_chunk(&q, &q, &q, &piece, &CAUSAL), "the sequences hold 5 queries and 3 keys");
    for implementation in [AttentionImpl::Reference, AttentionImpl::Cudnn] {
        let spec = AttentionSpec { choice: AttentionChoice { implementation, deterministic: false }, ..CAUSAL };
        assert_error(attention_chunk(&q, &k, &k, &piece, &spec), "cannot compute a chunk of the keys; `fused` can");
    }
    let part = attention_chunk(&q, &k, &k, &piece, &CAUSAL).unwrap();
    assert_error(part.rows(0, 4).unwrap().merge(&part), "F32 [5, 2, 4] into F32 [4, 2, 4]");
    assert_error(part.merge(&part.rows(0, 5).unwrap()), "share their memory");
    let inputs = ChunkInputs { q: &q, k: &k, v: &k, out: &q, lse: part.lse(), d_out: &k };
    let grads = [&q, &k, &k];
    assert_error(
        attention_chunk_backward(&inputs, &piece, &CAUSAL, grads),
        "d_out is F32 [3, 2, 4], but q F32 [5, 2, 4]",
    );
    let inputs = ChunkInputs { d_out: &q, ..inputs };
    assert_error(
        attention_chunk_backward(&inputs, &piece, &CAUSAL, [&q, &q, &k]),
        "dk is F32 [5, 2, 4], want F32 [3, 2, 4]",
    );
    let inputs = ChunkInputs { lse: &q, ..inputs };
    assert_error(attention_chunk_backward(&inputs, &piece, &CAUSAL, grads), "lse is [5, 2, 4], want [5, 2]");
}
