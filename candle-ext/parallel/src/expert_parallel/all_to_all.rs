//! The all-to-all dispatcher: rows travel to the ranks of their experts and back.
//!
//! Dispatch: rows sorted by expert, one all-gather of counts, then an all-to-all of rows and of their weights. Combine:
//! the all-to-all back. Adapters with dropout need the keys of their masks, a third all-to-all. Experts that are padded to their capacity need no counts. See Lepikhin et al., GShard, 2020,
//! <https://arxiv.org/abs/2006.16668>.
//!
//! A row travels to every rank that holds a shard of its expert. The sum over a token's rows adds the shards' outputs.
//!
//! Dimensions: t tokens of this rank, d hidden size, n rows that this rank sends, m rows that it receives

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candlewick_comm::{Collective, Pending};
use candlewick_model::{ExpertCall, ExpertTokens, TokenExchange};
use candlewick_ops::{self as ops, ExpertAssignment, TokensPerCall, record, saved_by_readers_only};

use super::row_counts::{RowCounts, counts_of_ranks};
use super::{ExpertParallel, Meanwhile};

impl ExpertParallel {
    /// Computes the routed experts of a layer: [t, d] -> [t, d]. Collective.
    pub(super) fn compute_by_all_to_all(&self, call: &ExpertCall, meanwhile: Meanwhile) -> Result<Tensor> {
        let n_local = self.n_local_experts(call);
        let assignment = call.routing.assignment.sharded(n_local, self.n_shards)?;
        let counts = RowCounts::new(&counts_of_ranks(&*self.ep, &assignment, call.padding)?, self.ep.rank());
        let assignment = match call.padded(&assignment, 1)? {
            Some(padded) => padded,
            None => assignment.without_dropped_rows(counts.send.iter().sum())?,
        };
        let weights = ops::repeat_weights(&call.routing.weights, self.n_shards)?;
        let rows = self.start_dispatch(ops::permute(call.x, &assignment)?, &counts)?;
        let weights = self.start_dispatch(ops::permute_weights(&weights, &assignment)?, &counts)?;
        let keys = self.start_dispatch_of_keys(call, &assignment, &counts)?;
        meanwhile(TokenExchange::Dispatch)?;
        let (received_md, weights_m) = (rows.wait()?, weights.wait()?);
        let keys_m1 = keys.map(|keys| keys.wait()?.unsqueeze(1)).transpose()?;
        let by_expert = counts.assignment(n_local, call.x)?;
        let weights_m1 = ops::reshape(&weights_m, (counts.experts.len(), 1))?;
        let computed_md = call.compute_tokens(ExpertTokens {
            x: &received_md,
            weights: &weights_m1,
            assignment: &by_expert,
            tokens: TokensPerCall::Many,
            dropout: self.dropout(keys_m1.as_ref()),
        })?;
        let returning = self.start_combine(computed_md, &counts)?;
        meanwhile(TokenExchange::Combine)?;
        ops::unpermute(&returning.wait()?, &assignment)
    }

    /// Starts to send rows sorted by expert to the ranks of their experts: [n, ..] -> [m, ..], in the order of the senders.
    pub(super) fn start_dispatch(&self, x: Tensor, counts: &RowCounts) -> Result<TravellingRows> {
        self.start("expert_dispatch", x, [&counts.send, &counts.recv])
    }

    /// Starts to send the keys of dropout masks with the rows: i64 [n] -> [m]. Returns `None` without dropout.
    fn start_dispatch_of_keys(
        &self,
        call: &ExpertCall,
        assignment: &ExpertAssignment,
        counts: &RowCounts,
    ) -> Result<Option<Pending>> {
        let Some(keys_tk) = call.dropout_keys else { return Ok(None) };
        let keys_n = ops::permute_dropout_keys(&ops::repeat_dropout_keys(keys_tk, self.n_shards)?, assignment)?;
        Ok(Some(self.ep.start_all_to_all(&keys_n, &counts.send, &counts.recv)?))
    }

    /// Starts to return computed rows to their senders: [m, ..] -> [n, ..].
    fn start_combine(&self, y: Tensor, counts: &RowCounts) -> Result<TravellingRows> {
        self.start("expert_combine", y, [&counts.recv, &counts.send])
    }

    fn start(&self, name: &'static str, x: Tensor, [send, recv]: [&Vec<usize>; 2]) -> Result<TravellingRows> {
        let pending = self.ep.start_all_to_all(&x.contiguous()?, send, recv)?;
        Ok(TravellingRows { name, x, pending, ep: Arc::clone(&self.ep), send: send.clone(), recv: recv.clone() })
    }
}

/// Rows between their sender and their receiver.
pub(super) struct TravellingRows {
    name: &'static str,
    x: Tensor,
    pending: Pending,
    ep: Arc<dyn Collective>,
    send: Vec<usize>,
    recv: Vec<usize>,
}

impl TravellingRows {
    /// Returns the received rows. The gradients of rows travel back. The ops that were recorded between the start and this call
    /// have their backward meanwhile.
    pub(super) fn wait(self) -> Result<Tensor> {
        let Self { name, x, pending, ep, send, recv } = self;
        let y = pending.wait()?;
        saved_by_readers_only(&y);
        Ok(record(name, [(&x).into()], y, move |dy, context| {
            let pending = ep.start_all_to_all(dy, &recv, &send)?;
            context.receive_later(0, Box::new(move || Ok(pending.wait()?)))?;
            Ok([None])
        }))
    }
}
