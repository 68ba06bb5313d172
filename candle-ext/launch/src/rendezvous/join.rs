//! Joining a generation: the nodes agree on the participants, by node rank (static) or in order of arrival (c10d).
//!
//! Every node writes its record and sends heartbeats while it waits. The first live node writes the list of
//! participants once. It does so when the maximum number of nodes has joined. With c10d, the minimum suffices after the
//! last call. A node that is not on the list waits for the next generation. A node that leaves earlier removes its
//! record.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use candlewick_comm::store::{Client, Error};

use super::Rendezvous;
use super::error::{Interrupted, RendezvousError, Result};
use super::heartbeats::Heartbeats;
use super::node_rank::{NodeRank, PendingNode, key, node_key};
use super::node_record::NodeRecord;
use super::quorum::Quorum;
use crate::generation::Participant;
use crate::plan::RendezvousPlan;

/// Name of the heartbeat counters of waiting nodes.
const WAITING_HEARTBEATS: &str = "here";

impl Rendezvous {
    /// Joins the generation after `before`, or the first later one that is not full.
    pub(super) fn join(
        &mut self,
        before: Option<usize>,
        interrupted: Interrupted,
    ) -> Result<(NodeRank, Vec<Participant>)> {
        let deadline = Instant::now() + self.join_timeout();
        if let Some(generation) = before {
            self.close_generation(generation)?;
        }
        loop {
            let generation = self.open_generation(before)?;
            // The host serves the store even if it is no participant.
            self.serve_workers_of(generation)?;
            if let Some(pending) = self.register(generation, interrupted)?
                && let Some(joined) = self.await_participants(pending, interrupted)?
            {
                return Ok(joined);
            }
            self.await_next_generation(generation, deadline, interrupted)?;
        }
    }

    /// Advances the generation counter (c10d). Only the first of several calls has an effect.
    fn close_generation(&self, generation: usize) -> Result<()> {
        if let RendezvousPlan::Dynamic(_) = self.plan {
            let (this, next) = (generation.to_string(), (generation + 1).to_string());
            let closed = self.store.compare_set("generation", this.as_bytes(), next.as_bytes());
            closed.map_err(|source| self.store_error(source))?;
        }
        Ok(())
    }

    fn open_generation(&self, before: Option<usize>) -> Result<usize> {
        match self.plan {
            RendezvousPlan::Static { .. } => Ok(before.map_or(0, |generation| generation + 1)),
            RendezvousPlan::Dynamic(_) => self.current_generation(),
        }
    }

    fn current_generation(&self) -> Result<usize> {
        Ok(self.store.add("generation", 0).map_err(|source| self.store_error(source))? as usize)
    }

    /// Writes this node's record. Returns `None` if the participants are already agreed on.
    fn register(&self, generation: usize, interrupted: Interrupted) -> Result<Option<PendingNode>> {
        let store_error = |source| self.store_error(source);
        if let RendezvousPlan::Static { node_rank, .. } = self.plan {
            let pending = PendingNode { generation, join_index: node_rank };
            return self.claim_node_rank(pending, interrupted).map(|()| Some(pending));
        }
        if self.store.check(&[&key(generation, "participants")]).map_err(store_error)? {
            return Ok(None);
        }
        let join_index = self.store.add(&key(generation, "arrivals"), 1).map_err(store_error)? as usize - 1;
        let pending = PendingNode { generation, join_index };
        self.store.set(&pending.own_key("record"), &self.own.json()).map_err(store_error)?;
        Ok(Some(pending))
    }

    /// Claims a static node rank. A launcher that sends no heartbeats loses its claim.
    fn claim_node_rank(&self, pending: PendingNode, interrupted: Interrupted) -> Result<()> {
        let store_error = |source| self.store_error(source);
        let (key, own) = (pending.own_key("record"), self.own.json());
        let mut heartbeats = Heartbeats::new(pending.generation, WAITING_HEARTBEATS, self.heartbeat_timeout);
        let mut expected = Vec::new();
        loop {
            let other = self.store.compare_set(&key, &expected, &own).map_err(store_error)?;
            if other == own {
                return self.store.set(&pending.own_key(WAITING_HEARTBEATS), b"1").map_err(store_error);
            }
            let is_running = self.store.check(&[&pending.key("participants")]).map_err(store_error)?;
            if is_running || heartbeats.is_beating(&self.store, pending.join_index).map_err(store_error)? {
                let other = NodeRecord::parse(&other);
                let other = other.map_or_else(|| "an unknown host".into(), |record| record.participant.host);
                return Err(RendezvousError::NodeRankTaken { node_rank: pending.join_index, other });
            }
            let is_silent = !heartbeats.may_be_alive(&self.store, pending.join_index).map_err(store_error)?;
            expected = if is_silent { other } else { Vec::new() };
            self.pause(interrupted)?;
        }
    }

    /// Waits for the agreement on the participants. Returns `None` if this node is not one of them.
    fn await_participants(
        &self,
        pending: PendingNode,
        interrupted: Interrupted,
    ) -> Result<Option<(NodeRank, Vec<Participant>)>> {
        let records = self.agree_on_participants(pending, interrupted).inspect_err(|_| self.withdraw(pending))?;
        for record in &records {
            self.own.check(record)?;
        }
        let group_rank = records.iter().position(|record| record.id == self.own.id);
        let (generation, n_nodes) = (pending.generation, records.len());
        let participants = records.into_iter().map(|record| record.participant).collect();
        Ok(group_rank.map(|group_rank| (NodeRank { generation, group_rank, n_nodes }, participants)))
    }

    /// Returns the records of the participants. The first live node writes them, the others wait for them.
    fn agree_on_participants(&self, pending: PendingNode, interrupted: Interrupted) -> Result<Vec<NodeRecord>> {
        let store_error = |source| self.store_error(source);
        let join_timeout_error = |(timeout, missing)| self.join_timeout_error(timeout, missing);
        let key = pending.key("participants");
        let mut heartbeats = Heartbeats::new(pending.generation, WAITING_HEARTBEATS, self.heartbeat_timeout);
        let mut quorum = Quorum::of(&self.plan, self.nodes);
        loop {
            if self.store.check(&[&key]).map_err(store_error)? {
                let records = self.store.get(&key).map_err(store_error)?;
                return serde_json::from_slice(&records).map_err(|_| NodeRecord::unreadable());
            }
            heartbeats.beat(&self.store, pending.join_index).map_err(store_error)?;
            let first = first_alive(&mut heartbeats, &self.store, pending.join_index).map_err(store_error)?;
            // The first live node checks all nodes, the others check the first.
            let candidates = match first {
                None => 0..quorum.n_joined(&self.store, pending).map_err(store_error)?,
                Some(first) => first..first + 1,
            };
            let alive_nodes = self.alive_nodes(&mut heartbeats, pending, candidates)?;
            let now = Instant::now();
            let is_recent = |since| {
                alive_nodes.keys().all(|join_index| {
                    *join_index == pending.join_index || heartbeats.has_beat_since(*join_index, since)
                })
            };
            match first {
                None if quorum.complete_since(alive_nodes.len(), now).is_some_and(is_recent) => {
                    let records: Vec<_> = alive_nodes.values().take(self.nodes.max).collect();
                    let records = serde_json::to_vec(&records).expect("records serialize to JSON");
                    self.store.compare_set(&key, b"", &records).map_err(store_error)?;
                }
                None => quorum.check_join_timeout(&alive_nodes, now).map_err(join_timeout_error)?,
                Some(_) => quorum.check_follower_timeout(now).map_err(join_timeout_error)?,
            }
            self.pause(interrupted)?;
        }
    }

    /// Returns the records of the live nodes. Fails if their settings differ from this node's.
    fn alive_nodes(
        &self,
        heartbeats: &mut Heartbeats,
        pending: PendingNode,
        join_indices: Range<usize>,
    ) -> Result<BTreeMap<usize, NodeRecord>> {
        let store_error = |source| self.store_error(source);
        let mut alive_nodes = BTreeMap::new();
        for join_index in join_indices {
            let is_beating = heartbeats.is_beating(&self.store, join_index).map_err(store_error)?;
            if join_index != pending.join_index && !is_beating {
                continue;
            }
            let json = self.store.get(&node_key(pending.generation, "record", join_index)).map_err(store_error)?;
            // A node that left has removed its record.
            if !json.is_empty() {
                let record = NodeRecord::parse(&json).ok_or_else(NodeRecord::unreadable)?;
                self.own.check(&record)?;
                alive_nodes.insert(join_index, record);
            }
        }
        Ok(alive_nodes)
    }

    /// Removes this node's record. If the participants were agreed on meanwhile, publishes a stop for the other nodes.
    fn withdraw(&self, pending: PendingNode) {
        let _ = self.store.set(&pending.own_key(WAITING_HEARTBEATS), b"-1");
        let _ = self.store.compare_set(&pending.own_key("record"), &self.own.json(), b"");
        if self.store.check(&[&pending.key("participants")]).unwrap_or(false) {
            let text = format!("- the launcher on {} left before the workers started", self.own.participant.host);
            let _ = self.store.compare_set(&pending.key("stopped"), b"", text.as_bytes());
        }
    }

    /// Waits for the next generation. The counter of waiting nodes makes running nodes start a rendezvous, unless the
    /// job has its maximum number of nodes.
    fn await_next_generation(&self, generation: usize, deadline: Instant, interrupted: Interrupted) -> Result<()> {
        if let RendezvousPlan::Static { node_rank, .. } = self.plan {
            return Err(RendezvousError::NodeRankTaken { node_rank, other: "an unknown host".into() });
        }
        let store_error = |source| self.store_error(source);
        let key = key(generation, "waiting");
        self.store.add(&key, 1).map_err(store_error)?;
        let wait = || {
            while self.current_generation()? == generation {
                if Instant::now() >= deadline {
                    return Err(self.join_timeout_error(
                        self.join_timeout(),
                        "the job runs with its maximum number of nodes".into(),
                    ));
                }
                self.pause(interrupted)?;
            }
            Ok(())
        };
        wait().inspect_err(|_| drop(self.store.add(&key, -1)))
    }
}

/// Returns the first node before `own` that may be alive.
fn first_alive(heartbeats: &mut Heartbeats, store: &Client, own: usize) -> std::result::Result<Option<usize>, Error> {
    for join_index in 0..own {
        if heartbeats.may_be_alive(store, join_index)? {
            return Ok(Some(join_index));
        }
    }
    Ok(None)
}
