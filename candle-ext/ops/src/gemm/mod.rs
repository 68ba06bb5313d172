//! Matmul (GEMM) of f32 or of bf16 on the CPU over strided slices, by own kernels for AMX, AVX-512 and AVX2, else by the
//! `gemm` crate. Sums are f32.

pub(crate) mod accumulate;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_bf16;
#[cfg(target_arch = "x86_64")]
mod amx_packing;
#[cfg(target_arch = "x86_64")]
mod amx_row;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "x86_64")]
mod blocks;
mod by_crate;
#[cfg(all(test, target_arch = "x86_64"))]
mod emulated;
mod kernel;
pub(crate) mod matrix;
mod operand;
mod packed;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod rate;
mod row;
#[cfg(target_arch = "x86_64")]
mod row_bf16;
mod selection;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod transpose;
#[cfg(target_arch = "x86_64")]
mod widened;

use crate::batch_invariance::is_batch_invariant;
pub(crate) use accumulate::Accumulate;
use by_crate::{by_crate, by_crate_bf16};
use half::bf16;
use kernel::KernelCall;
use matrix::check_dims;
pub(crate) use matrix::{Mat, MatMut, Output, Store, Threads};
pub(crate) use operand::{OperandElement, PackedOperand, gemm_packed};
pub(crate) use packed::packed_operand_bytes;
pub use packed::{GemmSize, cpu_gemm_buffer_bytes};
pub use rate::measure_cpu_gemm_rate;
use selection::GemmKernel;
pub use selection::{cpu_gemm_kernel, cpu_gemm_kernels, select_cpu_gemm_kernel};
pub(crate) use selection::{has_bf16_row_kernel, has_bf16_unit, packs_bf16, prefetches_f32};

/// Computes out = [out +] scale * a b.
pub(crate) fn gemm(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
    check_shapes(&out, a, b);
    if a.cols > 0 && row::takes(&out, a, b) && !is_batch_invariant() {
        return row::gemm(out, accumulate, a, b, scale);
    }
    blocked(out, accumulate, a, b, scale, threads);
}

/// Computes out = [out +] a b on the calling thread.
///
/// The bits of an output row depend on its row of a and on b alone. [`gemm`] rounds a single row differently.
pub(crate) fn gemm_by_rows(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>) {
    check_shapes(&out, a, b);
    blocked(out, accumulate, a, b, 1.0, Threads::One);
}

/// Computes out = [out +] scale a b for bf16 operands, with f32 sums. A bf16 output is rounded once.
///
/// The bits of an output row depend on its row of a and on b alone, also for a single row.
pub(crate) fn gemm_bf16<'a>(
    out: impl Into<Output<'a>>,
    accumulate: Accumulate,
    a: Mat<'_, bf16>,
    b: Mat<'_, bf16>,
    scale: f32,
    threads: Threads,
) {
    let out = out.into();
    check_dims(out.dims(), (a.rows, a.cols), (b.rows, b.cols));
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    if a.cols == 0 {
        if accumulate == Accumulate::Overwrite {
            out.clear();
        }
        return;
    }
    GemmKernel::of_process().run_bf16(out, accumulate, a, b, scale, threads);
}

fn blocked(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
    if out.rows == 0 || out.cols == 0 {
        return;
    }
    if a.cols == 0 {
        if accumulate == Accumulate::Overwrite {
            Output::F32(out).clear();
        }
        return;
    }
    GemmKernel::of_process().run(out, accumulate, a, b, scale, threads);
}

fn check_shapes(out: &MatMut<'_>, a: Mat<'_>, b: Mat<'_>) {
    check_dims((out.rows, out.cols), (a.rows, a.cols), (b.rows, b.cols));
}

/// Matmul of f32.
struct F32Gemm<'a> {
    out: MatMut<'a>,
    accumulate: Accumulate,
    a: Mat<'a>,
    b: Mat<'a>,
    scale: f32,
    threads: Threads,
}

impl KernelCall<f32> for F32Gemm<'_> {
    #[cfg(target_arch = "x86_64")]
    fn by<K: kernel::Kernel<Operand = f32>>(self, kernel: K) {
        let Self { out, accumulate, a, b, scale, threads } = self;
        blocks::gemm(kernel, out.into(), accumulate, a, b, scale, threads);
    }

    fn by_crate(self) {
        by_crate(self.out, self.accumulate, self.a, self.b, self.scale, self.threads);
    }
}

/// Multiplies by a kernel of this processor: a single row without packing.
#[cfg(target_arch = "x86_64")]
fn bf16_gemm<K: row_bf16::RowKernel>(
    kernel: K,
    out: Output<'_>,
    accumulate: Accumulate,
    a: Mat<'_, bf16>,
    b: Mat<'_, bf16>,
    scale: f32,
    threads: Threads,
) {
    if row_bf16::takes(a, b) {
        return row_bf16::gemm(kernel, out, accumulate, a, b, scale, threads);
    }
    blocks::gemm(kernel, out, accumulate, a, b, scale, threads);
}

impl GemmKernel {
    fn run(self, out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
        self.call(F32Gemm { out, accumulate, a, b, scale, threads });
    }

    fn run_bf16(
        self,
        out: Output<'_>,
        accumulate: Accumulate,
        a: Mat<'_, bf16>,
        b: Mat<'_, bf16>,
        scale: f32,
        threads: Threads,
    ) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(kernel) => bf16_gemm(amx_bf16::AmxBf16(kernel), out, accumulate, a, b, scale, threads),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(kernel) => bf16_gemm(kernel, out, accumulate, a, b, scale, threads),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(kernel) => bf16_gemm(widened::Widened(kernel), out, accumulate, a, b, scale, threads),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(kernel) => blocks::gemm(widened::Widened(kernel), out, accumulate, a, b, scale, threads),
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAmx => {
                let kernel = emulated::Emulated::<amx_bf16::AmxBf16>::NEW;
                bf16_gemm(kernel, out, accumulate, a, b, scale, threads);
            }
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAvx512Bf16 => {
                let kernel = emulated::Emulated::<avx512_bf16::Avx512Bf16>::NEW;
                bf16_gemm(kernel, out, accumulate, a, b, scale, threads);
            }
            Self::Crate => by_crate_bf16(out, accumulate, a, b, scale, threads),
        }
    }
}
