//! CPU kernels of `permute` and `unpermute`: blocks of rows in parallel.

use rayon::prelude::*;

use crate::floats::{Floats, FloatsMut};
use crate::moe::assignment::DROPPED;
use crate::simd::vectorised;

/// Rows per task.
const ROWS: usize = 64;

/// Permutation of slots, k per token. Rows from `n_kept` on belong to dropped slots.
#[derive(Clone, Copy)]
pub(super) struct Permutation<'a> {
    /// Slot of each row; `DROPPED` for padding.
    pub(super) order: &'a [u32],
    /// Row of each slot.
    pub(super) rows: &'a [u32],
    pub(super) n_kept: usize,
    pub(super) top_k: usize,
}

/// Copies the row of x [t, d] of each slot's token to y [n, d]; dropped slots get zeros.
pub(super) fn gather(x: Floats<'_>, y: FloatsMut<'_>, d: usize, permutation: Permutation<'_>) {
    match (x, y) {
        (Floats::F32(x), FloatsMut::F32(y)) => copy_rows(x, y, d, permutation),
        (Floats::Bf16(x), FloatsMut::Bf16(y)) => copy_rows(x, y, d, permutation),
        (Floats::F16(x), FloatsMut::F16(y)) => copy_rows(x, y, d, permutation),
        _ => unreachable!("the output has the input's dtype"),
    }
}

fn copy_rows<T: Copy + Default + Send + Sync>(x: &[T], y: &mut [T], d: usize, permutation: Permutation<'_>) {
    let Permutation { order, n_kept, top_k, .. } = permutation;
    if d == 0 {
        return;
    }
    y.par_chunks_mut(ROWS * d).enumerate().for_each(|(task, y)| {
        for (row, y) in (task * ROWS..).zip(y.chunks_exact_mut(d)) {
            if row < n_kept && order[row] != DROPPED {
                let token = order[row] as usize / top_k;
                y.copy_from_slice(&x[token * d..(token + 1) * d]);
            } else {
                y.fill(T::default());
            }
        }
    });
}

/// Sums the rows of x [n, d] of each token's slots, in slot order, into y [t, d], rounded once.
pub(super) fn sum_slots(x: Floats<'_>, y: FloatsMut<'_>, d: usize, permutation: Permutation<'_>) {
    let Permutation { rows, n_kept, top_k, .. } = permutation;
    y.chunks(ROWS * d).into_par_iter().enumerate().for_each(|(task, mut y)| {
        let (mut sum, mut wide) = (vec![0.0f32; d], Vec::new());
        for start in (0..y.len()).step_by(d.max(1)) {
            let token = task * ROWS + start / d;
            let kept = rows[token * top_k..(token + 1) * top_k].iter().map(|&row| row as usize);
            sum.fill(0.0);
            for row in kept.filter(|&row| row < n_kept) {
                let x = x.slice(row * d..(row + 1) * d).widened(&mut wide);
                vectorised!(sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x));
            }
            y.write(start, &sum);
        }
    });
}

/// Returns the value of each row's slot; 0 for dropped slots.
pub(super) fn values_of_rows(of_slots: &[f32], permutation: Permutation<'_>) -> Vec<f32> {
    let Permutation { order, n_kept, .. } = permutation;
    let is_kept = |row: usize, slot: u32| row < n_kept && slot != DROPPED;
    let value = |(row, &slot): (usize, &u32)| if is_kept(row, slot) { of_slots[slot as usize] } else { 0.0 };
    order.iter().enumerate().map(value).collect()
}

/// Returns the value of each slot's row; 0 for dropped slots.
pub(super) fn values_of_slots(of_rows: &[f32], permutation: Permutation<'_>) -> Vec<f32> {
    let Permutation { rows, n_kept, .. } = permutation;
    let value = |&row: &u32| if (row as usize) < n_kept { of_rows[row as usize] } else { 0.0 };
    rows.iter().map(value).collect()
}
