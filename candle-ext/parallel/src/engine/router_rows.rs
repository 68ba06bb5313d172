//! Rows of the residual stream that routers count.

use candle_core::{Device, Result, Tensor};
use candlewick_model::{RouterLoss, RouterRows};
use candlewick_ops::{to_host, upload};

use super::Engine;
use crate::batch::Micro;

impl Engine {
    /// Returns the rows of this rank's residual stream that routers count; `None` if there are no routers. They are among the
    /// first `n_tokens` of a padded micro-batch, and no padding of a sequence.
    pub(super) fn router_rows(&self, micro: &Micro, n_tokens: usize) -> Result<Option<RouterRows>> {
        if self.experts.is_none() {
            return Ok(None);
        }
        let tokens = self.residual_tokens(micro)?;
        let is_valid = |token: &usize| *token < n_tokens && !micro.is_padding(*token);
        let valid: Vec<u32> = (0..).zip(&tokens).filter(|(_, token)| is_valid(token)).map(|(row, _)| row).collect();
        let starts = micro.seqs.cu_seqlens_q();
        let sequence_of = |row: &u32| starts.partition_point(|start| *start <= tokens[*row as usize]) as u32 - 1;
        let on_device = |values: Vec<u32>| upload(&values, values.len(), &self.device);
        let needs_sequences = self.router.losses.contains(&RouterLoss::SequenceLoadBalancing);
        let sequences = needs_sequences.then(|| on_device(valid.iter().map(sequence_of).collect())).transpose()?;
        let has_padding = valid.len() < tokens.len();
        let mark = |token: &usize| u32::from(is_valid(token));
        let token_mask = has_padding.then(|| on_device(tokens.iter().map(mark).collect())).transpose()?;
        let valid = has_padding.then(|| on_device(valid)).transpose()?;
        let first_token = tokens.first().map_or(0, |token| *token as u64);
        let has_jitter = self.router.input_jitter_eps > 0.0;
        let tokens = has_jitter.then(|| on_device(tokens.iter().map(|token| *token as u32).collect())).transpose()?;
        Ok(Some(RouterRows { valid, token_mask, sequences, tokens, first_token, n_sequences: starts.len() - 1 }))
    }

    /// Returns the token of each row of this rank's residual stream, as an index into the padded micro-batch.
    pub(super) fn residual_tokens(&self, micro: &Micro) -> Result<Vec<usize>> {
        let tokens = Tensor::arange(0u32, micro.seqs.n_tokens() as u32, &Device::Cpu)?;
        let own = to_host(&self.of_own_tokens(&tokens, micro)?)?.to_vec1::<u32>()?;
        let rows = match &self.tensor {
            Some(tensor) => tensor.residual_rows(own.len()),
            None => 0..own.len(),
        };
        Ok(own[rows].iter().map(|token| *token as usize).collect())
    }
}
