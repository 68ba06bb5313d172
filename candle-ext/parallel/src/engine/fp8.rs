//! Scales and statistics of FP8 over all ranks.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, bail};
use candlewick_comm::Reduce;
use candlewick_ops::{
    Fp8Guard, Fp8LayerState, Fp8Layers, Fp8LinearScales, Fp8Operand, Fp8StepStats, Fp8TensorStats, to_host,
};

use super::Engine;
use crate::routing::n_matrices;

/// Statistics of one module in a step: of a linear layer, or of several matrices together.
#[derive(Clone, Debug, PartialEq)]
pub struct Fp8LayerStats {
    /// Module name of the layer.
    pub module: String,
    /// Statistics of input, weight and gradient of the output, in the order of [`Fp8Operand::ALL`]; `None` for a tensor that
    /// was not quantized.
    pub tensors: [Option<Fp8TensorStats>; Fp8Operand::ALL.len()],
}

impl Engine {
    /// Makes modules multiply in FP8 with fixed scales in evaluation and inference, by module name.
    /// Others compute in the compute dtype.
    pub fn with_fp8_scales(self, scales: &BTreeMap<String, Vec<Fp8LinearScales>>) -> Result<Self> {
        for (module, matrices) in scales {
            let n = n_matrices(&self.model, module)?;
            if n != matrices.len() {
                bail!("{module}: there are FP8 scales of {} matrices, and the model has {n}", matrices.len())
            }
        }
        let fp8 = Fp8Layers::with_fixed_scales(scales, &self.device)?;
        Ok(Self { store: self.store.with_fp8(fp8)?, ..self })
    }

    /// Turns fixed FP8 scales on, if the engine has them, until the guard is dropped.
    pub(super) fn enable_fixed_fp8(&self) -> Result<Option<Fp8Guard<'_>>> {
        // Nothing is rounded stochastically.
        self.store.fp8().filter(|fp8| fp8.has_fixed_scales()).map(|fp8| fp8.enable(0)).transpose()
    }

    /// Returns the current scales of delayed scaling by module name, those of each matrix; `None` with another recipe or without
    /// FP8. MTP layers, which compute in the compute dtype, have none. A tensor without a scale yet, such as an input
    /// without tokens, has 1.
    pub fn fp8_scales(&self) -> Result<Option<BTreeMap<String, Vec<Fp8LinearScales>>>> {
        let Some(fp8) = self.store.fp8().filter(|fp8| fp8.amaxes().is_some()) else { return Ok(None) };
        let of_module = |module: Fp8LayerState| {
            let scales = to_host(&module.scales.contiguous()?)?.to_vec1::<f32>()?;
            Ok((module.module, Fp8LinearScales::of_slots(&scales)))
        };
        let of_model = fp8.states()?.into_iter().filter(|module| n_matrices(&self.model, &module.module).is_ok());
        of_model.map(of_module).collect::<Result<_>>().map(Some)
    }

    /// Updates the scales of delayed scaling from the largest amaxes of all ranks, for the next step. Collective.
    pub fn update_fp8_scales(&self) -> Result<()> {
        let Some((fp8, amaxes)) = self.store.fp8().and_then(|fp8| Some((fp8, fp8.amaxes()?))) else { return Ok(()) };
        fp8.update(&self.over_all_ranks(amaxes, Reduce::Max)?)?;
        self.store.drop_fp8_copies();
        Ok(())
    }

    /// Returns the statistics of the last step over all ranks; `None` if they were not requested with
    /// [`Fp8Layers::request_stats`](candlewick_ops::Fp8Layers::request_stats). Waits for the device. Collective.
    pub fn fp8_stats(&self) -> Result<Option<Vec<Fp8LayerStats>>> {
        let Some(fp8) = self.store.fp8() else { return Ok(None) };
        let Some(Fp8StepStats { sums, amaxes }) = fp8.take_stats() else { return Ok(None) };
        let sums = to_host(&self.over_all_ranks(&sums, Reduce::Sum)?)?.to_vec2::<f64>()?;
        let amaxes = self.over_all_ranks(&amaxes, Reduce::Max)?.to_dtype(DType::F64)?;
        let amaxes = to_host(&amaxes)?.to_vec1::<f64>()?;
        let of_slots = sums.iter().zip(amaxes).map(|(sums, amax)| match sums[..] {
            [n, underflows, overflows, squares] => Fp8TensorStats::of([n, underflows, overflows, squares], amax),
            _ => None,
        });
        let of_slots: Vec<_> = of_slots.collect();
        let of_layers = fp8.modules().iter().zip(of_slots.as_chunks().0);
        let stats = of_layers.map(|(module, tensors)| Fp8LayerStats { module: module.name.clone(), tensors: *tensors });
        Ok(Some(stats.collect()))
    }

    /// Reduces a tensor over all ranks of the mesh. Collective.
    fn over_all_ranks(&self, x: &Tensor, reduce: Reduce) -> Result<Tensor> {
        let reduced = self.group.all_reduce(x, reduce)?;
        match &self.tensor {
            Some(tensor) => Ok(tensor.ranks.all_reduce(&reduced, reduce)?),
            None => Ok(reduced),
        }
    }
}
