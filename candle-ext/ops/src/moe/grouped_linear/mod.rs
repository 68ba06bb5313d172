//! Grouped linear layer, such as the experts of a mixture-of-experts layer: one weight matrix per group of rows.
//!
//! n rows in e groups, `in` inputs and `out` outputs of each group

mod call;
mod choice;
mod cost;
mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod fused;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod library;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod operands;
mod tasks;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod tile;
#[cfg(any(feature = "cuda", all(test, feature = "emulate")))]
mod tile_check;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod winners;

use candle_core::{DType, Result, Tensor, bail};

use crate::backward::BackwardContext;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use crate::cuda::gemm::grouped::GroupedOutput;
use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::fp8::{Contraction, Fp8Linear, Fp8Operand, GroupCodes, Groups};
use crate::recording::{bytes_of_saving, record, requires_grad, save};
use crate::saved::Saved;
use crate::span::span;
use crate::storage::{self, host};
use crate::weight::{StoredWeight, Weight};
use crate::weight_matmul::Dims;
use call::OP;
pub use call::{GroupedCall, GroupedGemmImpl, TokensPerCall};
pub use cost::GroupedLinearCost;
use cpu::Grouped;

/// Multiplies the rows of each group with the group's matrix: y = x w_i^T, with x [n, in] and y [n, out].
///
/// Group i has the rows `offsets[i]..offsets[i + 1]` of x, and the rows `i * out..(i + 1) * out` of w [e * out, in].
/// `offsets` is u32 [e + 1] and starts at 0. Rows from `offsets[e]` on become zero.
///
/// Weight gradients are added to the sink (dw_i += dy_i^T x_i); a frozen weight has none. The weight may be quantized
/// or have another dtype than x. A weight with an enabled [`Fp8Linear`] multiplies in FP8: values of codes with a scale per
/// group, or per block of a group's rows. It has a matrix per group.
///
/// # Errors
///
/// On the CPU, if the offsets decrease or exceed n. With [`GroupedGemmImpl::Cublas`] or [`GroupedGemmImpl::Cutlass`], if it
/// does not support the call.
pub fn grouped_linear(x: &Tensor, w: &Weight, offsets: &Tensor, call: impl Into<GroupedCall>) -> Result<Tensor> {
    let _span = span(OP, "forward");
    let GroupedCall { tokens, implementation } = call.into();
    let dims = check(x, w, offsets)?;
    let (input, offsets) = (x.contiguous()?, offsets.contiguous()?);
    let fp8 = w.fp8().cloned();
    fp8.as_ref().map_or(Ok(()), |fp8| fp8.check_matrices(offsets.elem_count() - 1))?;
    let layer = Layer { w: w.clone(), fp8, offsets, tokens, implementation, dims, dtype: x.dtype() };
    let (quantized, saved) = layer.quantized_and_saved(&input)?;
    let y = layer.forward(&quantized)?;
    drop(quantized);
    let wants_dx = requires_grad(x);
    Ok(record(OP, [x.into(), w.into()], y, move |dy, context| {
        Ok([layer.backward(dy, saved, wants_dx, context)?, None])
    }))
}

/// Weights, row ranges and sizes of a call.
struct Layer {
    w: Weight,
    /// FP8 layer of the weight, if FP8 is enabled.
    fp8: Option<Fp8Linear>,
    offsets: Tensor,
    tokens: TokensPerCall,
    implementation: GroupedGemmImpl,
    /// Sizes of one group's matmul; `t` counts the rows of all groups.
    dims: Dims,
    /// Dtype of x.
    dtype: DType,
}

/// Input of a layer between forward and backward.
enum SavedRows {
    /// Input in its dtype, or the function that recomputes it.
    Rows(Saved),
    /// FP8 codes of an input that no other op saves.
    Codes(GroupCodes),
}

impl Layer {
    /// Returns the input as the forward's matmul reads it, and what a trainable weight's gradient needs of it.
    fn quantized_and_saved(&self, x: &Tensor) -> Result<(Tensor, Option<SavedRows>)> {
        let n_bytes_of_codes = x.elem_count();
        let saves_codes = self.w.sink().is_some() && bytes_of_saving(x) > n_bytes_of_codes;
        let Some(fp8) = self.fp8.as_ref().filter(|_| saves_codes) else {
            let saved = self.w.sink().map(|_| SavedRows::Rows(save(x)));
            return Ok((self.quantized_input(x, Contraction::Columns)?, saved));
        };
        let codes = fp8.group_codes(Fp8Operand::Input, x, Groups::Offsets(&self.offsets), Contraction::Rows)?;
        let values = match fp8.has_same_blocks(Fp8Operand::Input) {
            true => codes.values()?,
            false => self.quantized_input(x, Contraction::Columns)?,
        };
        Ok((values, Some(SavedRows::Codes(codes))))
    }

    /// Computes y from the input as matmuls read it.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Dims { t, n, .. } = self.dims;
        on_device!(OP, x, {
            cpu => {
                self.implementation.check_cpu()?;
                let mut y = FloatBuf::unwritten(self.dtype, t * n)?;
                let x = host(OP, x)?;
                let x = x.floats()?;
                self.with_groups(|grouped| {
                    self.operand()?.with_operand(OP, |w| match self.tokens {
                        TokensPerCall::One => cpu::forward_one(x, w, y.view(), grouped),
                        TokensPerCall::Many => cpu::forward(x, w, y.view(), grouped),
                    })
                })?;
                Ok(storage::tensor(y, (t, n)))
            },
            cuda => self.multiply_on_gpu(GroupedOutput::Y, x),
        })
    }

    /// Adds dw to its sink and returns dx = dy w. Computes dx first if an exchange waits for it.
    fn backward(
        self,
        dy: &Tensor,
        x: Option<SavedRows>,
        wants_dx: bool,
        context: &mut BackwardContext<'_>,
    ) -> Result<Option<Tensor>> {
        let [for_dx, for_dw] = match &self.fp8 {
            Some(fp8) => fp8.grad_group_values(dy, Groups::Offsets(&self.offsets), x.is_some())?,
            None => [dy.clone(), dy.clone()],
        };
        if !context.defers() {
            self.add_grad_w(&for_dw, x.as_ref())?;
            return wants_dx.then(|| self.grad_x(&for_dx)).transpose();
        }
        let dx = wants_dx.then(|| self.grad_x(&for_dx)).transpose()?;
        context.defer(move || self.add_grad_w(&for_dw, x.as_ref()))?;
        Ok(dx)
    }

    /// Returns the input as matmuls read it that sum over `contraction`.
    fn quantized_input(&self, x: &Tensor, contraction: Contraction) -> Result<Tensor> {
        match &self.fp8 {
            Some(fp8) => fp8.group_values(x, Groups::Offsets(&self.offsets), contraction),
            None => Ok(x.clone()),
        }
    }

    /// Returns the saved input as dw's matmul reads it. In FP8 a recomputed input is freed then.
    fn saved_input(&self, saved: &SavedRows) -> Result<Tensor> {
        match (saved, &self.fp8) {
            (SavedRows::Codes(codes), _) => codes.values(),
            (SavedRows::Rows(saved), Some(_)) => self.quantized_input(&saved.get_once()?, Contraction::Rows),
            (SavedRows::Rows(saved), None) => saved.get(),
        }
    }

    /// Returns the weight as matmuls read it. In FP8 it is quantized once, until its buffer changes.
    fn operand(&self) -> Result<StoredWeight> {
        let Some(fp8) = &self.fp8 else { return self.w.stored() };
        let codes = self.w.fp8_groups(|stored| {
            let w = stored.dense(self.dtype)?;
            fp8.group_codes(Fp8Operand::Weight, &w, Groups::Equal, Contraction::Columns)
        })?;
        Ok(StoredWeight::Dense(codes.values()?))
    }

    /// Computes y from x, or dx from dy.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    fn multiply_on_gpu(&self, output: GroupedOutput, from: &Tensor) -> Result<Tensor> {
        let w = self.operand()?.dense(self.dtype)?;
        cuda::multiply(output, from, &w, &self.offsets, self.dims, self.implementation)
    }

    fn grad_x(&self, dy: &Tensor) -> Result<Tensor> {
        let Dims { t, k, .. } = self.dims;
        on_device!(OP, dy, {
            cpu => {
                let mut dx = FloatBuf::unwritten(self.dtype, t * k)?;
                let dy = host(OP, dy)?;
                let dy = dy.floats()?;
                self.with_groups(|grouped| {
                    self.operand()?.with_operand(OP, |w| match self.tokens {
                        TokensPerCall::One => cpu::grad_x_one(dy, w, dx.view(), grouped),
                        TokensPerCall::Many => cpu::grad_x(dy, w, dx.view(), grouped),
                    })
                })?;
                Ok(storage::tensor(dx, (t, k)))
            },
            cuda => self.multiply_on_gpu(GroupedOutput::X, dy),
        })
    }

    fn add_grad_w(&self, dy: &Tensor, x: Option<&SavedRows>) -> Result<()> {
        let (Some(sink), Some(x)) = (self.w.sink(), x) else { return Ok(()) };
        if self.dims.t == 0 {
            return Ok(());
        }
        on_device!(OP, dy, {
            cpu => {
                let x = self.saved_input(x)?;
                let (x, dy) = (host(OP, &x)?, host(OP, dy)?);
                let (x, dy) = (x.floats()?, dy.floats()?);
                self.with_groups(|grouped| {
                    sink.add_or_write(OP, |dw, accumulate| cpu::grad_w(dy, x, dw, accumulate, grouped))
                })
            },
            cuda => {
                let (dw, accumulate) = sink.grad_to_write()?;
                let x = self.saved_input(x)?;
                cuda::grad_w(dy, &x, &self.offsets, (&dw, accumulate), self.dims, self.implementation)
            },
        })
    }

    /// Calls `f` with the row range of each group.
    fn with_groups<T>(&self, f: impl FnOnce(Grouped<'_>) -> Result<T>) -> Result<T> {
        let offsets = host(OP, &self.offsets)?;
        let groups = tasks::groups(offsets.slice::<u32>()?, self.dims.t)?;
        f(Grouped { groups: &groups, dims: self.dims })
    }
}

fn check(x: &Tensor, w: &Weight, offsets: &Tensor) -> Result<Dims> {
    check_dtype(OP, "the input", x.dtype())?;
    if w.is_dense() {
        check_dtype(OP, "the weight", w.dtype())?;
    }
    let (&[t, k], &[n_rows, _]) = (x.dims(), w.dims()) else {
        bail!("{OP}: want an input [n, in] and a weight [e * out, in], got {:?} and {:?}", x.dims(), w.dims())
    };
    if offsets.dtype() != DType::U32 || offsets.rank() != 1 || offsets.elem_count() < 2 {
        bail!("{OP}: want u32 offsets [e + 1], got {:?} {:?}", offsets.dtype(), offsets.dims())
    }
    let n_groups = offsets.elem_count() - 1;
    if !n_rows.is_multiple_of(n_groups) {
        bail!("{OP}: {n_rows} rows of the weight cannot be divided by {n_groups} groups")
    }
    w.check(OP, &[n_rows, k])?;
    Ok(Dims { t, n: n_rows / n_groups, k })
}
