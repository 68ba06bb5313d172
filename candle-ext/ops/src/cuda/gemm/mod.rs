//! GEMMs on CUDA by cuBLASLt.
//!
//! [`search`] selects the algorithm of a GEMM, [`choices`] stores tuned ones; [`cublas_lt`] and [`cublas`] call the
//! libraries. [`grouped`] is one GEMM per group of rows, also by [`cutlass`].

#[cfg(any(feature = "cuda", test))]
mod choices;
#[cfg(feature = "cuda")]
mod cublas;
#[cfg(feature = "cuda")]
mod cublas_lt;
#[cfg(any(feature = "cuda", test))]
pub(crate) mod cutlass;
#[cfg(feature = "cuda")]
mod descriptors;
#[cfg_attr(
    not(feature = "emulate"),
    allow(dead_code, reason = "some fields are read by the emulator and CUTLASS only")
)]
pub(crate) mod grouped;
#[cfg(any(feature = "cuda", test))]
mod key;
#[cfg(any(feature = "cuda", test))]
mod lru_cache;
pub(super) mod operands;
#[cfg(any(feature = "cuda", test))]
mod search;

use candle_core::{DType, Result};

use super::{Arg, Gpu, kernels, suffix};
#[cfg(feature = "cuda")]
pub(crate) use cublas_lt::forget_plans;
use grouped::{GroupedGemm, GroupedProblems};
pub(crate) use operands::{Fp8Accumulation, Fp8Inputs, Gemm, GemmInputs, Matrix, ScaledInput, Scaling};

kernels!("gemm");

/// Elements of c that a thread fills, approximately.
const FILLED_PER_THREAD: usize = 4;

impl Gemm {
    /// Computes the GEMM.
    ///
    /// # Safety
    ///
    /// Every address must be valid for a matrix of its size and dtype. c must overlap neither a nor b.
    pub(crate) unsafe fn run(&self, gpu: Gpu) -> Result<()> {
        if self.m == 0 || self.n == 0 {
            return Ok(());
        }
        if self.k == 0 {
            // SAFETY: the caller guarantees valid addresses.
            return unsafe { self.fill(gpu) };
        }
        if self.bias.is_some() && !self.adds_bias_in_epilogue() {
            // SAFETY: as above.
            unsafe {
                self.fill(gpu)?;
                return Self { plus: Some(self.c), bias: None, ..*self }.run(gpu);
            }
        }
        match gpu {
            // SAFETY: the caller guarantees valid addresses.
            #[cfg(feature = "cuda")]
            Gpu::Device(device) => unsafe { cublas_lt::run(self, device) },
            // SAFETY: as above.
            #[cfg(feature = "emulate")]
            Gpu::Emulated(_) => unsafe { super::emulator::gemm(self) },
        }
    }

    /// Returns true if cuBLASLt can add the bias. With FP8 operands it has no f32 bias, and no bias with scales per block.
    fn adds_bias_in_epilogue(&self) -> bool {
        match self.inputs {
            GemmInputs::Floats(_) => true,
            GemmInputs::Fp8(Fp8Inputs { a, b, .. }) => {
                self.c_dtype != DType::F32 && [a.scaling, b.scaling] == [Scaling::Tensor; 2]
            }
        }
    }

    /// Writes addend plus bias, or zeros, to c. With k = 0, which cuBLASLt refuses, that is the result.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::run`].
    unsafe fn fill(&self, gpu: Gpu) -> Result<()> {
        if self.plus == Some(self.c) && self.bias.is_none() {
            return Ok(());
        }
        let [_, _, stride] = self.output().in_memory([self.m, self.n]);
        let args = [
            Arg::Address(self.plus.unwrap_or(0)),
            Arg::Address(self.bias.unwrap_or(0)),
            Arg::Address(self.c),
            Arg::I64(self.m as i64),
            Arg::I64(self.n as i64),
            Arg::I64(stride as i64),
        ];
        let name = format!("fill_{}", suffix(KERNELS.op, self.c_dtype)?);
        // SAFETY: the addend and c are [m, n] with this stride, the bias is [n], all in c's dtype; a zero address means
        // none.
        unsafe { KERNELS.launch_flat(gpu, &name, self.m * self.n, FILLED_PER_THREAD, &args) }
    }
}

impl GroupedGemm {
    /// Computes the GEMM.
    ///
    /// # Safety
    ///
    /// Every array must be valid, and every address in it for a matrix of its sizes and dtype. The output must not
    /// overlap an input.
    pub(crate) unsafe fn run(&self, gpu: Gpu) -> Result<()> {
        match gpu {
            // SAFETY: the caller guarantees valid addresses.
            #[cfg(feature = "cuda")]
            Gpu::Device(device) => unsafe { cublas_lt::grouped::run_grouped(self, device) },
            // SAFETY: as above.
            #[cfg(feature = "emulate")]
            Gpu::Emulated(_) => unsafe { super::emulator::grouped_gemm(self) },
        }
    }
}

impl GroupedProblems {
    /// Computes the GEMM.
    ///
    /// # Errors
    ///
    /// If the tile's object is unusable, or if CUTLASS fails.
    ///
    /// # Safety
    ///
    /// As for [`GroupedGemm::run`].
    pub(crate) unsafe fn run(&self, gpu: Gpu) -> Result<()> {
        match gpu {
            // SAFETY: the caller guarantees valid addresses.
            #[cfg(feature = "cuda")]
            Gpu::Device(device) => unsafe { cutlass::run(self, device) },
            // SAFETY: as above.
            #[cfg(feature = "emulate")]
            Gpu::Emulated(_) => unsafe { super::emulator::grouped_problems(self) },
        }
    }
}

#[cfg(all(test, feature = "emulate"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::marker::PhantomData;

    use half::bf16;

    use super::*;
    use crate::cuda::{DeviceAddress, emulator};

    /// Rows of c, and its row stride.
    const M: usize = 37;
    const STRIDE: usize = 70;

    /// Returns c of a GEMM with k = 0: [`M`] rows of n elements, with the gaps between the rows.
    fn product_over_nothing(n: usize, plus: Option<&[bf16]>, bias: Option<&[bf16]>, in_place: bool) -> Vec<bf16> {
        let mut c = vec![bf16::from_f32(-7.0); M * STRIDE];
        if let (true, Some(plus)) = (in_place, plus) {
            c.copy_from_slice(plus);
        }
        let at = |values: &[bf16]| values.as_ptr().expose_provenance() as DeviceAddress;
        let gemm = gemm_over_nothing(n, c.as_mut_ptr().expose_provenance() as DeviceAddress);
        let plus = plus.map(|plus| if in_place { gemm.c } else { at(plus) });
        let gemm = Gemm { plus, bias: bias.map(at), ..gemm };
        // SAFETY: a and b have no elements, c and the addend rows of n elements, the bias n.
        unsafe { gemm.run(Gpu::Emulated(PhantomData)) }.unwrap();
        c
    }

    fn gemm_over_nothing(n: usize, c: DeviceAddress) -> Gemm {
        let nothing = Matrix::plain(align_of::<bf16>() as DeviceAddress);
        Gemm { a: nothing, b: nothing, c, c_stride: Some(STRIDE), ..Gemm::new([M, n, 0], DType::BF16) }
    }

    fn values(n: usize, step: f32) -> Vec<bf16> {
        (0..n).map(|i| bf16::from_f32((i as f32 * step).sin())).collect()
    }

    #[test]
    fn a_gemm_over_zero_terms_is_the_addend_and_the_bias_or_zeros() {
        for n in [1, 64, 70] {
            let (plus, bias) = (values(M * STRIDE, 0.7), values(n, 0.3));
            for (plus, bias, in_place) in [
                (None, None, false),
                (None, Some(&bias[..]), false),
                (Some(&plus[..]), None, false),
                (Some(&plus[..]), None, true),
                (Some(&plus[..]), Some(&bias[..]), false),
                (Some(&plus[..]), Some(&bias[..]), true),
            ] {
                let got = product_over_nothing(n, plus, bias, in_place);
                for (i, got) in got.iter().enumerate() {
                    let (column, value) = (i % STRIDE, |x: Option<&[bf16]>, i: usize| x.map_or(0.0, |x| x[i].to_f32()));
                    let between = if in_place { value(plus, i) } else { -7.0 };
                    let want =
                        if column < n { value(plus, i) + bias.map_or(0.0, |b| b[column].to_f32()) } else { between };
                    assert_eq!(*got, bf16::from_f32(want), "{n} {} {} {in_place} {i}", plus.is_some(), bias.is_some());
                }
            }
        }
    }

    #[test]
    fn the_fill_kernel_equals_the_emulated_gemm_over_zero_terms() {
        let (n, plus, bias) = (64, values(M * STRIDE, 0.7), values(64, 0.3));
        let mut c = vec![bf16::NAN; M * STRIDE];
        let at = |values: &[bf16]| values.as_ptr().expose_provenance() as DeviceAddress;
        let gemm = gemm_over_nothing(n, c.as_mut_ptr().expose_provenance() as DeviceAddress);
        let gemm = Gemm { plus: Some(at(&plus)), bias: Some(at(&bias)), ..gemm };
        // SAFETY: as in `product_over_nothing`.
        unsafe { emulator::gemm(&gemm) }.unwrap();
        let got = product_over_nothing(n, Some(&plus), Some(&bias), false);
        for row in 0..M {
            let row = row * STRIDE..row * STRIDE + n;
            assert_eq!(got[row.clone()], c[row]);
        }
    }

    #[test]
    fn in_f32_the_addends_are_not_rounded() {
        let (plus, bias, mut c) = ([1.0f32, 2.0], [1e-7f32, 3e-7], [f32::NAN; 2]);
        let at = |values: &[f32]| values.as_ptr().expose_provenance() as DeviceAddress;
        let nothing = Matrix::plain(align_of::<f32>() as DeviceAddress);
        let gemm = Gemm {
            a: nothing,
            b: nothing,
            c: c.as_mut_ptr().expose_provenance() as DeviceAddress,
            plus: Some(at(&plus)),
            bias: Some(at(&bias)),
            ..Gemm::new([1, 2, 0], DType::F32)
        };
        // SAFETY: as above.
        unsafe { gemm.run(Gpu::Emulated(PhantomData)) }.unwrap();
        assert_eq!(c, [1.0 + 1e-7, 2.0 + 3e-7]);
    }
}
