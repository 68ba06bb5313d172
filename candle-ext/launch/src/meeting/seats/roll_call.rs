//! Who waits and lives, and when those are enough.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::{Entry, Waiting, node_key};
use crate::plan::Dynamic;
use crate::values::NodeRange;

/// What this node saw of those that wait.
pub(super) struct Arrivals {
    round: usize,
    /// The number of this node, which lives.
    own: Option<usize>,
    keep_alive: Duration,
    seen: BTreeMap<usize, Pulse>,
}

#[derive(Clone, Copy)]
struct Pulse {
    beats: i64,
    /// When it last changed, or was first looked at.
    at: Instant,
    has_beaten: bool,
}

impl Arrivals {
    pub(super) fn new(round: usize, own: Option<usize>, keep_alive: Duration) -> Self {
        Self { round, own, keep_alive, seen: BTreeMap::new() }
    }

    /// Says whether a node has beaten before the eyes of this one, and not long ago.
    pub(super) fn has_beaten(&mut self, store: &Client, number: usize) -> Result<bool, Error> {
        let pulse = self.feel(store, number)?;
        Ok(pulse.has_beaten && self.is_fresh(pulse))
    }

    /// Says whether a node may live: it came, did not leave, and has not been watched for long without a beat.
    pub(super) fn may_live(&mut self, store: &Client, number: usize) -> Result<bool, Error> {
        let pulse = self.feel(store, number)?;
        Ok(pulse.beats >= 0 && self.is_fresh(pulse))
    }

    /// Returns the first that may live.
    pub(super) fn first(&mut self, store: &Client, n_called: usize) -> Result<Option<usize>, Error> {
        for number in 0..n_called {
            if self.may_live(store, number)? {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// Returns what the living have written down, by their numbers.
    pub(super) fn living(&mut self, store: &Client, numbers: Range<usize>) -> Result<BTreeMap<usize, Vec<u8>>, Error> {
        let mut living = BTreeMap::new();
        for number in numbers {
            if self.has_beaten(store, number)? {
                let json = store.get(&node_key(self.round, "member", number))?;
                // One that leaves at this moment has taken it away.
                (!json.is_empty()).then(|| living.insert(number, json));
            }
        }
        Ok(living)
    }

    /// Says whether each of them has beaten since then: one that was just killed has not.
    pub(super) fn have_beaten_since<'a>(&self, mut numbers: impl Iterator<Item = &'a usize>, since: Instant) -> bool {
        numbers.all(|number| self.own == Some(*number) || self.seen.get(number).is_some_and(|pulse| pulse.at > since))
    }

    fn is_fresh(&self, pulse: Pulse) -> bool {
        Instant::now() < pulse.at + self.keep_alive
    }

    fn feel(&mut self, store: &Client, number: usize) -> Result<Pulse, Error> {
        let beats = store.add(&node_key(self.round, "here", number), 0)?;
        let first = Pulse { beats, at: Instant::now(), has_beaten: self.own == Some(number) };
        let pulse = self.seen.entry(number).or_insert(first);
        if beats != pulse.beats {
            *pulse = Pulse { beats, at: Instant::now(), has_beaten: beats > 0 };
        }
        Ok(*pulse)
    }
}

/// When those who came are enough.
pub(super) struct RollCall {
    nodes: NodeRange,
    /// How long the least are waited for, and then more.
    join: Duration,
    last_call: Option<Duration>,
    began: Instant,
    last_call_ends: Option<Instant>,
    over_since: Option<Instant>,
}

impl RollCall {
    /// All that were told a number.
    pub(super) fn all(n_nodes: usize, timeout: Duration) -> Self {
        let nodes = NodeRange { min: n_nodes, max: n_nodes };
        Self { nodes, join: timeout, last_call: None, began: Instant::now(), last_call_ends: None, over_since: None }
    }

    /// As many as come, between the bounds.
    pub(super) fn by_arrival(nodes: NodeRange, dynamic: &Dynamic) -> Self {
        let last_call = Some(dynamic.last_call);
        Self { nodes, join: dynamic.join, last_call, began: Instant::now(), last_call_ends: None, over_since: None }
    }

    /// Returns how many numbers were given out.
    pub(super) fn n_called(&self, store: &Client, waiting: Waiting) -> Result<usize, Error> {
        match self.last_call {
            None => Ok(self.nodes.max),
            Some(_) => store.add(&waiting.key("arrivals"), 0).map(|n| n as usize),
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

    /// Says how long was waited and for whom, if that was too long.
    pub(super) fn check(&self, living: &BTreeMap<usize, Entry>, now: Instant) -> Result<(), (Duration, String)> {
        let is_short = self.last_call_ends.is_none() && self.over_since.is_none();
        let is_too_long = is_short && now >= self.began + self.join;
        if is_too_long { Err((self.join, self.missing(living))) } else { Ok(()) }
    }

    /// The same for a node that is not the first: it must not give up before the one that is.
    pub(super) fn check_from_afar(&self, now: Instant) -> Result<(), (Duration, String)> {
        let longest = self.join + self.last_call.unwrap_or_default() + SLACK;
        let is_too_long = now >= self.began + longest;
        if is_too_long { Err((longest, "the first node did not call them".into())) } else { Ok(()) }
    }

    fn missing(&self, living: &BTreeMap<usize, Entry>) -> String {
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
