//! Expert parallelism: each rank holds some experts of a layer, and tokens travel to the ranks of their experts.
//!
//! Dispatch: rows sorted by expert, one all-gather of counts, then an all-to-all of rows and of their weights. Combine:
//! the all-to-all back. See Lepikhin et al., GShard, 2020, <https://arxiv.org/abs/2006.16668>. The counts are the only
//! exchange that the host waits for.
//!
//! Dimensions: t tokens of this rank, d hidden size, n rows that this rank sends (t times the selected experts), m rows
//! that it receives, e all experts

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use candlewick_comm::{Collective, Reduce};
use candlewick_model::{AttentionCall, ExpertCall, ParallelOps};
use candlewick_ops::{self as ops, ColumnShard, ExpertAssignment, TokensPerCall, Weight, record, to_host};

/// Expert parallel groups of a rank.
#[derive(Clone)]
pub struct ExpertParallel {
    /// Expert parallel ranks, each of which holds some experts of every layer.
    pub(crate) ep: Arc<dyn Collective>,
    /// Ranks that split the tokens of a micro-batch.
    pub(crate) micro_batch: Arc<dyn Collective>,
    /// Ranks that split the tokens of a step.
    pub(crate) step: Arc<dyn Collective>,
}

/// Rows that a rank sends to and receives from each expert parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RowCounts {
    send: Vec<usize>,
    recv: Vec<usize>,
    /// Expert on this rank of each received row, counted from its first.
    experts: Vec<u32>,
}

impl ExpertParallel {
    /// Computes the routed experts of a layer: [t, d] -> [t, d]. Collective.
    fn compute(&self, call: &ExpertCall) -> Result<Tensor> {
        let assignment = &call.routing.assignment;
        let rows_nd = ops::permute(call.x, assignment)?;
        let weights_n = ops::permute_weights(&call.routing.weights, assignment)?;
        let counts = self.exchange_counts(assignment)?;
        let received_md = self.dispatch(&rows_nd, &counts)?;
        let weights_m = self.dispatch(&weights_n, &counts)?;
        let by_expert = counts.assignment(assignment.n_experts() / self.ep.size(), call.x)?;
        let weights_m1 = ops::reshape(&weights_m, (counts.experts.len(), 1))?;
        let computed_md = call.experts.forward(
            &ops::permute(&received_md, &by_expert)?,
            &ops::permute_weights(&weights_m1, &by_expert)?,
            &by_expert.offsets,
            TokensPerCall::Many,
        )?;
        let computed_md = ops::unpermute(&computed_md, &by_expert)?;
        let returned_nd = self.combine(&computed_md, &counts, assignment.n_rows())?;
        ops::unpermute(&returned_nd, assignment)
    }

    /// Exchanges the number of rows of each expert on each rank. The host waits for it.
    fn exchange_counts(&self, assignment: &ExpertAssignment) -> Result<RowCounts> {
        let (n_ranks, n_experts) = (self.ep.size(), assignment.n_experts());
        if !n_experts.is_multiple_of(n_ranks) {
            bail!("expert_parallel_size: {n_experts} experts cannot be divided by {n_ranks} ranks")
        }
        let own = assignment.counts()?.to_dtype(DType::F64)?;
        let all = to_host(&self.ep.all_gather(&own.unsqueeze(0)?)?)?.to_vec2::<f64>()?;
        Ok(RowCounts::new(&all, self.ep.rank()))
    }

    /// Sends rows sorted by expert to the ranks of their experts: [n, ..] -> [m, ..], in the order of the senders. Rows
    /// that the capacity dropped come last, and stay.
    fn dispatch(&self, x: &Tensor, counts: &RowCounts) -> Result<Tensor> {
        let (send, recv, n_rows) = (counts.send.clone(), counts.recv.clone(), x.dim(0)?);
        let y = all_to_all(&*self.ep, x, &send, &recv)?;
        let ep = Arc::clone(&self.ep);
        Ok(record("expert_dispatch", [x.into()], y, move |dy, _| {
            Ok([Some(with_rows(&all_to_all(&*ep, dy, &recv, &send)?, n_rows)?)])
        }))
    }

    /// Returns computed rows to their senders: [m, ..] -> [n, ..], with zeros for dropped rows.
    fn combine(&self, y: &Tensor, counts: &RowCounts, n_rows: usize) -> Result<Tensor> {
        let (send, recv) = (counts.send.clone(), counts.recv.clone());
        let x = with_rows(&all_to_all(&*self.ep, y, &recv, &send)?, n_rows)?;
        let ep = Arc::clone(&self.ep);
        Ok(record("expert_combine", [y.into()], x, move |dx, _| Ok([Some(all_to_all(&*ep, dx, &send, &recv)?)])))
    }
}

/// Sends the first rows of x to other ranks, and receives theirs.
fn all_to_all(ep: &dyn Collective, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Tensor> {
    let kept = x.narrow(0, 0, send.iter().sum())?.contiguous()?;
    Ok(ep.all_to_all(&kept, send, recv)?)
}

/// Appends rows of zeros up to `n_rows`.
fn with_rows(x: &Tensor, n_rows: usize) -> Result<Tensor> {
    x.pad_with_zeros(0, 0, n_rows - x.dim(0)?)
}

impl RowCounts {
    /// Reads the counts of a rank off those of all ranks, `[rank][expert]`.
    fn new(all: &[Vec<f64>], rank: usize) -> Self {
        let n_ranks = all.len();
        let n_local = all[0].len() / n_ranks;
        let experts_of = |owner: usize| owner * n_local..(owner + 1) * n_local;
        let rows = |sender: usize, owner: usize| all[sender][experts_of(owner)].iter().map(|n| *n as usize).sum();
        let received = all.iter().flat_map(|counts| {
            counts[experts_of(rank)].iter().enumerate().map(|(expert, n)| (expert as u32, *n as usize))
        });
        Self {
            send: (0..n_ranks).map(|owner| rows(rank, owner)).collect(),
            recv: (0..n_ranks).map(|sender| rows(sender, rank)).collect(),
            experts: received.flat_map(|(expert, n)| std::iter::repeat_n(expert, n)).collect(),
        }
    }

    /// Returns the received rows' assignment to the `n_local` experts of this rank.
    fn assignment(&self, n_local: usize, like: &Tensor) -> Result<ExpertAssignment> {
        let experts = Tensor::from_slice(&self.experts, (self.experts.len(), 1), like.device())?;
        ExpertAssignment::new(&experts, n_local)
    }
}

/// Operations of an expert parallel rank. All but the experts are delegated to `inner`.
pub(crate) struct ExpertParallelOps<'a> {
    pub(crate) experts: &'a ExpertParallel,
    pub(crate) inner: &'a dyn ParallelOps,
}

impl ParallelOps for ExpertParallelOps<'_> {
    fn embedding(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        self.inner.embedding(ids, table, padding)
    }

    fn copy_to_tp(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.copy_to_tp(x)
    }

    fn sequence_parallel_size(&self) -> usize {
        self.inner.sequence_parallel_size()
    }

    fn input_shard(&self) -> ColumnShard {
        self.inner.input_shard()
    }

    fn reduce_from_tp(&self, y: &Tensor) -> Result<Tensor> {
        self.inner.reduce_from_tp(y)
    }

    fn attention(&self, call: &AttentionCall) -> Result<Tensor> {
        self.inner.attention(call)
    }

    fn experts(&self, call: &ExpertCall) -> Result<Tensor> {
        self.experts.compute(call)
    }

    fn sum_over_micro_batch(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.experts.micro_batch.all_reduce(x, Reduce::Sum)?)
    }

    fn sum_over_data_parallel(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.experts.step.all_reduce(x, Reduce::Sum)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_by_sender_and_owner() {
        // Two ranks with two experts each.
        let all = [vec![1.0, 2.0, 0.0, 3.0], vec![0.0, 1.0, 2.0, 0.0]];
        let first = RowCounts { send: vec![3, 3], recv: vec![3, 1], experts: vec![0, 1, 1, 1] };
        assert_eq!(RowCounts::new(&all, 0), first);
        let second = RowCounts { send: vec![1, 2], recv: vec![3, 2], experts: vec![1, 1, 1, 0, 0] };
        assert_eq!(RowCounts::new(&all, 1), second);
    }
}
