//! The quorum of a generation: the required number of nodes and the timeouts.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::node_rank::PendingNode;
use super::node_record::NodeRecord;
use crate::plan::RendezvousPlan;
use crate::values::NodeRange;

/// The quorum of a generation and its timers.
pub(super) struct Quorum {
    nodes: NodeRange,
    /// Longest wait for the minimum number of nodes.
    join_timeout: Duration,
    last_call_timeout: Option<Duration>,
    started: Instant,
    last_call_deadline: Option<Instant>,
    complete_since: Option<Instant>,
}

impl Quorum {
    /// Returns the quorum of a plan: all nodes (static), or any number from minimum to maximum (c10d).
    pub(super) fn of(plan: &RendezvousPlan, nodes: NodeRange) -> Self {
        let (nodes, join_timeout, last_call_timeout) = match plan {
            RendezvousPlan::Static { timeout, .. } => (NodeRange { min: nodes.max, max: nodes.max }, *timeout, None),
            RendezvousPlan::Dynamic(dynamic) => (nodes, dynamic.join_timeout, Some(dynamic.last_call_timeout)),
        };
        Self {
            nodes,
            join_timeout,
            last_call_timeout,
            started: Instant::now(),
            last_call_deadline: None,
            complete_since: None,
        }
    }

    /// Returns the number of assigned join indices.
    pub(super) fn n_joined(&self, store: &Client, pending: PendingNode) -> Result<usize, Error> {
        match self.last_call_timeout {
            None => Ok(self.nodes.max),
            Some(_) => store.add(&pending.key("arrivals"), 0).map(|n| n as usize),
        }
    }

    /// Returns the time since which the quorum is complete.
    pub(super) fn complete_since(&mut self, n_alive: usize, now: Instant) -> Option<Instant> {
        let last_call_timeout = self.last_call_timeout.filter(|_| n_alive >= self.nodes.min);
        self.last_call_deadline =
            last_call_timeout.map(|last_call_timeout| self.last_call_deadline.unwrap_or(now + last_call_timeout));
        let is_complete = n_alive >= self.nodes.max || self.last_call_deadline.is_some_and(|end| now >= end);
        self.complete_since = is_complete.then(|| self.complete_since.unwrap_or(now));
        self.complete_since
    }

    /// Fails with the timeout and the missing nodes after the join timeout.
    pub(super) fn check_join_timeout(
        &self,
        alive_nodes: &BTreeMap<usize, NodeRecord>,
        now: Instant,
    ) -> Result<(), (Duration, String)> {
        let is_short = self.last_call_deadline.is_none() && self.complete_since.is_none();
        let is_too_long = is_short && now >= self.started + self.join_timeout;
        if is_too_long { Err((self.join_timeout, self.missing(alive_nodes))) } else { Ok(()) }
    }

    /// Fails after a longer timeout, for a node that is not the first. The first node must time out earlier.
    pub(super) fn check_follower_timeout(&self, now: Instant) -> Result<(), (Duration, String)> {
        let longest = self.join_timeout + self.last_call_timeout.unwrap_or_default() + START_SKEW;
        let is_too_long = now >= self.started + longest;
        if is_too_long { Err((longest, "the first node did not complete the rendezvous".into())) } else { Ok(()) }
    }

    fn missing(&self, alive_nodes: &BTreeMap<usize, NodeRecord>) -> String {
        if self.last_call_timeout.is_some() {
            return format!("only {} joined", alive_nodes.len());
        }
        let absent = (0..self.nodes.max).filter(|join_index| !alive_nodes.contains_key(join_index));
        let absent: Vec<_> = absent.map(|join_index| join_index.to_string()).collect();
        let noun = if absent.len() == 1 { "node" } else { "nodes" };
        format!("{noun} {} did not join", absent.join(", "))
    }
}

/// The allowed difference between the start times of nodes.
const START_SKEW: Duration = Duration::from_secs(5);
