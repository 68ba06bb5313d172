//! The CPU kernel of `add`: blocks of elements in parallel.

use rayon::prelude::*;

use crate::floats::{Floats, FloatsMut};
use crate::simd::vectorised;

/// Elements per task.
const BLOCK: usize = 1 << 14;

/// Computes y = a + b.
pub(super) fn add(a: Floats<'_>, b: Floats<'_>, y: FloatsMut<'_>) {
    y.chunks(BLOCK).into_par_iter().enumerate().for_each(|(i, mut y)| {
        let range = i * BLOCK..i * BLOCK + y.len();
        let (mut a_wide, mut b_wide) = (Vec::new(), Vec::new());
        let (a, b) = (a.slice(range.clone()).widened(&mut a_wide), b.slice(range).widened(&mut b_wide));
        if let FloatsMut::F32(y) = y {
            vectorised!(y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = a + b));
        } else {
            let sums: Vec<f32> = a.iter().zip(b).map(|(a, b)| a + b).collect();
            y.write(0, &sums);
        }
    });
}
