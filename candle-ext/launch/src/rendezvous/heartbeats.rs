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
    last_seen: BTreeMap<usize, LastHeartbeat>,
}

#[derive(Clone, Copy)]
struct LastHeartbeat {
    count: i64,
    /// The last change of the count, or its first reading.
    changed_at: Instant,
    is_beating: bool,
}

impl Heartbeats {
    pub(super) fn new(generation: usize, name: &'static str, keep_alive: Duration) -> Self {
        Self { generation, name, keep_alive, last_seen: BTreeMap::new() }
    }

    /// Changes this node's counter.
    pub(super) fn beat(&self, store: &Client, index: usize) -> Result<(), Error> {
        store.add(&node_key(self.generation, self.name, index), 1).map(drop)
    }

    /// Returns whether a node has beaten since it was first read, and not long ago.
    pub(super) fn is_beating(&mut self, store: &Client, index: usize) -> Result<bool, Error> {
        let last = self.read(store, index)?;
        Ok(last.is_beating && self.is_fresh(last))
    }

    /// Returns whether a node may live: it did not leave, and has not been silent for long.
    pub(super) fn may_be_alive(&mut self, store: &Client, index: usize) -> Result<bool, Error> {
        let last = self.read(store, index)?;
        Ok(last.count >= 0 && self.is_fresh(last))
    }

    /// Returns whether a node's last heartbeat was read after `since`.
    pub(super) fn has_beat_since(&self, index: usize, since: Instant) -> bool {
        self.last_seen.get(&index).is_some_and(|last| last.changed_at > since)
    }

    fn is_fresh(&self, last: LastHeartbeat) -> bool {
        Instant::now() < last.changed_at + self.keep_alive
    }

    fn read(&mut self, store: &Client, index: usize) -> Result<LastHeartbeat, Error> {
        let count = store.add(&node_key(self.generation, self.name, index), 0)?;
        let now = Instant::now();
        let last = self.last_seen.entry(index).or_insert(LastHeartbeat { count, changed_at: now, is_beating: false });
        if count != last.count {
            *last = LastHeartbeat { count, changed_at: now, is_beating: count > 0 };
        }
        Ok(*last)
    }
}
