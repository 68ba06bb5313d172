//! Ranks that are processes of one machine, with nothing installed. They rendezvous in a [`store`](crate::store) and then
//! exchange bytes over Unix sockets, one between every two ranks of each group.
//!
//! A rank that exits is noticed at once, by its closed sockets; one that stops, by the time-out. This backend refuses to
//! connect machines: `nccl` (GPU) and `mpi` (CPU) do.

mod connections;
mod rank;
mod transport;
mod watch;

use std::sync::Arc;

use crate::peer::PeerInfo;
use crate::rendezvous::PeerRendezvous;
use crate::store::Client;
use crate::{Error, Options, Result, World};
use transport::{NamedListener, UnixSocketTransport};

/// Joins the world of `size` ranks that rendezvous in `store`, as rank `rank`; returns when all have joined, and fails if they
/// have not within `options.timeout`.
///
/// Each run, and each restart of it, needs keys of its own: see [`Client::with_prefix`]. Dropping the world and all its
/// groups leaves; ending the process without that ends the world.
///
/// All processes are of one user and see each other's abstract sockets: containers share the network and the user
/// namespace. Each holds a socket for every other rank and for every other member of each of its groups.
pub fn join(store: &Client, rank: usize, size: usize, options: Options) -> Result<World> {
    let rendezvous = PeerRendezvous::new(store.with_prefix("local"), rank, size, options.timeout)?;
    if size == 1 {
        return Ok(World::solo());
    }
    let listening = NamedListener::start();
    let listening = listening.map_err(|error| rendezvous.join_error(format!("listen on a Unix socket: {error}")))?;
    let own = PeerInfo::this_process(rank, size, listening.name().to_owned());
    let peers = rendezvous.exchange_peers(&own, |peer| check(&rendezvous, &own, peer))?;
    let transport = UnixSocketTransport::connect(&rendezvous, peers, listening, &options)?;
    World::open(Arc::new(transport), size, &options)
}

/// Fails if a rank's sockets cannot be reached from this process.
fn check(rendezvous: &PeerRendezvous, own: &PeerInfo, peer: &PeerInfo) -> Result<()> {
    let rank = peer.rank;
    if peer.boot_id != own.boot_id {
        let (here, there) = (own.host.clone(), peer.host.clone());
        return Err(Error::OtherHost { rank: own.rank, here, other: rank, there });
    }
    if peer.namespaces != own.namespaces {
        let (here, there) = (&own.namespaces, &peer.namespaces);
        return Err(rendezvous.join_error(format!(
            "rank {rank} runs in another container ({there}, not {here}): give all one network and one user namespace"
        )));
    }
    if peer.uid != own.uid {
        return Err(
            rendezvous.join_error(format!("rank {rank} runs as user {}, this one as user {}", peer.uid, own.uid))
        );
    }
    Ok(())
}
