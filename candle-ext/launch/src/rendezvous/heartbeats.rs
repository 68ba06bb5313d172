//! Heartbeats of nodes: counters in the store that each live node increments.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::node_rank::node_key;

/// The heartbeat counters of a generation, as read by this node.
pub(super) struct Heartbeats {
    generation: usize,
    /// Name of the counters in the store.
    name: &'static str,
    /// Longest time without a heartbeat of a live node.
    heartbeat_timeout: Duration,
    last_seen: BTreeMap<usize, LastHeartbeat>,
}

#[derive(Clone, Copy)]
struct LastHeartbeat {
    count: i64,
    /// Time of the last change, or of the first read.
    changed_at: Instant,
    is_beating: bool,
}

impl Heartbeats {
    pub(super) fn new(generation: usize, name: &'static str, heartbeat_timeout: Duration) -> Self {
        Self { generation, name, heartbeat_timeout, last_seen: BTreeMap::new() }
    }

    /// Increments this node's counter.
    pub(super) fn beat(&self, store: &Client, index: usize) -> Result<(), Error> {
        store.add(&node_key(self.generation, self.name, index), 1).map(drop)
    }

    /// Returns whether a node's counter has increased since it was first read, within the heartbeat timeout.
    pub(super) fn is_beating(&mut self, store: &Client, index: usize) -> Result<bool, Error> {
        let last = self.read(store, index)?;
        Ok(last.is_beating && self.is_fresh(last))
    }

    /// Returns whether a node may be alive: it did not leave, and its heartbeat timeout has not passed.
    pub(super) fn may_be_alive(&mut self, store: &Client, index: usize) -> Result<bool, Error> {
        let last = self.read(store, index)?;
        Ok(last.count >= 0 && self.is_fresh(last))
    }

    /// Returns whether a heartbeat of a node was read after `since`.
    pub(super) fn has_beat_since(&self, index: usize, since: Instant) -> bool {
        self.last_seen.get(&index).is_some_and(|last| last.changed_at > since)
    }

    fn is_fresh(&self, last: LastHeartbeat) -> bool {
        Instant::now() < last.changed_at + self.heartbeat_timeout
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
