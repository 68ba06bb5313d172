//! Errors of a rendezvous.

use std::time::Duration;

use candlewick_comm::store::Error;

use crate::endpoint::Endpoint;

/// An error of a rendezvous.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// Another process uses the port of the store.
    #[error(
        "host the store at {endpoint}: the port is in use, perhaps by another job \
         (use --standalone for a free port, or set --master-port or --rdzv-endpoint)"
    )]
    PortInUse {
        /// The address of the store.
        endpoint: Endpoint,
    },
    /// The store cannot be reached or does not reply.
    #[error("connect to the store at {endpoint}: {source}")]
    Store {
        /// The address of the store.
        endpoint: Endpoint,
        /// The error of the store's client.
        source: Box<Error>,
    },
    /// Two launchers have the same node rank.
    #[error("join as node {node_rank}: a launcher on {other} has this --node-rank already")]
    NodeRankTaken {
        /// The node rank.
        node_rank: usize,
        /// The host of the other launcher.
        other: String,
    },
    /// Two launchers have different settings.
    #[error("match the settings of the launcher on {other}: {difference}")]
    SettingsMismatch {
        /// The host of the other launcher.
        other: String,
        /// The setting and its two values.
        difference: String,
    },
    /// Nodes did not join within the timeout.
    #[error("complete the rendezvous of {min} nodes at {endpoint} within {timeout:?}: {missing}")]
    JoinTimeout {
        /// The minimum number of nodes.
        min: usize,
        /// The address of the store.
        endpoint: Endpoint,
        /// The timeout.
        timeout: Duration,
        /// The missing nodes, or another cause.
        missing: String,
    },
    /// A signal arrived during the rendezvous.
    #[error("complete the rendezvous: interrupted by signal {0}")]
    Interrupted(i32),
}

pub(super) type Result<T> = std::result::Result<T, RendezvousError>;

/// A check for a stop signal, which interrupts a wait.
pub type Interrupted<'a> = &'a dyn Fn() -> Option<i32>;

/// The interval between two checks of the store and of signals.
pub const POLL_INTERVAL: Duration = Duration::from_millis(50);
