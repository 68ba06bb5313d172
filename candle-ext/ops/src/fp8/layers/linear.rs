//! One module of [`Fp8Layers`](super::Fp8Layers): its operands, with the scales of its slots.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, TensorId};

use super::{Fp8Linear, QuantizedInput, Scaling};
use crate::derive_key;
use crate::fp8::delayed::SLOTS;
use crate::fp8::format::Fp8Format;
use crate::fp8::matrix::Fp8Matrix;
use crate::fp8::operands::{self, AmaxUse, Fp8Operands, Quantization, ScaleSource, raise_amax};
use crate::fp8::recipe::{Contraction, Fp8Operand, Fp8Orientation, Fp8Recipe};
use crate::fp8::rounding::Fp8Rounding;
use crate::fp8::stats::{self, Fp8StepStats};
use crate::fp8::stored::stored_operands;
use crate::quantized::ScaleBlock;
use crate::saved::Saved;
use crate::weight::StoredWeight;

impl Fp8Linear {
    pub(crate) fn is_enabled(&self) -> bool {
        self.layers.is_enabled()
    }

    /// Returns the module name.
    pub(in crate::fp8) fn module(&self) -> &str {
        &self.layers.modules[self.module_idx].name
    }

    /// Returns the layer with some of its matrices: those of a rank's experts.
    pub fn with_matrices(self, matrices: Range<usize>) -> Self {
        Self { matrices, ..self }
    }

    /// Returns the number of matrices that this rank holds.
    pub fn n_matrices(&self) -> usize {
        self.matrices.len()
    }

    /// Returns true if the layer multiplies the values of codes in the dtype of its input.
    pub(crate) fn fake_quantizes(&self) -> bool {
        self.layers.fake_quantize
    }

    /// Returns the elements of an operand that share a scale.
    pub(in crate::fp8) fn block(&self, operand: Fp8Operand, contraction: Contraction) -> ScaleBlock {
        match self.layers.scaling {
            Scaling::Blockwise(rule) => Fp8Recipe::Blockwise(rule).block(operand, contraction),
            Scaling::Delayed(..) | Scaling::Current(_) | Scaling::Fixed(_) => ScaleBlock::Tensor,
        }
    }

    /// Quantizes a matrix, or the last two dims of a tensor, for both matmuls that read this operand.
    pub fn quantize_operand(&self, operand: Fp8Operand, x: &Tensor) -> Result<Fp8Operands> {
        Ok(self.quantize(operand, &x.contiguous()?, Fp8Orientation::Both, Fp8Rounding::Nearest)?.0)
    }

    /// Quantizes the input, or returns what another layer has made of the same tensor.
    pub(in crate::fp8) fn input(&self, x: &Tensor, orientation: Fp8Orientation) -> Result<Fp8Operands> {
        self.add_stats(Fp8Operand::Input, x, orientation, Fp8Rounding::Nearest)?;
        self.shared_input(x.id(), orientation, || {
            self.quantize_without_stats(Fp8Operand::Input, x, orientation, Fp8Rounding::Nearest)
        })
    }

    /// Quantizes a saved input, or returns what another layer has made of it. A recomputed input is freed then.
    pub(in crate::fp8) fn saved_input(&self, saved: &Saved, orientation: Fp8Orientation) -> Result<Fp8Operands> {
        let (operand, rounding) = (Fp8Operand::Input, Fp8Rounding::Nearest);
        if self.step_stats().is_some() {
            self.add_stats(operand, &saved.get()?, orientation, rounding)?;
        }
        self.shared_input(saved.id(), orientation, || {
            self.quantize_without_stats(operand, &saved.get_once()?, orientation, rounding)
        })
    }

    /// Returns what another layer has made of the input with this id, or the operands and the amax that `quantize` returns.
    pub(in crate::fp8) fn shared_input(
        &self,
        id: TensorId,
        orientation: Fp8Orientation,
        quantize: impl FnOnce() -> Result<(Fp8Operands, Option<Tensor>)>,
    ) -> Result<Fp8Operands> {
        let is_same = |input: &&QuantizedInput| input.id == id && input.operands.serve(orientation);
        let known = self.layers.lock().as_ref().and_then(|active| active.input.as_ref().filter(is_same).cloned());
        if let Some(QuantizedInput { operands, amax, .. }) = known {
            amax.map_or(Ok(()), |amax| self.raise_amax(Fp8Operand::Input, &amax))?;
            return Ok(operands);
        }
        let (operands, amax) = quantize()?;
        if let Some(active) = self.layers.lock().as_mut() {
            active.input = Some(QuantizedInput { id, operands: operands.clone(), amax });
        }
        Ok(operands)
    }

    /// Quantizes the weight. The codes of a weight stored in FP8 are used as they are, if they are those of the recipe.
    pub(in crate::fp8) fn quantized_weight(
        &self,
        stored: StoredWeight,
        orientation: Fp8Orientation,
    ) -> Result<Fp8Operands> {
        if let (Scaling::Blockwise(rule), false) = (&self.layers.scaling, self.has_stats(Fp8Operand::Weight))
            && let Some(operands) = stored_operands(&stored, *rule, self.format(Fp8Operand::Weight), orientation)?
        {
            return Ok(operands);
        }
        // FP8 storage is exact in bf16.
        let value = stored.dense(DType::BF16)?;
        Ok(self.quantize(Fp8Operand::Weight, &value, orientation, Fp8Rounding::Nearest)?.0)
    }

    /// Quantizes the gradient of the output [t, n] for dx = dy w and dw = dy^T x.
    pub(in crate::fp8) fn grad_output(&self, dy: &Tensor, orientation: Fp8Orientation) -> Result<Fp8Operands> {
        Ok(self.quantize(Fp8Operand::GradOutput, dy, orientation, self.next_gradient_rounding())?.0)
    }

    /// Returns true unless gradients are rounded at random.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(in crate::fp8) fn rounds_gradients_to_nearest(&self) -> bool {
        self.layers.gradient_rounding == Fp8Rounding::Nearest
    }

    /// Returns the rounding of the next gradient, with a key of its own.
    pub(in crate::fp8) fn next_gradient_rounding(&self) -> Fp8Rounding {
        match (self.layers.gradient_rounding, self.layers.lock().as_mut()) {
            (Fp8Rounding::Stochastic { key }, Some(active)) => {
                let n = &mut active.n_gradients[self.module_idx];
                *n += 1;
                let parts = [active.key, self.module_idx as u64, *n];
                Fp8Rounding::Stochastic { key: parts.into_iter().fold(key, derive_key) }
            }
            (rounding, _) => rounding,
        }
    }

    /// Quantizes an operand, records its amax if scaling is delayed, and its statistics if they are collected.
    fn quantize(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        orientation: Fp8Orientation,
        rounding: Fp8Rounding,
    ) -> Result<(Fp8Operands, Option<Tensor>)> {
        self.add_stats(operand, x, orientation, rounding)?;
        self.quantize_without_stats(operand, x, orientation, rounding)
    }

    fn quantize_without_stats(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        orientation: Fp8Orientation,
        rounding: Fp8Rounding,
    ) -> Result<(Fp8Operands, Option<Tensor>)> {
        self.with_scales(operand, x, |rows, source| {
            let format = self.layers.formats.of(operand);
            // Several layers read the same input.
            let amax = if operand == Fp8Operand::Input { AmaxUse::OtherSlots } else { AmaxUse::Slot };
            operands::quantize(rows, source, Quantization { format, rounding, orientation, amax })
        })
    }

    /// Calls `quantize` with the rows of an operand and the source of their scales.
    pub(in crate::fp8) fn with_scales<R>(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        quantize: impl FnOnce(&Tensor, ScaleSource<'_>) -> Result<R>,
    ) -> Result<R> {
        let rows = x.flatten_to(x.rank().saturating_sub(2))?;
        self.with_scale_source(operand, 0, |source| quantize(&rows, source))
    }

    /// Calls `f` with the source of the scales of an operand of one of this rank's matrices. A slot of delayed scaling without
    /// a scale has that of its tensor.
    pub(in crate::fp8) fn with_scale_source<R>(
        &self,
        operand: Fp8Operand,
        matrix: usize,
        f: impl FnOnce(ScaleSource<'_>) -> Result<R>,
    ) -> Result<R> {
        let slot = self.slot(operand) + SLOTS * matrix;
        match self.layers.use_unscaled(slot) {
            true => self.with_scale_of_slot(slot, operand, |source| f(source.of_first_tensors())),
            false => self.with_scale_of_slot(slot, operand, f),
        }
    }

    /// Calls `f` with the source of the scales of an operand of all this rank's matrices, for kernels that find slots without a
    /// scale on the device: the slot of the first matrix.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(in crate::fp8) fn with_scales_of_groups<R>(
        &self,
        operand: Fp8Operand,
        f: impl FnOnce(ScaleSource<'_>) -> Result<R>,
    ) -> Result<R> {
        self.with_scale_of_slot(self.slot(operand), operand, f)
    }

    fn with_scale_of_slot<R>(
        &self,
        slot: usize,
        operand: Fp8Operand,
        f: impl FnOnce(ScaleSource<'_>) -> Result<R>,
    ) -> Result<R> {
        let of_slot = |of_slots: &Tensor| of_slots.narrow(0, slot, 1);
        match &self.layers.scaling {
            Scaling::Fixed(scales) => f(ScaleSource::Fixed { scale: &of_slot(scales)? }),
            Scaling::Current(rule) => f(ScaleSource::Current(*rule)),
            Scaling::Blockwise(rule) => f(ScaleSource::Blockwise(*rule, operand)),
            Scaling::Delayed(_, state) => {
                f(ScaleSource::Delayed { scale: &of_slot(&state.scales)?, slot: &of_slot(&state.amaxes)? })
            }
        }
    }

    /// Returns true if tensors of these operands can be quantized where they are computed: without statistics, and with scales
    /// that are known before their tensors.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(in crate::fp8) fn can_quantize_early(&self, operands: &[Fp8Operand]) -> bool {
        let is_unscaled = |operand: &Fp8Operand| self.layers.is_unscaled(self.slot(*operand));
        !operands.iter().any(is_unscaled) && !self.layers.fake_quantize && self.step_stats().is_none()
    }

    /// Returns true if scales of whole tensors follow from the tensors themselves.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(in crate::fp8) fn scales_are_current(&self) -> bool {
        matches!(self.layers.scaling, Scaling::Current(_))
    }

    /// Adds the statistics of a tensor that is quantized, if they are collected.
    fn add_stats(
        &self,
        operand: Fp8Operand,
        x: &Tensor,
        orientation: Fp8Orientation,
        rounding: Fp8Rounding,
    ) -> Result<()> {
        let Some(stats) = self.step_stats().filter(|_| self.has_stats(operand)) else { return Ok(()) };
        let format = self.format(operand);
        self.with_scales(operand, x, |rows, source| {
            let quantization = Quantization { format, rounding, orientation, amax: AmaxUse::Slot };
            let matrices = operands::plain_matrices(rows, source, quantization)?;
            matrices.iter().try_for_each(|(_, matrix)| self.add_sums(operand, rows, matrix, &stats))
        })
    }

    /// Returns the statistics of the step, if they are collected.
    pub(in crate::fp8) fn step_stats(&self) -> Option<Fp8StepStats> {
        self.layers.lock().as_ref().and_then(|active| Some(active.stats.as_ref()?.0.clone()))
    }

    /// Returns true if the statistics of the step include this operand.
    fn has_stats(&self, operand: Fp8Operand) -> bool {
        let slot = SLOTS * self.module_idx + operand as usize;
        self.layers
            .lock()
            .as_ref()
            .is_some_and(|active| active.stats.as_ref().is_some_and(|(_, selected)| selected[slot]))
    }

    /// Adds a matrix and its codes to the statistics of a step, if they include this operand.
    pub(in crate::fp8) fn add_sums(
        &self,
        operand: Fp8Operand,
        rows: &Tensor,
        matrix: &Fp8Matrix,
        Fp8StepStats { sums, amaxes }: &Fp8StepStats,
    ) -> Result<()> {
        if !self.has_stats(operand) {
            return Ok(());
        }
        let slot = SLOTS * self.module_idx + operand as usize;
        let (sums, largest) = (sums.narrow(0, slot, 1)?, amaxes.narrow(0, slot, 1)?);
        let (of_tensor, amax) = stats::sums(rows, matrix)?;
        sums.slice_set(&(&sums + of_tensor.unsqueeze(0)?)?, 0, 0)?;
        largest.slice_set(&largest.maximum(&amax)?, 0, 0)
    }

    /// Returns the format of an operand.
    pub(in crate::fp8) fn format(&self, operand: Fp8Operand) -> Fp8Format {
        self.layers.formats.of(operand)
    }

    pub(in crate::fp8) fn raise_amax(&self, operand: Fp8Operand, amax: &Tensor) -> Result<()> {
        let Some((_, state)) = self.layers.delayed() else { return Ok(()) };
        raise_amax(&state.amaxes.narrow(0, self.slot(operand), 1)?, amax)
    }

    /// Returns the slot of an operand of this rank's first matrix.
    fn slot(&self, operand: Fp8Operand) -> usize {
        self.layers.slots(self.module_idx).start + SLOTS * self.matrices.start + operand as usize
    }
}

impl std::fmt::Debug for Fp8Linear {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fp8Linear").field("module", &self.module()).finish_non_exhaustive()
    }
}
