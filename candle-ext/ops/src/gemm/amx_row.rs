//! One row of bf16 times a matrix with contiguous columns, such as a token times a weight [n, k], by AMX without packing.
//!
//! The columns are the left operand, as they are in memory. An AMX tile is 16 columns and 32 terms.

use std::arch::asm;

use half::bf16;

use super::amx::AmxConfig;
use super::amx_bf16::AmxBf16;
use super::kernel::Kernel;
use super::matrix::Mat;
use super::pairs::DEPTH;
use super::row_bf16::{COLUMNS, RowKernel};

/// Tiles 0 to 3 are sums of 16 columns, tile 4 is 32 terms of the row, tiles 5 to 7 are 32 terms of 16 columns.
static CONFIG: AmxConfig = AmxConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [4, 4, 4, 4, 4, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Adds the dot products of a row with 64 columns to the sums, 32 terms per step. Columns are a stride apart.
type AddProducts = unsafe fn(&mut [f32; COLUMNS], *const bf16, *const bf16, usize, usize);

impl RowKernel for AmxBf16 {
    fn row_sums(self, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
        sums(add_products, a, b)
    }

    fn begin_row(self) {
        self.0.configure(&CONFIG);
    }

    fn end_row(self) {
        self.end();
    }
}

/// Computes the sums of a row with up to [`COLUMNS`] columns. Incomplete steps are copied, with zeros.
pub(super) fn sums(add_products: AddProducts, a: &[bf16], b: Mat<'_, bf16>) -> [f32; COLUMNS] {
    assert!(a.len() == b.rows && b.row_stride == 1 && b.cols <= COLUMNS, "a row has the terms of its columns");
    let mut sums = [0.0; COLUMNS];
    let n_whole = if b.cols == COLUMNS { b.rows / DEPTH } else { 0 };
    if n_whole > 0 {
        // SAFETY: the row and each of the 64 columns have 32 `n_whole` terms.
        unsafe { add_products(&mut sums, a.as_ptr(), b.data.as_ptr(), b.col_stride, n_whole) };
    }
    for first in (n_whole * DEPTH..b.rows).step_by(DEPTH) {
        let n = DEPTH.min(b.rows - first);
        let (mut row, mut columns) = ([bf16::ZERO; DEPTH], [[bf16::ZERO; DEPTH]; COLUMNS]);
        row[..n].copy_from_slice(&a[first..first + n]);
        for (j, column) in columns.iter_mut().enumerate().take(b.cols) {
            column[..n].copy_from_slice(&b.data[j * b.col_stride + first..][..n]);
        }
        // SAFETY: the copies have 32 terms.
        unsafe { add_products(&mut sums, row.as_ptr(), columns.as_ptr().cast(), DEPTH, 1) };
    }
    sums
}

/// Adds the dot products of a row with 64 columns to `sums`, 32 terms per step.
///
/// # Safety
///
/// The row and each column must have 32 `n_steps` terms; columns are `stride` elements apart. The tiles must be configured.
unsafe fn add_products(sums: &mut [f32; COLUMNS], a: *const bf16, b: *const bf16, stride: usize, n_steps: usize) {
    let tile = |i: usize| b.wrapping_add(16 * i * stride);
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "tileloadd tmm0, [{sums} + {four}]",
            "tileloadd tmm1, [{sums} + {four} + 64]",
            "tileloadd tmm2, [{sums} + {four} + 128]",
            "tileloadd tmm3, [{sums} + {four} + 192]",
            "2:",
            "tileloadd tmm4, [{a} + {four}]",
            "tileloadd tmm5, [{b0} + {stride}]",
            "tileloadd tmm6, [{b1} + {stride}]",
            "tdpbf16ps tmm0, tmm5, tmm4",
            "tileloadd tmm7, [{b2} + {stride}]",
            "tdpbf16ps tmm1, tmm6, tmm4",
            "tileloadd tmm5, [{b3} + {stride}]",
            "tdpbf16ps tmm2, tmm7, tmm4",
            "tdpbf16ps tmm3, tmm5, tmm4",
            "add {a}, 64",
            "add {b0}, 64",
            "add {b1}, 64",
            "add {b2}, 64",
            "add {b3}, 64",
            "dec {n}",
            "jnz 2b",
            "tilestored [{sums} + {four}], tmm0",
            "tilestored [{sums} + {four} + 64], tmm1",
            "tilestored [{sums} + {four} + 128], tmm2",
            "tilestored [{sums} + {four} + 192], tmm3",
            a = inout(reg) a => _,
            b0 = inout(reg) tile(0) => _,
            b1 = inout(reg) tile(1) => _,
            b2 = inout(reg) tile(2) => _,
            b3 = inout(reg) tile(3) => _,
            n = inout(reg) n_steps => _,
            stride = in(reg) stride * size_of::<bf16>(),
            four = in(reg) 4usize,
            sums = in(reg) sums.as_mut_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
