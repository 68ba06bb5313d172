//! CPU kernel of `weighted_swiglu`: rows in parallel.

use rayon::prelude::*;

use crate::dot::dot;
use crate::exp::sigmoid;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task, approximately, and the most elements computed at once.
const BLOCK: usize = 1 << 12;
/// Terms of a weight's gradient that are summed in f32; the sums are added in f64.
const SUMMED: usize = 256;

/// Inputs: rows of `width` elements of gate, then of up, and one weight per row.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) gate_up: Floats<'a>,
    pub(super) weights: &'a [f32],
    pub(super) width: usize,
}

/// Gradients of the inputs.
pub(super) struct WeightedSwigluGrads<'a> {
    pub(super) gate_up: FloatsMut<'a>,
    pub(super) weights: &'a mut [f32],
}

/// Computes y = w silu(gate) up.
pub(super) fn forward(inputs: Inputs<'_>, y: FloatsMut<'_>) {
    let width = inputs.width;
    let n_rows = inputs.rows_per_task();
    y.chunks(n_rows * width).into_par_iter().enumerate().for_each(|(task, mut y)| {
        let (mut wide, mut out) = (Wide::default(), [0.0; BLOCK]);
        for (i, row) in (task * n_rows..).take(y.len() / width).enumerate() {
            let weight = inputs.weights[row];
            for start in (0..width).step_by(BLOCK) {
                let [gate, up] = inputs.block(row, start, &mut wide);
                let out = &mut out[..gate.len()];
                vectorised!(out.iter_mut().zip(gate.iter().zip(up)).for_each(|(out, (&g, u))| {
                    *out = weight * (g * sigmoid(g) * u);
                }));
                y.write(i * width + start, out);
            }
        }
    });
}

/// Computes the gradients of gate, up and the weights from dy, with s = sigmoid(gate):
///
/// d_up = w dy gate s, d_gate = w dy up s (1 + gate (1 - s)), d_w = sum(dy gate s up).
pub(super) fn backward(inputs: Inputs<'_>, dy: Floats<'_>, grads: WeightedSwigluGrads<'_>) {
    let width = inputs.width;
    let n_rows = inputs.rows_per_task();
    let outputs = grads.gate_up.chunks(n_rows * 2 * width).into_par_iter().zip(grads.weights.par_chunks_mut(n_rows));
    outputs.enumerate().for_each(|(task, (mut d_gate_up, d_weights))| {
        let (mut wide, mut dy_wide) = (Wide::default(), Vec::new());
        let [mut d_gate, mut d_up, mut gated] = [[0.0f32; BLOCK]; 3];
        for (i, d_weight) in d_weights.iter_mut().enumerate() {
            let row = task * n_rows + i;
            let weight = inputs.weights[row];
            let mut sum = 0.0;
            for start in (0..width).step_by(BLOCK) {
                let [gate, up] = inputs.block(row, start, &mut wide);
                let n = gate.len();
                let dy = dy.slice(row * width + start..row * width + start + n).widened(&mut dy_wide);
                let (d_gate, d_up, gated) = (&mut d_gate[..n], &mut d_up[..n], &mut gated[..n]);
                vectorised!({
                    let outputs = d_gate.iter_mut().zip(d_up.iter_mut()).zip(gated.iter_mut());
                    for (((d_gate, d_up), gated), ((&g, &u), &dy)) in outputs.zip(gate.iter().zip(up).zip(dy)) {
                        let s = sigmoid(g);
                        *gated = g * s * u;
                        *d_up = weight * dy * g * s;
                        *d_gate = weight * dy * u * s * (1.0 + g * (1.0 - s));
                    }
                });
                let parts = gated.chunks(SUMMED).zip(dy.chunks(SUMMED));
                sum += parts.map(|(gated, dy)| f64::from(dot(gated, dy))).sum::<f64>();
                d_gate_up.write(2 * i * width + start, d_gate);
                d_gate_up.write((2 * i + 1) * width + start, d_up);
            }
            *d_weight = sum as f32;
        }
    });
}

/// f32 copies of a block of gate and of up.
#[derive(Default)]
struct Wide([Vec<f32>; 2]);

impl<'a> Inputs<'a> {
    fn rows_per_task(&self) -> usize {
        (BLOCK / self.width.max(1)).max(1)
    }

    /// Returns up to [`BLOCK`] elements of gate and up, from column `start` of a row on.
    fn block<'s>(&self, row: usize, start: usize, wide: &'s mut Wide) -> [&'s [f32]; 2]
    where
        'a: 's,
    {
        let n = BLOCK.min(self.width - start);
        let Wide([gate_wide, up_wide]) = wide;
        let of = |half: usize| {
            let first = (2 * row + half) * self.width + start;
            self.gate_up.slice(first..first + n)
        };
        [of(0).widened(gate_wide), of(1).widened(up_wide)]
    }
}
