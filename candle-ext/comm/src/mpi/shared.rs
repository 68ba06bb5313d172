//! What a process's threads tell the one that talks to MPI, and what it tells them.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::about::About;
use super::frame::Frame;
use crate::Failure;
use crate::deadline::deadline;
use crate::fabric::Trouble;
use crate::signs::{Signs, Wait};

/// How long rank 0 may take to say whose failure was the first.
const ARBITRATE_WITHIN: Duration = Duration::from_secs(2);

/// The largest tag that every MPI allows.
const MAX_TAG: usize = 32_767;

/// The end of this process that its threads share.
pub(super) struct Shared {
    pub(super) rank: usize,
    pub(super) others: Vec<About>,
    pub(super) timeout: Duration,
    state: Mutex<State>,
    /// Something has changed that a caller may wait for.
    changed: Condvar,
    /// There is something to do for the thread that talks to MPI.
    bell: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    failure: Option<Failure>,
    left: Vec<bool>,
    /// The tags of groups that others lead.
    tags: HashMap<String, i32>,
    /// How many groups this rank has led.
    n_led: usize,
    signs: Signs,
    pub(super) orders: Vec<Order>,
    /// What this rank's groups hear with.
    ears: Vec<Sender<News>>,
    pub(super) leaving: bool,
}

/// What MPI is to do. Ranks are the world's.
pub(super) enum Order {
    Send { to: usize, tag: i32, bytes: Box<[u8]>, done: Done },
    Receive { from: usize, tag: i32, room: Box<[u8]>, done: Done },
    Tell { to: usize, frame: Frame },
}

/// Whom to tell that a piece of a message has arrived.
pub(super) struct Done {
    pub(super) ear: Sender<News>,
    /// Whose piece it is.
    pub(super) piece: Piece,
}

/// A piece of what a group's rank exchanges with another, `peer` in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) peer: usize,
    /// Where it begins.
    pub(super) start: usize,
    pub(super) is_sent: bool,
}

/// What a group hears.
pub(super) enum News {
    /// A piece has arrived, with these bytes.
    Arrived(Piece, Box<[u8]>),
    /// A rank has left, or the world has ended: look again.
    Look,
}

impl Shared {
    pub(super) fn new(rank: usize, others: Vec<About>, timeout: Duration) -> Self {
        let state = State { left: vec![false; others.len()], ..State::default() };
        Self { rank, others, timeout, state: Mutex::new(state), changed: Condvar::new(), bell: Condvar::new() }
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    pub(super) fn await_failure(&self, within: Duration) -> Option<Failure> {
        self.wait_until(deadline(within), |state| state.failure.is_some()).failure.clone()
    }

    /// Ends the world, unless it has ended before; returns why it has. Rank 0 knows whose failure came first; without it
    /// each rank keeps what it learns first.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        if let Some(first) = self.failure() {
            return first;
        }
        let failure = failure.shortened();
        if self.rank > 0 {
            self.order([Order::Tell { to: 0, frame: Frame::Accuse(failure.clone()) }]);
            if let Some(first) = self.await_failure(ARBITRATE_WITHIN) {
                return first;
            }
        }
        self.end(failure)
    }

    /// Keeps the world's first failure, and tells all others of it; returns it.
    pub(super) fn end(&self, failure: Failure) -> Failure {
        let (first, is_new) = self.adopt(failure);
        if is_new {
            self.tell_all(&Frame::Ended(first.clone()));
        }
        first
    }

    /// Keeps the world's first failure; returns it, and whether there was none.
    pub(super) fn adopt(&self, failure: Failure) -> (Failure, bool) {
        let mut state = self.lock();
        let is_new = state.failure.is_none();
        let first = state.failure.get_or_insert(failure).clone();
        self.wake(state);
        (first, is_new)
    }

    /// Shows everyone that this rank is at work.
    pub(super) fn beat(&self) {
        self.lock().signs.at_work(self.rank);
        self.tell_all(&Frame::Beat);
    }

    /// Another rank is at work.
    pub(super) fn heard_beat(&self, rank: usize) {
        self.lock().signs.at_work(rank);
    }

    /// Shows everyone for whom this rank waits.
    pub(super) fn wait_for(&self, ranks: &[usize]) {
        self.lock().signs.waits(self.rank, ranks);
        self.tell_all(&Frame::Waits(ranks.iter().map(|rank| *rank as u32).collect()));
    }

    /// Another rank waits for these.
    pub(super) fn heard_wait(&self, rank: usize, ranks: &[u32]) {
        let ranks = ranks.iter().map(|rank| *rank as usize).filter(|rank| *rank < self.others.len());
        self.lock().signs.waits(rank, &ranks.collect::<Vec<_>>());
    }

    /// Returns whom this rank has waited for in vain, if it has.
    pub(super) fn blamed(&self, ranks: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        self.lock().signs.blamed(self.rank, ranks, wait)
    }

    /// A rank has said that it leaves.
    pub(super) fn left(&self, rank: usize) {
        let mut state = self.lock();
        state.left[rank] = true;
        self.wake(state);
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.lock().left[rank]
    }

    /// Whether every other rank has said that it leaves.
    pub(super) fn all_have_left(&self) -> bool {
        self.lock().left.iter().enumerate().all(|(rank, left)| *left || rank == self.rank)
    }

    /// Says goodbye to all, and lets the thread that talks to MPI end.
    pub(super) fn leave(&self) {
        self.tell_all(&Frame::Leave);
        self.lock().leaving = true;
        self.bell.notify_all();
    }

    /// Returns the tag of the messages of a group: its first rank chooses it and tells the others.
    pub(super) fn open(&self, id: &str, members: &[usize]) -> Result<i32, Trouble> {
        if members[0] == self.rank {
            let tag = self.lead()?;
            let frame = Frame::Open(tag, id.to_owned());
            self.order(members[1..].iter().map(|to| Order::Tell { to: *to, frame: frame.clone() }));
            return Ok(tag);
        }
        let mut state =
            self.wait_until(deadline(self.timeout), |state| state.failure.is_some() || state.tags.contains_key(id));
        match (state.tags.remove(id), &state.failure) {
            (Some(tag), _) => Ok(tag),
            (None, Some(failure)) => Err(Trouble::Failed(failure.clone())),
            (None, None) => Err(Trouble::Late(vec![0], self.timeout)),
        }
    }

    /// Returns a tag that no other group of the world has. Tag 0 is for frames.
    fn lead(&self) -> Result<i32, Trouble> {
        let mut state = self.lock();
        let tag = 1 + self.rank + self.others.len() * state.n_led;
        state.n_led += 1;
        match tag {
            ..=MAX_TAG => Ok(tag as i32),
            _ => Err(Trouble::Own(format!("{} groups are too many for MPI", state.n_led))),
        }
    }

    /// The first rank of a group has chosen a tag.
    pub(super) fn opened(&self, tag: i32, id: String) {
        let mut state = self.lock();
        state.tags.insert(id, tag);
        self.wake(state);
    }

    /// A group wants to hear of what changes.
    pub(super) fn listen(&self, ear: &Sender<News>) {
        self.lock().ears.push(ear.clone());
    }

    pub(super) fn order(&self, orders: impl IntoIterator<Item = Order>) {
        self.lock().orders.extend(orders);
        self.bell.notify_all();
    }

    fn tell_all(&self, frame: &Frame) {
        let others = (0..self.others.len()).filter(|rank| *rank != self.rank);
        self.order(others.map(|to| Order::Tell { to, frame: frame.clone() }));
    }

    /// Waits for something to do, no longer than `within`.
    pub(super) fn await_bell(&self, within: Duration) {
        let idle = |state: &mut State| state.orders.is_empty() && !state.leaving;
        drop(self.bell.wait_timeout_while(self.lock(), within, idle));
    }

    fn wake(&self, mut state: MutexGuard<State>) {
        // Groups that are gone hear nothing more.
        state.ears.retain(|ear| ear.send(News::Look).is_ok());
        drop(state);
        self.changed.notify_all();
    }

    fn wait_until(&self, deadline: Instant, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |state| !done(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    // What it guards is whole between any two statements.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
