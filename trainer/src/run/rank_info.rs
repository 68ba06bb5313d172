//! The data-parallel rank of a process.

/// The index of this rank among the data-parallel ranks, which compute different micro-batches, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankInfo {
    pub(super) data_rank: usize,
    pub(super) data_world: usize,
}
