//! Keys and values that all processes of a run see: how they find each other and agree before they are a group.
//!
//! [`Server`] and [`Client`] speak the wire protocol of torch's TCPStore, so either end may be torch: `torchrun`
//! serves our ranks, and our launcher serves Python's. Not for tensors: a value has at most 8 MiB.

mod client;
mod server;
mod table;
mod wire;

use std::time::Duration;

pub use client::Client;
pub use server::Server;

/// What goes wrong between a client and its store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server cannot listen, most often because the port is taken.
    #[error("listen on {addr}: {source}")]
    Bind {
        /// The address asked for.
        addr: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Nobody listened in time.
    #[error("connect to the store at {host}:{port}: {source}")]
    Connect {
        /// The server's host.
        host: String,
        /// The server's port.
        port: u16,
        /// The reason of the last try.
        source: std::io::Error,
    },
    /// Something listens that did not answer in time, or hung up.
    #[error("connect to the store at {host}:{port}: what listens there does not answer as a store does: {source}")]
    Unanswered {
        /// The server's host.
        host: String,
        /// The server's port.
        port: u16,
        /// The reason of the last try.
        source: std::io::Error,
    },
    /// Something listens that does not speak the protocol.
    #[error("connect to the store at {host}:{port}: what listens there is not a store")]
    NotAStore {
        /// The host connected to.
        host: String,
        /// The port connected to.
        port: u16,
    },
    /// Keys that nobody has set in time.
    #[error("see {keys} in the store within {timeout:?}")]
    Timeout {
        /// The keys, separated by commas.
        keys: String,
        /// How long was waited.
        timeout: Duration,
    },
    /// A key or value that no server takes; nothing was sent.
    #[error("store {n} {what}: at most {bound} are allowed")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much there is.
        n: usize,
        /// How much is allowed.
        bound: u64,
    },
    /// The connection broke; the client is of no more use.
    #[error("talk to the store: {source}")]
    Lost {
        /// The system's reason.
        source: std::io::Error,
    },
}

/// A result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
