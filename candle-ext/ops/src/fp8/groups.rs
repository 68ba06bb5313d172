//! Quantization of the rows of groups, each group with scales of its own: the operands of `grouped_linear`.
//!
//! Grouped matmuls multiply the values of the codes in the dtype of the rows. Scales are rounded down to powers of two, so that
//! every value is exact in bf16, and y, dx and dw are what scaled codes give.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::delayed::SLOTS;
use super::layers::Fp8Linear;
use super::matrix::{Fp8Host, Fp8Matrix, amax};
use super::operands::{AmaxUse, Quantization, ScaleSource, plain_matrices, raise_amax};
#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::recipe::Fp8Recipe;
use super::recipe::{Contraction, Fp8Operand, Fp8Orientation, ScaleRule, power_of_two_below};
use super::rounding::Fp8Rounding;
use crate::device::on_device;
use crate::dropout::key_after;
use crate::floats::{FloatBuf, FloatsMut};
use crate::quantized::cpu::dequantize;
use crate::storage;
use crate::transfer::to_host;

/// Rows of each group of a matrix.
#[derive(Clone, Copy)]
pub(crate) enum Groups<'a> {
    /// Group i has the rows `offsets[i]..offsets[i + 1]`; u32 [groups + 1].
    Offsets(&'a Tensor),
    /// Groups of equally many rows: the matrices of a weight.
    Equal,
}

/// FP8 codes of the rows of groups, with scales of each group that are powers of two.
#[derive(Clone, Debug)]
pub(crate) struct GroupCodes(GroupStorage);

#[derive(Clone, Debug)]
enum GroupStorage {
    /// Row range and codes of each group that has rows.
    Host { matrices: Vec<(Range<usize>, Fp8Matrix)>, dtype: DType, shape: (usize, usize) },
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    Device(cuda::GpuGroupCodes),
}

impl GroupCodes {
    /// Returns the values of the codes, in the dtype of the rows from which they are. Rows after the last group are zero.
    pub(crate) fn values(&self) -> Result<Tensor> {
        match &self.0 {
            GroupStorage::Host { matrices, dtype, shape: (n, k) } => {
                let mut values = FloatBuf::zeros(*dtype, n * k)?;
                for (rows, matrix) in matrices {
                    write_values(matrix, rows.start * k, values.view())?;
                }
                Ok(storage::tensor(values, (*n, *k)))
            }
            #[cfg(any(feature = "cuda", feature = "emulate"))]
            GroupStorage::Device(codes) => codes.values(),
        }
    }
}

/// Writes the values of the codes of a matrix from element `first` on.
fn write_values(matrix: &Fp8Matrix, first: usize, values: FloatsMut<'_>) -> Result<()> {
    let (of_matrix, _) = values.split_at(first).1.split_at(matrix.codes.elem_count());
    dequantize(Fp8Host::lock(matrix)?.rows()?, of_matrix);
    Ok(())
}

impl Fp8Linear {
    /// Fails unless this rank has `n` matrices.
    pub(crate) fn check_matrices(&self, n: usize) -> Result<()> {
        if n != self.n_matrices() {
            bail!("{}: the scales of {} matrices cannot serve {n} groups", self.module(), self.n_matrices())
        }
        Ok(())
    }

    /// Returns the values of the codes of an input [n, k], in its dtype, for matmuls that sum over `contraction`. Rows after the
    /// last group become zero. Records amaxes if scaling is delayed.
    pub(crate) fn group_values(&self, x: &Tensor, groups: Groups<'_>, contraction: Contraction) -> Result<Tensor> {
        self.round_groups(Fp8Operand::Input, x, groups, (contraction, Fp8Rounding::Nearest))
    }

    /// Returns the codes of an input or a weight, from which [`GroupCodes::values`] makes what matmuls read that sum over
    /// `contraction`.
    pub(crate) fn group_codes(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        groups: Groups<'_>,
        contraction: Contraction,
    ) -> Result<GroupCodes> {
        let x = x.detach().contiguous()?;
        let how = (contraction, Fp8Rounding::Nearest);
        self.add_group_stats(operand, &x, groups, how)?;
        on_device!("fp8_quantize", x, {
            cpu => {
                let mut matrices = Vec::new();
                self.with_matrices_of_groups(operand, &x, groups, how, |rows, _, matrix| {
                    matrices.push((rows, matrix.clone()));
                    Ok(())
                })?;
                Ok(GroupCodes(GroupStorage::Host { matrices, dtype: x.dtype(), shape: x.dims2()? }))
            },
            cuda => {
                let codes = self.quantize_on_gpu(operand, &x, groups, how, |input, scales| input.codes(scales))?;
                Ok(GroupCodes(GroupStorage::Device(codes)))
            },
        })
    }

    /// Returns the values of the codes of the gradient of the output, for dx = dy w and for dw = dy^T x. Without `wants_dw`, as
    /// for a frozen weight, the second is not computed if its blocks differ.
    pub(crate) fn grad_group_values(&self, dy: &Tensor, groups: Groups<'_>, wants_dw: bool) -> Result<[Tensor; 2]> {
        let operand = Fp8Operand::GradOutput;
        let values = |contraction, rounding| self.round_groups(operand, dy, groups, (contraction, rounding));
        let for_dx = values(Contraction::Columns, self.next_gradient_rounding())?;
        if self.has_same_blocks(operand) {
            return Ok([for_dx.clone(), for_dx]);
        }
        // The key is drawn in any case, so that later gradients have the same ones.
        let rounding = self.next_gradient_rounding();
        let for_dw = if wants_dw { values(Contraction::Rows, rounding)? } else { dy.clone() };
        Ok([for_dx, for_dw])
    }

    /// Returns true if matmuls that sum over columns and over rows read the same codes of an operand.
    pub(crate) fn has_same_blocks(&self, operand: Fp8Operand) -> bool {
        let block = |contraction| self.block(operand, contraction);
        block(Contraction::Columns) == block(Contraction::Rows)
    }

    fn round_groups(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        groups: Groups<'_>,
        how: (Contraction, Fp8Rounding),
    ) -> Result<Tensor> {
        let x = x.detach().contiguous()?;
        self.add_group_stats(operand, &x, groups, how)?;
        on_device!("fp8_quantize", x, {
            cpu => {
                let mut values = FloatBuf::zeros(x.dtype(), x.elem_count())?;
                let k = x.dim(1)?;
                self.with_matrices_of_groups(operand, &x, groups, how, |rows, _, matrix| {
                    write_values(matrix, rows.start * k, values.view())
                })?;
                Ok(storage::tensor(values, x.shape()))
            },
            cuda => self.quantize_on_gpu(operand, &x, groups, how, |input, scales| input.values(scales)),
        })
    }

    /// Adds the rows of groups to the statistics of a step, if they are collected.
    fn add_group_stats(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        groups: Groups<'_>,
        how: (Contraction, Fp8Rounding),
    ) -> Result<()> {
        let Some(stats) = self.step_stats() else { return Ok(()) };
        self.with_matrices_of_groups(operand, x, groups, how, |_, rows, matrix| {
            self.add_sums(operand, rows, matrix, &stats)
        })
    }

    /// Calls `quantize` with the groups and their scales.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    fn quantize_on_gpu<R>(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        groups: Groups<'_>,
        (contraction, rounding): (Contraction, Fp8Rounding),
        quantize: impl FnOnce(cuda::GroupInput<'_>, cuda::GroupScales<'_>) -> Result<R>,
    ) -> Result<R> {
        let offsets = match groups {
            Groups::Offsets(offsets) => Some(offsets),
            Groups::Equal => None,
        };
        let encoding = (self.format(operand), rounding);
        let input = cuda::GroupInput { x, offsets, n_groups: self.n_matrices(), encoding };
        fn slots(first: &Tensor) -> cuda::Slots<'_> {
            cuda::Slots { first, stride: SLOTS }
        }
        // The slots of the other matrices follow those of the first.
        self.with_scales_of_groups(operand, |source| {
            let scales = match source {
                ScaleSource::Fixed { scale } => cuda::GroupScales::Given { scales: slots(scale), slots: None },
                ScaleSource::Delayed { scale, slot } => {
                    cuda::GroupScales::Given { scales: slots(scale), slots: Some(slots(slot)) }
                }
                ScaleSource::First { rule, slot } => cuda::GroupScales::Current { rule, slots: Some(slots(slot)) },
                ScaleSource::Current(rule) => cuda::GroupScales::Current { rule, slots: None },
                ScaleSource::Blockwise(rule, operand) => {
                    let block = Fp8Recipe::Blockwise(rule).block(operand, contraction);
                    cuda::GroupScales::Blocks { block, rule }
                }
            };
            quantize(input, scales)
        })
    }

    /// Calls `f` with the row range, the rows and the codes of each group that has rows. Reads offsets on the host.
    fn with_matrices_of_groups(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        groups: Groups<'_>,
        (contraction, rounding): (Contraction, Fp8Rounding),
        mut f: impl FnMut(Range<usize>, &Tensor, &Fp8Matrix) -> Result<()>,
    ) -> Result<()> {
        let format = self.format(operand);
        let orientation = match contraction {
            Contraction::Columns => Fp8Orientation::Rowwise,
            Contraction::Rows => Fp8Orientation::Columnwise,
        };
        for (matrix_idx, rows) in
            self.row_ranges(x, groups)?.into_iter().enumerate().filter(|(_, rows)| !rows.is_empty())
        {
            let of_group = x.narrow(0, rows.start, rows.len())?;
            let first = (rows.start * x.dim(1)?) as u64;
            let rounding = match rounding {
                Fp8Rounding::Nearest => rounding,
                Fp8Rounding::Stochastic { key } => Fp8Rounding::Stochastic { key: key_after(key, first) },
            };
            let quantization = Quantization { format, rounding, orientation, amax: AmaxUse::Slot };
            self.with_scale_source(operand, matrix_idx, |source| {
                with_powers_of_two(source, |source| {
                    if let ScaleSource::Delayed { slot, .. } | ScaleSource::First { slot, .. } = source {
                        raise_amax(slot, &amax(&of_group)?)?;
                    }
                    for (_, matrix) in plain_matrices(&of_group, source, quantization)? {
                        f(rows.clone(), &of_group, &matrix)?;
                    }
                    Ok(())
                })
            })?;
        }
        Ok(())
    }

    /// Returns the row range of each group.
    fn row_ranges(&self, x: &Tensor, groups: Groups<'_>) -> Result<Vec<Range<usize>>> {
        match groups {
            Groups::Offsets(offsets) => {
                let offsets = to_host(offsets)?.to_vec1::<u32>()?;
                Ok(offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize).collect())
            }
            Groups::Equal => {
                let height = x.dim(0)? / self.n_matrices().max(1);
                Ok((0..self.n_matrices()).map(|i| i * height..(i + 1) * height).collect())
            }
        }
    }
}

/// Calls `f` with a source whose scales are powers of two.
fn with_powers_of_two<R>(source: ScaleSource<'_>, f: impl FnOnce(ScaleSource<'_>) -> Result<R>) -> Result<R> {
    let power_of_two = |rule| ScaleRule { power_of_two: true, ..rule };
    let rounded = |scale: &Tensor| {
        let rounded = power_of_two_below(to_host(scale)?.to_vec1::<f32>()?[0]);
        Tensor::new(&[rounded], scale.device())
    };
    match source {
        ScaleSource::Fixed { scale } => f(ScaleSource::Fixed { scale: &rounded(scale)? }),
        ScaleSource::Delayed { scale, slot } => f(ScaleSource::Delayed { scale: &rounded(scale)?, slot }),
        ScaleSource::First { rule, slot } => f(ScaleSource::First { rule: power_of_two(rule), slot }),
        ScaleSource::Current(rule) => f(ScaleSource::Current(power_of_two(rule))),
        ScaleSource::Blockwise(rule, operand) => f(ScaleSource::Blockwise(power_of_two(rule), operand)),
    }
}
