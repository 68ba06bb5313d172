//! CPU kernel of `rms_norm`: rows in parallel.

use rayon::prelude::*;

use crate::dot::dot;
use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task, approximately.
const BLOCK: usize = 1 << 14;

/// Number of partial sums of the weight's gradient. Fixed, so that the result does not depend on the number of threads.
const PARTS: usize = 32;

/// Computes y = round(x r) w.
pub(super) fn forward(x: Floats<'_>, w: Floats<'_>, y: FloatsMut<'_>, d: usize, eps: f32) {
    let mut w_wide = Vec::new();
    let w = w.widened(&mut w_wide);
    let n_rows = rows_per_task(d);
    y.chunks(n_rows * d).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let (mut x_wide, mut out) = (Vec::new(), vec![0.0; d]);
        for row in 0..y.len() / d {
            let start = (i * n_rows + row) * d;
            let x_row = x.slice(start..start + d);
            normalise(x_row, x_row.widened(&mut x_wide), &mut out, eps);
            vectorised!(out.iter_mut().zip(w).for_each(|(out, w)| *out *= w));
            y.write(row * d, &out);
        }
    });
}

/// Computes sum = round(a + b) and y = round(sum r) w.
pub(super) fn add_forward([a, b]: [Floats<'_>; 2], w: Floats<'_>, [sum, y]: [FloatsMut<'_>; 2], d: usize, eps: f32) {
    let mut w_wide = Vec::new();
    let w = w.widened(&mut w_wide);
    let n_rows = rows_per_task(d);
    let outputs = sum.chunks(n_rows * d).into_par_iter().zip(y.chunks(n_rows * d));
    outputs.enumerate().for_each(|(i, (mut sum, mut y))| {
        let (mut a_wide, mut b_wide) = (Vec::new(), Vec::new());
        let (mut x, mut out) = (vec![0.0; d], vec![0.0; d]);
        for row in 0..y.len() / d {
            let range = (i * n_rows + row) * d..(i * n_rows + row + 1) * d;
            let (a, b) = (a.slice(range.clone()), b.slice(range));
            let (a_row, b_row) = (a.widened(&mut a_wide), b.widened(&mut b_wide));
            vectorised!(x.iter_mut().zip(a_row.iter().zip(b_row)).for_each(|(x, (a, b))| *x = a + b));
            a.round_like(&mut x);
            sum.write(row * d, &x);
            normalise(a, &x, &mut out, eps);
            vectorised!(out.iter_mut().zip(w).for_each(|(out, w)| *out *= w));
            y.write(row * d, &out);
        }
    });
}

/// Computes dx = r (g - n mean(g n)) with g = dy w, plus another gradient if given.
pub(super) fn grad_x([x, w, dy]: [Floats<'_>; 3], plus: Option<Floats<'_>>, dx: FloatsMut<'_>, eps: f32) {
    let mut w_wide = Vec::new();
    let w = w.widened(&mut w_wide);
    let d = w.len();
    let n_rows = rows_per_task(d);
    dx.chunks(n_rows * d).into_par_iter().enumerate().for_each(|(i, mut dx)| {
        let (mut x_wide, mut dy_wide, mut out) = (Vec::new(), Vec::new(), vec![0.0; d]);
        for row in 0..dx.len() / d {
            let range = (i * n_rows + row) * d..(i * n_rows + row + 1) * d;
            let x = x.slice(range.clone()).widened(&mut x_wide);
            let dy = dy.slice(range.clone()).widened(&mut dy_wide);
            let r = reciprocal_rms(x, eps);
            vectorised!(out.iter_mut().zip(dy).zip(w).for_each(|((g, dy), w)| *g = dy * w));
            let gn = dot(x, &out) * r / d as f32;
            vectorised!(out.iter_mut().zip(x).for_each(|(g, x)| *g = r * (*g - x * r * gn)));
            if let Some(plus) = plus {
                let plus = plus.slice(range).widened(&mut dy_wide);
                vectorised!(out.iter_mut().zip(plus).for_each(|(dx, plus)| *dx += plus));
            }
            dx.write(row * d, &out);
        }
    });
}

/// Adds the sum over rows of dy n to dw, in fixed parts that are added in order.
pub(super) fn add_grad_w(x: Floats<'_>, dy: Floats<'_>, dw: &mut [f32], eps: f32) {
    let d = dw.len();
    let scratch = || (Vec::new(), Vec::new(), vec![0.0f32; d]);
    add_in_parts(x.len() / d, dw, scratch, |row, (x_wide, dy_wide, normed), sum| {
        let x_row = x.slice(row * d..(row + 1) * d);
        normalise(x_row, x_row.widened(x_wide), normed, eps);
        let dy = dy.slice(row * d..(row + 1) * d).widened(dy_wide);
        vectorised!(sum.iter_mut().zip(&*normed).zip(dy).for_each(|((sum, n), dy)| *sum += n * dy));
    });
}

/// Adds to dw what `add` adds to a sum for each row, in fixed parts of rows that are added in order. `scratch` makes the buffers
/// of a part.
pub(crate) fn add_in_parts<S>(
    n_rows: usize,
    dw: &mut [f32],
    scratch: impl Fn() -> S + Sync,
    add: impl Fn(usize, &mut S, &mut [f32]) + Sync,
) {
    let (d, per_part) = (dw.len(), n_rows.div_ceil(PARTS).max(16));
    let parts: Vec<Vec<f32>> = (0..n_rows.div_ceil(per_part))
        .into_par_iter()
        .map(|part| {
            let (mut scratch, mut sum) = (scratch(), vec![0.0f32; d]);
            for row in part * per_part..((part + 1) * per_part).min(n_rows) {
                add(row, &mut scratch, &mut sum);
            }
            sum
        })
        .collect();
    for part in parts {
        dw.iter_mut().zip(part).for_each(|(dw, part)| *dw += part);
    }
}

/// Computes out = x r, rounded to the input's dtype.
pub(crate) fn normalise(format: Floats<'_>, x: &[f32], out: &mut [f32], eps: f32) {
    let r = reciprocal_rms(x, eps);
    vectorised!(out.iter_mut().zip(x).for_each(|(out, x)| *out = x * r));
    format.round_like(out);
}

/// Returns 1 / sqrt(mean(x^2) + eps).
pub(crate) fn reciprocal_rms(x: &[f32], eps: f32) -> f32 {
    let mean = dot(x, x) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

fn rows_per_task(d: usize) -> usize {
    (BLOCK / d).max(1)
}
