//! Key-value store for the rendezvous of a run's processes, compatible with torch's TCPStore.
//!
//! [`Server`] and [`Client`] implement the wire protocol of TCPStore. Either end may be torch: `torchrun` can host the store of
//! our ranks, and our launcher that of Python's. A value has at most 8 MiB, so do not store tensors.
//!
//! A server with a [`StoreSecret`] refuses all queries of a connection that has not sent the secret.

mod client;
mod secret;
mod server;
mod table;
mod wire;

use std::time::Duration;

pub use client::Client;
pub use secret::{StoreSecret, is_equal_in_constant_time};
pub use server::Server;

/// Error of a store's client or server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server cannot listen, most often because the port is in use.
    #[error("listen on {addr}: {source}")]
    Bind {
        /// Requested address.
        addr: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// No server listened within the timeout.
    #[error("connect to the store at {host}:{port}: {source}")]
    Connect {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
        /// Error of the last attempt.
        source: std::io::Error,
    },
    /// The server accepted the connection, but did not answer the handshake.
    #[error("connect to the store at {host}:{port}: the server there does not answer as a TCPStore: {source}")]
    Unanswered {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
        /// Error of the last attempt.
        source: std::io::Error,
    },
    /// The server does not implement the protocol.
    #[error("connect to the store at {host}:{port}: the server there is not a TCPStore; choose a free port")]
    NotAStore {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
    },
    /// The store requires a secret, and the client has none or another.
    #[error(
        "connect to the store at {host}:{port}: the store refuses the secret of this process, or its absence; set {} to \
         the same value on all nodes, and keep it in the environment of each worker",
        StoreSecret::VARIABLE
    )]
    Refused {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
    },
    /// Keys were not set within the timeout.
    #[error("wait for {keys} in the store: timed out after {timeout:?}")]
    Timeout {
        /// Keys, separated by commas.
        keys: String,
        /// Timeout of the wait.
        timeout: Duration,
    },
    /// A key or value exceeds the limits of the protocol. Nothing was sent.
    #[error("store {n} {what}: at most {bound} are allowed")]
    TooLarge {
        /// Counted unit.
        what: &'static str,
        /// Size of the request.
        n: usize,
        /// Largest allowed size.
        bound: u64,
    },
    /// The connection is broken. The client cannot be used again.
    #[error("communicate with the store: {source}")]
    Lost {
        /// Error of the system.
        source: std::io::Error,
    },
}

/// Result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
