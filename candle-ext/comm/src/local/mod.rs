//! Ranks that are processes of one machine, with nothing installed: they meet through a [`store`] and
//! then talk over Unix sockets, one between every two ranks of each group.
//!
//! A rank that dies is noticed at once, by its closed sockets; one that stops, by the time-out. Between machines this
//! engine refuses to work: `nccl` (GPU) and `mpi` (CPU) are made for that.

mod about;
mod links;
mod shared;
mod switch;
mod watch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::deadline::deadline;
use crate::store::{self, Client};
use crate::{Error, Options, Result, World};
use about::About;
use switch::{Listening, Switch};

/// Joins the world of `size` ranks that meet in `store`, as rank `rank`; returns when all have joined, and fails if they
/// have not within `options.timeout`.
///
/// Each run, and each restart of it, needs keys of its own: see [`Client::with_prefix`]. Dropping the world and all its
/// groups leaves; ending the process without that ends the world.
///
/// All processes are of one user and see each other's abstract sockets: containers share the network and the user
/// namespace. Each holds a socket for every other rank and for every other member of each of its groups.
pub fn join(store: &Client, rank: usize, size: usize, options: Options) -> Result<World> {
    let meeting = Meeting { store: store.with_prefix("local"), rank, size, deadline: deadline(options.timeout) };
    if rank >= size {
        return Err(meeting.refuse("there is no such rank".to_owned()));
    }
    if size == 1 {
        return Ok(World::solo());
    }
    let listening = Listening::start().map_err(|error| meeting.refuse(format!("listen on a Unix socket: {error}")))?;
    meeting.announce(&About::this_process(size, listening.name()))?;
    let others = meeting.await_all(options.timeout)?;
    let switch = Switch::connect(rank, others, listening, &meeting.store, meeting.deadline, options.timeout)?;
    World::open(Arc::new(switch), size, &options)
}

/// The ranks coming together in the store.
struct Meeting {
    store: Client,
    rank: usize,
    size: usize,
    deadline: Instant,
}

impl Meeting {
    fn announce(&self, about: &About) -> Result<()> {
        if self.store.add(&format!("{}/claims", self.rank), 1)? > 1 {
            return Err(self.refuse("another process has joined as this rank".to_owned()));
        }
        Ok(self.store.set(&key(self.rank), &about.encode())?)
    }

    /// Returns what all ranks say about themselves.
    fn await_all(&self, timeout: Duration) -> Result<Vec<About>> {
        (0..self.size).map(|rank| self.check(rank, &self.await_one(rank, timeout)?)).collect()
    }

    fn await_one(&self, rank: usize, timeout: Duration) -> Result<Vec<u8>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.store.wait_for(&[&key(rank)], left) {
            Ok(()) => Ok(self.store.get(&key(rank))?),
            Err(store::Error::Timeout { .. }) => Err(self.absent(timeout)?),
            Err(error) => Err(error.into()),
        }
    }

    fn absent(&self, timeout: Duration) -> Result<Error> {
        let (rank, size) = (self.rank, self.size);
        let mut absent = Vec::new();
        for rank in 0..self.size {
            if !self.store.check(&[&key(rank)])? {
                absent.push(rank);
            }
        }
        Ok(Error::Absent { rank, size, absent, timeout })
    }

    fn check(&self, rank: usize, bytes: &[u8]) -> Result<About> {
        let here = About::this_process(self.size, "");
        let Some(there) = About::decode(bytes) else {
            return Err(self.refuse(format!("rank {rank} runs another version of this program")));
        };
        if there.size != self.size {
            let other_size = there.size;
            return Err(Error::OtherSize { rank: self.rank, size: self.size, other: rank, other_size });
        }
        if there.boot != here.boot {
            return Err(Error::OtherHost { rank: self.rank, here: here.host, other: rank, there: there.host });
        }
        if there.namespaces != here.namespaces {
            let (here, there) = (here.namespaces, there.namespaces);
            return Err(self.refuse(format!(
                "rank {rank} runs in another container ({there}, not {here}): give all one network and one user namespace"
            )));
        }
        if there.uid != here.uid {
            return Err(self.refuse(format!("rank {rank} runs as user {}, this one as user {}", there.uid, here.uid)));
        }
        Ok(there)
    }

    fn refuse(&self, why: String) -> Error {
        Error::Join { rank: self.rank, size: self.size, why }
    }
}

fn key(rank: usize) -> String {
    format!("{rank}/about")
}
