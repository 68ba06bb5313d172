//! CPU kernels over flat buffers, in chunks of a fixed size.

use rayon::prelude::*;

use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task.
const CHUNK: usize = 1 << 14;
/// Independent accumulators, so that the order of sums is the same on every machine.
const LANES: usize = 32;

pub(super) fn zero(x: FloatsMut<'_>) {
    let zeros = [0.0; CHUNK];
    x.chunks(CHUNK).into_par_iter().for_each(|mut x| x.write(0, &zeros[..x.len()]));
}

pub(super) fn copy(dst: FloatsMut<'_>, src: Floats<'_>) {
    dst.chunks(CHUNK).into_par_iter().enumerate().for_each(|(i, mut dst)| {
        let src = src.slice(i * CHUNK..i * CHUNK + dst.len());
        dst.write(0, src.widened(&mut Vec::new()));
    });
}

pub(super) fn sum_of_squares(x: Floats<'_>) -> f64 {
    sum_of_chunks(x, |chunk| vectorised!(squares(chunk)))
}

pub(super) fn count_zeros(x: Floats<'_>) -> f64 {
    sum_of_chunks(x, |chunk| vectorised!(zeros(chunk)))
}

/// Sums `of_chunk` over chunks in their order.
fn sum_of_chunks(x: Floats<'_>, of_chunk: impl Fn(&[f32]) -> f64 + Sync) -> f64 {
    let n_chunks = x.len().div_ceil(CHUNK);
    let sums: Vec<f64> = (0..n_chunks)
        .into_par_iter()
        .map(|i| {
            let mut wide = Vec::new();
            let end = ((i + 1) * CHUNK).min(x.len());
            of_chunk(x.slice(i * CHUNK..end).widened(&mut wide))
        })
        .collect();
    sums.iter().sum()
}

#[inline(always)]
fn zeros(x: &[f32]) -> f64 {
    x.iter().map(|&x| u32::from(x == 0.0)).sum::<u32>().into()
}

#[inline(always)]
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail: f64 = chunks.remainder().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += f64::from(x) * f64::from(x));
    }
    lanes.iter().sum::<f64>() + tail
}
