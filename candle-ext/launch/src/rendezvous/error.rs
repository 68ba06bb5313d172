//! Errors of a rendezvous.

use std::time::Duration;

use candlewick_comm::store::Error;

use crate::endpoint::Endpoint;

/// An error that keeps a node from the rendezvous.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// The port of the store is taken.
    #[error(
        "host the store at {endpoint}: the port is in use, perhaps by another job \
         (--standalone takes a free one, --master-port or --rdzv-endpoint another)"
    )]
    PortInUse {
        /// The address of the store.
        endpoint: Endpoint,
    },
    /// The store cannot be reached, or does not answer.
    #[error("meet at {endpoint}: {source}")]
    Store {
        /// The address of the store.
        endpoint: Endpoint,
        /// The error of the store's client.
        source: Box<Error>,
    },
    /// Two launchers say they are the same node.
    #[error("be node {node_rank}: another launcher of this job has that --node-rank, {other}")]
    NodeRankTaken {
        /// The number.
        node_rank: usize,
        /// The other's machine.
        other: String,
    },
    /// Two launchers were not started alike.
    #[error("agree with the launcher on {other}: {difference}")]
    SettingsMismatch {
        /// The other's machine.
        other: String,
        /// In what.
        difference: String,
    },
    /// Nodes did not come.
    #[error("meet {min} nodes at {endpoint} within {timeout:?}: {missing}")]
    JoinTimeout {
        /// The number of nodes that are needed.
        min: usize,
        /// The address of the store.
        endpoint: Endpoint,
        /// The time that was waited.
        timeout: Duration,
        /// The missing nodes.
        missing: String,
    },
    /// A signal came while the nodes were waited for.
    #[error("meet the other nodes: stopped by signal {0}")]
    Interrupted(i32),
}

pub(super) type Result<T> = std::result::Result<T, RendezvousError>;

/// Looks for a signal that ends the wait.
pub type Interrupted<'a> = &'a dyn Fn() -> Option<i32>;

/// The longest wait between two checks for a signal.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);
