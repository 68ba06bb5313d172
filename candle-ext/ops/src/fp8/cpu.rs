//! CPU kernels of FP8: amax, and quantization with one scale or a scale per block.

use std::ops::Range;

use rayon::prelude::*;

use super::format::{Fp8Format, e4m3, e5m2, stochastic_e4m3, stochastic_e5m2};
use super::recipe::ScaleRule;
use super::rounding::Fp8Rounding;
use crate::dropout::random;
use crate::floats::Floats;
use crate::simd::vectorised;

/// Elements per task.
const TASK: usize = 1 << 14;

/// Sizes of a matrix [rows, columns] and of its blocks.
#[derive(Clone, Copy)]
pub(super) struct BlockSizes {
    pub(super) columns: usize,
    pub(super) block_rows: usize,
    pub(super) block_columns: usize,
}

impl BlockSizes {
    pub(super) fn per_row(self) -> usize {
        self.columns.div_ceil(self.block_columns)
    }
}

/// Returns the largest magnitude; NaN counts as nothing.
pub(super) fn amax(x: Floats<'_>) -> f32 {
    tasks(x.len()).map_init(Vec::new, |wide, range| largest(x.slice(range).widened_here(wide))).reduce(|| 0.0, larger)
}

fn larger(a: f32, b: f32) -> f32 {
    if a < b { b } else { a }
}

fn largest(x: &[f32]) -> f32 {
    let mut largest = 0.0f32;
    // Lanes of their own let the compiler vectorise.
    let mut lanes = [0.0f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    vectorised!(chunks.iter().for_each(|chunk| {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane = if *lane < x.abs() { x.abs() } else { *lane })
    }));
    for x in lanes.iter().chain(rest) {
        largest = if largest < x.abs() { x.abs() } else { largest };
    }
    largest
}

/// Encodes all elements, multiplied by one scale.
pub(super) fn encode(x: Floats<'_>, scale: f32, format: Fp8Format, rounding: Fp8Rounding) -> Vec<u8> {
    let mut codes = vec![0; x.len()];
    codes.par_chunks_mut(TASK).enumerate().for_each_init(Vec::new, |wide, (i, codes)| {
        let start = i * TASK;
        let x = x.slice(start..start + codes.len()).widened_here(wide);
        encode_row(x, codes, |_| scale, (format, rounding, start));
    });
    codes
}

/// Encodes like [`encode`], and returns also the largest magnitude. Each task reads its elements from memory once.
pub(super) fn encode_with_amax(x: Floats<'_>, scale: f32, format: Fp8Format, rounding: Fp8Rounding) -> (Vec<u8>, f32) {
    let mut codes = vec![0; x.len()];
    let of_tasks = codes.par_chunks_mut(TASK).enumerate().map_init(Vec::new, |wide, (i, codes)| {
        let start = i * TASK;
        let x = x.slice(start..start + codes.len()).widened_here(wide);
        encode_row(x, codes, |_| scale, (format, rounding, start));
        largest(x)
    });
    let amax = of_tasks.reduce(|| 0.0, larger);
    (codes, amax)
}

/// Encodes a matrix with a scale per block. Returns the codes and the inverse scale of each block, row by row.
pub(super) fn encode_blocks(
    x: Floats<'_>,
    blocks: BlockSizes,
    format: Fp8Format,
    (rule, largest_number): (ScaleRule, f32),
    rounding: Fp8Rounding,
) -> (Vec<u8>, Vec<f32>) {
    let BlockSizes { columns, block_rows, block_columns } = blocks;
    if x.len() == 0 {
        return (Vec::new(), Vec::new());
    }
    let (n_rows, per_row) = (x.len() / columns, blocks.per_row());
    let mut codes = vec![0; x.len()];
    let mut inverses = vec![0.0; n_rows.div_ceil(block_rows) * per_row];
    let strip = block_rows * columns;
    let strips = codes.par_chunks_mut(strip).zip(inverses.par_chunks_mut(per_row)).enumerate();
    strips.with_min_len((TASK / strip).max(1)).for_each_init(Vec::new, |wide, (i, (codes, inverses))| {
        let x = x.slice(i * strip..i * strip + codes.len()).widened_here(wide);
        let mut scales = vec![0.0f32; per_row];
        for row in x.chunks(columns) {
            if block_columns == 1 {
                vectorised!(scales.iter_mut().zip(row).for_each(|(max, x)| {
                    *max = if *max < x.abs() { x.abs() } else { *max };
                }));
            } else {
                for (max, block) in scales.iter_mut().zip(row.chunks(block_columns)) {
                    *max = max.max(largest(block));
                }
            }
        }
        for (scale, inverse) in scales.iter_mut().zip(inverses) {
            *scale = rule.scale(*scale, format, largest_number);
            *inverse = 1.0 / *scale;
        }
        for (row_idx, (row, codes)) in x.chunks(columns).zip(codes.chunks_mut(columns)).enumerate() {
            let start = i * strip + row_idx * columns;
            if block_columns == 1 {
                encode_row(row, codes, |column| scales[column], (format, rounding, start));
                continue;
            }
            let row_blocks = row.chunks(block_columns).zip(codes.chunks_mut(block_columns));
            for (block_idx, (row, codes)) in row_blocks.enumerate() {
                let scale = scales[block_idx];
                encode_row(row, codes, |_| scale, (format, rounding, start + block_idx * block_columns));
            }
        }
    });
    (codes, inverses)
}

/// Encodes elements, each times its scale. `start` is the position of the first in the stream of random numbers.
#[inline(always)]
fn encode_row(
    x: &[f32],
    codes: &mut [u8],
    scale: impl Fn(usize) -> f32 + Copy,
    (format, rounding, start): (Fp8Format, Fp8Rounding, usize),
) {
    /// Encodes in one loop, which the compiler vectorises.
    macro_rules! each {
        (|$x:ident, $i:ident| $code:expr) => {
            vectorised!(x.iter().zip(codes).enumerate().for_each(|($i, (x, code))| {
                let $x = *x * scale($i);
                *code = $code;
            }))
        };
    }
    match (format, rounding) {
        (Fp8Format::E4m3, Fp8Rounding::Nearest) => each!(|x, _i| e4m3(x)),
        (Fp8Format::E5m2, Fp8Rounding::Nearest) => each!(|x, _i| e5m2(x)),
        (Fp8Format::E4m3, Fp8Rounding::Stochastic { key }) => {
            each!(|x, i| stochastic_e4m3(x, random(key, (start + i) as u64) as u32))
        }
        (Fp8Format::E5m2, Fp8Rounding::Stochastic { key }) => {
            each!(|x, i| stochastic_e5m2(x, random(key, (start + i) as u64) as u32))
        }
    }
}

/// Splits `len` elements into the ranges of tasks.
fn tasks(len: usize) -> impl ParallelIterator<Item = Range<usize>> {
    (0..len.div_ceil(TASK)).into_par_iter().map(move |i| i * TASK..((i + 1) * TASK).min(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One pass has the codes and the amax of two, over several tasks and with numbers that are not finite.
    #[test]
    fn codes_with_their_amax_are_those_of_two_passes() {
        for len in [0, 1, 17, TASK, 2 * TASK + 5] {
            let places = [0, len / 2, len.saturating_sub(1)];
            for (at, odd) in places.into_iter().flat_map(|at| [2.0, f32::NAN, f32::INFINITY].map(|odd| (at, odd))) {
                let mut x: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin()).collect();
                x.iter_mut().skip(at).take(1).for_each(|x| *x = odd);
                let x = Floats::F32(&x);
                for rounding in [Fp8Rounding::Nearest, Fp8Rounding::Stochastic { key: 3 }] {
                    let (codes, largest) = encode_with_amax(x, 3.5, Fp8Format::E5m2, rounding);
                    assert!(
                        codes == encode(x, 3.5, Fp8Format::E5m2, rounding) && largest == amax(x),
                        "{len} {at} {odd}"
                    );
                }
            }
        }
    }
}
