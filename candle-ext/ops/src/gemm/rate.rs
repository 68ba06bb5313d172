//! What products on this processor reach, here and now.

use std::time::Instant;

use super::{Mat, MatMut, Old, Threads, gemm};

/// Rows and columns: large enough for all threads, and small enough that the memory it takes and leaves is no matter.
const SIDE: usize = 256;
const TRIES: usize = 16;

/// Measures the f32 product of two matrices of 256 x 256 on all threads, the best of a few: operations a second. Takes some
/// milliseconds.
pub fn cpu_product_rate() -> f64 {
    let (a, mut out) = (vec![1.0; SIDE * SIDE], vec![0.0; SIDE * SIDE]);
    let mat = Mat::new(&a, SIDE, SIDE);
    let mut seconds = || {
        let began = Instant::now();
        gemm(MatMut::new(&mut out, SIDE, SIDE), Old::Overwrite, mat, mat, 1.0, Threads::All);
        began.elapsed().as_secs_f64()
    };
    let best = (0..TRIES).map(|_| seconds()).fold(f64::INFINITY, f64::min);
    2.0 * (SIDE as f64).powi(3) / best.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between a core of twenty years ago and any that is likely to come.
    #[test]
    fn the_rate_is_that_of_a_processor() {
        let rate = cpu_product_rate();
        assert!((1e8..1e16).contains(&rate), "{rate:e}");
    }
}
