use candle_core::{D, DType, Device, Result, Tensor};
use candlewick_ops::{AttentionChoice, AttentionImpl, AttentionSpec, CuSeqlens, attention};
use rand::Rng;
use rand::rngs::StdRng;

use crate::cases::{
    F32, OpCase, TestDevice, assert_close, assert_error, bits, check_each, randn, relative_error, rng, tape, values,
};

const FUSED: AttentionChoice = AttentionChoice { implementation: AttentionImpl::Fused, deterministic: false };
pub(crate) const CAUSAL: AttentionSpec = AttentionSpec { scale: 0.3, causal: true, window: None, choice: FUSED };
pub(crate) const BIDIRECTIONAL: AttentionSpec = AttentionSpec { causal: false, ..CAUSAL };

/// Sequence lengths, heads and mask of a test.
#[derive(Clone, Debug)]
pub(crate) struct AttentionCase {
    pub(crate) queries: Vec<usize>,
    pub(crate) keys: Vec<usize>,
    pub(crate) hq: usize,
    pub(crate) hkv: usize,
    pub(crate) dim: usize,
    pub(crate) spec: AttentionSpec,
}

impl AttentionCase {
    pub(crate) fn packed(lens: &[usize], (hq, hkv, dim): (usize, usize, usize), spec: AttentionSpec) -> Self {
        Self { queries: lens.to_vec(), keys: lens.to_vec(), hq, hkv, dim, spec }
    }

    pub(crate) fn seqs(&self) -> CuSeqlens {
        CuSeqlens::from_q_and_k(cumulative(&self.queries), cumulative(&self.keys)).unwrap()
    }

    pub(crate) fn inputs(&self) -> Vec<Tensor> {
        let (t, s) = (self.queries.iter().sum::<usize>(), self.keys.iter().sum::<usize>());
        let kv = (s, self.hkv, self.dim);
        vec![randn((t, self.hq, self.dim), 1), randn(kv, 2), randn(kv, 3)]
    }

    fn with_case(&self, check: impl Fn(&OpCase<'_>)) {
        let seqs = self.seqs();
        self.with_op("attention", &|x| attention(&x[0], &x[1], &x[2], &seqs, &self.spec), check);
    }

    /// Checks another implementation of the same attention.
    pub(crate) fn with_op(&self, name: &str, op: &dyn Fn(&[Tensor]) -> Result<Tensor>, check: impl Fn(&OpCase<'_>)) {
        check(&OpCase {
            name: &format!("{name} {self:?}"),
            inputs: self.inputs(),
            weights: vec![],
            op: &|x, _| op(x),
            reference: &|x| self.naive(&x[0], &x[1], &x[2]),
        });
    }

    /// Computes attention one sequence and head at a time, with all scores and a mask.
    fn naive(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (cu_q, cu_k) = (cumulative(&self.queries), cumulative(&self.keys));
        let mut outputs = Vec::new();
        for i in (0..self.queries.len()).filter(|&i| self.queries[i] > 0) {
            let mask = self.mask(i)?;
            let mut heads = Vec::new();
            for head in 0..self.hq {
                let pick = |x: &Tensor, head, cu: &[usize]| {
                    x.narrow(0, cu[i], cu[i + 1] - cu[i])?.narrow(1, head, 1)?.squeeze(1)
                };
                let kv_head = head / (self.hq / self.hkv);
                let (q, k) = (pick(q, head, &cu_q)?, pick(k, kv_head, &cu_k)?);
                let scores = (q.matmul(&k.t()?)? * f64::from(self.spec.scale))?;
                let scores = scores.add(&mask)?;
                let scores = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
                let p = scores.broadcast_div(&scores.sum_keepdim(D::Minus1)?)?;
                heads.push(p.matmul(&pick(v, kv_head, &cu_k)?)?);
            }
            outputs.push(Tensor::stack(&heads, 1)?);
        }
        Tensor::cat(&outputs, 0)
    }

    /// Returns true if a query sees a key, both counted within their sequence.
    pub(crate) fn sees(&self, sequence: usize, query: usize, key: usize) -> bool {
        let position = query + self.keys[sequence] - self.queries[sequence];
        let window = self.spec.window.unwrap_or(usize::MAX);
        (!self.spec.causal || key <= position) && position < window.saturating_add(key)
    }

    fn mask(&self, sequence: usize) -> Result<Tensor> {
        let (n_queries, n_keys) = (self.queries[sequence], self.keys[sequence]);
        let values: Vec<f64> = (0..n_queries)
            .flat_map(|query| (0..n_keys).map(move |key| if self.sees(sequence, query, key) { 0.0 } else { -1e30 }))
            .collect();
        Tensor::from_vec(values, (n_queries, n_keys), &Device::Cpu)
    }
}

pub(crate) fn cumulative(lens: &[usize]) -> Vec<usize> {
    let sums = lens.iter().scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}

pub(crate) fn window(window: usize) -> AttentionSpec {
    AttentionSpec { window: Some(window), ..CAUSAL }
}

/// Returns small setups, for tests in every dtype.
pub(crate) fn small() -> Vec<AttentionCase> {
    vec![
        AttentionCase::packed(&[150, 1, 0, 37], (6, 2, 16), CAUSAL),
        AttentionCase::packed(&[1], (1, 1, 1), CAUSAL),
        AttentionCase::packed(&[1, 1, 1], (4, 4, 5), CAUSAL),
        AttentionCase::packed(&[0, 40, 0], (2, 1, 7), BIDIRECTIONAL),
        AttentionCase::packed(&[5], (2, 2, 8), window(1)),
        AttentionCase::packed(&[30], (2, 2, 8), AttentionSpec { scale: -0.3, ..CAUSAL }),
        AttentionCase::packed(&[90], (2, 1, 8), AttentionSpec { window: Some(20), ..BIDIRECTIONAL }),
    ]
}

/// Returns setups that exceed one tile of something.
fn large() -> Vec<AttentionCase> {
    vec![
        AttentionCase::packed(&[300], (9, 3, 8), CAUSAL),
        AttentionCase::packed(&[200, 60], (4, 2, 8), window(5)),
        AttentionCase::packed(&[280], (2, 2, 8), window(130)),
        AttentionCase::packed(&[20], (140, 1, 4), CAUSAL),
    ]
}

fn of_all_dims() -> Vec<AttentionCase> {
    let of = |dim: usize| {
        let spec = AttentionSpec { scale: (dim as f32).powf(-0.5), ..CAUSAL };
        AttentionCase::packed(&[40, 3], (4, 2, dim), spec)
    };
    [36, 64, 80, 96, 128, 200, 256].map(of).into()
}

/// Returns setups with more keys than queries, as with a KV cache.
fn cached() -> Vec<AttentionCase> {
    let of =
        |spec| AttentionCase { keys: vec![140, 3, 12, 5], ..AttentionCase::packed(&[1, 3, 0, 2], (4, 2, 8), spec) };
    [CAUSAL, window(9), BIDIRECTIONAL].map(of).into()
}

/// Returns all of the above and some random setups.
pub(crate) fn setups() -> Vec<AttentionCase> {
    [small(), large(), of_all_dims(), cached(), drawn()].concat()
}

#[test]
fn it_equals_the_reference() {
    check_each(small(), |setup| {
        setup.with_case(|case| case.check_all_formats());
    });
    check_each(large(), |setup| {
        setup.with_case(|case| case.check(DType::F32));
    });
}

#[test]
fn heads_may_have_up_to_256_elements() {
    check_each(of_all_dims(), |setup| {
        setup.with_case(|case| [DType::F32, DType::BF16].into_iter().for_each(|dtype| case.check(dtype)));
    });
}

/// Sets the scale to 1 / sqrt(dim), as most models do.
fn scaled(dim: usize, spec: AttentionSpec) -> AttentionSpec {
    AttentionSpec { scale: (dim as f32).powf(-0.5), ..spec }
}

/// Covers tensor core tiles of 128 rows or 64 keys.
///
/// Sequences end just before, at and after a tile's edge. Some rows see none of a tile's first keys; some heads are
/// narrower than their kernel.
///
/// The bound of two roundings still holds: p or ds is rounded before a matmul, then its result.
#[test]
fn sixteen_bit_tiles_of_any_length_equal_the_reference() {
    let wide = AttentionSpec { window: Some(90), ..BIDIRECTIONAL };
    check_each(
        [
            (DType::BF16, 64, CAUSAL),
            (DType::F16, 80, window(65)),
            (DType::BF16, 96, wide),
            (DType::F16, 128, window(33)),
            (DType::BF16, 128, BIDIRECTIONAL),
        ],
        |(dtype, dim, spec)| {
            let setup = AttentionCase::packed(&[1, 17, 63, 64, 65, 130, 200], (1, 1, dim), scaled(dim, spec));
            setup.with_case(|case| case.check(dtype));
        },
    );
}

#[test]
fn sixteen_bit_tiles_of_head_groups_equal_the_reference() {
    check_each(
        [
            (DType::F16, 64, 3, window(20)),
            (DType::BF16, 80, 3, CAUSAL),
            (DType::F16, 96, 4, BIDIRECTIONAL),
            (DType::BF16, 128, 4, CAUSAL),
            (DType::F16, 128, 3, CAUSAL),
        ],
        |(dtype, dim, group, spec)| {
            let spec = scaled(dim, spec);
            AttentionCase::packed(&[17, 64, 65], (group, 1, dim), spec).with_case(|case| case.check(dtype));
            let cached =
                AttentionCase { keys: vec![130, 70], ..AttentionCase::packed(&[35, 6], (2 * group, 2, dim), spec) };
            cached.with_case(|case| case.check(dtype));
        },
    );
}

#[test]
fn two_runs_give_the_same_bits() {
    let setup = AttentionCase::packed(&[100, 41], (4, 2, 64), CAUSAL);
    check_each([DType::F32, DType::BF16, DType::F16], |dtype| {
        everywhere(&setup, |x| {
            let run = || {
                let x: Vec<Tensor> = x.iter().map(|x| x.to_dtype(dtype).unwrap()).collect();
                let tape = tape(&x, || attention(&x[0], &x[1], &x[2], &setup.seqs(), &setup.spec));
                let y = tape.output().clone();
                let grads = tape.backward(&y).unwrap();
                let grads = x.iter().map(|x| bits(grads.get(x).unwrap()));
                std::iter::once(bits(&y)).chain(grads).collect::<Vec<_>>()
            };
            assert!(run() == run(), "{dtype:?}");
        });
    });
}

/// A view may start at an address that is not aligned for tensor cores.
#[test]
fn a_view_equals_its_copy() {
    let setup = AttentionCase::packed(&[70], (2, 1, 64), CAUSAL);
    everywhere(&setup, |x| {
        let run = |x: &[Tensor]| attention(&x[0], &x[1], &x[2], &setup.seqs(), &setup.spec).unwrap();
        let copies: Vec<Tensor> = x.iter().map(|x| x.to_dtype(DType::BF16).unwrap()).collect();
        let views: Vec<Tensor> = copies.iter().map(shifted).collect();
        assert_eq!(bits(&run(&views)), bits(&run(&copies)));
    });
}

/// Returns the same values at an offset of one element into a buffer.
pub(crate) fn shifted(x: &Tensor) -> Tensor {
    let first = Tensor::zeros(1, x.dtype(), x.device()).unwrap();
    let all = Tensor::cat(&[&first, &x.flatten_all().unwrap()], 0).unwrap();
    all.narrow(0, 1, x.elem_count()).unwrap().reshape(x.shape()).unwrap()
}

#[test]
fn queries_stand_at_the_end_of_longer_keys() {
    check_each(cached(), |setup| {
        setup.with_case(|case| case.check(DType::F32));
    });
}

fn drawn() -> Vec<AttentionCase> {
    let mut rng = rng(4);
    let mut draw = || {
        let queries: Vec<usize> =
            (0..rng.random_range(1..5)).map(|_| rng.random_range(0..5) * rng.random_range(0..40)).collect();
        let cached = rng.random_bool(0.3);
        let extra = |rng: &mut StdRng| if cached { rng.random_range(0..150) } else { 0 };
        let keys = queries.iter().map(|len| len + extra(&mut rng)).collect();
        let hkv = rng.random_range(1..4);
        AttentionCase {
            queries,
            keys,
            hq: hkv * rng.random_range(1..4),
            hkv,
            dim: rng.random_range(1..20),
            spec: AttentionSpec {
                scale: rng.random_range(0.1..0.5),
                causal: rng.random_bool(0.7),
                window: rng.random_bool(0.5).then(|| rng.random_range(2..200)),
                choice: FUSED,
            },
        }
    };
    let drawn: Vec<AttentionCase> = (0..30).map(|_| draw()).collect();
    // With one key each, dq and dk are zero up to rounding; the table above covers that.
    drawn.into_iter().filter(|setup| setup.queries.iter().any(|&len| len > 1)).collect()
}

#[test]
fn random_shapes_equal_the_reference() {
    check_each(drawn(), |setup| {
        setup.with_case(|case| case.check(DType::F32));
    });
}

#[test]
fn the_gradient_is_the_slope() {
    check_each([CAUSAL, window(4)], |spec| {
        AttentionCase::packed(&[9, 4], (4, 2, 6), spec).with_case(|case| case.check_finite_difference());
    });
}

/// Runs a check on every device, with the inputs there.
fn everywhere(setup: &AttentionCase, check: impl Fn(&[Tensor])) {
    for test_device in TestDevice::all() {
        let inputs: Vec<Tensor> = setup.inputs().iter().map(|x| test_device.put(x)).collect();
        test_device.run(|| check(&inputs));
    }
}

#[test]
fn a_packed_sequence_equals_itself_alone() {
    let lens = [130, 20, 7];
    let setup = AttentionCase::packed(&lens, (4, 2, 8), CAUSAL);
    everywhere(&setup, |x| {
        let together = attention(&x[0], &x[1], &x[2], &setup.seqs(), &CAUSAL).unwrap();
        let mut start = 0;
        for len in lens {
            let x: Vec<Tensor> = x.iter().map(|x| x.narrow(0, start, len).unwrap()).collect();
            let seqs = CuSeqlens::packed(vec![0, len]).unwrap();
            let alone = attention(&x[0], &x[1], &x[2], &seqs, &CAUSAL).unwrap();
            assert_eq!(bits(&together.narrow(0, start, len).unwrap()), bits(&alone));
            start += len;
        }
    });
}

#[test]
fn decoding_step_by_step_equals_one_pass() {
    let setup = AttentionCase::packed(&[40], (4, 2, 8), window(11));
    everywhere(&setup, |x| {
        let whole = attention(&x[0], &x[1], &x[2], &setup.seqs(), &setup.spec).unwrap();
        for position in 0..40 {
            let seqs = CuSeqlens::from_q_and_k(vec![0, 1], vec![0, position + 1]).unwrap();
            let q = x[0].narrow(0, position, 1).unwrap();
            let seen = |x: &Tensor| x.narrow(0, 0, position + 1).unwrap();
            let step = attention(&q, &seen(&x[1]), &seen(&x[2]), &seqs, &setup.spec).unwrap();
            assert_close("step", &step, &whole.narrow(0, position, 1).unwrap(), F32);
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    let setup = AttentionCase::packed(&[20], (2, 1, 4), AttentionSpec { scale: 1e4, ..CAUSAL });
    let exact: Vec<Tensor> = setup.inputs().iter().map(|x| x.to_dtype(DType::F64).unwrap()).collect();
    let want = setup.naive(&exact[0], &exact[1], &exact[2]).unwrap();
    everywhere(&setup, |x| {
        let y = attention(&x[0], &x[1], &x[2], &setup.seqs(), &setup.spec).unwrap();
        // Scores of 1e4 carry an absolute error of 1e-3 in f32, and so do the probabilities' logs.
        assert!(relative_error(&y, &want, 0.0) < 1e-2);
    });
}

#[test]
fn a_nan_is_passed_on() {
    let setup = AttentionCase::packed(&[3], (1, 1, 2), CAUSAL);
    everywhere(&setup, |x| {
        let q = Tensor::new(&[0f32, 0.0, f32::NAN, 0.0, 0.0, 0.0], x[0].device()).unwrap();
        let y = attention(&q.reshape((3, 1, 2)).unwrap(), &x[1], &x[2], &setup.seqs(), &CAUSAL).unwrap();
        let nan: Vec<bool> = values(&y).iter().map(|y| y.is_nan()).collect();
        assert_eq!(nan, [false, false, true, true, false, false]);
    });
}

#[test]
fn only_empty_sequences_give_an_empty_output() {
    let setup = AttentionCase::packed(&[0, 0], (2, 1, 4), CAUSAL);
    everywhere(&setup, |x| {
        let tape = tape(x, || attention(&x[0], &x[1], &x[2], &setup.seqs(), &CAUSAL));
        let y = tape.output().clone();
        assert_eq!(y.dims(), [0, 2, 4]);
        tape.backward(&y).unwrap();
    });
}

#[test]
fn wrong_sequences_are_named() {
    assert_error(CuSeqlens::packed(vec![]), "must start with 0, got None");
    assert_error(CuSeqlens::packed(vec![1, 2]), "must start with 0, got Some(1)");
    assert_error(CuSeqlens::packed(vec![0, 3, 2]), "number 1 end at 2 but start at 3");
    assert_error(CuSeqlens::from_q_and_k(vec![0, 1], vec![0, 1, 2]), "1 of queries but 2 of keys");
    assert_error(CuSeqlens::from_q_and_k(vec![0, 3], vec![0, 2]), "number 0 has 3 queries but only 2 keys");
}

#[test]
fn wrong_shapes_are_named() {
    let seqs = CuSeqlens::packed(vec![0, 5]).unwrap();
    let run =
        |q: &[usize], k: &[usize], v: &[usize], spec| attention(&randn(q, 1), &randn(k, 2), &randn(v, 3), &seqs, spec);
    assert_error(run(&[5, 4], &[5, 2, 3], &[5, 2, 3], &CAUSAL), "want q [t, hq, k]");
    assert_error(run(&[5, 4, 3], &[5, 3, 3], &[5, 3, 3], &CAUSAL), "4 query heads");
    assert_error(run(&[5, 4, 3], &[5, 2, 4], &[5, 2, 4], &CAUSAL), "q is [5, 4, 3], k [5, 2, 4]");
    assert_error(run(&[6, 4, 3], &[6, 2, 3], &[6, 2, 3], &CAUSAL), "the sequences hold 5 queries");
    assert_error(run(&[5, 4, 3], &[5, 2, 3], &[5, 2, 3], &window(0)), "a window of 0");
    let half = randn((5, 2, 3), 1).to_dtype(DType::BF16).unwrap();
    let mixed = attention(&randn((5, 2, 3), 1), &half, &half, &seqs, &CAUSAL);
    assert_error(mixed, "q is F32 but k is BF16");
}
