//! Benchmark cases of a linear layer.
//!
//! t rows, k inputs, n outputs

use candle_core::{DType, Tensor};
use candlewick_ops::{OutputDtype, Weight, linear};

use crate::cases::{BenchCase, BenchCost, F32, Graph, both, randn_in, trainable_in};

/// Returns the names of forward, dx and dw.
fn names(dtype: DType) -> [&'static str; 3] {
    match dtype {
        DType::F32 => ["linear f32", "linear f32 dx", "linear f32 dw"],
        _ => ["linear", "linear dx", "linear dw"],
    }
}

/// Returns cases of y = x w^T, dx = dy w and dw += dy^T x, with dw in f32.
pub(crate) fn linears(dtype: DType, t: usize, k: usize, n: usize) -> Vec<BenchCase> {
    let (x, w, y) = ((t * k) as f64, (n * k) as f64, (t * n) as f64);
    let (of_element, flops) = (dtype.size_in_bytes() as f64, 2.0 * x * n as f64);
    let cost = |bytes| BenchCost { bytes, flops };
    let shape = || vec![("t", t), ("k", k), ("n", n)];
    let product = |x: &Tensor, w: &Weight| linear(x, w, None, OutputDtype::SameAsInput);
    let [name, name_dx, name_dw] = names(dtype);
    let [forward, grad_x] = both(name, shape(), [cost(of_element * (x + w + y)); 2], move |device| {
        let w = Weight::frozen(randn_in(dtype, (n, k), device)?);
        Ok(Graph::new([randn_in(dtype, (t, k), device)?], move |x| product(&x[0], &w)))
    });
    let cost_w = cost(of_element * (x + y) + 2.0 * F32 * w);
    let [_, grad_w] = both(name_dw, shape(), [cost_w; 2], move |device| {
        let (x, w) = (randn_in(dtype, (t, k), device)?, trainable_in(dtype, &[n, k], device)?);
        Ok(Graph::new([], move |_| product(&x, &w)))
    });
    vec![forward, BenchCase { op: name_dx, ..grad_x }, grad_w]
}
