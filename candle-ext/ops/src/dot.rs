//! The sum of products of two slices, written so that the compiler vectorises it.

use half::bf16;

use crate::simd::vectorised;

/// Independent lanes: fast, exact enough for rows of thousands, and always in the same order.
const LANES: usize = 16;

/// sum(a b)
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    vectorised!(sum_of_products(a, b, |a| a))
}

/// The same, one side widened on the way.
pub(crate) fn dot_bf16(a: &[bf16], b: &[f32]) -> f32 {
    vectorised!(sum_of_products(a, b, |a| f32::from_bits(u32::from(a.to_bits()) << 16)))
}

/// The same for what is vectorised as a whole.
#[inline(always)]
pub(crate) fn sum_of_products<T: Copy>(a: &[T], b: &[f32], widen: impl Fn(T) -> f32) -> f32 {
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
    use super::*;

    #[test]
    fn every_length_is_summed_whole() {
        for len in 0..70u8 {
            let a: Vec<f32> = (0..len).map(f32::from).collect();
            let want: f32 = a.iter().map(|a| a * (a + 1.0)).sum();
            let b: Vec<f32> = a.iter().map(|a| a + 1.0).collect();
            assert_eq!(dot(&a, &b), want);
            let rounded: Vec<bf16> = a.iter().copied().map(bf16::from_f32).collect();
            assert_eq!(dot_bf16(&rounded, &b), want);
        }
    }
}
