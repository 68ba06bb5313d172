//! Who takes part in a round, and under which number: as told (static), or by arrival (c10d).
//!
//! Every node writes down who it is, and beats while it waits. The first that lives settles the round, once and for all, by
//! writing the roll of those that beat: when the most nodes have come, or, by arrival, when the least have and the last
//! call is over. Who is not on it waits for the next round. Who leaves before takes its name away.

mod entry;
mod roll_call;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{Interrupted, Meeting, MeetingError, Result, Seat};
use crate::plan::Dynamic;
use crate::round::Member;
pub(super) use entry::{Entry, Terms};
use roll_call::{Arrivals, RollCall};

/// A node that waits to be called.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    round: usize,
    number: usize,
}

impl Waiting {
    fn key(self, name: &str) -> String {
        Seat { round: self.round, group_rank: 0, n_nodes: 0 }.key(name)
    }

    fn own_key(self, name: &str) -> String {
        node_key(self.round, name, self.number)
    }
}

fn node_key(round: usize, name: &str, number: usize) -> String {
    Seat { round, group_rank: 0, n_nodes: 0 }.node_key(name, number)
}

impl Meeting {
    /// Takes the seat of a node that was told its number.
    pub(super) fn take_given_seat(
        &mut self,
        before: Option<usize>,
        node_rank: usize,
        timeout: Duration,
        interrupted: Interrupted,
    ) -> Result<(Seat, Vec<Member>)> {
        let waiting = Waiting { round: before.map_or(0, |round| round + 1), number: node_rank };
        self.serve_workers_of(waiting.round)?;
        self.claim(waiting, interrupted)?;
        let call = RollCall::all(self.nodes.max, timeout);
        let taken = self.wait_for_roll(waiting, call, interrupted)?;
        taken.ok_or_else(|| MeetingError::NodeRankTaken { node_rank, other: "elsewhere".into() })
    }

    /// Takes the next seat of a round that is open.
    pub(super) fn take_free_seat(
        &mut self,
        before: Option<usize>,
        dynamic: &Dynamic,
        interrupted: Interrupted,
    ) -> Result<(Seat, Vec<Member>)> {
        if let Some(round) = before {
            self.close_round(round)?;
        }
        let deadline = Instant::now() + dynamic.join;
        loop {
            let round = self.store.add("round", 0).map_err(|source| self.lost(source))? as usize;
            // Even if there is no seat for the host itself.
            self.serve_workers_of(round)?;
            if let Some(taken) = self.sit_down(round, dynamic, interrupted)? {
                return Ok(taken);
            }
            self.wait_for_next_round(round, deadline, dynamic.join, interrupted)?;
        }
    }

    fn sit_down(
        &self,
        round: usize,
        dynamic: &Dynamic,
        interrupted: Interrupted,
    ) -> Result<Option<(Seat, Vec<Member>)>> {
        let lost = |source| self.lost(source);
        let mut waiting = Waiting { round, number: 0 };
        if self.store.check(&[&waiting.key("roll")]).map_err(lost)? {
            return Ok(None);
        }
        waiting.number = self.store.add(&waiting.key("arrivals"), 1).map_err(lost)? as usize - 1;
        self.store.set(&waiting.own_key("member"), &self.own.json()).map_err(lost)?;
        self.wait_for_roll(waiting, RollCall::by_arrival(self.nodes, dynamic), interrupted)
    }

    /// Many nodes may say it, and it happens once.
    fn close_round(&self, round: usize) -> Result<()> {
        let (this, next) = (round.to_string(), (round + 1).to_string());
        self.store.compare_set("round", this.as_bytes(), next.as_bytes()).map_err(|source| self.lost(source))?;
        Ok(())
    }

    /// Takes a number, from a launcher that is silent if need be.
    fn claim(&self, waiting: Waiting, interrupted: Interrupted) -> Result<()> {
        let lost = |source| self.lost(source);
        let (key, own) = (waiting.own_key("member"), self.own.json());
        let mut arrivals = Arrivals::new(waiting.round, None, self.keep_alive);
        let mut expected = Vec::new();
        loop {
            let other = self.store.compare_set(&key, &expected, &own).map_err(lost)?;
            if other == own {
                return self.store.set(&waiting.own_key("here"), b"1").map_err(lost);
            }
            let is_running = self.store.check(&[&waiting.key("roll")]).map_err(lost)?;
            if is_running || arrivals.has_beaten(&self.store, waiting.number).map_err(lost)? {
                let other =
                    Entry::parse(&other).map_or_else(|| "elsewhere".into(), |it| format!("on {}", it.member.host));
                return Err(MeetingError::NodeRankTaken { node_rank: waiting.number, other });
            }
            let is_silent = !arrivals.may_live(&self.store, waiting.number).map_err(lost)?;
            expected = if is_silent { other } else { Vec::new() };
            self.pause(interrupted)?;
        }
    }

    /// Waits until the round is settled, or settles it. Returns nothing if there is no seat for this node.
    fn wait_for_roll(
        &self,
        waiting: Waiting,
        call: RollCall,
        interrupted: Interrupted,
    ) -> Result<Option<(Seat, Vec<Member>)>> {
        let roll = self.call_roll(waiting, call, interrupted).inspect_err(|_| self.withdraw(waiting))?;
        for entry in &roll {
            self.own.check(entry)?;
        }
        let group_rank = roll.iter().position(|entry| entry.id == self.own.id);
        let (round, n_nodes) = (waiting.round, roll.len());
        let members = roll.into_iter().map(|entry| entry.member).collect();
        Ok(group_rank.map(|group_rank| (Seat { round, group_rank, n_nodes }, members)))
    }

    fn call_roll(&self, waiting: Waiting, mut call: RollCall, interrupted: Interrupted) -> Result<Vec<Entry>> {
        let lost = |source| self.lost(source);
        let key = waiting.key("roll");
        let mut arrivals = Arrivals::new(waiting.round, Some(waiting.number), self.keep_alive);
        loop {
            if self.store.check(&[&key]).map_err(lost)? {
                let roll = self.store.get(&key).map_err(lost)?;
                return serde_json::from_slice(&roll).map_err(|_| Entry::foreign());
            }
            self.store.add(&waiting.own_key("here"), 1).map_err(lost)?;
            let first = arrivals.first(&self.store, waiting.number).map_err(lost)?;
            // The first looks at all, the others at the first.
            let seen = match first {
                None => 0..call.n_called(&self.store, waiting).map_err(lost)?,
                Some(first) => first..first + 1,
            };
            let living = self.alike(arrivals.living(&self.store, seen).map_err(lost)?)?;
            let now = Instant::now();
            match first {
                None if call
                    .over_since(living.len(), now)
                    .is_some_and(|since| arrivals.have_beaten_since(living.keys(), since)) =>
                {
                    let roll: Vec<_> = living.values().take(self.nodes.max).collect();
                    let roll = serde_json::to_vec(&roll).expect("a roll is plain data");
                    self.store.compare_set(&key, b"", &roll).map_err(lost)?;
                }
                None => call.check(&living, now).map_err(|(timeout, missing)| self.missing(timeout, missing))?,
                Some(_) => call.check_from_afar(now).map_err(|(timeout, missing)| self.missing(timeout, missing))?,
            }
            self.pause(interrupted)?;
        }
    }

    /// Reads what nodes have written down, if they were started like this one.
    fn alike(&self, living: BTreeMap<usize, Vec<u8>>) -> Result<BTreeMap<usize, Entry>> {
        let read = |(number, json): (usize, Vec<u8>)| {
            let entry = Entry::parse(&json).ok_or_else(Entry::foreign)?;
            self.own.check(&entry).map(|()| (number, entry))
        };
        living.into_iter().map(read).collect()
    }

    /// Takes this node's name away, as if it had not come. If it was called meanwhile, the others are told.
    fn withdraw(&self, waiting: Waiting) {
        let _ = self.store.set(&waiting.own_key("here"), b"-1");
        let _ = self.store.compare_set(&waiting.own_key("member"), &self.own.json(), b"");
        if self.store.check(&[&waiting.key("roll")]).unwrap_or(false) {
            let text = format!("- the launcher on {} left before it began", self.own.member.host);
            let _ = self.store.compare_set(&waiting.key("stopped"), b"", text.as_bytes());
        }
    }

    /// The nodes that run are told of one that waits, if there is room for it.
    fn wait_for_next_round(
        &self,
        round: usize,
        deadline: Instant,
        timeout: Duration,
        interrupted: Interrupted,
    ) -> Result<()> {
        let lost = |source| self.lost(source);
        let key = Waiting { round, number: 0 }.key("waiting");
        self.store.add(&key, 1).map_err(lost)?;
        let wait = || {
            while self.store.add("round", 0).map_err(lost)? as usize == round {
                if Instant::now() >= deadline {
                    return Err(self.missing(timeout, "the job runs, and no seat became free".into()));
                }
                self.pause(interrupted)?;
            }
            Ok(())
        };
        wait().inspect_err(|_| drop(self.store.add(&key, -1)))
    }
}
