//! The heartbeats of nodes: counters in the store that a living node keeps changing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::node_rank::node_key;

/// The counters of a generation's nodes, as this node saw them change.
pub(super) struct Heartbeats {
    generation: usize,
    /// The counters' name in the store.
    name: &'static str,
    /// The longest silence of a living node.
    keep_alive: Duration,
    seen: BTreeMap<usize, Seen>,
}

#[derive(Clone, Copy)]
struct Seen {
    count: i64,
    /// The last change of the count, or its first reading.
    at: Instant,
    has_beaten: bool,
}

impl Heartbeats {
    pub(super) fn new(generation: usize, name: &'static str, keep_alive: Duration) -> Self {
        Self { generation, name, keep_alive, seen: BTreeMap::new() }
    }

    /// Changes this node's counter.
    pub(super) fn beat(&self, store: &Client, own: usize) -> Result<(), Error> {
        store.add(&node_key(self.generation, self.name, own), 1).map(drop)
    }

    /// Returns whether a node has beaten since it was first read, and not long ago.
    pub(super) fn has_beaten(&mut self, store: &Client, number: usize) -> Result<bool, Error> {
        let seen = self.poll(store, number)?;
        Ok(seen.has_beaten && self.is_fresh(seen))
    }

    /// Returns whether a node may live: it did not leave, and has not been silent for long.
    pub(super) fn may_live(&mut self, store: &Client, number: usize) -> Result<bool, Error> {
        let seen = self.poll(store, number)?;
        Ok(seen.count >= 0 && self.is_fresh(seen))
    }

    /// Returns whether a node's last heartbeat was read after `since`.
    pub(super) fn has_beaten_since(&self, number: usize, since: Instant) -> bool {
        self.seen.get(&number).is_some_and(|seen| seen.at > since)
    }

    fn is_fresh(&self, seen: Seen) -> bool {
        Instant::now() < seen.at + self.keep_alive
    }

    fn poll(&mut self, store: &Client, number: usize) -> Result<Seen, Error> {
        let count = store.add(&node_key(self.generation, self.name, number), 0)?;
        let now = Instant::now();
        let seen = self.seen.entry(number).or_insert(Seen { count, at: now, has_beaten: false });
        if count != seen.count {
            *seen = Seen { count, at: now, has_beaten: count > 0 };
        }
        Ok(*seen)
    }
}
