use candle_core::{DType, Tensor};
use candlewick_ops::{AttentionChoice, AttentionSpec, CuSeqlens, QkvHeads, attention, reshape, rope, split_qkv};

use crate::cases::{OpCase, TestDevice, assert_error, bits, check_each, randn, tape};

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

/// Compares attention over a fused projection, split by the op, with attention over three inputs.
#[track_caller]
fn check_split(heads: QkvHeads, r: usize, dtype: DType) {
    let (t, QkvHeads { n_q, n_kv, dim }) = (70, heads);
    let spec = AttentionSpec { scale: 0.3, causal: true, window: None, choice: AttentionChoice::default() };
    let seqs = CuSeqlens::packed(vec![0, 50, t]).unwrap();
    let joined = randn((t, (n_q + 2 * n_kv) * dim), 1).to_dtype(dtype).unwrap();
    let narrow = |first: usize, n: usize| joined.narrow(1, first * dim, n * dim).unwrap();
    let parts = [narrow(0, n_q), narrow(n_q, n_kv), narrow(n_q + n_kv, n_kv)];
    for test_device in TestDevice::all() {
        let (cos, sin) = tables(t, r / 2);
        let (cos, sin, dy) = (
            test_device.put(&cos),
            test_device.put(&sin),
            test_device.put(&randn((t, n_q, dim), 3).to_dtype(dtype).unwrap()),
        );
        let results = |inputs: &[Tensor]| {
            let inputs: Vec<Tensor> = inputs.iter().map(|x| test_device.put(&x.contiguous().unwrap())).collect();
            test_device.run(|| {
                let tape = tape(&inputs, || {
                    let [q, k, v] = match inputs.as_slice() {
                        [joined] => split_qkv(joined, heads, &cos, &sin)?,
                        parts => {
                            let heads = |i: usize, n| reshape(&parts[i], (t, n, dim));
                            [rope(&heads(0, n_q)?, &cos, &sin)?, rope(&heads(1, n_kv)?, &cos, &sin)?, heads(2, n_kv)?]
                        }
                    };
                    attention(&q, &k, &v, &seqs, &spec)
                });
                let y = bits(tape.output());
                let grads = tape.backward(&dy).unwrap();
                let grads: Vec<Tensor> = inputs.iter().map(|x| grads.get(x).unwrap().clone()).collect();
                [y, bits(&Tensor::cat(&grads, 1).unwrap())]
            })
        };
        assert!(results(std::slice::from_ref(&joined)) == results(&parts), "{heads:?} {dtype:?} {test_device:?}");
    }
}

#[test]
fn heads_of_a_joined_projection_have_the_bits_of_their_own() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (n_q, n_kv, dim) in [(6, 2, 64), (3, 1, 6), (2, 2, 16)] {
            check_split(QkvHeads { n_q, n_kv, dim }, dim, dtype);
            check_split(QkvHeads { n_q, n_kv, dim }, dim / 4 * 2, dtype);
        }
    }
}

#[test]
fn heads_of_a_joined_projection_are_used_all_together() {
    let heads = QkvHeads { n_q: 2, n_kv: 1, dim: 4 };
    let (cos, sin) = tables(5, 2);
    let x = randn((5, 16), 1);
    let tape = tape(std::slice::from_ref(&x), || split_qkv(&x, heads, &cos, &sin).map(|[q, ..]| q));
    assert_error(tape.backward(&randn((5, 2, 4), 2)), "of the gradients of q, k and v there are 1");
    assert_error(split_qkv(&randn((5, 15), 1), heads, &cos, &sin), "want an input [t, 16]");
    assert_error(split_qkv(&randn((4, 16), 1), heads, &cos, &sin), "cos is F32 [5, 2], want f32 [4, 2]");
    let [q, k, v] = split_qkv(&randn((0, 16), 1), heads, &tables(0, 2).0, &tables(0, 2).1).unwrap();
    assert_eq!([q.dims(), k.dims(), v.dims()], [[0, 2, 4], [0, 1, 4], [0, 1, 4]]);
}
