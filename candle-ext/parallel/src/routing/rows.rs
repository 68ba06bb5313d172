//! Rows of the residual stream that routers count.

use candle_core::Result;
use candlewick_model::{RouterLoss, RouterRows};
use candlewick_ops::upload;

use super::{RankTokens, RoutingStep};

impl RoutingStep<'_> {
    /// Returns the rows of this rank's residual stream that routers count; `None` if there are no routers. They are no padding of
    /// the micro-batch or of a sequence.
    pub(super) fn rows(&self, of_rank: &RankTokens<'_>) -> Result<Option<RouterRows>> {
        if self.routing.experts.is_none() {
            return Ok(None);
        }
        let (micro, settings) = (of_rank.micro, &self.routing.settings);
        let tokens = (of_rank.tokens_of_rows)()?;
        let is_valid = |token: &usize| *token < of_rank.n_valid_tokens && !micro.is_padding(*token);
        let valid: Vec<u32> = (0..).zip(&tokens).filter(|(_, token)| is_valid(token)).map(|(row, _)| row).collect();
        let starts = micro.seqs.cu_seqlens_q();
        let sequence_of = |row: &u32| starts.partition_point(|start| *start <= tokens[*row as usize]) as u32 - 1;
        let on_device = |values: Vec<u32>| upload(&values, values.len(), &self.device);
        let needs_sequences = settings.losses.contains(&RouterLoss::SequenceLoadBalancing);
        let sequences = needs_sequences.then(|| on_device(valid.iter().map(sequence_of).collect())).transpose()?;
        let has_padding = valid.len() < tokens.len();
        let mark = |token: &usize| u32::from(is_valid(token));
        let token_mask = has_padding.then(|| on_device(tokens.iter().map(mark).collect())).transpose()?;
        let valid = has_padding.then(|| on_device(valid)).transpose()?;
        let first_token = tokens.first().map_or(0, |token| *token as u64);
        let has_jitter = settings.input_jitter_eps > 0.0;
        let tokens = has_jitter.then(|| on_device(tokens.iter().map(|token| *token as u32).collect())).transpose()?;
        Ok(Some(RouterRows { valid, token_mask, sequences, tokens, first_token, n_sequences: starts.len() - 1 }))
    }
}
