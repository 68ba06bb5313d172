//! Measurement of the CPU's matmul speed.

use std::time::Instant;

use super::gemm;
use super::matrix::{Accumulate, Mat, MatMut, Threads};

/// Rows and columns of the matrices; small, so that their memory does not matter.
const SIDE: usize = 256;
/// Matmuls per thread: waking a thread takes about as long as one of them.
const PRODUCTS: usize = 8;
const TRIES: usize = 8;

/// Measures the f32 matmul speed of all threads together, in FLOP/s.
///
/// Each thread multiplies 256 x 256 matrices; the best of a few tries counts. The call takes some tens of milliseconds.
pub fn measure_cpu_gemm_rate() -> f64 {
    let a = vec![1.0; SIDE * SIDE];
    let mat = Mat::new(&a, SIDE, SIDE);
    let seconds = || {
        let began = Instant::now();
        rayon::broadcast(|_| {
            let mut out = vec![0.0; SIDE * SIDE];
            for _ in 0..PRODUCTS {
                gemm(MatMut::new(&mut out, SIDE, SIDE), Accumulate::Overwrite, mat, mat, 1.0, Threads::One);
            }
        });
        began.elapsed().as_secs_f64()
    };
    let best = (0..TRIES).map(|_| seconds()).fold(f64::INFINITY, f64::min);
    let n_products = PRODUCTS * rayon::current_num_threads();
    2.0 * (SIDE as f64).powi(3) * n_products as f64 / best.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bounds: a core of twenty years ago, and more than any processor today.
    #[test]
    fn the_rate_is_that_of_a_processor() {
        let rate = measure_cpu_gemm_rate();
        assert!((1e8..1e16).contains(&rate), "{rate:e}");
    }
}
