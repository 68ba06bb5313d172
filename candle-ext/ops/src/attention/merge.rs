//! CPU kernel that merges attention outputs over two sets of keys.

use rayon::prelude::*;

use crate::simd::vectorised;

/// Rows per task.
const ROWS: usize = 64;

/// Replaces `out` by the mean of both outputs, weighted by e^lse, and `lse` by the log of the summed weights.
///
/// out is f32 [rows, dim], lse f32 [rows]. A fully masked row has an lse of -inf and so a weight of 0.
pub(super) fn run(out: &mut [f32], lse: &mut [f32], other_out: &[f32], other_lse: &[f32], dim: usize) {
    let rows = out.par_chunks_mut(ROWS * dim).zip(lse.par_chunks_mut(ROWS));
    let others = other_out.par_chunks(ROWS * dim).zip(other_lse.par_chunks(ROWS));
    rows.zip(others).for_each(|((out, lse), (other_out, other_lse))| {
        for (row, (lse, other_lse)) in lse.iter_mut().zip(other_lse).enumerate() {
            if *lse == f32::NEG_INFINITY && *other_lse == f32::NEG_INFINITY {
                continue;
            }
            let range = row * dim..(row + 1) * dim;
            let max = lse.max(*other_lse);
            let (own, other) = ((*lse - max).exp(), (*other_lse - max).exp());
            mean(&mut out[range.clone()], &other_out[range], own / (own + other), other / (own + other));
            *lse = max + (own + other).ln();
        }
    });
}

fn mean(out: &mut [f32], other: &[f32], own_weight: f32, other_weight: f32) {
    vectorised!(out.iter_mut().zip(other).for_each(|(x, y)| *x = *x * own_weight + y * other_weight));
}
