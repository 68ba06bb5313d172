use candle_core::{DType, Device, Tensor};
use candlewick_ops::{linear, scale_rows};

use crate::cases::{OpCase, assert_close, assert_error, grad_of, randn, tape, trainable};

#[test]
fn the_gradients_are_the_slopes() {
    OpCase {
        name: "scale_rows",
        inputs: vec![randn((7, 5), 1), randn(7, 2)],
        weights: Vec::new(),
        op: &|x, _| scale_rows(&x[0], &x[1]),
        reference: &|x| x[0].broadcast_mul(&x[1].unsqueeze(1)?),
    }
    .check_finite_difference();
}

#[test]
fn rows_are_multiplied_and_recomputed() {
    let (x, weights) = (randn((7, 5), 1), randn(7, 2));
    let product = x.broadcast_mul(&weights.unsqueeze(1).unwrap()).unwrap();
    let w = trainable(&randn((3, 5), 3));
    let tape = tape(&[x.clone(), weights.clone()], || {
        linear(&scale_rows(&x, &weights)?, &w, None, candlewick_ops::OutputDtype::SameAsInput)
    });
    let dy = randn((7, 3), 9);
    let grads = tape.backward(&dy).unwrap();
    assert_close("dw", &grad_of(&w), &dy.t().unwrap().matmul(&product).unwrap(), 1e-6);
    let d_product = dy.matmul(&randn((3, 5), 3)).unwrap();
    let dx = d_product.broadcast_mul(&weights.unsqueeze(1).unwrap()).unwrap();
    assert_close("dx", grads.get(&x).unwrap(), &dx, 1e-6);
    let d_weights = (d_product * &x).unwrap().sum(1).unwrap();
    assert_close("d_weights", grads.get(&weights).unwrap(), &d_weights, 1e-6);
}

#[test]
fn wrong_shapes_are_named() {
    let x = Tensor::zeros((3, 2), DType::F32, &Device::Cpu).unwrap();
    assert_error(scale_rows(&x, &randn(2, 1)), "want x [n, d] and f32 weights [n], got [3, 2] and F32 [2]");
}
