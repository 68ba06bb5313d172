//! State of a rank, and the requests of its threads to the progress thread.

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

/// Largest tag that every MPI supports.
const MAX_TAG: usize = 32_767;

/// State of a rank, shared by its threads.
pub(super) struct MpiRank {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) timeout: Duration,
    pub(super) monitor: FailureMonitor<MpiState>,
    /// Wakes the progress thread.
    wake: Condvar,
}

#[derive(Default)]
pub(super) struct MpiState {
    left: Vec<bool>,
    /// Tags of groups whose first rank is another rank.
    tags: HashMap<String, i32>,
    /// Number of tags that this rank has assigned.
    n_tags: usize,
    wait_graph: WaitGraph,
    pub(super) requests: Vec<MpiRequest>,
    /// Senders of events to this rank's groups.
    listeners: Vec<Sender<ProgressEvent>>,
    pub(super) leaving: bool,
}

/// Request to the progress thread. Ranks are those of the world.
pub(super) enum MpiRequest {
    Send { to: usize, tag: i32, bytes: Box<[u8]>, done: Completion },
    Receive { from: usize, tag: i32, buffer: Box<[u8]>, done: Completion },
    SendFrame { to: usize, frame: Frame },
}

/// Completion of a chunk, reported to its group.
pub(super) struct Completion {
    pub(super) events: Sender<ProgressEvent>,
    pub(super) chunk: MessageChunk,
}

/// Chunk of the data that a rank exchanges with `peer` of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageChunk {
    pub(super) peer: usize,
    /// Offset in bytes.
    pub(super) start: usize,
    pub(super) is_sent: bool,
}

/// Event for a group.
pub(super) enum ProgressEvent {
    /// A chunk has completed, with this buffer.
    Arrived(MessageChunk, Box<[u8]>),
    /// A rank has left or the world has failed: check again.
    Check,
}

impl MpiRank {
    pub(super) fn new(rank: usize, peers: Vec<PeerInfo>, timeout: Duration) -> Self {
        let state = MpiState { left: vec![false; peers.len()], ..MpiState::default() };
        Self { rank, peers, timeout, monitor: FailureMonitor::new(state), wake: Condvar::new() }
    }

    /// Aborts the world and reports its first failure to all ranks. Rank 0 is the arbiter.
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

    /// Aborts the world without the arbiter, and reports the first failure to all ranks.
    pub(super) fn end(&self, failure: RankFailure) -> RankFailure {
        self.monitor.adopt(failure, |first| self.announce(first))
    }

    /// Records the failure that another rank reports.
    pub(super) fn adopt(&self, failure: RankFailure) {
        self.monitor.adopt(failure, |_| self.wake_groups());
    }

    fn announce(&self, first: &RankFailure) {
        self.wake_groups();
        self.send_all(&Frame::Ended(first.clone()));
    }

    /// Sends a heartbeat of busy work to all ranks.
    pub(super) fn beat(&self) {
        self.on_beat(self.rank);
        self.send_all(&Frame::Beat);
    }

    /// Records a heartbeat of busy work of a rank.
    pub(super) fn on_beat(&self, rank: usize) {
        self.lock().wait_graph.record_busy(rank);
    }

    /// Sends all ranks a heartbeat with the ranks that this one waits for.
    pub(super) fn send_wait(&self, ranks: &[usize]) {
        self.lock().wait_graph.record_wait(self.rank, ranks);
        self.send_all(&Frame::Waits(ranks.iter().map(|rank| *rank as u32).collect()));
    }

    /// Records a heartbeat of a waiting rank.
    pub(super) fn on_wait(&self, rank: usize, ranks: &[u32]) {
        let ranks = ranks.iter().map(|rank| *rank as usize).filter(|rank| *rank < self.peers.len());
        self.lock().wait_graph.record_wait(rank, &ranks.collect::<Vec<_>>());
    }

    /// Returns the suspects after this rank has waited for `ranks` until the timeout.
    pub(super) fn suspects(&self, ranks: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        self.lock().wait_graph.suspects(self.rank, ranks, wait)
    }

    /// Records that a rank has left.
    pub(super) fn left(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.wake_groups();
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.lock().left[rank]
    }

    /// Returns true if every other rank has left.
    pub(super) fn all_have_left(&self) -> bool {
        self.lock().left.iter().enumerate().all(|(rank, left)| *left || rank == self.rank)
    }

    /// Leaves the world and ends the progress thread.
    pub(super) fn leave(&self) {
        self.send_all(&Frame::Leave);
        self.lock().leaving = true;
        self.wake.notify_all();
    }

    /// Returns the tag of a group. Its first rank assigns the tag and sends it to the others.
    pub(super) fn open(&self, id: &str, members: &[usize]) -> Result<i32, TransportError> {
        if members[0] == self.rank {
            let tag = self.new_tag()?;
            let frame = Frame::Open(tag, id.to_owned());
            self.request(members[1..].iter().map(|to| MpiRequest::SendFrame { to: *to, frame: frame.clone() }));
            return Ok(tag);
        }
        let is_there = |state: &MpiState| state.tags.contains_key(id);
        let tag = self.monitor.wait_for(deadline(self.timeout), is_there, |state| state.tags.remove(id))?;
        tag.ok_or(TransportError::ConnectTimeout(vec![0], self.timeout))
    }

    /// Returns a tag that is unique in the world. Tag 0 is for control messages.
    fn new_tag(&self) -> Result<i32, TransportError> {
        let mut state = self.lock();
        let tag = 1 + self.rank + self.peers.len() * state.n_tags;
        state.n_tags += 1;
        match tag {
            ..=MAX_TAG => Ok(tag as i32),
            _ => Err(TransportError::Local(format!(
                "group {} of this rank exceeds the tags of MPI (at most {MAX_TAG})",
                state.n_tags
            ))),
        }
    }

    /// Records the tag that the first rank of a group has assigned.
    pub(super) fn opened(&self, tag: i32, id: String) {
        self.lock().tags.insert(id, tag);
        self.wake_groups();
    }

    /// Adds a group that receives events.
    pub(super) fn subscribe(&self, events: &Sender<ProgressEvent>) {
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

    /// Waits up to `within` for a request.
    pub(super) fn await_request(&self, within: Duration) {
        let idle = |state: &mut Monitored<MpiState>| state.requests.is_empty() && !state.leaving;
        drop(self.wake.wait_timeout_while(self.lock(), within, idle));
    }

    fn wake_groups(&self) {
        // Drop the senders of dropped groups.
        self.lock().listeners.retain(|events| events.send(ProgressEvent::Check).is_ok());
        self.monitor.notify();
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Monitored<MpiState>> {
        self.monitor.lock()
    }
}
