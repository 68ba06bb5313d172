//! The store of a rendezvous: server, client and address.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error, Server, StoreSecret};

use super::error::{Interrupted, POLL_INTERVAL, RendezvousError, Result};
use crate::console::log;
use crate::endpoint::Endpoint;

/// Starts the store server on the address that clients use.
pub(super) fn bind(endpoint: &Endpoint, is_single_node: bool, secret: Option<&StoreSecret>) -> Result<Server> {
    let server = match own_loopback(&endpoint.host).filter(|_| is_single_node) {
        Some(address) => Server::bind_with_secret((address, endpoint.port), secret.cloned()),
        None => Server::bind_for(&endpoint.host, endpoint.port, secret.cloned()),
    };
    server.map_err(|source| match &source {
        Error::Bind { source: reason, .. } if reason.kind() == std::io::ErrorKind::AddrInUse => {
            RendezvousError::PortInUse { endpoint: endpoint.clone() }
        }
        _ => store_error(endpoint, source),
    })
}

fn store_error(endpoint: &Endpoint, source: Error) -> RendezvousError {
    RendezvousError::Store { endpoint: endpoint.clone(), source: Box::new(source) }
}

/// Returns the address of the store for this node and every worker.
pub(super) fn address_of(endpoint: &Endpoint, server: Option<&Server>, is_single_node: bool) -> Endpoint {
    let loopback = own_loopback(&endpoint.host).filter(|_| is_single_node);
    let host = loopback.map_or_else(|| endpoint.host.clone(), |address| address.to_string());
    Endpoint { host, port: server.map_or(endpoint.port, Server::port) }
}

fn own_loopback(host: &str) -> Option<IpAddr> {
    match host {
        "localhost" => Some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => host.parse().ok().filter(IpAddr::is_loopback),
    }
}

/// Timeout of one connection attempt. Signals are checked between attempts.
const CONNECT_ATTEMPT: Duration = Duration::from_secs(2);

/// Timeouts of a launcher's connection to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectTimeouts {
    /// Time until the store is reached.
    pub(super) connect: Duration,
    /// Time until each answer.
    pub(super) reply: Duration,
}

/// Connects to the store until the timeout. The host, or its name in DNS, may appear later. The first error is logged.
pub(super) fn connect(
    address: &Endpoint,
    secret: Option<&StoreSecret>,
    timeouts: ConnectTimeouts,
    interrupted: Interrupted,
) -> Result<Client> {
    let deadline = Instant::now() + timeouts.connect;
    let mut is_logged = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match Client::connect_with_secret(&address.host, address.port, left.min(CONNECT_ATTEMPT), secret.cloned()) {
            Ok(client) => {
                return client
                    .new_connection_with_timeout(timeouts.reply)
                    .map_err(|source| store_error(address, source));
            }
            Err(error @ (Error::Connect { .. } | Error::Unanswered { .. })) if Instant::now() < deadline => {
                if !is_logged {
                    log(&format!("waiting for {address}: failed to {error}"));
                }
                is_logged = true;
            }
            Err(source) => return Err(store_error(address, source)),
        }
        if let Some(signal) = interrupted() {
            return Err(RendezvousError::Interrupted(signal));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}
