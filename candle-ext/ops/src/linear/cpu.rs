//! CPU kernel of `linear`: tokens in blocks, which bounds the f32 copies.

use std::ops::Range;

use rayon::prelude::*;

use crate::floats::{Floats, FloatsMut};
use crate::gemm::Accumulate;
use crate::weight_matmul::{self, Dims, WeightOperand};

/// Elements of a converted block of activations: 32 MiB. Weight panels are converted once per block.
const BLOCK: usize = 1 << 23;

/// Columns per task of the bias gradient.
const COLUMNS: usize = 256;

/// Computes y = x w^T + b.
pub(super) fn forward(x: Floats<'_>, w: WeightOperand<'_>, bias: Option<Floats<'_>>, mut y: FloatsMut<'_>, dims: Dims) {
    let (mut x_wide, mut y_wide, mut b_wide) = (Vec::new(), Vec::new(), Vec::new());
    let bias = bias.map(|b| b.widened(&mut b_wide));
    for (rows, dims) in token_blocks(dims) {
        let x = x.slice(rows.start * dims.k..rows.end * dims.k).widened(&mut x_wide);
        let out = rows.start * dims.n..rows.end * dims.n;
        if let FloatsMut::F32(y) = &mut y {
            block(x, w, bias, &mut y[out], dims);
        } else {
            y_wide.resize(dims.t * dims.n, 0.0);
            block(x, w, bias, &mut y_wide, dims);
            y.write(out.start, &y_wide);
        }
    }
}

fn block(x: &[f32], w: WeightOperand<'_>, bias: Option<&[f32]>, y: &mut [f32], dims: Dims) {
    let accumulate = match bias {
        Some(bias) => {
            y.chunks_exact_mut(dims.n.max(1)).for_each(|row| row.copy_from_slice(bias));
            Accumulate::Add
        }
        None => Accumulate::Overwrite,
    };
    weight_matmul::forward(x, w, y, accumulate, 1.0, dims);
}

/// Computes dx = dy w, as a sum over the parts of w.
pub(super) fn grad_x(dy: Floats<'_>, w: WeightOperand<'_>, parts: &[usize], mut dx: FloatsMut<'_>, dims: Dims) {
    let (mut dy_wide, mut dx_wide) = (Vec::new(), Vec::new());
    for (rows, dims) in token_blocks(dims) {
        let dy = dy.slice(rows.start * dims.n..rows.end * dims.n).widened(&mut dy_wide);
        let out = rows.start * dims.k..rows.end * dims.k;
        if let FloatsMut::F32(dx) = &mut dx {
            weight_matmul::grad_x(dy, w, parts, &mut dx[out], 1.0, dims);
        } else {
            dx_wide.resize(dims.t * dims.k, 0.0);
            weight_matmul::grad_x(dy, w, parts, &mut dx_wide, 1.0, dims);
            dx.write(out.start, &dx_wide);
        }
    }
}

/// Computes dw = [dw +] dy^T x for at least one token.
pub(super) fn grad_w(dy: Floats<'_>, x: Floats<'_>, dw: &mut [f32], accumulate: Accumulate, dims: Dims) {
    let (mut dy_wide, mut x_wide) = (Vec::new(), Vec::new());
    for (rows, dims) in token_blocks(dims) {
        let dy = dy.slice(rows.start * dims.n..rows.end * dims.n).widened(&mut dy_wide);
        let x = x.slice(rows.start * dims.k..rows.end * dims.k).widened(&mut x_wide);
        weight_matmul::grad_w(dy, x, dw, if rows.start == 0 { accumulate } else { Accumulate::Add }, 1.0, dims);
    }
}

/// Adds the sum of dy over tokens to db, in f64 and in token order.
pub(super) fn add_grad_bias(dy: Floats<'_>, db: &mut [f32]) {
    let n = db.len();
    if n == 0 {
        return;
    }
    let n_rows = dy.len() / n;
    db.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, db)| {
        let mut wide = Vec::new();
        let mut sum = vec![0.0f64; db.len()];
        for row in 0..n_rows {
            let start = row * n + i * COLUMNS;
            let dy = dy.slice(start..start + db.len()).widened(&mut wide);
            sum.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += f64::from(*dy));
        }
        db.iter_mut().zip(sum).for_each(|(db, sum)| *db += sum as f32);
    });
}

/// Returns the most tokens per block with `n` outputs and `k` inputs.
pub(super) fn block_rows(n: usize, k: usize) -> usize {
    (BLOCK / n.max(k).max(1)).clamp(64, 4096)
}

/// Splits the tokens into blocks, each with its own sizes.
pub(crate) fn token_blocks(dims: Dims) -> impl Iterator<Item = (Range<usize>, Dims)> {
    let height = block_rows(dims.n, dims.k);
    (0..dims.t).step_by(height).map(move |start| {
        let end = (start + height).min(dims.t);
        let t = end - start;
        (start..end, Dims { t, ..dims })
    })
}
