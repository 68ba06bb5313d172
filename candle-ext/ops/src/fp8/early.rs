//! Inputs that are quantized where a GPU computes them, and never written in bf16.

use candle_core::{DType, Result, Tensor, bail};

use super::cuda::{self, CastScale, CastSource, CodeEncoding};
use super::kernels::Fp8Kernels;
use super::layers::Fp8Linear;
use super::operands::{Fp8Operands, ScaleSource};
use super::recipe::{Fp8Operand, Fp8Orientation};
use super::rounding::Fp8Rounding;
use crate::saved::{NormInputs, Saved};

impl Fp8Linear {
    /// Quantizes a saved input. That of a norm is not recomputed in bf16, if its scale is known.
    pub(super) fn saved_input_on_gpu(&self, saved: &Saved, orientation: Fp8Orientation) -> Result<Fp8Operands> {
        match saved.norm() {
            Some(norm)
                if Fp8Kernels::selected() == Fp8Kernels::Fused
                    && self.can_quantize_early(&[Fp8Operand::Input])
                    && !self.scales_are_current() =>
            {
                self.normed_input(norm, saved, orientation)
            }
            _ => self.saved_input(saved, orientation),
        }
    }

    /// Quantizes the output of a norm, or returns what another layer has made of it.
    fn normed_input(&self, norm: &NormInputs, saved: &Saved, orientation: Fp8Orientation) -> Result<Fp8Operands> {
        let x = norm.x.flatten_to(norm.x.rank().saturating_sub(2))?;
        let (w, rstd) = (norm.weight.value()?, &norm.rstd);
        let source = CastSource::NormedInput([&x, &w, rstd]);
        let fits = x.rank() == 2 && x.dims()[0] == rstd.elem_count() && w.dtype() == x.dtype();
        if !fits || !source.has_patches()? {
            return self.saved_input(saved, orientation);
        }
        // Each layer that reads the norm raised its slot in forward, by the same amax.
        let quantize = || Ok((self.computed_input(source, orientation, None)?.0, None));
        self.shared_input(saved.id(), orientation, quantize)
    }

    /// Quantizes the SwiGLU of gate and up. Returns also the scale, if it follows from the SwiGLU, for a second call.
    pub(super) fn gated_input(
        &self,
        gate_up: [&Tensor; 2],
        orientation: Fp8Orientation,
        scale: Option<&Tensor>,
    ) -> Result<(Fp8Operands, Option<Tensor>)> {
        self.computed_input(CastSource::GatedInput(gate_up), orientation, scale)
    }

    /// Quantizes the output of a norm in forward. With delayed scaling, returns also its amax, f32 [1].
    pub(super) fn normed_codes(
        &self,
        source: CastSource<'_>,
        orientation: Fp8Orientation,
    ) -> Result<(Fp8Operands, Option<Tensor>)> {
        let encoding = CodeEncoding { format: self.format(Fp8Operand::Input), orientation };
        let rounding = Fp8Rounding::Nearest;
        self.with_scale_source(Fp8Operand::Input, 0, |scales| {
            let ([codes], amax) = match scales {
                ScaleSource::Blockwise(rule, operand) => {
                    (cuda::block_operands(source, [rounding], (rule, operand), encoding)?, None)
                }
                scales => {
                    let of_slot = scales.known(rounding)?;
                    let zero = || Tensor::zeros(1, DType::F32, of_slot.scale.device());
                    let amax = of_slot.record.map(|_| zero()).transpose()?;
                    let record = of_slot.record.map(|(slot, _)| (slot, amax.as_ref()));
                    (cuda::cast_operands(source, [CastScale { record, ..of_slot }], encoding)?, amax)
                }
            };
            Ok((Fp8Operands::of_gemm_codes(codes, encoding.format), amax))
        })
    }

    fn computed_input(
        &self,
        source: CastSource<'_>,
        orientation: Fp8Orientation,
        known: Option<&Tensor>,
    ) -> Result<(Fp8Operands, Option<Tensor>)> {
        let encoding = CodeEncoding { format: self.format(Fp8Operand::Input), orientation };
        let rounding = Fp8Rounding::Nearest;
        self.with_scale_source(Fp8Operand::Input, 0, |scales| {
            let ([codes], scale) = match (scales, known) {
                (ScaleSource::Blockwise(rule, operand), _) => {
                    (cuda::block_operands(source, [rounding], (rule, operand), encoding)?, None)
                }
                (ScaleSource::Current(rule), known) => {
                    let scale = match known {
                        Some(scale) => scale.clone(),
                        None => {
                            let [scale] = cuda::current_scales(source, rule, encoding.format)?;
                            scale
                        }
                    };
                    let of_matrix = CastScale { scale: &scale, record: None, rounding };
                    (cuda::cast_operands(source, [of_matrix], encoding)?, Some(scale))
                }
                (scales, _) => (cuda::cast_operands(source, [scales.known(rounding)?], encoding)?, None),
            };
            Ok((Fp8Operands::of_gemm_codes(codes, encoding.format), scale))
        })
    }
}

impl<'a> ScaleSource<'a> {
    /// Returns a scale that is known before its tensor.
    pub(super) fn known(&self, rounding: Fp8Rounding) -> Result<CastScale<'a>> {
        match *self {
            Self::Fixed { scale } => Ok(CastScale { scale, record: None, rounding }),
            Self::Delayed { scale, slot } => Ok(CastScale { scale, record: Some((slot, None)), rounding }),
            Self::First { .. } | Self::Current(_) | Self::Blockwise(..) => {
                bail!("FP8: the scale of an activation is not known before its elements")
            }
        }
    }
}
