//! Rendezvous of a world's ranks in a store.

use std::time::{Duration, Instant};

use crate::liveness::deadline;
use crate::peer::PeerInfo;
use crate::store::{self, Client};
use crate::{Error, Result};

/// Rendezvous of one rank with the others.
pub(crate) struct PeerRendezvous {
    store: Client,
    rank: usize,
    size: usize,
    timeout: Duration,
    deadline: Instant,
}

impl PeerRendezvous {
    /// Begins the rendezvous as rank `rank` of `size`. `store` has a prefix of its own.
    pub(crate) fn new(store: Client, rank: usize, size: usize, timeout: Duration) -> Result<Self> {
        let rendezvous = Self { store, rank, size, timeout, deadline: deadline(timeout) };
        if rank >= size {
            Err(rendezvous.join_error("the rank must be less than the world size".to_owned()))
        } else {
            Ok(rendezvous)
        }
    }

    pub(crate) fn store(&self) -> &Client {
        &self.store
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    #[cfg(target_os = "linux")]
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Publishes this rank's description and returns those of all ranks. Fails if `check` fails for one.
    pub(crate) fn exchange_peers(
        &self,
        own: &PeerInfo,
        check: impl Fn(&PeerInfo) -> Result<()>,
    ) -> Result<Vec<PeerInfo>> {
        if self.store.add(&format!("{}/claims", self.rank), 1)? > 1 {
            return Err(self.join_error("another process has already joined as this rank; check RANK".to_owned()));
        }
        self.store.set(&key(self.rank), &own.encode())?;
        let checked = |rank| {
            let peer = self.await_one(rank)?;
            check(&peer).map(|()| peer)
        };
        (0..self.size).map(checked).collect()
    }

    fn await_one(&self, rank: usize) -> Result<PeerInfo> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.store.wait_for(&[&key(rank)], left) {
            Ok(()) => {}
            Err(store::Error::Timeout { .. }) => return Err(self.absent()?),
            Err(error) => return Err(error.into()),
        }
        let peer = PeerInfo::decode(rank, &self.store.get(&key(rank))?);
        let peer = peer.ok_or_else(|| {
            self.join_error(format!("rank {rank} runs another version of this program; start all ranks from one build"))
        })?;
        if peer.size != self.size {
            let (other, other_size) = (rank, peer.size);
            return Err(Error::OtherSize { rank: self.rank, size: self.size, other, other_size });
        }
        Ok(peer)
    }

    fn absent(&self) -> Result<Error> {
        let mut absent = Vec::new();
        for rank in 0..self.size {
            if !self.store.check(&[&key(rank)])? {
                absent.push(rank);
            }
        }
        Ok(Error::Absent { rank: self.rank, size: self.size, absent, timeout: self.timeout })
    }

    /// Creates the error of this rank's failure to join.
    pub(crate) fn join_error(&self, why: String) -> Error {
        Error::Join { rank: self.rank, size: self.size, why }
    }
}

fn key(rank: usize) -> String {
    format!("{rank}/peer")
}
