//! The state of a process in its world, and the requests of its threads to the one that talks to MPI.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::sync::{Condvar, MutexGuard};
use std::time::Duration;

use super::frame::Frame;
use crate::RankFailure;
use crate::failure::{ARBITRATE_WITHIN, FailureMonitor, Monitored};
use crate::liveness::{Wait, WaitGraph, deadline};
use crate::peer::PeerInfo;
use crate::transport::TransportError;

/// The largest tag that every MPI allows.
const MAX_TAG: usize = 32_767;

/// The end of this process that its threads share.
pub(super) struct MpiRank {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) timeout: Duration,
    pub(super) monitor: FailureMonitor<MpiState>,
    /// Wakes the thread that talks to MPI.
    wake: Condvar,
}

#[derive(Default)]
pub(super) struct MpiState {
    left: Vec<bool>,
    /// The tags of groups that others lead.
    tags: HashMap<String, i32>,
    /// The number of groups that this rank has led.
    n_tags: usize,
    wait_graph: WaitGraph,
    pub(super) requests: Vec<MpiRequest>,
    /// The ends of this rank's groups that get its events.
    listeners: Vec<Sender<ProgressEvent>>,
    pub(super) leaving: bool,
}

/// A request to MPI. Ranks are the world's.
pub(super) enum MpiRequest {
    Send { to: usize, tag: i32, bytes: Box<[u8]>, done: Completion },
    Receive { from: usize, tag: i32, buffer: Box<[u8]>, done: Completion },
    SendFrame { to: usize, frame: Frame },
}

/// The receiver of the event that a chunk of a message has arrived.
pub(super) struct Completion {
    pub(super) events: Sender<ProgressEvent>,
    pub(super) chunk: MessageChunk,
}

/// A chunk of what a group's rank exchanges with another, `peer` in the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageChunk {
    pub(super) peer: usize,
    /// Where it begins.
    pub(super) start: usize,
    pub(super) is_sent: bool,
}

/// An event for a group.
pub(super) enum ProgressEvent {
    /// A chunk has arrived, with these bytes.
    Arrived(MessageChunk, Box<[u8]>),
    /// A rank has left, or the world has ended: check again.
    Check,
}

impl MpiRank {
    pub(super) fn new(rank: usize, peers: Vec<PeerInfo>, timeout: Duration) -> Self {
        let state = MpiState { left: vec![false; peers.len()], ..MpiState::default() };
        Self { rank, peers, timeout, monitor: FailureMonitor::new(state), wake: Condvar::new() }
    }

    /// Ends the world and reports its first failure to all ranks. Rank 0 is the arbiter.
    pub(super) fn fail(&self, failure: RankFailure) -> RankFailure {
        let arbitrate = |own: &RankFailure| {
            if self.rank == 0 {
                return None;
            }
            self.request([MpiRequest::SendFrame { to: 0, frame: Frame::ReportFailure(own.clone()) }]);
            self.monitor.await_failure(ARBITRATE_WITHIN)
        };
        self.monitor.fail(failure, arbitrate, |first| self.announce(first))
    }

    /// Takes over a failure without asking the arbiter, and reports the first to all ranks.
    pub(super) fn end(&self, failure: RankFailure) -> RankFailure {
        self.monitor.adopt(failure, |first| self.announce(first))
    }

    /// Takes over the failure that another rank reports.
    pub(super) fn adopt(&self, failure: RankFailure) {
        self.monitor.adopt(failure, |_| self.wake_groups());
    }

    fn announce(&self, first: &RankFailure) {
        self.wake_groups();
        self.send_all(&Frame::Ended(first.clone()));
    }

    /// Shows all ranks that this one is busy.
    pub(super) fn beat(&self) {
        self.on_beat(self.rank);
        self.send_all(&Frame::Beat);
    }

    /// Notes that a rank is busy.
    pub(super) fn on_beat(&self, rank: usize) {
        self.lock().wait_graph.record_busy(rank);
    }

    /// Shows all ranks for which ranks this one waits.
    pub(super) fn send_wait(&self, ranks: &[usize]) {
        self.lock().wait_graph.record_wait(self.rank, ranks);
        self.send_all(&Frame::Waits(ranks.iter().map(|rank| *rank as u32).collect()));
    }

    /// Notes that another rank waits for these.
    pub(super) fn on_wait(&self, rank: usize, ranks: &[u32]) {
        let ranks = ranks.iter().map(|rank| *rank as usize).filter(|rank| *rank < self.peers.len());
        self.lock().wait_graph.record_wait(rank, &ranks.collect::<Vec<_>>());
    }

    /// Returns the ranks that this one has waited for in vain.
    pub(super) fn suspects(&self, ranks: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        self.lock().wait_graph.suspects(self.rank, ranks, wait)
    }

    /// Notes that a rank leaves.
    pub(super) fn left(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.wake_groups();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.lock().left[rank]
    }

    /// Returns whether every other rank has said that it leaves.
    pub(super) fn all_have_left(&self) -> bool {
        self.lock().left.iter().enumerate().all(|(rank, left)| *left || rank == self.rank)
    }

    /// Leaves, and lets the thread that talks to MPI end.
    pub(super) fn leave(&self) {
        self.send_all(&Frame::Leave);
        self.lock().leaving = true;
        self.wake.notify_all();
    }

    /// Returns the tag of the messages of a group: its first rank chooses it and tells the others.
    pub(super) fn open(&self, id: &str, members: &[usize]) -> Result<i32, TransportError> {
        if members[0] == self.rank {
            let tag = self.new_tag()?;
            let frame = Frame::Open(tag, id.to_owned());
            self.request(members[1..].iter().map(|to| MpiRequest::SendFrame { to: *to, frame: frame.clone() }));
            return Ok(tag);
        }
        let is_there = |state: &MpiState| state.tags.contains_key(id);
        let tag = self.monitor.wait_for(deadline(self.timeout), is_there, |state| state.tags.remove(id))?;
        tag.ok_or(TransportError::Timeout(vec![0], self.timeout))
    }

    /// Returns a tag that no other group of the world has. Tag 0 is for frames.
    fn lead(&self) -> Result<i32, TransportError> {
        let mut state = self.lock();
        let tag = 1 + self.rank + self.peers.len() * state.n_tags;
        state.n_tags += 1;
        match tag {
            ..=MAX_TAG => Ok(tag as i32),
            _ => Err(TransportError::Local(format!("{} groups are too many for MPI", state.n_tags))),
        }
    }

    /// Notes the tag that the first rank of a group has chosen.
    pub(super) fn opened(&self, tag: i32, id: String) {
        self.lock().tags.insert(id, tag);
        self.wake_groups();
    }

    /// Adds a group's receiver of events.
    pub(super) fn listen(&self, events: &Sender<ProgressEvent>) {
        self.lock().listeners.push(events.clone());
    }

    pub(super) fn request(&self, requests: impl IntoIterator<Item = MpiRequest>) {
        self.lock().requests.extend(requests);
        self.wake.notify_all();
    }

    fn send_all(&self, frame: &Frame) {
        let others = (0..self.peers.len()).filter(|rank| *rank != self.rank);
        self.request(others.map(|to| MpiRequest::SendFrame { to, frame: frame.clone() }));
    }

    /// Waits for something to do, no longer than `within`.
    pub(super) fn await_request(&self, within: Duration) {
        let idle = |state: &mut Monitored<MpiState>| state.requests.is_empty() && !state.leaving;
        drop(self.wake.wait_timeout_while(self.lock(), within, idle));
    }

    fn wake_groups(&self) {
        // The ends of groups that are gone are dropped.
        self.lock().listeners.retain(|events| events.send(ProgressEvent::Check).is_ok());
        self.monitor.notify();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Monitored<MpiState>> {
        self.monitor.lock()
    }
}
