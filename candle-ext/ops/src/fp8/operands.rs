//! Quantized operands of a linear layer's matmuls, in the layout that the device's GEMM reads.
//!
//! A matrix is the operand of matmuls that sum over its columns (rowwise), and of others that sum over its rows
//! (columnwise). The CPU reads both from row-major codes. cuBLASLt needs the sum to be the last dim, so on CUDA the
//! columnwise codes are transposed.

#[cfg(any(feature = "cuda", feature = "emulate"))]
use candle_core::DType;
use candle_core::{Result, Tensor, bail};

#[cfg(any(feature = "cuda", feature = "emulate"))]
use super::cuda;
use super::format::Fp8Format;
use super::matrix::{Fp8Matrix, ScaleOrder, amax, fp8_quantize, fp8_quantize_current, quantize_with_amax_on_cpu};
use super::recipe::{Contraction, Fp8Operand, Fp8Orientation, Fp8Recipe, ScaleRule};
use super::rounding::Fp8Rounding;
use crate::device::on_device;
use crate::floats::FloatsMut;
use crate::quantized::ScaleBlock;
use crate::storage::{host, update};

/// A matrix quantized for matmuls.
#[derive(Clone, Debug)]
pub struct Fp8Operands {
    pub(super) rowwise: Option<Fp8Matrix>,
    pub(super) columnwise: Option<Fp8Matrix>,
}

/// Source of the scales of a matrix.
#[derive(Clone, Copy)]
pub(super) enum ScaleSource<'a> {
    /// A scale that never changes, f32 [1].
    Fixed { scale: &'a Tensor },
    /// A scale from earlier steps, f32 [1], which is 0 if there is none yet. The amax of the matrix raises `slot`, f32 [1].
    Delayed { scale: &'a Tensor, slot: &'a Tensor },
    /// The amax of the matrix, with delayed scaling and without a scale from earlier steps. It raises `slot`, f32 [1].
    First { rule: ScaleRule, slot: &'a Tensor },
    /// The amax of the matrix.
    Current(ScaleRule),
    /// The amaxes of the blocks of an operand.
    Blockwise(ScaleRule, Fp8Operand),
}

/// Quantization of a matrix: format, rounding and the matmuls that read it.
#[derive(Clone, Copy)]
pub(super) struct Quantization {
    pub(super) format: Fp8Format,
    pub(super) rounding: Fp8Rounding,
    pub(super) orientation: Fp8Orientation,
    /// Use of the amax of a matrix with a delayed scale.
    #[cfg_attr(not(any(feature = "cuda", feature = "emulate")), expect(dead_code, reason = "only CUDA reads it"))]
    pub(super) amax: AmaxUse,
}

/// Use of the amax of a matrix with a delayed scale, apart from its slot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AmaxUse {
    /// None.
    Slot,
    /// Other layers that read the matrix raise their slots by it.
    OtherSlots,
}

/// Scales of the first tensors of a slot of delayed scaling. A power of two changes no rounding, so that ranks with other
/// amaxes round alike.
pub(super) const FIRST_SCALES: ScaleRule = ScaleRule { power_of_two: true, amax_epsilon: 0.0 };

impl<'a> ScaleSource<'a> {
    /// Returns the source without scales from earlier steps.
    pub(super) fn of_first_tensors(self) -> ScaleSource<'a> {
        match self {
            Self::Delayed { slot, .. } => Self::First { rule: FIRST_SCALES, slot },
            source => source,
        }
    }
}

impl Fp8Operands {
    /// Returns true if all matmuls of `orientation` can read the matrix.
    pub(super) fn serve(&self, orientation: Fp8Orientation) -> bool {
        (!orientation.is_rowwise() || self.rowwise.is_some())
            && (!orientation.is_columnwise() || self.columnwise.is_some())
    }

    /// Returns the operands of row-major codes [rows, columns] with one scale, f32 [1]. On CUDA
    /// [`Fp8Operands::for_matmuls`] transposes the codes when a matmul needs that.
    pub(super) fn from_codes(codes: Tensor, scale: &Tensor, format: Fp8Format) -> Result<Self> {
        let scale_inv = scale.recip()?;
        on_device!("fp8", codes, {
            cpu => {
                let (block, scale_order) = (ScaleBlock::Tensor, ScaleOrder::Rows);
                let matrix = Fp8Matrix { codes, scale_inv, format, block, scale_order };
                Ok(Self { rowwise: Some(matrix.clone()), columnwise: Some(matrix) })
            },
            cuda => {
                let rowwise = Fp8Matrix::in_order_of_cublas_lt(codes, scale_inv, format, ScaleBlock::Tensor);
                Ok(Self { rowwise: Some(rowwise), columnwise: None })
            },
        })
    }

    /// Returns the operands for all matmuls of `orientation`, with transposed codes if only these are missing; `None` if
    /// the matrix must be quantized again.
    pub(super) fn for_matmuls(&self, orientation: Fp8Orientation) -> Result<Option<Self>> {
        if self.serve(orientation) {
            return Ok(Some(self.clone()));
        }
        let Some(rowwise) = self.rowwise.as_ref().filter(|matrix| matrix.block == ScaleBlock::Tensor) else {
            return Ok(None);
        };
        let columnwise = on_device!("fp8", rowwise.codes, {
            cpu => rowwise.clone(),
            cuda => Fp8Matrix { codes: cuda::transpose(&rowwise.codes)?, ..rowwise.clone() },
        });
        Ok(Some(Self { rowwise: Some(rowwise.clone()), columnwise: Some(columnwise) }))
    }

    /// Returns the operands of rowwise and columnwise codes for cuBLASLt.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(super) fn of_gemm_codes(codes: [Option<cuda::GemmCodes>; 2], format: Fp8Format) -> Self {
        let matrix = |cuda::GemmCodes { codes, scale_inv, block }| {
            Fp8Matrix::in_order_of_cublas_lt(codes, scale_inv, format, block)
        };
        let [rowwise, columnwise] = codes.map(|codes| codes.map(matrix));
        Self { rowwise, columnwise }
    }

    /// Keeps the operand of matmuls that sum over the rows alone.
    pub(super) fn into_columnwise(self) -> Self {
        Self { rowwise: None, ..self }
    }

    /// Returns the operand of matmuls that sum over the columns.
    pub(super) fn rowwise(&self) -> Result<&Fp8Matrix> {
        operand(&self.rowwise)
    }

    /// Returns the operand of matmuls that sum over the rows.
    pub(super) fn columnwise(&self) -> Result<&Fp8Matrix> {
        operand(&self.columnwise)
    }
}

fn operand(matrix: &Option<Fp8Matrix>) -> Result<&Fp8Matrix> {
    match matrix {
        Some(matrix) => Ok(matrix),
        None => bail!("FP8: the matrix was not quantized for this matmul"),
    }
}

/// Quantizes a matrix for matmuls. With a delayed scale, returns also its amax, f32 [1].
pub(super) fn quantize(
    x: &Tensor,
    source: ScaleSource<'_>,
    quantization: Quantization,
) -> Result<(Fp8Operands, Option<Tensor>)> {
    on_device!("fp8_quantize", x, {
        cpu => quantize_on_cpu(x, source, quantization),
        cuda => quantize_on_cuda(&x.detach().contiguous()?, source, quantization),
    })
}

#[cfg(any(feature = "cuda", feature = "emulate"))]
fn quantize_on_cuda(
    x: &Tensor,
    source: ScaleSource<'_>,
    Quantization { format, rounding, orientation, amax: amax_use }: Quantization,
) -> Result<(Fp8Operands, Option<Tensor>)> {
    let (encoding, matrix) = (cuda::CodeEncoding { format, orientation }, cuda::CastSource::Matrix(x));
    let cast = |scale: &Tensor, record: Option<(&Tensor, Option<&Tensor>)>| {
        cuda::cast_operands(matrix, [cuda::CastScale { scale, record, rounding }], encoding)
    };
    let ([codes], amax) = match source {
        ScaleSource::Fixed { scale } => (cast(scale, None)?, None),
        ScaleSource::Delayed { scale, slot } => {
            let zero = || Tensor::zeros(1, DType::F32, x.device());
            let amax = (amax_use == AmaxUse::OtherSlots).then(zero).transpose()?;
            (cast(scale, Some((slot, amax.as_ref())))?, amax)
        }
        ScaleSource::First { rule, slot } => {
            let [amax, scale] = cuda::current_scale(x, rule, format)?;
            cuda::raise_amax(slot, &amax)?;
            (cast(&scale, None)?, Some(amax))
        }
        ScaleSource::Current(rule) => {
            let [_, scale] = cuda::current_scale(x, rule, format)?;
            (cast(&scale, None)?, None)
        }
        ScaleSource::Blockwise(rule, operand) => {
            (cuda::block_operands(matrix, [rounding], (rule, operand), encoding)?, None)
        }
    };
    Ok((Fp8Operands::of_gemm_codes(codes, format), amax))
}

fn quantize_on_cpu(
    x: &Tensor,
    source: ScaleSource<'_>,
    quantization: Quantization,
) -> Result<(Fp8Operands, Option<Tensor>)> {
    let amax = match source {
        ScaleSource::Delayed { scale, slot } => {
            let Quantization { format, rounding, .. } = quantization;
            let (matrix, amax) = quantize_with_amax_on_cpu(x, scale, format, rounding)?;
            raise_amax(slot, &amax)?;
            return Ok((Fp8Operands { rowwise: Some(matrix.clone()), columnwise: Some(matrix) }, Some(amax)));
        }
        ScaleSource::First { slot, .. } => {
            let amax = amax(x)?;
            raise_amax(slot, &amax)?;
            Some(amax)
        }
        ScaleSource::Fixed { .. } | ScaleSource::Current(_) | ScaleSource::Blockwise(..) => None,
    };
    let mut operands = Fp8Operands { rowwise: None, columnwise: None };
    for (orientation, matrix) in plain_matrices(x, source, quantization)? {
        if orientation.is_rowwise() {
            operands.rowwise = Some(matrix.clone());
        }
        if orientation.is_columnwise() {
            operands.columnwise = Some(matrix);
        }
    }
    Ok((operands, amax))
}

/// Quantizes a matrix to row-major codes on any device: one for all matmuls, or one for each orientation if their blocks differ.
pub(super) fn plain_matrices(
    x: &Tensor,
    source: ScaleSource<'_>,
    Quantization { format, rounding, orientation, .. }: Quantization,
) -> Result<Vec<(Fp8Orientation, Fp8Matrix)>> {
    let (rule, operand) = match source {
        ScaleSource::Fixed { scale } | ScaleSource::Delayed { scale, .. } => {
            return Ok(vec![(Fp8Orientation::Both, fp8_quantize(x, scale, format, rounding)?)]);
        }
        ScaleSource::First { rule, .. } | ScaleSource::Current(rule) => {
            let matrix = fp8_quantize_current(x, ScaleBlock::Tensor, rule, format, rounding)?;
            return Ok(vec![(Fp8Orientation::Both, matrix)]);
        }
        ScaleSource::Blockwise(rule, operand) => (rule, operand),
    };
    let block = |contraction| Fp8Recipe::Blockwise(rule).block(operand, contraction);
    let [rowwise, columnwise] = [Contraction::Columns, Contraction::Rows].map(block);
    let mut wanted = Vec::new();
    if rowwise == columnwise {
        wanted.push((Fp8Orientation::Both, rowwise));
    } else {
        wanted.extend(orientation.is_rowwise().then_some((Fp8Orientation::Rowwise, rowwise)));
        wanted.extend(orientation.is_columnwise().then_some((Fp8Orientation::Columnwise, columnwise)));
    }
    let quantize = |(orientation, block)| Ok((orientation, fp8_quantize_current(x, block, rule, format, rounding)?));
    wanted.into_iter().map(quantize).collect()
}

/// Returns the scale of a matrix with this amax, f32 [1].
pub(super) fn scale_of_amax(amax: &Tensor, rule: ScaleRule, format: Fp8Format) -> Result<Tensor> {
    on_device!("fp8_quantize", amax, {
        cpu => {
            let amax_host = host("fp8_quantize", amax)?.slice::<f32>()?[0];
            Tensor::new(&[rule.scale(amax_host, format, f32::MAX)], amax.device())
        },
        cuda => cuda::scale_of_amax(amax, rule, format),
    })
}

/// Raises the amax of a slot, f32 [1], to that of a matrix.
pub(super) fn raise_amax(slot: &Tensor, amax: &Tensor) -> Result<()> {
    on_device!("delayed scaling", slot, {
        cpu => {
            let amax = host("delayed scaling", amax)?.slice::<f32>()?[0];
            update_f32(slot, |slot| slot[0] = if amax > slot[0] { amax } else { slot[0] })
        },
        cuda => cuda::raise_amax(slot, amax),
    })
}

/// Changes the elements of an f32 tensor in CPU memory.
pub(super) fn update_f32(tensor: &Tensor, change: impl FnOnce(&mut [f32])) -> Result<()> {
    update(tensor, "delayed scaling", |elements| match elements {
        FloatsMut::F32(elements) => {
            change(elements);
            Ok(())
        }
        _ => bail!("delayed scaling: the state is f32"),
    })
}
