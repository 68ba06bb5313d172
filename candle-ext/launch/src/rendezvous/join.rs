//! The participants of a generation, under the numbers they were given (static) or in the order of their arrival (c10d).
//!
//! Every node leaves its record, and heartbeats while it waits. The first that lives settles the generation, once, by writing
//! the list of those that beat: when the most nodes have come or, by arrival, when the least have and the last call is over.
//! A node that is not on the list waits for the next generation. A node that leaves before takes its record away.

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

/// The counter of a node that waits.
const HERE: &str = "here";

impl Rendezvous {
    /// Takes part in the generation after `before`, or in the first later one that has room.
    pub(super) fn join(
        &mut self,
        before: Option<usize>,
        interrupted: Interrupted,
    ) -> Result<(NodeRank, Vec<Participant>)> {
        let deadline = Instant::now() + self.patience();
        if let Some(generation) = before {
            self.close_generation(generation)?;
        }
        loop {
            let generation = self.open_generation(before)?;
            // Even if the host itself has no place in it.
            self.serve_workers_of(generation)?;
            if let Some(pending) = self.register(generation, interrupted)?
                && let Some(joined) = self.await_participants(pending, interrupted)?
            {
                return Ok(joined);
            }
            self.await_next_generation(generation, deadline, interrupted)?;
        }
    }

    /// Ends the generation that nodes join by arrival. Several nodes may do this, and it happens once.
    fn close_generation(&self, generation: usize) -> Result<()> {
        if let RendezvousPlan::Dynamic(_) = self.plan {
            let (this, next) = (generation.to_string(), (generation + 1).to_string());
            let closed = self.store.compare_set("generation", this.as_bytes(), next.as_bytes());
            closed.map_err(|source| self.lost(source))?;
        }
        Ok(())
    }

    fn open_generation(&self, before: Option<usize>) -> Result<usize> {
        match self.plan {
            RendezvousPlan::Static { .. } => Ok(before.map_or(0, |generation| generation + 1)),
            RendezvousPlan::Dynamic(_) => self.present_generation(),
        }
    }

    fn present_generation(&self) -> Result<usize> {
        Ok(self.store.add("generation", 0).map_err(|source| self.lost(source))? as usize)
    }

    /// Leaves this node's record under its number. Returns nothing if the generation has its participants already.
    fn register(&self, generation: usize, interrupted: Interrupted) -> Result<Option<PendingNode>> {
        let lost = |source| self.lost(source);
        if let RendezvousPlan::Static { node_rank, .. } = self.plan {
            let pending = PendingNode { generation, number: node_rank };
            return self.claim(pending, interrupted).map(|()| Some(pending));
        }
        if self.store.check(&[&key(generation, "participants")]).map_err(lost)? {
            return Ok(None);
        }
        let number = self.store.add(&key(generation, "arrivals"), 1).map_err(lost)? as usize - 1;
        let pending = PendingNode { generation, number };
        self.store.set(&pending.own_key("record"), &self.own.json()).map_err(lost)?;
        Ok(Some(pending))
    }

    /// Claims a number, also one whose launcher is silent.
    fn claim(&self, pending: PendingNode, interrupted: Interrupted) -> Result<()> {
        let lost = |source| self.lost(source);
        let (key, own) = (pending.own_key("record"), self.own.json());
        let mut heartbeats = Heartbeats::new(pending.generation, HERE, self.keep_alive);
        let mut expected = Vec::new();
        loop {
            let other = self.store.compare_set(&key, &expected, &own).map_err(lost)?;
            if other == own {
                return self.store.set(&pending.own_key(HERE), b"1").map_err(lost);
            }
            let is_running = self.store.check(&[&pending.key("participants")]).map_err(lost)?;
            if is_running || heartbeats.has_beaten(&self.store, pending.number).map_err(lost)? {
                let other = NodeRecord::parse(&other);
                let other = other.map_or_else(|| "elsewhere".into(), |it| format!("on {}", it.participant.host));
                return Err(RendezvousError::NodeRankTaken { node_rank: pending.number, other });
            }
            let is_silent = !heartbeats.may_live(&self.store, pending.number).map_err(lost)?;
            expected = if is_silent { other } else { Vec::new() };
            self.pause(interrupted)?;
        }
    }

    /// Waits until the generation is settled, or settles it. Returns nothing if this node has no place in it.
    fn await_participants(
        &self,
        pending: PendingNode,
        interrupted: Interrupted,
    ) -> Result<Option<(NodeRank, Vec<Participant>)>> {
        let records = self.settle(pending, interrupted).inspect_err(|_| self.withdraw(pending))?;
        for record in &records {
            self.own.check(record)?;
        }
        let group_rank = records.iter().position(|record| record.id == self.own.id);
        let (generation, n_nodes) = (pending.generation, records.len());
        let participants = records.into_iter().map(|record| record.participant).collect();
        Ok(group_rank.map(|group_rank| (NodeRank { generation, group_rank, n_nodes }, participants)))
    }

    /// Returns the records of the participants, once the first living node has written their list.
    fn settle(&self, pending: PendingNode, interrupted: Interrupted) -> Result<Vec<NodeRecord>> {
        let lost = |source| self.lost(source);
        let missing = |(timeout, missing)| self.missing(timeout, missing);
        let key = pending.key("participants");
        let mut heartbeats = Heartbeats::new(pending.generation, HERE, self.keep_alive);
        let mut quorum = Quorum::of(&self.plan, self.nodes);
        loop {
            if self.store.check(&[&key]).map_err(lost)? {
                let records = self.store.get(&key).map_err(lost)?;
                return serde_json::from_slice(&records).map_err(|_| NodeRecord::foreign());
            }
            heartbeats.beat(&self.store, pending.number).map_err(lost)?;
            let first = first_living(&mut heartbeats, &self.store, pending.number).map_err(lost)?;
            // The first looks at all, the others at the first.
            let seen = match first {
                None => 0..quorum.n_joined(&self.store, pending).map_err(lost)?,
                Some(first) => first..first + 1,
            };
            let living = self.living(&mut heartbeats, pending, seen)?;
            let now = Instant::now();
            let is_recent = |since| {
                living.keys().all(|number| *number == pending.number || heartbeats.has_beaten_since(*number, since))
            };
            match first {
                None if quorum.over_since(living.len(), now).is_some_and(is_recent) => {
                    let records: Vec<_> = living.values().take(self.nodes.max).collect();
                    let records = serde_json::to_vec(&records).expect("records are plain data");
                    self.store.compare_set(&key, b"", &records).map_err(lost)?;
                }
                None => quorum.check(&living, now).map_err(missing)?,
                Some(_) => quorum.check_from_afar(now).map_err(missing)?,
            }
            self.pause(interrupted)?;
        }
    }

    /// Returns the records of the nodes that beat, if they were started like this one.
    fn living(
        &self,
        heartbeats: &mut Heartbeats,
        pending: PendingNode,
        numbers: Range<usize>,
    ) -> Result<BTreeMap<usize, NodeRecord>> {
        let lost = |source| self.lost(source);
        let mut living = BTreeMap::new();
        for number in numbers {
            let has_beaten = heartbeats.has_beaten(&self.store, number).map_err(lost)?;
            if number != pending.number && !has_beaten {
                continue;
            }
            let json = self.store.get(&node_key(pending.generation, "record", number)).map_err(lost)?;
            // A node that leaves at this moment has taken its record away.
            if !json.is_empty() {
                let record = NodeRecord::parse(&json).ok_or_else(NodeRecord::foreign)?;
                self.own.check(&record)?;
                living.insert(number, record);
            }
        }
        Ok(living)
    }

    /// Takes this node's record away, as if it had not come. If the generation was settled meanwhile, the others learn it.
    fn withdraw(&self, pending: PendingNode) {
        let _ = self.store.set(&pending.own_key(HERE), b"-1");
        let _ = self.store.compare_set(&pending.own_key("record"), &self.own.json(), b"");
        if self.store.check(&[&pending.key("participants")]).unwrap_or(false) {
            let text = format!("- the launcher on {} left before it began", self.own.participant.host);
            let _ = self.store.compare_set(&pending.key("stopped"), b"", text.as_bytes());
        }
    }

    /// Waits for the generation after a settled one. The nodes that run see that one waits, and make room if there is any.
    fn await_next_generation(&self, generation: usize, deadline: Instant, interrupted: Interrupted) -> Result<()> {
        if let RendezvousPlan::Static { node_rank, .. } = self.plan {
            return Err(RendezvousError::NodeRankTaken { node_rank, other: "elsewhere".into() });
        }
        let lost = |source| self.lost(source);
        let key = key(generation, "waiting");
        self.store.add(&key, 1).map_err(lost)?;
        let wait = || {
            while self.present_generation()? == generation {
                if Instant::now() >= deadline {
                    return Err(self.missing(self.patience(), "the job runs, and no seat became free".into()));
                }
                self.pause(interrupted)?;
            }
            Ok(())
        };
        wait().inspect_err(|_| drop(self.store.add(&key, -1)))
    }
}

/// Returns the first node before `own` that may live.
fn first_living(heartbeats: &mut Heartbeats, store: &Client, own: usize) -> std::result::Result<Option<usize>, Error> {
    for number in 0..own {
        if heartbeats.may_live(store, number)? {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
