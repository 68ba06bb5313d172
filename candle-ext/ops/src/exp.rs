//! e^x on slices, written so that the compiler vectorises it. The error is below 2 ulp.

use crate::simd::vectorised;

/// Independent accumulators. The order of sums is the same on every machine.
const LANES: usize = 16;

/// Replaces each x of `row` by e^(x - shift) and returns their sum.
pub(crate) fn exp_shifted(row: &mut [f32], shift: f32) -> f32 {
    vectorised!(exp_shifted_by_lanes(row, shift))
}

#[inline(always)]
fn exp_shifted_by_lanes(row: &mut [f32], shift: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let mut chunks = row.chunks_exact_mut(LANES);
    for chunk in &mut chunks {
        for (x, sum) in chunk.iter_mut().zip(&mut sums) {
            *x = exp(*x - shift);
            *sum += *x;
        }
    }
    let mut tail = 0.0;
    for x in chunks.into_remainder() {
        *x = exp(*x - shift);
        tail += *x;
    }
    sums.iter().sum::<f32>() + tail
}

/// Returns the largest element; -inf for an empty row. NaNs are skipped here; `exp_shifted` propagates them.
pub(crate) fn max(row: &[f32]) -> f32 {
    vectorised!(max_by_lanes(row))
}

#[inline(always)]
fn max_by_lanes(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut maxima = [f32::NEG_INFINITY; LANES];
    let mut chunks = row.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (&x, max) in chunk.iter().zip(&mut maxima) {
            *max = larger(*max, x);
        }
    }
    maxima.iter().chain(chunks.remainder()).copied().fold(f32::NEG_INFINITY, larger)
}

/// Returns 1 / (1 + e^-x).
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Returns e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2; e^r is a Taylor polynomial.
///
/// x below the smallest normal result gives almost 0; x above the largest is clamped to e^88.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // The high part of ln 2 has few bits, so n * LN2_HIGH is exact (Cody and Waite).
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Comparisons instead of min and max propagate NaN.
    let clamped = if x < -87.0 { -87.0 } else { x };
    let clamped = if clamped > 88.0 { 88.0 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let p = 1.0 / 5040.0;
    let p = p * r + 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    let exponent = (shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits());
    let y = p * f32::from_bits(exponent);
    if x < -87.0 { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "e^{x}: relative error {error}");
        }
    }

    #[test]
    fn exp_of_special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert!(exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn a_nan_reaches_the_sum() {
        for at in [0, 20, 37] {
            let mut row = vec![0.5f32; 38];
            row[at] = f32::NAN;
            let shift = max(&row);
            assert_eq!(shift, 0.5);
            assert!(exp_shifted(&mut row, shift).is_nan());
        }
    }

    #[test]
    fn rows_of_every_length_are_summed() {
        for len in 0..70usize {
            let row: Vec<f32> = (0..len).map(|i| (i * 7 % 11) as f32 - 3.0).collect();
            let want_max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&row), want_max);
            let want: f64 = row.iter().map(|&x| f64::from(x - 1.0).exp()).sum();
            let got = f64::from(exp_shifted(&mut row.clone(), 1.0));
            assert!((got - want).abs() <= 1e-6 * want, "{len}: {got} {want}");
        }
    }
}
