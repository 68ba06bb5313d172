//! The number of nodes that suffices for a generation, and the time to wait for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::node_rank::PendingNode;
use super::node_record::NodeRecord;
use crate::plan::RendezvousPlan;
use crate::values::NodeRange;

/// The condition under which the nodes that joined are enough.
pub(super) struct Quorum {
    nodes: NodeRange,
    /// The longest wait for the least number of nodes.
    join: Duration,
    last_call: Option<Duration>,
    began: Instant,
    last_call_ends: Option<Instant>,
    over_since: Option<Instant>,
}

impl Quorum {
    /// Returns the condition of a plan: all nodes that have numbers, or as many as come between the bounds.
    pub(super) fn of(plan: &RendezvousPlan, nodes: NodeRange) -> Self {
        let (nodes, join, last_call) = match plan {
            RendezvousPlan::Static { timeout, .. } => (NodeRange { min: nodes.max, max: nodes.max }, *timeout, None),
            RendezvousPlan::Dynamic(dynamic) => (nodes, dynamic.join, Some(dynamic.last_call)),
        };
        Self { nodes, join, last_call, began: Instant::now(), last_call_ends: None, over_since: None }
    }

    /// Returns how many numbers were given out.
    pub(super) fn n_joined(&self, store: &Client, pending: PendingNode) -> Result<usize, Error> {
        match self.last_call {
            None => Ok(self.nodes.max),
            Some(_) => store.add(&pending.key("arrivals"), 0).map(|n| n as usize),
        }
    }

    /// Returns since when there are enough.
    pub(super) fn over_since(&mut self, n_living: usize, now: Instant) -> Option<Instant> {
        let last_call = self.last_call.filter(|_| n_living >= self.nodes.min);
        self.last_call_ends = last_call.map(|last_call| self.last_call_ends.unwrap_or(now + last_call));
        let is_over = n_living >= self.nodes.max || self.last_call_ends.is_some_and(|end| now >= end);
        self.over_since = is_over.then(|| self.over_since.unwrap_or(now));
        self.over_since
    }

    /// Fails with the time that was waited and the missing nodes, if that was too long.
    pub(super) fn check(&self, living: &BTreeMap<usize, NodeRecord>, now: Instant) -> Result<(), (Duration, String)> {
        let is_short = self.last_call_ends.is_none() && self.over_since.is_none();
        let is_too_long = is_short && now >= self.began + self.join;
        if is_too_long { Err((self.join, self.missing(living))) } else { Ok(()) }
    }

    /// Fails after a longer wait, for a node that is not the first: it must not give up before the first does.
    pub(super) fn check_from_afar(&self, now: Instant) -> Result<(), (Duration, String)> {
        let longest = self.join + self.last_call.unwrap_or_default() + SLACK;
        let is_too_long = now >= self.began + longest;
        if is_too_long { Err((longest, "the first node did not call them".into())) } else { Ok(()) }
    }

    fn missing(&self, living: &BTreeMap<usize, NodeRecord>) -> String {
        if self.last_call.is_some() {
            return format!("{} came", living.len());
        }
        let away = (0..self.nodes.max).filter(|number| !living.contains_key(number));
        let away: Vec<_> = away.map(|number| number.to_string()).collect();
        let noun = if away.len() == 1 { "node" } else { "nodes" };
        format!("{noun} {} did not come", away.join(", "))
    }
}

/// The nodes do not begin at one moment.
const SLACK: Duration = Duration::from_secs(5);
