//! The rank of a node in a generation, and the store's keys of a node.

/// The rank of a participant in a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodeRank {
    pub(super) generation: usize,
    pub(super) group_rank: usize,
    pub(super) n_nodes: usize,
}

/// A node that waits to join a generation.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingNode {
    pub(super) generation: usize,
    /// Node rank (static), or position in the order of arrival (c10d).
    pub(super) join_index: usize,
}

impl NodeRank {
    pub(super) fn key(self, name: &str) -> String {
        key(self.generation, name)
    }

    pub(super) fn node_key(self, name: &str, group_rank: usize) -> String {
        node_key(self.generation, name, group_rank)
    }
}

impl PendingNode {
    pub(super) fn key(self, name: &str) -> String {
        key(self.generation, name)
    }

    pub(super) fn own_key(self, name: &str) -> String {
        node_key(self.generation, name, self.join_index)
    }
}

/// Returns a key of a generation.
pub(super) fn key(generation: usize, name: &str) -> String {
    format!("{generation}/{name}")
}

/// Returns a key of one node of a generation.
pub(super) fn node_key(generation: usize, name: &str, join_index: usize) -> String {
    format!("{generation}/{name}/{join_index}")
}
