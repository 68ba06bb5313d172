//! Measurement of the CPU's matmul speed.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use candle_core::DType;
use half::bf16;

use super::accumulate::Accumulate;
use super::matrix::{Mat, MatMut, Threads};
use super::{gemm, gemm_bf16};

/// Rows and columns of the matrices; small, so that their memory does not matter.
const SIDE: usize = 256;
/// Matmuls per thread: waking a thread takes about as long as one of them.
const PRODUCTS: usize = 8;
/// Tries of a reading, of which the best counts.
const TRIES: usize = 8;
/// Most readings. They end when one confirms the best within [`AGREEMENT`].
const READINGS: usize = 8;
const AGREEMENT: f64 = 0.05;

/// Measures the matmul speed of all threads together for operands in `dtype`, in FLOP/s: bf16 with its own instructions
/// where the processor has them, other dtypes as f32.
///
/// Each thread multiplies 256 x 256 matrices. The call repeats until two readings agree, and returns the best that the
/// process has measured. It takes some tens of milliseconds.
pub fn measure_cpu_gemm_rate(dtype: DType) -> f64 {
    static BEST: Mutex<[f64; 2]> = Mutex::new([0.0; 2]);
    let mut best = BEST.lock().unwrap_or_else(PoisonError::into_inner);
    let best = &mut best[usize::from(dtype == DType::BF16)];
    settle(best, if dtype == DType::BF16 { bf16_reading } else { f32_reading });
    *best
}

/// Raises `best` to the best of several readings. They end when one confirms the best.
fn settle(best: &mut f64, mut reading: impl FnMut() -> f64) {
    for _ in 0..READINGS {
        let reading = reading();
        let agrees = (reading / *best - 1.0).abs() < AGREEMENT;
        *best = best.max(reading);
        if agrees {
            break;
        }
    }
}

fn f32_reading() -> f64 {
    let a = vec![1.0; SIDE * SIDE];
    let mat = Mat::new(&a, SIDE, SIDE);
    reading(|out| gemm(out, Accumulate::Overwrite, mat, mat, 1.0, Threads::One))
}

fn bf16_reading() -> f64 {
    let a = vec![bf16::ONE; SIDE * SIDE];
    let mat = Mat::new(&a, SIDE, SIDE);
    reading(|out| gemm_bf16(out, Accumulate::Overwrite, mat, mat, 1.0, Threads::One))
}

fn reading(product: impl Fn(MatMut<'_>) + Sync) -> f64 {
    let seconds = || {
        let began = Instant::now();
        rayon::broadcast(|_| {
            let mut out = vec![0.0; SIDE * SIDE];
            (0..PRODUCTS).for_each(|_| product(MatMut::new(&mut out, SIDE, SIDE)));
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

    #[test]
    fn readings_end_when_two_agree_and_the_best_is_kept() {
        let check = |mut best: f64, readings: &[f64], (want, n_read): (f64, usize)| {
            let mut left = readings.iter().copied();
            settle(&mut best, || left.next().expect("no more readings are needed"));
            assert_eq!((best, readings.len() - left.count()), (want, n_read), "{readings:?}");
        };
        check(0.0, &[100.0, 98.0], (100.0, 2));
        check(0.0, &[50.0, 100.0, 70.0, 104.0], (104.0, 4));
        // A slow reading of a process that has measured more.
        check(100.0, &[60.0, 99.0], (100.0, 2));
        check(100.0, &[200.0, 201.0], (201.0, 2));
        let growing: Vec<f64> = (0..READINGS).map(|i| 2f64.powi(i as i32)).collect();
        check(0.0, &growing, (128.0, READINGS));
    }

    /// Compares the dtypes' peaks where bf16 has an instruction that is several times as fast as those of f32.
    #[test]
    fn bf16_has_a_peak_of_its_own() {
        if super::super::cpu_gemm_kernel() == "amx" {
            let [f32_rate, bf16_rate] = [DType::F32, DType::BF16].map(measure_cpu_gemm_rate);
            assert!(bf16_rate > 1.2 * f32_rate, "{bf16_rate:e} and {f32_rate:e}");
        }
    }

    /// Bounds: a core of twenty years ago, and more than any processor today.
    #[test]
    fn the_rate_is_that_of_a_processor_and_the_best_of_the_process() {
        for dtype in [DType::F32, DType::BF16] {
            let rate = measure_cpu_gemm_rate(dtype);
            assert!((1e8..1e16).contains(&rate), "{rate:e}");
            assert!(measure_cpu_gemm_rate(dtype) >= rate);
        }
    }
}
