//! The GEMM kernel of this process.

use std::sync::OnceLock;

use candle_core::{Result, bail};
use half::bf16;

#[cfg(all(test, target_arch = "x86_64"))]
use super::emulated;
use super::kernel::KernelCall;
#[cfg(target_arch = "x86_64")]
use super::{amx, amx_bf16, avx2, avx512, avx512_bf16, widened};

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

/// Returns true if [`gemm_bf16`](super::gemm_bf16) packs its operands as they are. The `gemm` crate needs them in f32 as a whole.
pub(crate) fn packs_bf16() -> bool {
    !matches!(GemmKernel::of_process(), GemmKernel::Crate)
}

/// Returns true if [`gemm_bf16`](super::gemm_bf16) multiplies a single row of bf16 as fast as a loop of dot products. With AVX2 it takes twice
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

/// Implementation of GEMM. A process uses only one, so that bits do not depend on the number of rows.
#[derive(Clone, Copy)]
pub(super) enum GemmKernel {
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
    pub(super) fn all() -> Vec<Self> {
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
    pub(super) fn tested() -> Vec<Self> {
        let mut tested = Self::all();
        #[cfg(target_arch = "x86_64")]
        tested.extend([Self::EmulatedAmx, Self::EmulatedAvx512Bf16]);
        tested
    }

    pub(super) fn of_process() -> Self {
        *CHOSEN.get_or_init(|| Self::all()[0])
    }

    pub(super) fn name(self) -> &'static str {
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

    /// Calls `call` with the kernel for f32.
    pub(super) fn call(self, call: impl KernelCall<f32>) {
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
    pub(super) fn call_bf16(self, call: impl KernelCall<bf16>) {
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
}
