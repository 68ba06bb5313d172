//! Linear layers that read a norm: on a GPU its output is quantized as it is computed, and never written in bf16.
//!
//! t tokens, d hidden size

use candle_core::{Result, Tensor};

use crate::device::on_device;
use crate::rms_norm::NormCall;
use crate::weight::Weight;

/// Computes a norm and linear layers that alone read it, in FP8 on a GPU. Returns the input of the norm, which is a sum if it has an
/// addend, and the output of each layer. Bits and gradients are those of the ops [`rms_norm`](crate::rms_norm()),
/// [`add_rms_norm`](crate::add_rms_norm()) and [`linear`](crate::linear()).
///
/// Returns `None` where these ops must compute it: on a CPU, if a layer is not in FP8, with current scaling, before delayed scaling
/// has scales of all inputs, and in a step with statistics. Input, addend and weight of the norm must be bf16 in rows of multiples of 8.
#[cfg_attr(
    not(any(feature = "cuda", feature = "emulate")),
    expect(unused_variables, reason = "the CPU multiplies activations in memory")
)]
pub fn fp8_normed_linears<const N: usize>(
    norm: NormCall<'_>,
    linears: [(&Weight, Option<&Weight>); N],
) -> Result<Option<(Tensor, [Tensor; N])>> {
    on_device!("linear", norm.x, {
        cpu => Ok(None),
        cuda => fused::forward(norm, linears),
    })
}

#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(super) mod fused {
    use candle_core::{DType, Result, Tensor};

    use crate::fp8::cuda::CastSource;
    use crate::fp8::kernels::Fp8Kernels;
    use crate::fp8::layers::Fp8Linear;
    use crate::fp8::linear::Fp8LinearCall;
    use crate::fp8::operands::Fp8Operands;
    use crate::fp8::recipe::{Fp8Operand, Fp8Orientation};
    use crate::linear::check;
    use crate::rms_norm::{NormCall, UnwrittenNorm};
    use crate::span::span;
    use crate::weight::Weight;

    pub(super) fn forward<const N: usize>(
        norm: NormCall<'_>,
        linears: [(&Weight, Option<&Weight>); N],
    ) -> Result<Option<(Tensor, [Tensor; N])>> {
        let layers: Option<Vec<&Fp8Linear>> = linears.iter().map(|(w, _)| w.fp8()).collect();
        let Some(layers) = layers else { return Ok(None) };
        if !has_quantized_output(norm, &layers)? {
            return Ok(None);
        }
        let norm = norm.unwritten()?;
        let _span = span("linear", "forward");
        let quantized = quantize(&norm, &layers)?;
        let multiply = |((w, bias), layer): (&(&Weight, Option<&Weight>), &&Fp8Linear)| {
            let dims = check("linear", &norm.y, w, *bias)?;
            let call = Fp8LinearCall { w, bias: *bias, layer, out_dtype: norm.y.dtype(), dims };
            call.multiply(&norm.y, quantized.clone())
        };
        let outputs: Vec<Tensor> = linears.iter().zip(&layers).map(multiply).collect::<Result<_>>()?;
        match outputs.try_into() {
            Ok(outputs) => Ok(Some((norm.stream, outputs))),
            Err(_) => unreachable!("there is an output per layer"),
        }
    }

    /// Returns true if the output of a norm can be quantized as it is computed, for these layers.
    pub(in crate::fp8) fn has_quantized_output(norm: NormCall<'_>, layers: &[&Fp8Linear]) -> Result<bool> {
        let NormCall { x, plus, weight, .. } = norm;
        let can = |layer: &&Fp8Linear| layer.can_quantize_early(&[Fp8Operand::Input]) && !layer.scales_are_current();
        let is_bf16 = |x: &Tensor| x.dtype() == DType::BF16 && x.rank() == 2 && x.dims()[0] > 0;
        if Fp8Kernels::selected() != Fp8Kernels::Fused || !layers.iter().all(can) || weight.dtype() != DType::BF16 {
            return Ok(false);
        }
        if !is_bf16(x) || !plus.is_none_or(is_bf16) {
            return Ok(false);
        }
        // The sum of x and an addend is in memory of its own, which is aligned.
        let (x, w) = (x.contiguous()?, weight.value()?);
        CastSource::NormedInput([&x, &w, &w]).has_patches()
    }

    /// Quantizes the output of a norm. Each layer that reads it raises its slot.
    pub(in crate::fp8) fn quantize(norm: &UnwrittenNorm, layers: &[&Fp8Linear]) -> Result<Fp8Operands> {
        let w = norm.inputs.weight.value()?;
        let source = CastSource::NormedInput([&norm.inputs.x, &w, &norm.inputs.rstd]);
        let (codes, amax) = layers[0].normed_codes(source, Fp8Orientation::Rowwise)?;
        if let Some(amax) = amax {
            layers[1..].iter().try_for_each(|layer| layer.raise_amax(Fp8Operand::Input, &amax))?;
        }
        Ok(codes)
    }
}
