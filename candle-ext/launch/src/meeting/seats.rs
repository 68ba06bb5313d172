//! Who takes part in a round, and under which number: as told (static), or by arrival (c10d).
//!
//! By arrival, the first node keeps the round open until the most nodes have come, or, once the least have, until the
//! last call is over. Who comes later waits for the next round.

use std::time::{Duration, Instant};

use super::{Interrupted, Meeting, MeetingError, Result, SLICE, Seat};
use crate::plan::Dynamic;
use crate::round::Member;

impl Meeting {
    /// Takes the seat of a node that was told its number.
    pub(super) fn take_given_seat(
        &mut self,
        node_rank: usize,
        timeout: Duration,
        interrupted: Interrupted,
    ) -> Result<Seat> {
        let round = self.seat.map_or(0, |seat| seat.round + 1);
        let seat = Seat { round, group_rank: node_rank, n_nodes: self.nodes.max };
        self.serve_workers_of(round)?;
        let lost = |source| self.lost(source);
        let key = seat.node_key("member", node_rank);
        if self.store.add(&seat.node_key("claims", node_rank), 1).map_err(lost)? > 1 {
            let other = self.store.get(&key).ok().and_then(|json| serde_json::from_slice::<Member>(&json).ok());
            let other = other.map_or_else(|| "elsewhere".to_owned(), |member| format!("on {}", member.host));
            return Err(MeetingError::NodeRankTaken { node_rank, other });
        }
        self.sit_down(seat)?;
        self.wait_for_members(seat, timeout, interrupted)?;
        Ok(seat)
    }

    /// Takes the next seat of a round that is open.
    pub(super) fn take_free_seat(&mut self, dynamic: &Dynamic, interrupted: Interrupted) -> Result<Seat> {
        if let Some(seat) = self.seat {
            self.close_round(seat.round)?;
        }
        let deadline = Instant::now() + dynamic.join;
        loop {
            let round = self.store.add("round", 0).map_err(|source| self.lost(source))? as usize;
            // Even if there is no seat for the host itself.
            self.serve_workers_of(round)?;
            let lost = |source| self.lost(source);
            let mut seat = Seat { round, group_rank: 0, n_nodes: 0 };
            let is_closed = self.store.check(&[&seat.key("size")]).map_err(lost)?;
            if !is_closed {
                seat.group_rank = self.store.add(&seat.key("seats"), 1).map_err(lost)? as usize - 1;
                seat.n_nodes = self.size_of(seat, dynamic, interrupted)?;
            }
            if seat.group_rank < seat.n_nodes {
                self.wait_for_members(seat, dynamic.join, interrupted)?;
                return Ok(seat);
            }
            self.wait_for_next_round(round, deadline, dynamic.join, interrupted)?;
        }
    }

    /// Returns every node of a round.
    pub(super) fn members(&self, seat: Seat) -> Result<Vec<Member>> {
        let read = |group_rank| {
            let json = self.store.get(&seat.node_key("member", group_rank)).map_err(|source| self.lost(source))?;
            Ok(serde_json::from_slice(&json).expect("a launcher writes what a launcher reads"))
        };
        (0..seat.n_nodes).map(read).collect()
    }

    /// Many nodes may say it, and it happens once.
    fn close_round(&self, round: usize) -> Result<()> {
        let (this, next) = (round.to_string(), (round + 1).to_string());
        self.store.compare_set("round", this.as_bytes(), next.as_bytes()).map_err(|source| self.lost(source))?;
        Ok(())
    }

    /// Sits down, and waits until the first node has counted the seats.
    fn size_of(&self, seat: Seat, dynamic: &Dynamic, interrupted: Interrupted) -> Result<usize> {
        let lost = |source| self.lost(source);
        self.sit_down(seat)?;
        if seat.group_rank == 0 {
            let n_nodes = self.count_seats(seat, dynamic, interrupted)?;
            self.store.set(&seat.key("size"), n_nodes.to_string().as_bytes()).map_err(lost)?;
        }
        let key = seat.key("size");
        self.wait_for_key(&key, dynamic.join + dynamic.last_call, interrupted, || "the first node is gone".into())?;
        let text = String::from_utf8(self.store.get(&key).map_err(lost)?);
        Ok(text.ok().and_then(|text| text.parse().ok()).expect("a launcher writes what a launcher reads"))
    }

    fn count_seats(&self, seat: Seat, dynamic: &Dynamic, interrupted: Interrupted) -> Result<usize> {
        let began = Instant::now();
        let mut last_call = None;
        loop {
            let taken = self.store.add(&seat.key("seats"), 0).map_err(|source| self.lost(source))? as usize;
            let now = Instant::now();
            if taken >= self.nodes.min {
                last_call.get_or_insert(now + dynamic.last_call);
            }
            if taken >= self.nodes.max || last_call.is_some_and(|end| now >= end) {
                return Ok(taken.min(self.nodes.max));
            }
            if last_call.is_none() && now >= began + dynamic.join {
                return Err(self.missing(dynamic.join, format!("{taken} came")));
            }
            self.pause(interrupted)?;
        }
    }

    fn sit_down(&self, seat: Seat) -> Result<()> {
        let json = serde_json::to_vec(&self.own).expect("a node is plain data");
        self.store.set(&seat.node_key("member", seat.group_rank), &json).map_err(|source| self.lost(source))
    }

    fn wait_for_members(&self, seat: Seat, timeout: Duration, interrupted: Interrupted) -> Result<()> {
        let deadline = Instant::now() + timeout;
        for group_rank in 0..seat.n_nodes {
            let left = deadline.saturating_duration_since(Instant::now());
            let key = seat.node_key("member", group_rank);
            self.wait_for_key(&key, left, interrupted, || format!("node {group_rank} did not come")).map_err(
                |error| match error {
                    // The whole time, not what was left of it.
                    MeetingError::Missing { missing, .. } => self.missing(timeout, missing),
                    error => error,
                },
            )?;
        }
        Ok(())
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
        let seat = Seat { round, group_rank: 0, n_nodes: 0 };
        self.store.add(&seat.key("waiting"), 1).map_err(lost)?;
        while self.store.add("round", 0).map_err(lost)? as usize == round {
            if Instant::now() >= deadline {
                return Err(self.missing(timeout, "the job runs, and no seat became free".into()));
            }
            self.pause(interrupted)?;
        }
        Ok(())
    }

    fn wait_for_key(
        &self,
        key: &str,
        timeout: Duration,
        interrupted: Interrupted,
        missing: impl Fn() -> String,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        while !self.store.check(&[key]).map_err(|source| self.lost(source))? {
            if Instant::now() >= deadline {
                return Err(self.missing(timeout, missing()));
            }
            self.pause(interrupted)?;
        }
        Ok(())
    }

    fn pause(&self, interrupted: Interrupted) -> Result<()> {
        std::thread::sleep(SLICE);
        interrupted().map_or(Ok(()), |signal| Err(MeetingError::Interrupted(signal)))
    }

    fn missing(&self, timeout: Duration, missing: String) -> MeetingError {
        MeetingError::Missing { min: self.nodes.min, endpoint: self.address.clone(), timeout, missing }
    }
}
