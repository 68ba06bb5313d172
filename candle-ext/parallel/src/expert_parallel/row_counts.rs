//! Numbers of rows that expert parallel ranks exchange.

use std::rc::Rc;

use candle_core::{DType, Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_model::ExpertPadding;
use candlewick_ops::{ExpertAssignment, ReplayedOutput, compute_or_replay, to_host, upload};

/// Rows that a rank sends to and receives from each expert parallel rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowCounts {
    pub(super) send: Vec<usize>,
    pub(super) recv: Vec<usize>,
    /// Expert on this rank of each received row, counted from its first.
    pub(super) experts: Vec<u32>,
}

/// Returns the number of rows of each expert on each rank, `[rank][expert]`. Without padding, ranks exchange the counts and
/// the host waits for it.
pub(super) fn counts_of_ranks(
    ep: &dyn Collective,
    assignment: &ExpertAssignment,
    padding: Option<ExpertPadding>,
) -> Result<Rc<Vec<Vec<usize>>>> {
    let (n_ranks, n_experts) = (ep.size(), assignment.n_experts());
    if !n_experts.is_multiple_of(n_ranks) {
        bail!("expert_parallel_size: {n_experts} experts cannot be divided by {n_ranks} ranks")
    }
    match padding {
        Some(padding) => Ok(Rc::new(vec![vec![padding.rows_per_expert; n_experts]; n_ranks])),
        None => exchange(ep, &assignment.counts()?),
    }
}

/// Gathers vectors of counts from all ranks. The host waits. A recomputed layer waits in its first forward only.
pub(super) fn exchange(ep: &dyn Collective, own: &Tensor) -> Result<Rc<Vec<Vec<usize>>>> {
    let (_, all) = compute_or_replay("expert_counts", ReplayedOutput::Routing, || {
        let all = to_host(&ep.all_gather(&own.to_dtype(DType::F64)?.unsqueeze(0)?)?)?.to_vec2::<f64>()?;
        let all: Vec<Vec<usize>> = all.iter().map(|counts| counts.iter().map(|n| *n as usize).collect()).collect();
        Ok((own.clone(), all))
    })?;
    Ok(all)
}

impl RowCounts {
    /// Reads the counts of a rank off those of all ranks, `[rank][expert]`.
    pub(super) fn new(all: &[Vec<usize>], rank: usize) -> Self {
        let n_ranks = all.len();
        let n_local = all[0].len() / n_ranks;
        let experts_of = |owner: usize| owner * n_local..(owner + 1) * n_local;
        let rows = |sender: usize, owner: usize| all[sender][experts_of(owner)].iter().sum();
        let received = all
            .iter()
            .flat_map(|counts| counts[experts_of(rank)].iter().enumerate().map(|(expert, n)| (expert as u32, *n)));
        Self {
            send: (0..n_ranks).map(|owner| rows(rank, owner)).collect(),
            recv: (0..n_ranks).map(|sender| rows(sender, rank)).collect(),
            experts: received.flat_map(|(expert, n)| std::iter::repeat_n(expert, n)).collect(),
        }
    }

    /// Returns the received rows' assignment to the `n_local` experts of this rank.
    pub(super) fn assignment(&self, n_local: usize, like: &Tensor) -> Result<ExpertAssignment> {
        let experts = upload(&self.experts, (self.experts.len(), 1), like.device())?;
        ExpertAssignment::new(&experts, n_local)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_counted_by_sender_and_owner() {
        // Two ranks with two experts each.
        let all = [vec![1, 2, 0, 3], vec![0, 1, 2, 0]];
        let first = RowCounts { send: vec![3, 3], recv: vec![3, 1], experts: vec![0, 1, 1, 1] };
        assert_eq!(RowCounts::new(&all, 0), first);
        let second = RowCounts { send: vec![1, 2], recv: vec![3, 2], experts: vec![1, 1, 1, 0, 0] };
        assert_eq!(RowCounts::new(&all, 1), second);
    }
}
