//! Experts of a step that are recorded, or replayed from a record.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, bail};
use candlewick_model::{ReplayedExperts, RoutingRecord};
use candlewick_ops::{DeviceReadback, upload};

use super::Engine;
use crate::batch::Micro;
use crate::tensor_parallel::TensorParallel;

/// Choice of the experts of a step's tokens.
#[derive(Clone, Copy, Debug, Default)]
pub enum StepRouting<'a> {
    /// The routers select the experts.
    #[default]
    Select,
    /// The routers select the experts, and the step returns them: see [`StepResult::experts`](crate::StepResult::experts).
    Record,
    /// The experts are given: an entry for each micro-batch of this rank, with all tokens in order. In a micro-batch with
    /// `None` the routers select.
    Replay(&'a [Option<MicroExperts>]),
}

/// Experts of a micro-batch's tokens, on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MicroExperts {
    /// Position of each token in the micro-batch, without the engine's padding.
    pub tokens: Vec<u32>,
    /// Experts of these tokens, k each, by layer index.
    pub layers: BTreeMap<usize, Vec<u32>>,
}

/// Copy of recorded experts to the host, in flight.
pub(super) struct ExpertReadback {
    micros: Vec<RecordedMicro>,
    /// Experts of all micro-batches and layers, as f32, which holds every index of an expert.
    experts: Option<DeviceReadback>,
}

/// Position of a micro-batch's experts in the copy.
struct RecordedMicro {
    /// Token of each row of this rank's residual stream, with padding.
    rows: Vec<usize>,
    /// Tokens without padding.
    n_tokens: usize,
    /// Layers in the order of the copy.
    layers: Vec<usize>,
}

impl Engine {
    /// Returns the experts of this rank's rows of a padded micro-batch. `given` has those of its first `n_tokens` tokens, which
    /// are no padding. Rows of padding get the first experts.
    pub(super) fn replayed_experts(
        &self,
        micro: &Micro,
        n_tokens: usize,
        given: &MicroExperts,
    ) -> Result<ReplayedExperts> {
        let tokens = self.residual_tokens(micro)?;
        let top_k = self.model.config().moe().map_or(0, |moe| moe.router.top_k);
        let padding: Vec<u32> = (0..top_k as u32).collect();
        let of_layer = |layer_idx: usize| {
            let Some(experts) = given.layers.get(&layer_idx).filter(|experts| experts.len() == n_tokens * top_k) else {
                bail!("routing replay: layer {layer_idx} needs {top_k} experts of each of {n_tokens} tokens")
            };
            let of_token = |token: &usize| experts.get(token * top_k..(token + 1) * top_k).unwrap_or(&padding);
            let rows: Vec<u32> = tokens.iter().flat_map(of_token).copied().collect();
            Ok((layer_idx, upload(&rows, (tokens.len(), top_k), &self.device)?))
        };
        Ok(ReplayedExperts::new(self.own_moe_layers().map(of_layer).collect::<Result<_>>()?))
    }

    /// Starts to copy a step's experts to the host. `n_tokens` counts the tokens of each padded micro-batch without padding.
    pub(super) fn read_back_experts(
        &self,
        record: RoutingRecord,
        micros: &[impl AsRef<Micro>],
        n_tokens: &[usize],
    ) -> Result<ExpertReadback> {
        let mut recorded = Vec::with_capacity(micros.len());
        for (micro, n_tokens) in micros.iter().zip(n_tokens) {
            let rows = self.residual_tokens(micro.as_ref())?;
            recorded.push(RecordedMicro { rows, n_tokens: *n_tokens, layers: Vec::new() });
        }
        if self.tensor.as_ref().is_some_and(TensorParallel::holds_copy) {
            return Ok(ExpertReadback { micros: recorded, experts: None });
        }
        let mut all = Vec::new();
        for ((micro_idx, layer_idx), experts) in record.into_selected() {
            recorded[micro_idx].layers.push(layer_idx);
            all.push(experts.flatten_all()?.to_dtype(DType::F32)?);
        }
        let experts = (!all.is_empty()).then(|| DeviceReadback::start(&Tensor::cat(&all, 0)?)).transpose()?;
        Ok(ExpertReadback { micros: recorded, experts })
    }

    /// Returns the indices of the layers with experts that this rank computes.
    fn own_moe_layers(&self) -> impl Iterator<Item = usize> {
        let (layout, stage) = (self.pipeline.layout(), self.pipeline.stage());
        let blocks = (0..layout.n_chunks()).flat_map(move |chunk| layout.blocks(stage, chunk));
        let mtp_layers = self.model.n_blocks()..self.model.layers().count();
        let own = blocks.chain(mtp_layers.filter(|_| self.has_loss())).collect::<Vec<usize>>();
        let with_experts = self.model.layers().filter(|layer| layer.n_experts().is_some());
        with_experts.map(|layer| layer.layer_idx).filter(move |layer_idx| own.contains(layer_idx))
    }
}

impl ExpertReadback {
    /// Waits for the copy. Returns the experts of each micro-batch, of this rank's tokens and layers. A micro-batch whose
    /// experts another rank returns has no layers.
    pub(super) fn wait(self) -> Result<Vec<MicroExperts>> {
        let values = self.experts.map_or(Ok(Vec::new()), DeviceReadback::wait)?;
        let n_rows: usize = self.micros.iter().map(|micro| micro.rows.len() * micro.layers.len()).sum();
        let top_k = values.len() / n_rows.max(1);
        let mut rest = values.as_slice();
        let micros = self.micros.into_iter().map(|RecordedMicro { rows, n_tokens, layers }| {
            let is_token = |row: &&usize| **row < n_tokens;
            let of_layer = |layer_idx: usize| {
                let of_rows = rest.split_off(..rows.len() * top_k).unwrap_or_default().chunks_exact(top_k.max(1));
                let of_tokens = rows.iter().zip(of_rows).filter(|(row, _)| is_token(row));
                let experts = of_tokens.flat_map(|(_, experts)| experts.iter().map(|expert| *expert as u32));
                (layer_idx, experts.collect())
            };
            let layers = layers.into_iter().map(of_layer).collect();
            let tokens = rows.iter().filter(is_token).map(|row| *row as u32).collect();
            MicroExperts { tokens, layers }
        });
        Ok(micros.collect())
    }
}
