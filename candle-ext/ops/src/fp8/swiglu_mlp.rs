//! SwiGLU MLP in FP8 on a GPU: the activation and its gradients are quantized where they are computed, and never written in
//! bf16. `swiglu` writes and reads them.
//!
//! t tokens, d hidden size, f MLP intermediate size

use candle_core::{Result, Tensor};

use crate::device::on_device;
use crate::rms_norm::NormCall;
use crate::weight::Weight;

/// Computes the MLP down(silu(gate(x)) * up(x)) in FP8 on a GPU, with x [t, d] in bf16. Bits and gradients are those of the
/// ops [`linear`](crate::linear()) and [`swiglu`](crate::swiglu()).
///
/// Returns `None` where these ops must compute it: on a CPU, without FP8, before delayed scaling has scales of all tensors, in a step
/// with statistics, and for numbers of tokens that are no multiples of 16.
#[cfg_attr(
    not(any(feature = "cuda", feature = "emulate")),
    expect(unused_variables, reason = "the CPU multiplies activations in memory")
)]
pub fn fp8_swiglu_mlp(x: &Tensor, weights: [&Weight; 3]) -> Result<Option<Tensor>> {
    on_device!("swiglu_mlp", x, {
        cpu => Ok(None),
        cuda => fused::forward(x, weights),
    })
}

/// Computes [`fp8_swiglu_mlp`] of a norm, which is quantized as it is computed. Returns also the input of the norm, which is a sum if
/// it has an addend.
///
/// Returns `None` also where the norm must be written: see [`fp8_normed_linears`](crate::fp8_normed_linears).
#[cfg_attr(
    not(any(feature = "cuda", feature = "emulate")),
    expect(unused_variables, reason = "the CPU multiplies activations in memory")
)]
pub fn fp8_normed_swiglu_mlp(norm: NormCall<'_>, weights: [&Weight; 3]) -> Result<Option<[Tensor; 2]>> {
    on_device!("swiglu_mlp", norm.x, {
        cpu => Ok(None),
        cuda => fused::forward_of_norm(norm, weights),
    })
}

#[cfg(any(feature = "cuda", feature = "emulate"))]
mod fused {
    use candle_core::{DType, Result, Tensor, bail};

    use crate::backward::BackwardContext;
    use crate::fp8::cuda::{self, CastScale, CastSource, CodeEncoding};
    use crate::fp8::kernels::Fp8Kernels;
    use crate::fp8::layers::Fp8Linear;
    use crate::fp8::linear::quantized_weight;
    use crate::fp8::normed::fused::{has_quantized_output, quantize};
    use crate::fp8::operands::{Fp8Operands, ScaleSource};
    use crate::fp8::recipe::{Fp8Operand, Fp8Orientation};
    use crate::fp8::rounding::Fp8Rounding;
    use crate::recording::{record, requires_grad, save};
    use crate::rms_norm::NormCall;
    use crate::saved::Saved;
    use crate::span::span;
    use crate::swiglu::swiglu_grads;
    use crate::weight::Weight;
    use crate::weight_matmul::Dims;

    /// Operands that are quantized where they are computed.
    const OPERANDS: [Fp8Operand; 2] = [Fp8Operand::Input, Fp8Operand::GradOutput];

    /// A linear layer of the MLP.
    struct MlpLinear {
        layer: Fp8Linear,
        w: Weight,
        dims: Dims,
    }

    /// State of the MLP between forward and backward.
    struct SavedMlp {
        gate: MlpLinear,
        up: MlpLinear,
        down: MlpLinear,
        /// Input, saved for the gradients of trainable weights.
        x: Option<Saved>,
        /// Outputs of gate and up.
        gate_up: [Tensor; 2],
        /// Scale of their SwiGLU, if it followed from the SwiGLU.
        gated_scale: Option<Tensor>,
        wants_dx: bool,
    }

    pub(super) fn forward(x: &Tensor, [gate, up, down]: [&Weight; 3]) -> Result<Option<Tensor>> {
        let Some([gate, up, down]) = linears(x, [gate, up, down])? else { return Ok(None) };
        let _span = span("swiglu_mlp", "forward");
        let input = x.contiguous()?;
        let quantized = gate.layer.input(&input, Fp8Orientation::Rowwise)?;
        // Raises the amax of this layer's input.
        up.layer.input(&input, Fp8Orientation::Rowwise)?;
        Ok(Some(multiply([x, &input], &quantized, [gate, up, down])?))
    }

    pub(super) fn forward_of_norm(norm: NormCall<'_>, weights: [&Weight; 3]) -> Result<Option<[Tensor; 2]>> {
        let Some([gate, up, down]) = linears(norm.x, weights)? else { return Ok(None) };
        if !has_quantized_output(norm, &[&gate.layer, &up.layer])? {
            return Ok(None);
        }
        let norm = norm.unwritten()?;
        let _span = span("swiglu_mlp", "forward");
        let quantized = quantize(&norm, &[&gate.layer, &up.layer])?;
        let y = multiply([&norm.y, &norm.y], &quantized, [gate, up, down])?;
        Ok(Some([norm.stream, y]))
    }

    /// Computes the MLP from the codes of x; `input` is x, contiguous.
    fn multiply([x, input]: [&Tensor; 2], quantized: &Fp8Operands, [gate, up, down]: [MlpLinear; 3]) -> Result<Tensor> {
        let is_trained = [&gate, &up, &down].iter().any(|linear| linear.is_trained());
        let wants_dx = requires_grad(x);
        let of_weights = if is_trained || wants_dx { Fp8Orientation::Both } else { Fp8Orientation::Rowwise };
        let gate_up = [gate.multiply(quantized, of_weights)?, up.multiply(quantized, of_weights)?];
        let (gated, gated_scale) = down.layer.gated_input(gate_up.each_ref(), Fp8Orientation::Rowwise, None)?;
        let y = down.multiply(&gated, of_weights)?;
        let weights = [&gate, &up, &down].map(|linear| linear.w.clone());
        let x_saved = [&gate, &up].iter().any(|linear| linear.is_trained()).then(|| save(input));
        let saved = SavedMlp { gate, up, down, x: x_saved, gate_up, gated_scale, wants_dx };
        let [of_gate, of_up, of_down] = &weights;
        let inputs = [x.into(), of_gate.into(), of_up.into(), of_down.into()];
        Ok(record("swiglu_mlp", inputs, y, move |dy, context| Ok([saved.backward(dy, context)?, None, None, None])))
    }

    /// Returns the layers of gate, up and down; `None` if they cannot be fused.
    fn linears(x: &Tensor, weights: [&Weight; 3]) -> Result<Option<[MlpLinear; 3]>> {
        let &[t, d] = x.dims() else { return Ok(None) };
        let is_usual = x.dtype() == DType::BF16 && t > 0 && t.is_multiple_of(cuda::MULTIPLE);
        if !is_usual || Fp8Kernels::selected() != Fp8Kernels::Fused {
            return Ok(None);
        }
        let linear = |w: &Weight| {
            let layer = w.fp8().filter(|layer| layer.can_quantize_early(&OPERANDS))?.clone();
            let &[n, k] = w.dims() else { return None };
            let is_wide = n.is_multiple_of(cuda::MULTIPLE) && k.is_multiple_of(cuda::MULTIPLE);
            is_wide.then(|| MlpLinear { layer, w: w.clone(), dims: Dims { t, n, k } })
        };
        let [Some(gate), Some(up), Some(down)] = weights.map(linear) else { return Ok(None) };
        let f = gate.dims.n;
        if [gate.dims.k, up.dims.k, up.dims.n, down.dims.k] != [d, d, f, f] {
            bail!("swiglu_mlp: {:?} do not fit an input of width {d}", weights.map(Weight::dims))
        }
        Ok(Some([gate, up, down]))
    }

    impl MlpLinear {
        fn is_trained(&self) -> bool {
            self.w.sink().is_some()
        }

        fn multiply(&self, x: &Fp8Operands, orientation: Fp8Orientation) -> Result<Tensor> {
            let w = quantized_weight(&self.layer, &self.w, orientation)?;
            cuda::forward(x.rowwise()?, w.rowwise()?, None, DType::BF16, self.dims)
        }

        /// Returns dx, plus a sum.
        fn grad_x(&self, dy: &Fp8Operands, sum: Option<Tensor>) -> Result<Tensor> {
            let w = quantized_weight(&self.layer, &self.w, Fp8Orientation::Columnwise)?;
            let (dy, w) = (dy.rowwise()?, w.columnwise()?);
            match sum {
                Some(sum) if !cuda::adds_to_sum(dy, self.dims) => {
                    sum + cuda::grad_x(dy, w, None, DType::BF16, self.dims)?
                }
                sum => cuda::grad_x(dy, w, sum.as_ref(), DType::BF16, self.dims),
            }
        }

        fn add_grad_w(&self, dy: &Fp8Operands, x: &Fp8Operands) -> Result<()> {
            let Some(sink) = self.w.sink() else { return Ok(()) };
            let (dw, accumulate) = sink.grad_to_write()?;
            cuda::grad_w(dy.columnwise()?, x.columnwise()?, (&dw, accumulate), self.dims)
        }
    }

    impl SavedMlp {
        /// Adds the weights' gradients to their sinks and returns dx. Computes dx first if an exchange waits for it.
        fn backward(self, dy: &Tensor, context: &mut BackwardContext<'_>) -> Result<Option<Tensor>> {
            let trains_gate_up = self.gate.is_trained() || self.up.is_trained();
            let needs_gate_up = self.wants_dx || trains_gate_up;
            let Some(of_dy) = Fp8Orientation::of(needs_gate_up, self.down.is_trained()) else { return Ok(None) };
            let dy = self.down.layer.grad_output(dy, of_dy)?;
            let Some(orientation) = Fp8Orientation::of(self.wants_dx, trains_gate_up) else {
                self.add_grads(&dy, None)?;
                return Ok(None);
            };
            let grads = {
                let ([gate, up], d_gated) = (&self.gate_up, self.down.grad_x(&dy, None)?);
                gated_grads([&self.gate.layer, &self.up.layer], [gate, up, &d_gated], orientation)?
            };
            let dx = if self.wants_dx { Some(self.grad_x(&grads, context)?) } else { None };
            context.defer(move || self.add_grads(&dy, Some(&grads)))?;
            Ok(dx)
        }

        /// Returns dx. The layers add to it in the order in which a tape runs their backward.
        fn grad_x(&self, [d_gate, d_up]: &[Fp8Operands; 2], context: &mut BackwardContext<'_>) -> Result<Tensor> {
            let shape = [self.up.dims.t, self.up.dims.k];
            let sum = context.accumulated(0, DType::BF16, &shape)?;
            let dx = self.up.grad_x(d_up, sum)?;
            self.gate.grad_x(d_gate, Some(dx))
        }

        fn add_grads(&self, dy: &Fp8Operands, grads: Option<&[Fp8Operands; 2]>) -> Result<()> {
            if self.down.is_trained() {
                let (gate_up, scale) = (self.gate_up.each_ref(), self.gated_scale.as_ref());
                let (gated, _) = self.down.layer.gated_input(gate_up, Fp8Orientation::Columnwise, scale)?;
                self.down.add_grad_w(dy, &gated)?;
            }
            let (Some(x), Some([d_gate, d_up])) = (&self.x, grads) else { return Ok(()) };
            for (linear, dy) in [(&self.up, d_up), (&self.gate, d_gate)] {
                if linear.is_trained() {
                    linear.add_grad_w(dy, &linear.layer.saved_input_on_gpu(x, Fp8Orientation::Columnwise)?)?;
                }
            }
            Ok(())
        }
    }

    /// Quantizes the gradients of gate and up, outputs of two layers, from gate, up and the gradient of their SwiGLU.
    fn gated_grads(
        [of_gate, of_up]: [&Fp8Linear; 2],
        tensors: [&Tensor; 3],
        orientation: Fp8Orientation,
    ) -> Result<[Fp8Operands; 2]> {
        let operand = Fp8Operand::GradOutput;
        if !of_gate.rounds_gradients_to_nearest() {
            // Patches have no random numbers.
            let [gate, up, dy] = tensors;
            let [d_gate, d_up] = swiglu_grads([gate, up], dy)?;
            return Ok([of_gate.grad_output(&d_gate, orientation)?, of_up.grad_output(&d_up, orientation)?]);
        }
        let encoding = CodeEncoding { format: of_gate.format(operand), orientation };
        let (source, rounding) = (CastSource::GatedGrads(tensors), Fp8Rounding::Nearest);
        let codes = of_gate.with_scale_source(operand, 0, |gate| {
            of_up.with_scale_source(operand, 0, |up| match gate {
                ScaleSource::Blockwise(rule, operand) => {
                    cuda::block_operands(source, [rounding; 2], (rule, operand), encoding)
                }
                ScaleSource::Current(rule) => {
                    let scales: [Tensor; 2] = cuda::current_scales(source, rule, encoding.format)?;
                    let scales = scales.each_ref().map(|scale| CastScale { scale, record: None, rounding });
                    cuda::cast_operands(source, scales, encoding)
                }
                gate => {
                    let scales = [gate.known(rounding)?, up.known(rounding)?];
                    cuda::cast_operands(source, scales, encoding)
                }
            })
        })?;
        Ok(codes.map(|codes| Fp8Operands::of_gemm_codes(codes, encoding.format)))
    }
}
