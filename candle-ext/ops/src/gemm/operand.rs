//! Operands that several matmuls read: packed once.

use std::marker::PhantomData;

use half::bf16;

use super::accumulate::Accumulate;
use super::by_crate::by_crate;
use super::kernel::KernelCall;
#[cfg(target_arch = "x86_64")]
use super::kernel::{CacheLine, Kernel};
use super::matrix::{Mat, MatMut, Side, Threads, check_dims};
use super::selection::GemmKernel;
#[cfg(target_arch = "x86_64")]
use super::tiles::{gemm_of_packed, pack_operand};
use crate::floats::wide_bf16;

/// Element of an operand, f32 or bf16.
#[allow(private_bounds, reason = "kernels are private to `gemm`")]
pub(crate) trait OperandElement: Dispatch {}

impl<T: Dispatch> OperandElement for T {}

/// Elements with kernels of their own.
pub(super) trait Dispatch: Copy {
    /// Calls `call` with the kernel for these elements.
    fn dispatch<C: KernelCall<Self>>(kernel: GemmKernel, call: C);

    /// Returns the element as f32.
    fn wide(self) -> f32;
}

impl Dispatch for f32 {
    fn dispatch<C: KernelCall<Self>>(kernel: GemmKernel, call: C) {
        kernel.call(call);
    }

    fn wide(self) -> f32 {
        self
    }
}

impl Dispatch for bf16 {
    fn dispatch<C: KernelCall<Self>>(kernel: GemmKernel, call: C) {
        kernel.call_bf16(call);
    }

    fn wide(self) -> f32 {
        wide_bf16(self)
    }
}

/// Operand of matmuls on one thread, in the layout of this process's kernel.
///
/// The buffer is kept when another operand is packed.
pub(crate) struct PackedOperand<T> {
    side: Side,
    rows: usize,
    cols: usize,
    #[cfg(target_arch = "x86_64")]
    lines: Vec<CacheLine>,
    /// Elements row by row, for the `gemm` crate.
    plain: Vec<f32>,
    element: PhantomData<T>,
}

impl<T> Default for PackedOperand<T> {
    fn default() -> Self {
        Self {
            side: Side::A,
            rows: 0,
            cols: 0,
            #[cfg(target_arch = "x86_64")]
            lines: Vec::new(),
            plain: Vec::new(),
            element: PhantomData,
        }
    }
}

impl<T: OperandElement> PackedOperand<T> {
    /// Returns a packed left operand [m, k].
    pub(crate) fn left(a: Mat<'_, T>) -> Self {
        let mut packed = Self::default();
        packed.pack_left(a);
        packed
    }

    /// Returns a packed right operand [k, n].
    pub(crate) fn right(b: Mat<'_, T>) -> Self {
        let mut packed = Self::default();
        packed.pack_right(b);
        packed
    }

    /// Packs the left operand [m, k] of matmuls.
    pub(crate) fn pack_left(&mut self, a: Mat<'_, T>) -> &Self {
        self.pack_side(Side::A, a)
    }

    /// Packs the right operand [k, n] of matmuls.
    pub(crate) fn pack_right(&mut self, b: Mat<'_, T>) -> &Self {
        self.pack_side(Side::B, b)
    }

    fn pack_side(&mut self, side: Side, of: Mat<'_, T>) -> &Self {
        self.pack_by(GemmKernel::of_process(), side, of)
    }

    pub(super) fn pack_by(&mut self, kernel: GemmKernel, side: Side, of: Mat<'_, T>) -> &Self {
        (self.side, self.rows, self.cols) = (side, of.rows, of.cols);
        T::dispatch(kernel, PackCall { side, of, to: self });
        self
    }
}

/// Computes out = [out +] scale a b on the calling thread, a packed as left operand and b as right operand.
///
/// The bits are those of a matmul of the unpacked operands, except for a single row of f32.
pub(crate) fn gemm_packed<T: OperandElement>(
    out: MatMut<'_>,
    accumulate: Accumulate,
    a: &PackedOperand<T>,
    b: &PackedOperand<T>,
    scale: f32,
) {
    multiply_by(GemmKernel::of_process(), out, accumulate, [a, b], scale);
}

pub(super) fn multiply_by<T: OperandElement>(
    kernel: GemmKernel,
    out: MatMut<'_>,
    accumulate: Accumulate,
    [a, b]: [&PackedOperand<T>; 2],
    scale: f32,
) {
    check_dims((out.rows, out.cols), (a.rows, a.cols), (b.rows, b.cols));
    assert!((a.side, b.side) == (Side::A, Side::B), "each operand is packed for its side");
    assert!(a.rows > 0 && a.cols > 0 && b.cols > 0, "packed operands have elements");
    T::dispatch(kernel, PackedGemm { out, accumulate, a, b, scale });
}

struct PackCall<'a, 't, T> {
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    side: Side,
    of: Mat<'a, T>,
    to: &'t mut PackedOperand<T>,
}

impl<T: OperandElement> KernelCall<T> for PackCall<'_, '_, T> {
    #[cfg(target_arch = "x86_64")]
    fn by<K: Kernel<Operand = T>>(self, kernel: K) {
        pack_operand(kernel, self.side, self.of, &mut self.to.lines);
    }

    fn by_crate(self) {
        self.to.plain.clear();
        self.to.plain.extend(self.of.elements().map(T::wide));
    }
}

struct PackedGemm<'a, T> {
    out: MatMut<'a>,
    accumulate: Accumulate,
    a: &'a PackedOperand<T>,
    b: &'a PackedOperand<T>,
    scale: f32,
}

impl<T: OperandElement> KernelCall<T> for PackedGemm<'_, T> {
    #[cfg(target_arch = "x86_64")]
    fn by<K: Kernel<Operand = T>>(self, kernel: K) {
        let Self { out, accumulate, a, b, scale } = self;
        gemm_of_packed(kernel, out, accumulate, [&a.lines, &b.lines], a.cols, scale);
    }

    fn by_crate(self) {
        let [a, b] = [self.a, self.b].map(|x| Mat::new(&x.plain, x.rows, x.cols));
        by_crate(self.out, self.accumulate, a, b, self.scale, Threads::One);
    }
}
