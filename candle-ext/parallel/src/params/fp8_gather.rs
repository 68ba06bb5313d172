//! All-gather of FP8 weights: codes of this rank's shard, with the scales of whole weights.
//!
//! torchao calls it `enable_fsdp_float8_all_gather`, Megatron-LM `fp8_param_gather`. Codes and scales are those of a rank
//! that quantizes the whole weight.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor, bail};
use candlewick_ops::{Fp8Layers, Fp8Linear, Fp8Operands, amax, copy_into};

use super::layout::{ParamGroup, PlacedParam};

/// Weights of a parameter group that ranks gather as FP8 codes.
pub(crate) struct Fp8Gather {
    layers: Arc<Fp8Layers>,
    weights: Vec<GatheredWeight>,
    /// Scale of each weight in this step, f32 [1].
    scales: Mutex<Vec<Tensor>>,
}

struct GatheredWeight {
    layer: Fp8Linear,
    /// Rows and columns on this rank.
    shape: Vec<usize>,
    /// Elements in the unsharded buffer.
    elements: Range<usize>,
    /// Elements in this rank's shard, if it has any.
    piece: Option<Range<usize>>,
}

impl Fp8Gather {
    /// Creates the state of a group whose parameters are weights of `layers`.
    pub(crate) fn new(group: &ParamGroup, layers: &Arc<Fp8Layers>) -> Result<Self> {
        let weight = |param: &PlacedParam| {
            let module = param.spec.name.trim_end_matches(".weight");
            let Some(layer) = layers.layer(module) else { bail!("{module} does not multiply in FP8") };
            let start = group.shard.start;
            Ok(GatheredWeight {
                layer,
                shape: param.shape(),
                elements: param.range.start..param.range.start + param.n_elements(),
                piece: param.piece(&group.shard).map(|piece| piece.start - start..piece.end - start),
            })
        };
        let weights = group.params.iter().map(weight).collect::<Result<_>>()?;
        Ok(Self { layers: Arc::clone(layers), weights, scales: Mutex::default() })
    }

    /// Returns true while the weights multiply in FP8.
    pub(crate) fn is_enabled(&self) -> bool {
        self.layers.is_enabled()
    }

    /// Returns the amaxes of this rank's parts of the weights on `device`, f32 [weights], and records them for delayed
    /// scaling.
    pub(crate) fn record_amaxes(&self, own: &Tensor, device: &Device) -> Result<Tensor> {
        let of_weight = |weight: &GatheredWeight| {
            let Some(piece) = &weight.piece else { return Tensor::zeros(1, DType::F32, device) };
            let amax = amax(&own.narrow(0, piece.start, piece.len())?)?.to_device(device)?;
            weight.layer.record_weight_amax(&amax)?;
            Ok(amax)
        };
        Tensor::cat(&self.weights.iter().map(of_weight).collect::<Result<Vec<_>>>()?, 0)
    }

    /// Sets the scales of a step from the amaxes of the whole weights, f32 [weights].
    pub(crate) fn set_scales(&self, amaxes: &Tensor) -> Result<()> {
        let scale = |(i, weight): (usize, &GatheredWeight)| weight.layer.weight_scale(&amaxes.narrow(0, i, 1)?);
        *self.lock_scales() = self.weights.iter().enumerate().map(scale).collect::<Result<_>>()?;
        Ok(())
    }

    /// Forgets the scales: the weights change.
    pub(crate) fn clear_scales(&self) {
        self.lock_scales().clear();
    }

    /// Returns the number of weights.
    pub(crate) fn n_weights(&self) -> usize {
        self.weights.len()
    }

    /// Returns the codes of this rank's shard, u8 of its length.
    pub(crate) fn quantize(&self, own: &Tensor) -> Result<Tensor> {
        let codes = Tensor::zeros(own.elem_count(), DType::U8, own.device())?;
        for (weight, scale) in self.scaled()? {
            if let Some(piece) = &weight.piece {
                let part = |flat: &Tensor| flat.narrow(0, piece.start, piece.len());
                copy_into(&part(&codes)?, &weight.layer.quantize_part(&part(own)?, &scale)?)?;
            }
        }
        Ok(codes)
    }

    /// Returns the weights by their first elements, from the codes of all shards.
    pub(crate) fn weights(&self, codes: &Tensor) -> Result<BTreeMap<usize, Fp8Operands>> {
        let operands = |(weight, scale): (&GatheredWeight, Tensor)| {
            let Range { start, end } = weight.elements;
            let codes = codes.narrow(0, start, end - start)?.reshape(weight.shape.as_slice())?;
            Ok((start, weight.layer.weight_from_codes(codes, &scale)?))
        };
        self.scaled()?.into_iter().map(operands).collect()
    }

    /// Returns the weights with their scales.
    fn scaled(&self) -> Result<Vec<(&GatheredWeight, Tensor)>> {
        let scales = self.lock_scales().clone();
        if scales.len() != self.weights.len() {
            bail!("FP8 weights are gathered before the step has set their scales")
        }
        Ok(self.weights.iter().zip(scales).collect())
    }

    fn lock_scales(&self) -> std::sync::MutexGuard<'_, Vec<Tensor>> {
        self.scales.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
