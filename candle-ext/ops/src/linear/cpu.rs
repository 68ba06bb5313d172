//! CPU kernel of `linear`. bf16 operands are multiplied as they are. Others are converted to f32, tokens in blocks, which
//! bounds the copies.

use std::ops::Range;

use rayon::prelude::*;

use half::bf16;

use crate::batch_invariance::is_batch_invariant;
use crate::floats::{Floats, FloatsMut};
use crate::gemm::{Accumulate, Mat, Output, Threads, gemm_bf16, has_bf16_row_kernel};
use crate::weight_matmul::{self, Dims, WeightOperand, bf16_operands};

/// Elements of a converted block of activations: 32 MiB. Weight panels are converted once per block.
const BLOCK: usize = 1 << 23;

/// Columns per task of the bias gradient.
const COLUMNS: usize = 256;

/// Computes y = x w^T + b.
pub(super) fn forward(x: Floats<'_>, w: WeightOperand<'_>, bias: Option<Floats<'_>>, mut y: FloatsMut<'_>, dims: Dims) {
    if let (Some((x, w)), true) = (bf16_operands(x, w), dims.t > 1 || has_bf16_row_kernel() || is_batch_invariant()) {
        return forward_bf16(x, w, bias, y, dims);
    }
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

fn forward_bf16(x: &[bf16], w: &[bf16], bias: Option<Floats<'_>>, mut y: FloatsMut<'_>, dims: Dims) {
    let Dims { t, n, k } = dims;
    let mut bias_wide = Vec::new();
    let accumulate = match bias.map(|bias| bias.widened_here(&mut bias_wide)) {
        // A bias in y's dtype is copied exactly.
        Some(bias) => {
            (0..t).for_each(|row| y.write(row * n, bias));
            Accumulate::Add
        }
        None => Accumulate::Overwrite,
    };
    gemm_bf16(Output::new(y, t, n), accumulate, Mat::new(x, t, k), Mat::new(w, n, k).t(), 1.0, Threads::All);
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

/// Computes dx = dy w. In f32 it is a sum over the parts of w, with the bits of separate layers.
pub(super) fn grad_x(dy: Floats<'_>, w: WeightOperand<'_>, parts: &[usize], mut dx: FloatsMut<'_>, dims: Dims) {
    let Dims { t, n, k } = dims;
    if let Some((dy, w)) = bf16_operands(dy, w) {
        let (dy, w) = (Mat::new(dy, t, n), Mat::new(w, n, k));
        return gemm_bf16(Output::new(dx, t, k), Accumulate::Overwrite, dy, w, 1.0, Threads::All);
    }
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
pub(super) fn grad_w(dy: Floats<'_>, x: Floats<'_>, dw: FloatsMut<'_>, accumulate: Accumulate, dims: Dims) {
    let Dims { t, n, k } = dims;
    if let Some((dy, x)) = bf16_operands(dy, x) {
        let (dy, x) = (Mat::new(dy, t, n), Mat::new(x, t, k));
        return gemm_bf16(Output::new(dw, n, k), accumulate, dy.t(), x, 1.0, Threads::All);
    }
    let (mut dy_wide, mut x_wide) = (Vec::new(), Vec::new());
    dw.change_in_f32(accumulate, |dw| {
        for (rows, dims) in token_blocks(dims) {
            let dy = dy.slice(rows.start * n..rows.end * n).widened(&mut dy_wide);
            let x = x.slice(rows.start * k..rows.end * k).widened(&mut x_wide);
            weight_matmul::grad_w(dy, x, dw, if rows.start == 0 { accumulate } else { Accumulate::Add }, 1.0, dims);
        }
    });
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
