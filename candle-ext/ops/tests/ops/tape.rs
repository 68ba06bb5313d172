use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor, Var};
use candlewick_ops::{GradSink, cotangent, record};

use crate::cases::{assert_error, backward, bits, randn};

fn output(values: &[f32]) -> (Storage, Shape) {
    (Storage::Cpu(CpuStorage::F32(values.to_vec())), Shape::from(values.len()))
}

fn var(values: &[f32]) -> Var {
    Var::new(values, &Device::Cpu).unwrap()
}

#[test]
fn each_of_three_inputs_gets_its_gradient() {
    let (a, b, c) = (var(&[1.0, 2.0]), var(&[3.0, 4.0]), var(&[5.0, 6.0]));
    let y = record("op", [&a, &b, &c], output(&[9.0, 12.0]), |y, dy| {
        Ok([Some(dy.clone()), Some((dy * 2.0)?), Some((dy * y)?)])
    })
    .unwrap();
    assert_eq!(y.to_vec1::<f32>().unwrap(), [9.0, 12.0]);
    let grads = backward(&y, &Tensor::new(&[1f32, 10.0], &Device::Cpu).unwrap());
    let grad = |x: &Var| grads.get(x).unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(grad(&a), [1.0, 10.0]);
    assert_eq!(grad(&b), [2.0, 20.0]);
    assert_eq!(grad(&c), [9.0, 120.0]);
}

/// candle panics when a tracked inner node is left without a gradient.
#[test]
fn none_is_zero_for_an_inner_node() {
    let leaf = var(&[1.0, 2.0]);
    let inner = (leaf.as_tensor() * 3.0).unwrap();
    let y = record("op", [&inner], output(&[0.0]), |_, _| Ok([None])).unwrap();
    let grads = y.backward().unwrap();
    assert_eq!(grads.get(&leaf).unwrap().to_vec1::<f32>().unwrap(), [0.0, 0.0]);
}

#[test]
fn untracked_inputs_give_an_untracked_output_that_saves_nothing() {
    let saved = Arc::new(());
    let held = saved.clone();
    let x = randn(2, 1);
    let y = record("op", [&x, &x], output(&[0.0]), move |_, _| {
        let _ = &held;
        Ok([None, None])
    })
    .unwrap();
    assert!(!y.track_op());
    assert_eq!(Arc::strong_count(&saved), 1);
}

#[test]
fn an_output_used_twice_runs_its_backward_once_with_the_sum() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let x = var(&[1.0]);
    let y = record("op", [&x], output(&[1.0]), move |_, dy| {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok([Some(dy.clone())])
    })
    .unwrap();
    let both = (&y + (&y * 4.0).unwrap()).unwrap();
    assert_eq!(both.backward().unwrap().get(&x).unwrap().to_vec1::<f32>().unwrap(), [5.0]);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn an_error_in_backward_is_the_error_of_backward() {
    let x = var(&[1.0]);
    let fail = |_: &Tensor, _: &Tensor| -> Result<[Option<Tensor>; 1]> { candle_core::bail!("the wire was cut") };
    let y = record("op", [&x], output(&[1.0]), fail).unwrap();
    assert_error(y.backward(), "the wire was cut");
}

#[test]
fn a_cotangent_seeds_exactly_what_it_is_given() {
    for dtype in [DType::F32, DType::BF16] {
        let x = Var::from_tensor(&randn((3, 4), 1).to_dtype(dtype).unwrap()).unwrap();
        let y = x.as_tensor().t().unwrap().contiguous().unwrap();
        let dy = randn((4, 3), 2).to_dtype(dtype).unwrap();
        let grads = backward(&y, &dy);
        assert_eq!(bits(grads.get(&x).unwrap()), bits(&dy.t().unwrap()));
    }
}

#[test]
fn cotangents_add_up_over_several_outputs() {
    let x = var(&[1.0, 2.0]);
    let (y, z) = ((x.as_tensor() * 2.0).unwrap(), (x.as_tensor() * 3.0).unwrap());
    let ones = y.ones_like().unwrap();
    let root = (cotangent(&y, &ones).unwrap() + cotangent(&z, &ones).unwrap()).unwrap();
    assert_eq!(root.dims(), [0usize; 0]);
    assert_eq!(root.backward().unwrap().get(&x).unwrap().to_vec1::<f32>().unwrap(), [5.0, 5.0]);
}

#[test]
fn a_cotangent_of_another_shape_or_format_is_refused() {
    let y = var(&[1.0, 2.0]);
    assert_error(cotangent(&y, &randn(3, 1)), "the gradient has shape [3]");
    assert_error(cotangent(&y, &randn(2, 1).to_dtype(DType::BF16).unwrap()), "BF16");
}

#[test]
fn a_sink_must_be_a_contiguous_view() {
    assert_error(GradSink::new(randn((2, 3), 1).t().unwrap()), "want a contiguous f32 or bf16 view");
    let half = randn(2, 1).to_dtype(DType::F16).unwrap();
    assert_error(GradSink::new(half), "want a contiguous f32 or bf16 view, got F16");
}
