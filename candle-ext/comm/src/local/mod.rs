//! Backend for processes of one node, without dependencies.
//!
//! The ranks rendezvous in a [`store`](crate::store) and exchange bytes over Unix sockets, one between every two ranks of each
//! group. A rank that exits is detected immediately by its closed sockets, and one that stops by the timeout. For several
//! nodes use `nccl` (GPU) or `mpi` (CPU).

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

/// Joins the world of `size` ranks as rank `rank`, by a rendezvous in `store`.
///
/// Returns when all ranks have joined, and fails if they have not within `options.timeout`. Each run and each restart needs
/// its own keys: see [`Client::with_prefix`]. Dropping the world and all its groups leaves it. A process that exits without
/// leaving aborts the world.
///
/// All processes belong to one user and see each other's abstract sockets, so containers share the network and the user
/// namespace. Each process holds a socket for every other rank, and for every other rank of each of its groups.
pub fn join(store: &Client, rank: usize, size: usize, options: Options) -> Result<World> {
    join_peers(&PeerRendezvous::new(store.with_prefix("local"), rank, size, options.timeout)?, options)
}

/// Joins the world of a rendezvous.
pub(crate) fn join_peers(rendezvous: &PeerRendezvous, options: Options) -> Result<World> {
    let (rank, size) = (rendezvous.rank(), rendezvous.size());
    if size == 1 {
        return Ok(World::solo());
    }
    let listening = NamedListener::start();
    let listening = listening.map_err(|error| rendezvous.join_error(format!("listen on a Unix socket: {error}")))?;
    let own = PeerInfo::this_process(rank, size, listening.name().to_owned());
    let peers = rendezvous.exchange_peers(&own, |peer| check(rendezvous, &own, peer))?;
    let transport = UnixSocketTransport::connect(rendezvous, peers, listening, &options)?;
    World::open(Arc::new(transport), size, &options)
}

/// Fails if this process cannot reach the sockets of `peer`.
fn check(rendezvous: &PeerRendezvous, own: &PeerInfo, peer: &PeerInfo) -> Result<()> {
    let rank = peer.rank;
    if peer.boot_id != own.boot_id {
        let (here, there) = (own.host.clone(), peer.host.clone());
        return Err(Error::OtherHost { rank: own.rank, here, other: rank, there });
    }
    if peer.namespaces != own.namespaces {
        let (here, there) = (&own.namespaces, &peer.namespaces);
        return Err(rendezvous.join_error(format!(
            "rank {rank} runs in another container ({there}, not {here}); run all ranks in one network and user namespace"
        )));
    }
    if peer.uid != own.uid {
        return Err(
            rendezvous.join_error(format!("rank {rank} runs as user {}, this one as user {}", peer.uid, own.uid))
        );
    }
    Ok(())
}
