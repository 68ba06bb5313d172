//! Dot products, written so that the compiler vectorises them.

use crate::gemm::accumulate::Accumulate;
use crate::simd::{prefetch, vectorised};

/// Independent accumulators: fast, accurate enough for rows of thousands, and always summed in the same order.
const LANES: usize = 16;

/// Returns sum(a b).
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    vectorised!(sum_of_products(a, b, |a| a))
}

/// Rows of a matrix, each contiguous.
#[derive(Clone, Copy)]
pub(crate) struct MatrixRows<'a, T> {
    pub(crate) data: &'a [T],
    /// Row stride in elements.
    pub(crate) stride: usize,
    /// Prefetch distance in elements.
    pub(crate) ahead: usize,
}

/// Computes out = [out +] scale rows a, with one row per element of `out`. Inlined, so that callers vectorise it as a
/// whole.
#[inline(always)]
pub(crate) fn dots<T: Copy>(
    out: &mut [f32],
    accumulate: Accumulate,
    rows: MatrixRows<'_, T>,
    a: &[f32],
    scale: f32,
    widen: impl Fn(T) -> f32 + Copy,
) {
    for (j, out) in out.iter_mut().enumerate() {
        let start = j * rows.stride;
        prefetch(rows.data.as_ptr().wrapping_add(start + rows.ahead), a.len());
        let sum = scale * sum_of_products(&rows.data[start..][..a.len()], a, widen);
        *out = if accumulate == Accumulate::Add { *out + sum } else { sum };
    }
}

#[inline(always)]
fn sum_of_products<T: Copy>(a: &[T], b: &[f32], widen: impl Fn(T) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail = a_chunks.remainder().iter().zip(b_chunks.remainder());
    let tail: f32 = tail.map(|(a, b)| widen(*a) * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += widen(*a) * b;
        }
    }
    lanes.iter().sum::<f32>() + tail
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::floats::wide_bf16;

    #[test]
    fn every_length_is_summed_whole() {
        for len in 0..70u8 {
            let a: Vec<f32> = (0..len).map(f32::from).collect();
            let want: f32 = a.iter().map(|a| a * (a + 1.0)).sum();
            let b: Vec<f32> = a.iter().map(|a| a + 1.0).collect();
            assert_eq!(dot(&a, &b), want);
            let rounded: Vec<bf16> = a.iter().chain(&[9.0; 3]).chain(&a).copied().map(bf16::from_f32).collect();
            let rows = MatrixRows { data: &rounded, stride: a.len() + 3, ahead: 1 };
            let mut out = [1.0; 2];
            dots(&mut out, Accumulate::Add, rows, &b, 2.0, wide_bf16);
            assert_eq!(out, [1.0 + 2.0 * want; 2]);
            dots(&mut out, Accumulate::Overwrite, rows, &b, 2.0, wide_bf16);
            assert_eq!(out, [2.0 * want; 2]);
        }
    }
}
