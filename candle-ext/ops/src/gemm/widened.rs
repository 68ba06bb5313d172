//! bf16 matmul on processors without bf16 instructions: a kernel of f32, whose packing widens the elements.

use std::arch::x86_64::{
    __m512, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_slli_epi32,
};
use std::cell::RefCell;

use half::bf16;

use super::accumulate::Accumulate;
use super::avx512::Avx512;
use super::kernel::{CacheLine, Kernel, Tile};
use super::matrix::Mat;
use super::pairs::row_sums;
use super::row_bf16::{COLUMNS, RowKernel};
use crate::floats::{first_of, wide_bf16, widen_bf16};

thread_local! {
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Kernel of f32 with bf16 operands. Its results are those of the widened operands.
#[derive(Clone, Copy)]
pub(super) struct Widened<K>(pub(super) K);

impl<K: Kernel<Operand = f32>> Kernel for Widened<K> {
    type Operand = bf16;
    const MR: usize = K::MR;
    const NR: usize = K::NR;
    const KC: usize = K::KC;
    const BLOCK_LINES: usize = K::BLOCK_LINES;
    const MAX_PACKED: usize = K::MAX_PACKED;

    fn lines_a(kc: usize) -> usize {
        K::lines_a(kc)
    }

    fn lines_b(kc: usize) -> usize {
        K::lines_b(kc)
    }

    fn pack_a(self, block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        with_widened(block, |block| self.0.pack_a(block, to));
    }

    fn pack_b(self, block: Mat<'_, bf16>, to: &mut [CacheLine]) {
        with_widened(block, |block| self.0.pack_b(block, to));
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
        // SAFETY: the caller's contract.
        unsafe { self.0.multiply(kc, a, b, tile, scale, accumulate) };
    }

    fn begin(self) {
        self.0.begin();
    }

    fn end(self) {
        self.0.end();
    }
}

/// Calls `pack` with a block as f32. Columns that were contiguous still are.
fn with_widened(block: Mat<'_, bf16>, pack: impl FnOnce(Mat<'_>)) {
    let Mat { data, rows, cols, row_stride, col_stride } = block;
    WIDE.with_borrow_mut(|wide| {
        let wide = first_of(wide, rows * cols);
        if row_stride == 1 {
            for (j, column) in wide.chunks_exact_mut(rows).enumerate() {
                widen_bf16(&data[j * col_stride..][..rows], column);
            }
            return pack(Mat::new(wide, cols, rows).t());
        }
        for (k, row) in wide.chunks_exact_mut(cols).enumerate() {
            let from = &data[k * row_stride..];
            if col_stride == 1 {
                widen_bf16(&from[..cols], row);
            } else {
                row.iter_mut().enumerate().for_each(|(j, x)| *x = wide_bf16(from[j * col_stride]));
            }
        }
        pack(Mat::new(wide, rows, cols));
    });
}

impl RowKernel for Widened<Avx512> {
    fn row_sums(self, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
        // SAFETY: the processor has AVX-512.
        unsafe { sums(a, b) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn sums(a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
    row_sums(
        a,
        b,
        #[inline(always)]
        |sum, factor, columns, n| add_pair(sum, factor, columns, n),
    )
}

/// Multiplies two terms, or the first only, and adds to the sums.
#[target_feature(enable = "avx512f")]
#[inline]
fn add_pair(sum: __m512, factor: u32, columns: __m512, n: usize) -> __m512 {
    const HIGH: u32 = 0xffff_0000;
    let columns = _mm512_castps_si512(columns);
    let even = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(columns));
    let sum = _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(factor << 16)), even, sum);
    if n < 2 {
        return sum;
    }
    let odd = _mm512_castsi512_ps(_mm512_and_si512(columns, _mm512_set1_epi32(HIGH as i32)));
    _mm512_fmadd_ps(_mm512_set1_ps(f32::from_bits(factor & HIGH)), odd, sum)
}
