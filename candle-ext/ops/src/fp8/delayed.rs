//! State of delayed scaling, and its update from the amaxes of a step.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::operands::update_f32;
use super::recipe::{AmaxHistoryPolicy, DelayedScaling, Fp8Formats, Fp8Operand};
use crate::device::on_device;
use crate::in_place::zero_;
use crate::storage::host;

/// Slots of a layer: one for each of [`Fp8Operand::ALL`].
pub(super) const SLOTS: usize = Fp8Operand::ALL.len();

/// State of delayed scaling: three slots per layer.
pub(super) struct DelayedState {
    /// Largest magnitudes since the last update, f32 [slots]. 0: no tensor was quantized.
    pub(super) amaxes: Tensor,
    /// Amaxes of the last steps, the newest first, f32 [slots, amax_history_len].
    pub(super) history: Tensor,
    /// Scales, f32 [slots]. 0: no step has given the slot an amax yet.
    pub(super) scales: Tensor,
}

impl DelayedState {
    /// Creates the state of a number of layers.
    pub(super) fn new(n_layers: usize, scaling: DelayedScaling, device: &Device) -> Result<Self> {
        if scaling.amax_history_len == 0 {
            bail!("delayed scaling: an amax history needs at least one step")
        }
        let n_slots = SLOTS * n_layers;
        Ok(Self {
            amaxes: Tensor::zeros(n_slots, DType::F32, device)?,
            history: Tensor::zeros((n_slots, scaling.amax_history_len), DType::F32, device)?,
            scales: Tensor::zeros(n_slots, DType::F32, device)?,
        })
    }

    /// Updates history and scales from the amaxes of a step, f32 [slots], and clears the state's own amaxes.
    pub(super) fn update(&self, amaxes: &Tensor, scaling: DelayedScaling, formats: Fp8Formats) -> Result<()> {
        if amaxes.dims() != self.amaxes.dims() {
            bail!("delayed scaling: want amaxes {:?}, got {:?}", self.amaxes.dims(), amaxes.dims())
        }
        on_device!("delayed scaling", self.scales, {
            cpu => self.update_on_cpu(amaxes, scaling, formats)?,
            cuda => super::cuda::update_delayed(amaxes, [&self.history, &self.scales], scaling, formats)?,
        });
        zero_(&self.amaxes)
    }

    fn update_on_cpu(&self, amaxes: &Tensor, scaling: DelayedScaling, formats: Fp8Formats) -> Result<()> {
        let amaxes = host("delayed scaling", amaxes)?.slice::<f32>()?.to_vec();
        update_f32(&self.history, |history| {
            let of_slots = history.chunks_exact_mut(scaling.amax_history_len).zip(&amaxes);
            for (history, amax) in of_slots.filter(|(_, amax)| is_amax(**amax)) {
                history.rotate_right(1);
                history[0] = *amax;
            }
        })?;
        let history = host("delayed scaling", &self.history)?;
        let history = history.slice::<f32>()?;
        update_f32(&self.scales, |scales| {
            let of_slots = history.chunks_exact(scaling.amax_history_len).zip(&amaxes).enumerate();
            for (slot, (history, _)) in of_slots.filter(|(_, (_, amax))| is_amax(**amax)) {
                let amax = match scaling.amax_compute {
                    AmaxHistoryPolicy::MostRecent => history[0],
                    AmaxHistoryPolicy::Max => {
                        history.iter().fold(0.0, |max, amax| if *amax > max { *amax } else { max })
                    }
                };
                scales[slot] = scaling.scale(amax, formats.of(Fp8Operand::ALL[slot % SLOTS]));
            }
        })
    }
}

/// Returns true if a step's amax counts: a tensor was quantized, and was neither all zeros nor infinite.
fn is_amax(amax: f32) -> bool {
    amax != 0.0 && amax.is_finite()
}
