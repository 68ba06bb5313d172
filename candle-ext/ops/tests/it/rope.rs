use candle_core::{DType, Tensor};
use candlewick_ops::{
    AttentionChoice, AttentionSpec, CuSeqlens, QkNorms, QkvHeads, Weight, attention, reshape, rms_norm, rms_norm_rope,
    rope, split_qkv,
};

use crate::cases::{OpCase, TestDevice, assert_error, bits, check_each, grad_of, randn, tape, trainable};

fn tables(t: usize, half: usize) -> (Tensor, Tensor) {
    let angle = randn((t, half), 7);
    (angle.cos().unwrap(), angle.sin().unwrap())
}

fn case((t, h, k): (usize, usize, usize), check: impl Fn(&OpCase<'_>)) {
    partial_case((t, h, k), k, check);
}

/// Runs a case in which the first `r` elements of a head are rotated.
fn partial_case((t, h, k): (usize, usize, usize), r: usize, check: impl Fn(&OpCase<'_>)) {
    let (cos, sin) = tables(t, r / 2);
    check(&OpCase {
        name: "rope",
        inputs: vec![randn((t, h, k), 1)],
        weights: vec![],
        op: &|x, _| rope(&x[0], &cos.to_device(x[0].device())?, &sin.to_device(x[0].device())?),
        reference: &|a| {
            let wide = |table: &Tensor| table.to_dtype(DType::F64)?.unsqueeze(1);
            let (cos, sin) = (wide(&cos)?, wide(&sin)?);
            let (x, y) = (a[0].narrow(2, 0, r / 2)?, a[0].narrow(2, r / 2, r / 2)?);
            let rest = a[0].narrow(2, r, k - r)?;
            let left = (x.broadcast_mul(&cos)? - y.broadcast_mul(&sin)?)?;
            let right = (y.broadcast_mul(&cos)? + x.broadcast_mul(&sin)?)?;
            Tensor::cat(&[left, right, rest], 2)
        },
    });
}

#[test]
fn it_equals_the_reference() {
    check_each([(300, 3, 64), (1, 1, 2), (17, 9, 10), (5, 32, 128)], |shape| {
        case(shape, |case| case.check_all_formats());
    });
}

#[test]
fn the_gradient_is_the_slope() {
    case((5, 2, 6), |case| case.check_finite_difference());
}

#[test]
fn elements_without_an_angle_are_copied() {
    for (shape, r) in [((300, 3, 64), 32), ((5, 2, 128), 64), ((7, 3, 10), 4), ((3, 2, 6), 2), ((2, 1, 24), 16)] {
        partial_case(shape, r, |case| case.check_all_formats());
    }
    partial_case((5, 2, 6), 4, |case| case.check_finite_difference());
}

#[test]
fn no_tokens_give_no_tokens() {
    let (cos, sin) = tables(0, 2);
    assert_eq!(rope(&randn((0, 3, 4), 1), &cos, &sin).unwrap().dims(), [0, 3, 4]);
}

#[test]
fn wrong_shapes_are_named() {
    let (cos, sin) = tables(5, 2);
    assert_error(rope(&randn((5, 1, 3), 1), &cos, &sin), "even k");
    assert_error(rope(&randn((4, 1, 4), 1), &cos, &sin), "cos is F32 [5, 2], want f32 [4, 2]");
    assert_error(rope(&randn((5, 1, 2), 1), &cos, &sin), "cos is F32 [5, 2], want f32 [5, 1]");
    let narrow = sin.narrow(1, 0, 1).unwrap();
    assert_error(rope(&randn((5, 1, 4), 1), &cos, &narrow), "sin is F32 [5, 1], want f32 [5, 2]");
    let half = sin.to_dtype(DType::BF16).unwrap();
    assert_error(rope(&randn((5, 1, 4), 1), &cos, &half), "sin is BF16");
}

/// Heads of a fused projection, and what the split computes of them.
#[derive(Clone, Copy, Debug)]
struct SplitCase {
    heads: QkvHeads,
    /// Rotated elements of a head.
    rotary_dim: usize,
    n_tokens: usize,
    dtype: DType,
    norms: Norms,
}

/// QK norms.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Norms {
    None,
    Frozen,
    Trained,
}

/// Computation of the heads of an input.
#[derive(Clone, Copy, PartialEq)]
enum SplitBy {
    /// One op, over the joined rows.
    SplitQkv,
    /// A norm and a rotation for queries and for keys, each of its own rows.
    Ops,
    /// An op for queries and for keys, which norms and rotates.
    NormRope,
}

impl SplitCase {
    /// Returns the weights of the norms on a device.
    fn weights(&self, test_device: &TestDevice) -> Option<[Weight; 2]> {
        let value = |seed| test_device.put(&randn(self.heads.dim, seed).to_dtype(self.dtype).unwrap());
        match self.norms {
            Norms::None => None,
            Norms::Frozen => Some([8, 9].map(|seed| Weight::frozen(value(seed)))),
            Norms::Trained => Some([8, 9].map(|seed| trainable(&value(seed)))),
        }
    }

    /// Returns the bits of attention over the heads, and of the gradients of the input and of the norms.
    fn results(&self, test_device: &TestDevice, by: SplitBy) -> Vec<Vec<u64>> {
        const EPS: f64 = 1e-3;
        let QkvHeads { n_q, n_kv, dim } = self.heads;
        let put = |x: &Tensor| test_device.put(&x.to_dtype(self.dtype).unwrap().contiguous().unwrap());
        let joined = randn((self.n_tokens, (n_q + 2 * n_kv) * dim), 1);
        let narrow = |first: usize, n: usize| put(&joined.narrow(1, first * dim, n * dim).unwrap());
        let inputs = match by {
            SplitBy::SplitQkv => vec![put(&joined)],
            SplitBy::Ops | SplitBy::NormRope => vec![narrow(0, n_q), narrow(n_q, n_kv), narrow(n_q + n_kv, n_kv)],
        };
        let (cos, sin) = tables(self.n_tokens, self.rotary_dim / 2);
        let (cos, sin, dy) = (test_device.put(&cos), test_device.put(&sin), put(&randn((self.n_tokens, n_q, dim), 3)));
        let spec = AttentionSpec { scale: 0.3, causal: true, window: None, choice: AttentionChoice::default() };
        let seqs = CuSeqlens::packed(vec![0, self.n_tokens / 2, self.n_tokens]).unwrap();
        let weights = self.weights(test_device);
        let rotated = |x: &Tensor, n: usize, i: usize| {
            let x = reshape(x, (self.n_tokens, n, dim))?;
            match &weights {
                Some(weights) if by == SplitBy::NormRope => rms_norm_rope(&x, &weights[i], EPS, &cos, &sin),
                Some(weights) => rope(&rms_norm(&x, &weights[i], EPS)?, &cos, &sin),
                None => rope(&x, &cos, &sin),
            }
        };
        let norms = weights.as_ref().map(|[q, k]| QkNorms { weights: [q, k], eps: EPS });
        test_device.run(|| {
            let tape = tape(&inputs, || {
                let [q, k, v] = match inputs.as_slice() {
                    [joined] => split_qkv(joined, self.heads, norms, &cos, &sin)?,
                    parts => {
                        let v = reshape(&parts[2], (self.n_tokens, n_kv, dim))?;
                        [rotated(&parts[0], n_q, 0)?, rotated(&parts[1], n_kv, 1)?, v]
                    }
                };
                attention(&q, &k, &v, &seqs, &spec)
            });
            let y = bits(tape.output());
            let grads = tape.backward(&dy).unwrap();
            let grads: Vec<Tensor> = inputs.iter().map(|x| grads.get(x).unwrap().clone()).collect();
            let of_norms = weights.iter().flatten().filter(|_| self.norms == Norms::Trained).map(|w| bits(&grad_of(w)));
            [y, bits(&Tensor::cat(&grads, 1).unwrap())].into_iter().chain(of_norms).collect()
        })
    }

    /// Compares one op over joined rows, and one op for each part, with the separate ops.
    #[track_caller]
    fn check(&self) {
        for test_device in TestDevice::all() {
            let want = self.results(&test_device, SplitBy::Ops);
            assert!(want.iter().flatten().all(|bits| f64::from_bits(*bits).is_finite()), "{self:?} {test_device:?}");
            for by in [SplitBy::SplitQkv, SplitBy::NormRope] {
                for (i, (got, want)) in self.results(&test_device, by).iter().zip(&want).enumerate() {
                    assert!(got == want, "result {i} of {self:?} on {test_device:?}");
                }
            }
        }
    }
}

#[test]
fn heads_of_a_joined_projection_have_the_bits_of_their_own() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (n_q, n_kv, dim) in [(6, 2, 64), (3, 1, 6), (2, 2, 16)] {
            for rotary_dim in [dim, dim / 4 * 2] {
                let heads = QkvHeads { n_q, n_kv, dim };
                SplitCase { heads, rotary_dim, n_tokens: 70, dtype, norms: Norms::None }.check();
            }
        }
    }
}

#[test]
fn normed_heads_of_a_joined_projection_have_the_bits_of_a_norm_and_a_rotation() {
    let dims = [(64, 64), (80, 80), (96, 48), (128, 128), (256, 64), (256, 256), (24, 8), (10, 6), (6, 6), (128, 40)];
    check_each(dims, |(dim, rotary_dim)| {
        for (dtype, norms, n_q, n_kv, n_tokens) in [
            (DType::F32, Norms::Trained, 3, 1, 21),
            (DType::BF16, Norms::Trained, 4, 2, 21),
            (DType::BF16, Norms::Frozen, 1, 1, 3),
            (DType::F16, Norms::Trained, 2, 2, 9),
        ] {
            SplitCase { heads: QkvHeads { n_q, n_kv, dim }, rotary_dim, n_tokens, dtype, norms }.check();
        }
    });
}

#[test]
fn the_gradient_of_a_norm_sums_more_heads_than_a_grid_has_groups() {
    for dtype in [DType::F32, DType::BF16] {
        let heads = QkvHeads { n_q: 36, n_kv: 1, dim: 128 };
        SplitCase { heads, rotary_dim: 128, n_tokens: 120, dtype, norms: Norms::Trained }.check();
    }
}

#[test]
fn a_norm_and_a_rotation_equal_the_reference() {
    check_each([(30, 3, 64), (1, 1, 2), (17, 2, 10)], |(t, h, k)| {
        let (cos, sin) = tables(t, k / 2);
        let case = OpCase {
            name: "rms_norm_rope",
            inputs: vec![randn((t, h, k), 1)],
            weights: vec![randn(k, 2)],
            op: &|x, w| {
                let [cos, sin] = [&cos, &sin].map(|table| table.to_device(x[0].device()).unwrap());
                rms_norm_rope(&x[0], &w[0], 1e-5, &cos, &sin)
            },
            reference: &|a| {
                let mean = (a[0].sqr()?.mean_keepdim(2)? + 1e-5)?;
                let y = a[0].broadcast_div(&mean.sqrt()?)?.broadcast_mul(&a[1])?;
                let [cos, sin] = [&cos, &sin].map(|table| table.to_dtype(DType::F64).unwrap().unsqueeze(1).unwrap());
                let (left, right) = (y.narrow(2, 0, k / 2)?, y.narrow(2, k / 2, k / 2)?);
                let turned = (left.broadcast_mul(&cos)? - right.broadcast_mul(&sin)?)?;
                Tensor::cat(&[turned, (right.broadcast_mul(&cos)? + left.broadcast_mul(&sin)?)?], 2)
            },
        };
        case.check(DType::F32);
    });
}

/// A layer's heads take one launch in each pass. Backward also copies the values for attention, and sums the gradients of norms.
#[test]
#[cfg(not(feature = "cuda"))]
fn normed_heads_take_one_launch_in_each_pass() {
    let half = |x: Tensor| x.to_dtype(DType::BF16).unwrap();
    let heads = QkvHeads { n_q: 4, n_kv: 2, dim: 128 };
    let ((cos, sin), x) = (tables(9, 64), half(randn((9, 8 * 128), 1)));
    let weights = [8, 9].map(|seed| trainable(&half(randn(128, seed))));
    let norms = QkNorms { weights: [&weights[0], &weights[1]], eps: 1e-6 };
    let (seqs, spec) = (
        CuSeqlens::packed(vec![0, 9]).unwrap(),
        AttentionSpec { scale: 0.3, causal: true, window: None, choice: AttentionChoice::default() },
    );
    let attend = |[q, k, v]: [Tensor; 3]| attention(&q, &k, &v, &seqs, &spec);
    let of_split = |work: candlewick_ops::EmulatedWork| -> Vec<String> {
        const OWN: [&str; 6] = ["split_", "join_grads_", "add_parts_", "rotate_", "forward_1_", "backward_1_"];
        let is_own = |name: &String| OWN.iter().any(|own| name.starts_with(own));
        work.launches.into_iter().filter(is_own).collect()
    };
    let inputs = [x];
    let (recorded, forward) = candlewick_ops::emulate_counted(|| {
        tape(&inputs, || attend(split_qkv(&inputs[0], heads, Some(norms), &cos, &sin)?))
    });
    assert_eq!(of_split(forward), ["split_1_bf16"]);
    let (_, backward) = candlewick_ops::emulate_counted(|| recorded.backward(&half(randn((9, 4, 128), 5))).unwrap());
    assert_eq!(of_split(backward), ["rotate_bf16", "join_grads_1_bf16", "add_parts_f32", "add_parts_f32"]);
    let apart = || {
        let heads =
            |first: usize, n: usize| reshape(&inputs[0].narrow(1, first * 128, n * 128)?.contiguous()?, (9, n, 128));
        let normed = |x: Tensor, i: usize| rope(&rms_norm(&x, &weights[i], 1e-6)?, &cos, &sin);
        attend([normed(heads(0, 4)?, 0)?, normed(heads(4, 2)?, 1)?, heads(6, 2)?])
    };
    let (_, forward) = candlewick_ops::emulate_counted(|| apart().unwrap());
    assert_eq!(of_split(forward), ["forward_1_bf16", "rotate_bf16", "forward_1_bf16", "rotate_bf16"]);
}

#[test]
fn heads_of_a_joined_projection_are_used_all_together() {
    let heads = QkvHeads { n_q: 2, n_kv: 1, dim: 4 };
    let (cos, sin) = tables(5, 2);
    let x = randn((5, 16), 1);
    let tape = tape(std::slice::from_ref(&x), || split_qkv(&x, heads, None, &cos, &sin).map(|[q, ..]| q));
    assert_error(tape.backward(&randn((5, 2, 4), 2)), "of the gradients of q, k and v there are 1");
    assert_error(split_qkv(&randn((5, 15), 1), heads, None, &cos, &sin), "want an input [t, 16]");
    assert_error(split_qkv(&randn((4, 16), 1), heads, None, &cos, &sin), "cos is F32 [5, 2], want f32 [4, 2]");
    let [q, k, v] = split_qkv(&randn((0, 16), 1), heads, None, &tables(0, 2).0, &tables(0, 2).1).unwrap();
    assert_eq!([q.dims(), k.dims(), v.dims()], [[0, 2, 4], [0, 1, 4], [0, 1, 4]]);
    let [norm, wide] = [4, 6].map(|dim| Weight::frozen(randn(dim, 1)));
    let norms = Some(QkNorms { weights: [&norm, &wide], eps: 1e-6 });
    assert_error(split_qkv(&x, heads, norms, &cos, &sin), "[6]");
    let half = Weight::frozen(randn(4, 1).to_dtype(DType::BF16).unwrap());
    let norms = Some(QkNorms { weights: [&norm, &half], eps: 1e-6 });
    assert_error(split_qkv(&x, heads, norms, &cos, &sin), "want a norm in the dtype of the heads, F32, got BF16");
}
