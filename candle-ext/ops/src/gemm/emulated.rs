//! Kernels with emulated instructions. They run the packed layouts and the cache blocking of AMX and AVX512_BF16 on any
//! processor.
//!
//! The semantics of TDPBF16PS and VDPBF16PS are those of Intel's Software Developer's Manual, volume 2.

use std::marker::PhantomData;

use half::bf16;

use super::accumulate::Accumulate;
use super::amx::Amx;
use super::amx_bf16::AmxBf16;
use super::amx_packing::PARTS;
use super::amx_row;
use super::avx512_bf16::Avx512Bf16;
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Mat;
use super::row_bf16::{COLUMNS, RowKernel};
use crate::floats::wide_bf16;

/// Pairs of terms per cache line.
const PAIRS: usize = 16;

/// Kernel with the sizes of `K`. Its packing and its multiplication need no instructions of `K`.
#[derive(Clone, Copy)]
pub(super) struct Emulated<K>(PhantomData<K>);

impl<K> Emulated<K> {
    pub(super) const NEW: Self = Self(PhantomData);
}

/// Layout and multiplication of packed slivers, by portable code.
pub(super) trait Portable: Kernel {
    fn pack_a(block: Mat<'_, Self::Operand>, to: &mut [CacheLine]);

    fn pack_b(block: Mat<'_, Self::Operand>, to: &mut [CacheLine]);

    /// Returns the sums of a tile, row by row, MR rows of NR.
    fn sums(kc: usize, a: &[CacheLine], b: &[CacheLine]) -> Vec<f32>;
}

impl<K: Portable> Kernel for Emulated<K> {
    type Operand = K::Operand;
    const MR: usize = K::MR;
    const NR: usize = K::NR;
    const KC: usize = K::KC;
    const DEPTH: usize = K::DEPTH;
    const BLOCK_LINES: usize = K::BLOCK_LINES;
    const MAX_PACKED: usize = K::MAX_PACKED;

    fn lines_a(kc: usize) -> usize {
        K::lines_a(kc)
    }

    fn lines_b(kc: usize) -> usize {
        K::lines_b(kc)
    }

    fn pack_a(self, block: Mat<'_, Self::Operand>, to: &mut [CacheLine]) {
        <K as Portable>::pack_a(block, to);
    }

    fn pack_b(self, block: Mat<'_, Self::Operand>, to: &mut [CacheLine]) {
        <K as Portable>::pack_b(block, to);
    }

    unsafe fn multiply(
        self,
        kc: usize,
        a: &[CacheLine],
        b: &[CacheLine],
        tile: Tile,
        scale: f32,
        accumulate: Accumulate,
    ) {
        for (i, row) in K::sums(kc, a, b).chunks_exact(K::NR).enumerate().take(tile.n_rows) {
            for (j, sum) in row.iter().enumerate().take(tile.n_cols) {
                // SAFETY: the caller's contract: the tile has this row and column.
                let to = unsafe { &mut *tile.data.add(i * tile.stride + j) };
                *to = if accumulate == Accumulate::Add { sum.mul_add(scale, *to) } else { sum * scale };
            }
        }
    }
}

impl Portable for Avx512Bf16 {
    fn pack_a(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        pack_pairs(block, Self::MR, to);
    }

    fn pack_b(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        pack_pairs(block, Self::NR, to);
    }

    fn sums(kc: usize, a: &[CacheLine], b: &[CacheLine]) -> Vec<f32> {
        let mut sums = vec![0.0; Self::MR * Self::NR];
        for p in 0..kc.div_ceil(2) {
            for (at, sum) in sums.iter_mut().enumerate() {
                *sum = vdpbf16ps(*sum, word(a, p * Self::MR + at / Self::NR), word(b, p * Self::NR + at % Self::NR));
            }
        }
        sums
    }
}

impl RowKernel for Emulated<Avx512Bf16> {
    fn row_sums(self, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
        let pair = |column: &dyn Fn(usize) -> bf16, k: usize| {
            [k, k + 1].map(|k| if k < a.len() { column(k).to_bits() } else { 0 })
        };
        let sum = |j: usize| {
            let of_b = |k: usize| b.data[j * b.col_stride + k];
            (0..a.len()).step_by(2).fold(0.0, |sum, k| vdpbf16ps(sum, pair(&|k| a[k], k), pair(&of_b, k)))
        };
        std::array::from_fn(|j| if j < b.cols { sum(j) } else { 0.0 })
    }
}

impl RowKernel for Emulated<AmxBf16> {
    fn row_sums(self, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
        amx_row::sums(add_products, a, b)
    }
}

/// Emulates the loop over AMX tiles of one row.
///
/// # Safety
///
/// The row and each column must have 32 `n_steps` terms; columns are `stride` elements apart.
unsafe fn add_products(sums: &mut [f32; COLUMNS], a: *const bf16, b: *const bf16, stride: usize, n_steps: usize) {
    for (j, sum) in sums.iter_mut().enumerate() {
        for step in 0..n_steps {
            // SAFETY: the caller's contract.
            let pair = |p: usize| unsafe {
                let at = step * 2 * PAIRS + 2 * p;
                let bits = |from: *const bf16| [(*from).to_bits(), (*from.add(1)).to_bits()];
                (bits(b.add(j * stride + at)), bits(a.add(at)))
            };
            *sum = tdpbf16ps(*sum, (0..PAIRS).map(pair));
        }
    }
}

impl Portable for AmxBf16 {
    fn pack_a(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        pack_tiles(block, 1, Operand::Left, |x, _| x.to_bits(), to);
    }

    fn pack_b(block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        pack_tiles(block, 1, Operand::Right, |x, _| x.to_bits(), to);
    }

    fn sums(kc: usize, a: &[CacheLine], b: &[CacheLine]) -> Vec<f32> {
        multiply_tiles(kc, 1, &[(0, 0)], a, b)
    }
}

impl Portable for Amx {
    fn pack_a(block: Mat<'_>, to: &mut [CacheLine]) {
        pack_tiles(block, PARTS, Operand::Left, |x, part| split(x)[part], to);
    }

    fn pack_b(block: Mat<'_>, to: &mut [CacheLine]) {
        pack_tiles(block, PARTS, Operand::Right, |x, part| split(x)[part], to);
    }

    fn sums(kc: usize, a: &[CacheLine], b: &[CacheLine]) -> Vec<f32> {
        // Parts of a and b: 0 is the highest.
        multiply_tiles(kc, PARTS, &[(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)], a, b)
    }
}

/// Side of a tile multiplication.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operand {
    Left,
    Right,
}

/// Packs a matrix [k, n] with n <= `width`: `width` pairs of terms per two rows, zeros past its end.
fn pack_pairs(block: Mat<'_, bf16>, width: usize, to: &mut [CacheLine]) {
    for p in 0..block.rows.div_ceil(2) {
        for j in 0..width {
            let [even, odd] = [2 * p, 2 * p + 1].map(|k| at(block, k, j).map_or(0, bf16::to_bits));
            set_word(to, p * width + j, even, odd);
        }
    }
}

/// Packs a matrix [k, n] in AMX's layout. For each 32 terms: `n_parts` times two tiles of 16 rows or columns.
fn pack_tiles<T: Copy>(
    block: Mat<'_, T>,
    n_parts: usize,
    operand: Operand,
    part_of: impl Fn(T, usize) -> u16,
    to: &mut [CacheLine],
) {
    for step in 0..block.rows.div_ceil(2 * PAIRS) {
        for (j, p) in (0..2 * PAIRS).flat_map(|j| (0..PAIRS).map(move |p| (j, p))) {
            let (line, lane) = if operand == Operand::Left { (j % PAIRS, p) } else { (p, j % PAIRS) };
            let first = step * 2 * PAIRS + 2 * p;
            for part in 0..n_parts {
                let tile = (step * n_parts + part) * 2 + j / PAIRS;
                let [even, odd] = [first, first + 1].map(|k| at(block, k, j).map_or(0, |x| part_of(x, part)));
                set_word(to, (tile * PAIRS + line) * PAIRS + lane, even, odd);
            }
        }
    }
}

/// Multiplies packed tiles, two by two. `part_pairs` lists the parts of a and b that are multiplied, in this order.
fn multiply_tiles(
    kc: usize,
    n_parts: usize,
    part_pairs: &[(usize, usize)],
    a: &[CacheLine],
    b: &[CacheLine],
) -> Vec<f32> {
    const SIDE: usize = 2 * PAIRS;
    let mut sums = vec![0.0; SIDE * SIDE];
    for step in 0..kc.div_ceil(SIDE) {
        for (part_a, part_b) in part_pairs {
            for (at, sum) in sums.iter_mut().enumerate() {
                let (i, j) = (at / SIDE, at % SIDE);
                let row = ((step * n_parts + part_a) * 2 + i / PAIRS) * PAIRS + i % PAIRS;
                let tile = ((step * n_parts + part_b) * 2 + j / PAIRS) * PAIRS;
                let pairs = (0..PAIRS).map(|p| (word(a, row * PAIRS + p), word(b, (tile + p) * PAIRS + j % PAIRS)));
                *sum = tdpbf16ps(*sum, pairs);
            }
        }
    }
    sums
}

/// Returns the element (k, j) of a block, or `None` past its end.
fn at<T: Copy>(block: Mat<'_, T>, k: usize, j: usize) -> Option<T> {
    (k < block.rows && j < block.cols).then(|| block.data[k * block.row_stride + j * block.col_stride])
}

/// Splits a number into three bf16 that add up to it, largest first, as AMX's packing does.
fn split(x: f32) -> [u16; PARTS] {
    let high_half = |bits: u32| f32::from_bits(bits & 0xffff_0000);
    let nearest = |x: f32| high_half(x.to_bits().wrapping_add(0x8000));
    let high = nearest(x);
    let middle = nearest(x - high);
    [high, middle, high_half((x - high - middle).to_bits())].map(|part| (part.to_bits() >> 16) as u16)
}

/// Multiplies a pair of terms, as VDPBF16PS does in each lane: the odd term is added first.
fn vdpbf16ps(sum: f32, a: [u16; 2], b: [u16; 2]) -> f32 {
    fma(a[0], b[0], fma(a[1], b[1], sum))
}

/// Multiplies pairs of terms, as TDPBF16PS does for each sum: even and odd terms are summed apart.
fn tdpbf16ps(sum: f32, pairs: impl Iterator<Item = ([u16; 2], [u16; 2])>) -> f32 {
    let add_pair = |[even, odd]: [f32; 2], (a, b): ([u16; 2], [u16; 2])| [fma(a[0], b[0], even), fma(a[1], b[1], odd)];
    let [even, odd] = pairs.fold([0.0; 2], add_pair);
    flushed(flushed(sum) + flushed(even + odd))
}

/// Computes a b + c, rounded once to the nearest even. Subnormal inputs and results are zero.
fn fma(a: u16, b: u16, c: f32) -> f32 {
    let [a, b] = [a, b].map(|bits| flushed(wide_bf16(bf16::from_bits(bits))));
    flushed(a.mul_add(b, flushed(c)))
}

fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

fn word(lines: &[CacheLine], i: usize) -> [u16; 2] {
    let bytes = &lines[i / PAIRS].0[i % PAIRS * 4..][..4];
    [u16::from_le_bytes([bytes[0], bytes[1]]), u16::from_le_bytes([bytes[2], bytes[3]])]
}

fn set_word(lines: &mut [CacheLine], i: usize, even: u16, odd: u16) {
    let bytes = &mut lines[i / PAIRS].0[i % PAIRS * 4..][..4];
    bytes[..2].copy_from_slice(&even.to_le_bytes());
    bytes[2..].copy_from_slice(&odd.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::super::blocks::gemm;
    use super::super::matrix::{MatMut, Threads};
    use super::*;

    /// Returns values of very different magnitudes, with zeros, subnormal numbers and sums that cancel.
    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let value = |_| {
            let x = next() as f32 / (1 << 23) as f32 - 1.0;
            match next() % 16 {
                0 => 0.0,
                1 => x * f32::MIN_POSITIVE,
                2 => x * 1e-19,
                3 => x * 1e15,
                _ => x,
            }
        };
        (0..len).map(value).collect()
    }

    /// Checks that emulation and hardware pack the same bytes and compute the same bits.
    fn check<K: Portable>(kernel: K, numbers: impl Fn(usize, u32) -> Vec<K::Operand>) {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (40, 33, 130), (65, 70, 1100)] {
            let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
            for (a_t, b_t) in [(false, false), (true, false), (false, true), (true, true)] {
                let a = if a_t { Mat::new(&a, k, m).t() } else { Mat::new(&a, m, k) };
                let b = if b_t { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
                check_packing(kernel, a, b);
                for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                    let mut outs = [vec![0.3f32; m * n], vec![0.3f32; m * n]];
                    let [ours, emulated] = outs.each_mut().map(|out| MatMut::new(out, m, n));
                    gemm(kernel, ours.into(), accumulate, a, b, 0.7, Threads::One);
                    gemm(Emulated::<K>::NEW, emulated.into(), accumulate, a, b, 0.7, Threads::One);
                    let [ours, emulated] = outs.map(|out| out.into_iter().map(f32::to_bits).collect::<Vec<_>>());
                    assert!(ours == emulated, "[{m}, {n}, {k}], {a_t} {b_t} {accumulate:?}");
                }
            }
        }
    }

    fn check_packing<K: Portable>(kernel: K, a: Mat<'_, K::Operand>, b: Mat<'_, K::Operand>) {
        let (rows, cols) = (a.rows.min(K::MR), b.cols.min(K::NR));
        let kc = a.cols.min(K::KC);
        let (a, b) = (a.t().part(0, kc, 0, rows), b.part(0, kc, 0, cols));
        let mut slivers =
            [K::lines_a(kc), K::lines_b(kc)].map(|n| [vec![CacheLine([1; 64]); n], vec![CacheLine([1; 64]); n]]);
        let [[packed_a, portable_a], [packed_b, portable_b]] = &mut slivers;
        Kernel::pack_a(kernel, a, packed_a);
        <K as Portable>::pack_a(a, portable_a);
        Kernel::pack_b(kernel, b, packed_b);
        <K as Portable>::pack_b(b, portable_b);
        for [packed, portable] in slivers {
            let same = packed.iter().zip(&portable).all(|(packed, portable)| packed.0 == portable.0);
            assert!(same, "[{rows}, {cols}, {kc}]");
        }
    }

    fn rounded(len: usize, seed: u32) -> Vec<bf16> {
        values(len, seed).into_iter().map(bf16::from_f32).collect()
    }

    #[test]
    fn emulated_avx512_bf16_has_the_bits_of_the_instruction() {
        if let Some(kernel) = Avx512Bf16::detect() {
            check(kernel, rounded);
        }
    }

    #[test]
    fn emulated_amx_has_the_bits_of_the_instruction() {
        if let Some(kernel) = Amx::detect() {
            check(AmxBf16(kernel), rounded);
            check(kernel, values);
        }
    }

    #[test]
    fn terms_are_added_in_the_order_of_the_manual() {
        let bits = |x: f32| bf16::from_f32(x).to_bits();
        let (large, one) = (bits(2f32.powi(24)), bits(1.0));
        // The odd term first: 2^24 + 1 rounds to 2^24, and the even term cancels it.
        assert_eq!(vdpbf16ps(1.0, [bits(-2f32.powi(24)), large], [one, one]), 0.0);
        // Even and odd sums are apart: each is exact, and so is their sum.
        let pairs = [([large, one], [one, one]), ([bits(-2f32.powi(24)), one], [one, one])];
        assert_eq!(tdpbf16ps(1.0, pairs.into_iter()), 3.0);
        assert_eq!(fma(1, one, 0.0), 0.0);
    }
}
