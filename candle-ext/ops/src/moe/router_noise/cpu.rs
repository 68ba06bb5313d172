//! CPU kernels of the router's noise: blocks in parallel, each element from its position and the key.

use candle_core::WithDType;
use rayon::prelude::*;

use crate::dropout::random;
use crate::floats::{Floats, FloatsMut};

/// Elements per task.
const BLOCK: usize = 1 << 12;

/// Range and key of the factors, and the token of each row of width `d`.
#[derive(Clone, Copy)]
pub(super) struct Jitter<'a> {
    pub(super) eps: f64,
    pub(super) key: u64,
    pub(super) tokens: &'a [u32],
    pub(super) d: usize,
}

impl Jitter<'_> {
    /// Returns the factor of an element of x.
    fn factor(&self, i: usize) -> f32 {
        let position = u64::from(self.tokens[i / self.d]) * self.d as u64 + (i % self.d) as u64;
        (1.0 - self.eps + 2.0 * self.eps * uniform(random(self.key, position))) as f32
    }
}

/// Computes y = x * u, with u uniform in [1 - eps, 1 + eps) for each element.
pub(super) fn jitter(x: Floats<'_>, y: FloatsMut<'_>, jitter: Jitter<'_>) {
    y.chunks(BLOCK).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let start = i * BLOCK;
        let mut wide = Vec::new();
        let x = x.slice(start..start + y.len()).widened(&mut wide);
        let out: Vec<f32> = (start..).zip(x).map(|(i, x)| x * jitter.factor(i)).collect();
        y.write(0, &out);
    });
}

/// Returns `n` standard normal numbers.
pub(super) fn normal<T: WithDType>(n: usize, key: u64) -> Vec<T> {
    (0..n).into_par_iter().with_min_len(BLOCK).map(|i| T::from_f64(normal_at(key, i))).collect()
}

/// Returns `rows` with `std` times a standard normal number per column added.
pub(super) fn biased<T: WithDType>(rows: &[T], n_columns: usize, std: f64, key: u64) -> Vec<T> {
    let bias: Vec<f64> = (0..n_columns).map(|i| std * normal_at(key, i)).collect();
    rows.iter().zip(bias.iter().cycle()).map(|(x, bias)| T::from_f64(x.to_f64() + bias)).collect()
}

/// Returns the standard normal number at `position` of the stream of `key`, by Box and Muller.
fn normal_at(key: u64, position: usize) -> f64 {
    let [radius, angle] = [0, 1].map(|i| uniform(random(key, 2 * position as u64 + i)));
    (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
}

/// Converts random bits to a number in [0, 1), a multiple of 2^-24.
fn uniform(bits: u64) -> f64 {
    (bits >> 40) as f64 / f64::from(1 << 24)
}
