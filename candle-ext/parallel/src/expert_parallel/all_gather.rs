//! The all-gather dispatcher: every rank gets the tokens of all ranks and computes the rows of its experts.
//!
//! Dispatch: one all-gather of counts, then all-gathers of tokens, of their weights and of their experts. Combine: a
//! reduce-scatter of the sums over this rank's experts. Adapters with dropout need the keys of their masks, too. Ranks pad their tokens to the most of any rank. Experts that are
//! padded to their capacity need no counts.
//!
//! Dimensions: t tokens of this rank, d hidden size, k selected experts of a token, r ranks, u the most tokens of a rank

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candlewick_comm::Pending;
use candlewick_model::{ExpertCall, ExpertTokens, TokenExchange};
use candlewick_ops::{DROPPED, ExpertAssignment, TokensPerCall, record, relabel_experts, saved_by_readers_only};

use super::row_counts::exchange;
use super::{ExpertParallel, Meanwhile};

/// Tokens and rows of a layer that the ranks have agreed on.
pub(super) struct GatherSizes {
    /// Tokens of this rank.
    pub(super) n_own: usize,
    /// The most tokens of any rank.
    pub(super) n_padded: usize,
    /// Rows of this rank's experts, from all ranks.
    pub(super) n_rows: usize,
}

impl ExpertParallel {
    /// Computes the routed experts of a layer: [t, d] -> [t, d]. Collective.
    pub(super) fn compute_by_all_gather(&self, call: &ExpertCall, meanwhile: Meanwhile) -> Result<Tensor> {
        let (n_local, owner) = (self.n_local_experts(call), self.ep.rank() / self.n_shards);
        let own_experts = owner * n_local..(owner + 1) * n_local;
        let sizes = self.gather_sizes(call, own_experts.clone())?;
        let tokens_d = self.start_gather(call.x, &sizes)?;
        let weights_k = self.start_gather(&call.routing.weights, &sizes)?;
        let experts_k = self.start_gather_of_experts(&call.routing.assignment, &sizes)?;
        let keys_k = call.dropout_keys.map(|keys| self.start_gather(keys, &sizes)).transpose()?;
        meanwhile(TokenExchange::Dispatch)?;
        let tokens_d = self.gathered(call.x, tokens_d, &sizes)?;
        let weights_k = self.gathered(&call.routing.weights, weights_k, &sizes)?;
        let experts_k = experts_k.wait()?;
        let label = |expert| if own_experts.contains(&expert) { (expert - own_experts.start) as u32 } else { DROPPED };
        let labels: Vec<u32> = (0..call.routing.assignment.n_experts()).map(label).collect();
        let of_rank = ExpertAssignment::new(&relabel_experts(&experts_k, &labels, 1)?, n_local)?;
        let by_expert = match call.padded(&of_rank, self.ep.size())? {
            Some(padded) => padded,
            None => of_rank.without_dropped_rows(sizes.n_rows)?,
        };
        let keys_k = keys_k.map(Pending::wait).transpose()?;
        let computed = call.compute_tokens(ExpertTokens {
            x: &tokens_d,
            weights: &weights_k,
            assignment: &by_expert,
            tokens: TokensPerCall::Many,
            dropout: self.dropout(keys_k.as_ref()),
        })?;
        let sums = self.ep.start_reduce_scatter(&computed.contiguous()?)?;
        meanwhile(TokenExchange::Combine)?;
        self.scattered(&computed, sums, &sizes)
    }

    /// Returns the sizes. Without padding, ranks exchange the number of tokens of each rank, and of rows of each expert on
    /// each rank. The host waits for it.
    fn gather_sizes(&self, call: &ExpertCall, own_experts: std::ops::Range<usize>) -> Result<GatherSizes> {
        let n_own = call.x.dim(0)?;
        if let Some(padding) = call.padding {
            let n_rows = padding.rows_per_expert * own_experts.len() * self.ep.size();
            return Ok(GatherSizes { n_own, n_padded: padding.most_tokens, n_rows });
        }
        let n_tokens = Tensor::new(&[n_own as f64], call.x.device())?;
        let counts = call.routing.assignment.counts()?.to_dtype(DType::F64)?;
        let all = exchange(&*self.ep, &Tensor::cat(&[counts, n_tokens], 0)?)?;
        let n_padded = all.iter().filter_map(|counts| counts.last()).copied().max().unwrap_or(0);
        let n_rows = all.iter().map(|counts| counts[own_experts.clone()].iter().sum::<usize>()).sum();
        Ok(GatherSizes { n_own, n_padded, n_rows })
    }

    /// Starts to gather the tokens of all ranks: [t, ..] -> [r * u, ..]. Rows of padding are zero.
    pub(super) fn start_gather(&self, x: &Tensor, sizes: &GatherSizes) -> Result<Pending> {
        Ok(self.ep.start_all_gather(&x.pad_with_zeros(0, 0, sizes.n_padded - sizes.n_own)?.contiguous()?)?)
    }

    /// Waits for the tokens of all ranks. The gradients of tokens are summed over the ranks. The ops that were recorded between
    /// the start and this call have their backward meanwhile.
    pub(super) fn gathered(&self, x: &Tensor, pending: Pending, sizes: &GatherSizes) -> Result<Tensor> {
        let (n_own, ep) = (sizes.n_own, Arc::clone(&self.ep));
        let y = pending.wait()?;
        saved_by_readers_only(&y);
        Ok(record("gather_tokens", [x.into()], y, move |dy, context| {
            let pending = ep.start_reduce_scatter(dy)?;
            context.receive_later(0, Box::new(move || pending.wait()?.narrow(0, 0, n_own)?.contiguous()))?;
            Ok([None])
        }))
    }

    /// Starts to gather the experts of all ranks' tokens: u32 [r * u, k]. Tokens of padding have none.
    fn start_gather_of_experts(&self, assignment: &ExpertAssignment, sizes: &GatherSizes) -> Result<Pending> {
        let experts = &assignment.experts;
        let padding = Tensor::full(DROPPED, (sizes.n_padded - sizes.n_own, assignment.top_k()), experts.device())?;
        Ok(self.ep.start_all_gather(&Tensor::cat(&[experts, &padding], 0)?.contiguous()?)?)
    }

    /// Waits for the sums of the outputs `y` over the ranks, of this rank's tokens: [r * u, d] -> [t, d]. Their gradients are
    /// gathered. The ops that were recorded between the start and this call have their backward meanwhile.
    fn scattered(&self, y: &Tensor, pending: Pending, sizes: &GatherSizes) -> Result<Tensor> {
        let (n_own, n_more) = (sizes.n_own, sizes.n_padded - sizes.n_own);
        let sums = pending.wait()?.narrow(0, 0, n_own)?.contiguous()?;
        let ep = Arc::clone(&self.ep);
        Ok(record("scatter_sums", [y.into()], sums, move |dx, context| {
            let pending = ep.start_all_gather(&dx.pad_with_zeros(0, 0, n_more)?.contiguous()?)?;
            context.receive_later(0, Box::new(move || Ok(pending.wait()?)))?;
            Ok([None])
        }))
    }
}
