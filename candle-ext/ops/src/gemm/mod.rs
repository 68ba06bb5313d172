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
#[cfg(all(test, target_arch = "x86_64"))]
mod emulated;
#[cfg(target_arch = "x86_64")]
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
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod transpose;
#[cfg(target_arch = "x86_64")]
mod widened;

use std::sync::OnceLock;

pub(crate) use accumulate::Accumulate;
use candle_core::{Result, bail};
use half::bf16;
pub(crate) use matrix::{Mat, MatMut, Output, Store, Threads};
use operand::KernelCall;
pub(crate) use operand::{OperandElement, PackedOperand, gemm_packed};
pub(crate) use packed::packed_operand_bytes;
pub use packed::{GemmSize, cpu_gemm_buffer_bytes};
pub use rate::measure_cpu_gemm_rate;

use crate::floats::write_bf16;

/// Returns the name of this process's GEMM kernel: `amx`, `avx512_bf16`, `avx512`, `avx2`, or `gemm` (the crate).
///
/// Kernels round differently, except that `avx512_bf16`, `avx512` and `avx2` give the same bits in f32, and the last two
/// also in bf16.
pub fn cpu_gemm_kernel() -> &'static str {
    GemmKernel::of_process().name()
}

/// Lists the GEMM kernels that this processor supports, the fastest first.
pub fn cpu_gemm_kernels() -> Vec<&'static str> {
    GemmKernel::all().into_iter().map(GemmKernel::name).collect()
}

/// Selects the GEMM kernel by name, to reproduce the results of another processor.
///
/// # Errors
///
/// If the processor does not support the kernel, or another kernel has already computed.
pub fn select_cpu_gemm_kernel(name: &str) -> Result<()> {
    let Some(kernel) = GemmKernel::all().into_iter().find(|kernel| kernel.name() == name) else {
        bail!("GEMM kernel `{name}` is unknown or unsupported: this processor has {}", cpu_gemm_kernels().join(", "))
    };
    let chosen = CHOSEN.get_or_init(|| kernel).name();
    if chosen != name {
        bail!("GEMM kernel `{name}` cannot be selected: `{chosen}` has already been used")
    }
    Ok(())
}

static CHOSEN: OnceLock<GemmKernel> = OnceLock::new();

/// Computes out = [out +] scale * a b.
pub(crate) fn gemm(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
    check_shapes(&out, a, b);
    if a.cols > 0 && row::takes(&out, a, b) {
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

/// Returns true if [`gemm_bf16`] packs its operands as they are. The `gemm` crate needs them in f32 as a whole.
pub(crate) fn packs_bf16() -> bool {
    !matches!(GemmKernel::of_process(), GemmKernel::Crate)
}

/// Returns true if [`gemm_bf16`] multiplies a single row of bf16 as fast as a loop of dot products. With AVX2 it takes twice
/// as long.
pub(crate) fn has_bf16_row_kernel() -> bool {
    match GemmKernel::of_process() {
        #[cfg(target_arch = "x86_64")]
        GemmKernel::Amx(_) | GemmKernel::Avx512Bf16(_) | GemmKernel::Avx512(_) => true,
        _ => false,
    }
}

/// Returns true if the kernel prefetches f32 matrices while it packs them, so that a copy before packing costs time.
pub(crate) fn prefetches_f32() -> bool {
    match GemmKernel::of_process() {
        #[cfg(target_arch = "x86_64")]
        GemmKernel::Amx(_) => true,
        _ => false,
    }
}

/// Returns true if the kernel multiplies bf16 by instructions for bf16, faster than f32.
pub(crate) fn has_bf16_unit() -> bool {
    match GemmKernel::of_process() {
        #[cfg(target_arch = "x86_64")]
        GemmKernel::Amx(_) | GemmKernel::Avx512Bf16(_) => true,
        _ => false,
    }
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

fn check_dims((m, n): (usize, usize), (a_rows, a_cols): (usize, usize), (b_rows, b_cols): (usize, usize)) {
    assert!(
        m == a_rows && n == b_cols && a_cols == b_rows,
        "gemm of [{a_rows}, {a_cols}] by [{b_rows}, {b_cols}] into [{m}, {n}]"
    );
}

/// Implementation of GEMM. A process uses only one, so that bits do not depend on the number of rows.
#[derive(Clone, Copy)]
enum GemmKernel {
    #[cfg(target_arch = "x86_64")]
    Amx(amx::Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(avx512_bf16::Avx512Bf16),
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    /// Emulated AMX.
    #[cfg(all(test, target_arch = "x86_64"))]
    EmulatedAmx,
    /// Emulated AVX512_BF16; f32 by the crate.
    #[cfg(all(test, target_arch = "x86_64"))]
    EmulatedAvx512Bf16,
    Crate,
}

impl GemmKernel {
    /// Lists the kernels that this processor supports, the fastest first.
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        all.extend(amx::Amx::detect().map(Self::Amx));
        #[cfg(target_arch = "x86_64")]
        {
            let bf16 = avx512_bf16::Avx512Bf16::detect();
            let ranked = [bf16.map(Self::Avx512Bf16), avx512::Avx512::detect().map(Self::Avx512)];
            let mut ranked: Vec<_> = ranked.into_iter().flatten().collect();
            if bf16.is_some_and(|kernel| !kernel.is_faster_than_f32()) {
                ranked.reverse();
            }
            all.extend(ranked);
        }
        #[cfg(target_arch = "x86_64")]
        all.extend(avx2::Avx2::detect().map(Self::Avx2));
        all.push(Self::Crate);
        all
    }

    /// Lists the kernels that a test can run here: those of [`GemmKernel::all`], and emulated ones.
    #[cfg(test)]
    fn tested() -> Vec<Self> {
        let mut tested = Self::all();
        #[cfg(target_arch = "x86_64")]
        tested.extend([Self::EmulatedAmx, Self::EmulatedAvx512Bf16]);
        tested
    }

    fn of_process() -> Self {
        *CHOSEN.get_or_init(|| Self::all()[0])
    }

    fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(_) => "avx512_bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAmx => "emulated amx",
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAvx512Bf16 => "emulated avx512_bf16",
            Self::Crate => "gemm",
        }
    }

    fn run(self, out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
        self.call(F32Gemm { out, accumulate, a, b, scale, threads });
    }

    /// Calls `call` with the kernel for f32.
    fn call(self, call: impl KernelCall<f32>) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(kernel) => call.by(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(kernel) => call.by(kernel.f32()),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(kernel) => call.by(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(kernel) => call.by(kernel),
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAmx => call.by(emulated::Emulated::<amx::Amx>::NEW),
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAvx512Bf16 => call.by_crate(),
            Self::Crate => call.by_crate(),
        }
    }

    /// Calls `call` with the kernel for bf16.
    fn call_bf16(self, call: impl KernelCall<bf16>) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx(kernel) => call.by(amx_bf16::AmxBf16(kernel)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16(kernel) => call.by(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(kernel) => call.by(widened::Widened(kernel)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(kernel) => call.by(widened::Widened(kernel)),
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAmx => call.by(emulated::Emulated::<amx_bf16::AmxBf16>::NEW),
            #[cfg(all(test, target_arch = "x86_64"))]
            Self::EmulatedAvx512Bf16 => call.by(emulated::Emulated::<avx512_bf16::Avx512Bf16>::NEW),
            Self::Crate => call.by_crate(),
        }
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

/// Widens the operands as a whole: the crate has no bf16.
fn by_crate_bf16(
    out: Output<'_>,
    accumulate: Accumulate,
    a: Mat<'_, bf16>,
    b: Mat<'_, bf16>,
    scale: f32,
    threads: Threads,
) {
    let (a_wide, b_wide) = (a.widened(), b.widened());
    let (a, b) = (Mat::new(&a_wide, a.rows, a.cols), Mat::new(&b_wide, b.rows, b.cols));
    match out {
        Output::F32(out) => by_crate(out, accumulate, a, b, scale, threads),
        Output::Bf16(out) => {
            let (rows, cols) = (out.rows, out.cols);
            let mut sums = vec![0.0; rows * cols];
            by_crate(MatMut::new(&mut sums, rows, cols), Accumulate::Overwrite, a, b, scale, threads);
            for (to, sums) in out.data.chunks_mut(out.row_stride).zip(sums.chunks_exact(cols)) {
                write_bf16(sums, &mut to[..cols], accumulate);
            }
        }
    }
}

fn by_crate(out: MatMut<'_>, accumulate: Accumulate, a: Mat<'_>, b: Mat<'_>, scale: f32, threads: Threads) {
    let (keep, parallelism) = (
        accumulate == Accumulate::Add,
        match threads {
            Threads::One => gemm::Parallelism::None,
            Threads::All => gemm::Parallelism::Rayon(0),
        },
    );
    // SAFETY: the constructors checked that all indices are within the slices. The shapes agree (asserted above), rows
    // of `out` do not overlap (row_stride >= cols), and the mutable borrow of `out` rules out aliasing. Slices are at
    // most isize::MAX bytes, so strides fit in isize.
    unsafe {
        gemm::gemm(
            out.rows,
            out.cols,
            a.cols,
            out.data.as_mut_ptr(),
            1,
            out.row_stride as isize,
            keep,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            if keep { 1.0 } else { 0.0 },
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
