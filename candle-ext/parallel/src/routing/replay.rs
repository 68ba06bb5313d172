//! Experts of a step that are recorded, or replayed from a record.

use candle_core::{DType, Result, Tensor, bail};
use candlewick_model::{Model, ReplayedExperts};
use candlewick_ops::{DeviceReadback, upload};

use super::step_routing::RoutedMicro;
use super::{RankTokens, RoutingStep};

/// Copy of recorded experts to the host, in flight.
pub(crate) struct RoutingReadback {
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

impl RoutingStep<'_> {
    /// Returns the experts of this rank's rows of a padded micro-batch. `given` has those of its tokens before the padding. Rows
    /// of padding get the first experts.
    pub(super) fn replayed(
        &self,
        model: &Model,
        own_layers: &[usize],
        of_rank: &RankTokens<'_>,
        given: &RoutedMicro,
    ) -> Result<ReplayedExperts> {
        let (tokens, n_tokens) = ((of_rank.tokens_of_rows)()?, of_rank.n_tokens);
        let top_k = model.config().moe().map_or(0, |moe| moe.router.top_k);
        let padding: Vec<u32> = (0..top_k as u32).collect();
        let of_layer = |layer_idx: usize| {
            let Some(experts) = given.layers.get(&layer_idx).filter(|experts| experts.len() == n_tokens * top_k) else {
                bail!("routing replay: layer {layer_idx} needs {top_k} experts of each of {n_tokens} tokens")
            };
            let of_token = |token: &usize| experts.get(token * top_k..(token + 1) * top_k).unwrap_or(&padding);
            let rows: Vec<u32> = tokens.iter().flat_map(of_token).copied().collect();
            Ok((layer_idx, upload(&rows, (tokens.len(), top_k), &self.device)?))
        };
        let with_experts = model.layers().filter(|layer| layer.n_experts().is_some());
        let own = with_experts.map(|layer| layer.layer_idx).filter(|layer_idx| own_layers.contains(layer_idx));
        Ok(ReplayedExperts::new(own.map(of_layer).collect::<Result<_>>()?))
    }

    /// Starts to copy the step's experts to the host; `None` if the step does not record them. `rows_of` returns the rows of a
    /// micro-batch on this rank, and the tokens before its padding. A copy of another rank's residual stream returns no experts.
    pub(crate) fn read_back(
        &self,
        n_micros: usize,
        is_copy: bool,
        rows_of: impl Fn(usize) -> Result<(Vec<usize>, usize)>,
    ) -> Result<Option<RoutingReadback>> {
        let Some(record) = &self.record else { return Ok(None) };
        let of_micro = |micro_idx| {
            let (rows, n_tokens) = rows_of(micro_idx)?;
            Ok(RecordedMicro { rows, n_tokens, layers: Vec::new() })
        };
        let mut micros = (0..n_micros).map(of_micro).collect::<Result<Vec<_>>>()?;
        if is_copy {
            return Ok(Some(RoutingReadback { micros, experts: None }));
        }
        let mut all = Vec::new();
        for ((micro_idx, layer_idx), experts) in record.take_selected() {
            micros[micro_idx].layers.push(layer_idx);
            all.push(experts.flatten_all()?.to_dtype(DType::F32)?);
        }
        let experts = (!all.is_empty()).then(|| DeviceReadback::start(&Tensor::cat(&all, 0)?)).transpose()?;
        Ok(Some(RoutingReadback { micros, experts }))
    }
}

impl RoutingReadback {
    /// Waits for the copy. Returns the experts of each micro-batch, of this rank's tokens and layers. A micro-batch whose
    /// experts another rank returns has no layers.
    pub(crate) fn wait(self) -> Result<Vec<RoutedMicro>> {
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
            RoutedMicro { tokens, layers }
        });
        Ok(micros.collect())
    }
}
