//! State of a rank: its control connections, the ranks that have left, and the first failure.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendFlags, send};

use crate::failure::{FailureMonitor, StoreArbiter};
use crate::liveness::{Wait, WaitGraph, deadline};
use crate::peer::PeerInfo;
use crate::transport::TransportError;
use crate::{Cause, CollectiveCall, RankFailure};

/// Timeout for the reason why a rank closed a socket: its leave message or its exit.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_secs(5);

/// Group of the control connections, which carry failures, heartbeats and leave messages.
pub(super) const CONTROL: &str = "control";

pub(super) const LEAVE: u8 = 1;
pub(super) const FAIL: u8 = 2;
pub(super) const BEAT: u8 = 3;
pub(super) const WAITS: u8 = 4;

/// State of a rank, shared by its threads.
pub(super) struct LocalRank {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) monitor: FailureMonitor<LocalState>,
    arbiter: StoreArbiter,
    /// Event that becomes and stays readable when the world has failed.
    ended: OwnedFd,
}

#[derive(Default)]
pub(super) struct LocalState {
    left: Vec<bool>,
    /// True for ranks whose control stream has closed, also after a failure.
    exited: Vec<bool>,
    /// Accepted streams by group and rank, until a thread takes them.
    arrived: HashMap<(String, usize), UnixStream>,
    /// True for ranks that have connected to this one. Their streams in `control` may have closed since.
    connected: Vec<bool>,
    pub(super) control: Vec<Option<Arc<UnixStream>>>,
    current_calls: BTreeMap<String, CollectiveCall>,
    wait_graph: WaitGraph,
    pub(super) stopping: bool,
}

impl LocalRank {
    pub(super) fn new(rank: usize, peers: Vec<PeerInfo>, arbiter: StoreArbiter) -> io::Result<Self> {
        let n = peers.len();
        let state = LocalState {
            left: vec![false; n],
            exited: vec![false; n],
            connected: vec![false; n],
            control: vec![None; n],
            ..LocalState::default()
        };
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { rank, peers, monitor: FailureMonitor::new(state), arbiter, ended })
    }

    /// Returns the event that becomes readable when the world has failed.
    pub(super) fn ended(&self) -> &OwnedFd {
        &self.ended
    }

    /// Returns a rank's name for messages, without the host because all ranks share it.
    pub(super) fn who(&self, rank: usize) -> String {
        format!("rank {rank} (pid {})", self.peers[rank].pid)
    }

    /// Aborts the world and reports its first failure to all ranks.
    pub(super) fn fail(&self, failure: RankFailure) -> RankFailure {
        self.monitor.fail(
            failure,
            |own| self.arbiter.first(own),
            |first| {
                self.wake_exchanges();
                self.send_all(FAIL, &first.encode());
            },
        )
    }

    /// Records the failure that another rank reports.
    pub(super) fn adopt(&self, failure: RankFailure) {
        self.monitor.adopt(failure, |_| self.wake_exchanges());
    }

    fn wake_exchanges(&self) {
        let _ = rustix::io::write(&self.ended, &1u64.to_ne_bytes());
    }

    /// Sends a heartbeat of busy work to all ranks.
    pub(super) fn beat(&self) {
        self.on_beat(self.rank);
        self.send_all(BEAT, &[]);
    }

    /// Records a heartbeat of busy work of a rank.
    pub(super) fn on_beat(&self, rank: usize) {
        self.monitor.lock().wait_graph.record_busy(rank);
    }

    /// Sends all ranks a heartbeat with the ranks that this one waits for.
    pub(super) fn send_wait(&self, ranks: &[usize]) {
        let payload: Vec<u8> = ranks.iter().flat_map(|rank| (*rank as u32).to_le_bytes()).collect();
        self.monitor.lock().wait_graph.record_wait(self.rank, ranks);
        self.send_all(WAITS, &payload);
    }

    /// Records a heartbeat of a waiting rank, as [`LocalRank::send_wait`] encodes it.
    pub(super) fn on_wait(&self, rank: usize, payload: &[u8]) {
        let ranks = payload.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        let ranks: Vec<usize> = ranks.filter(|rank| *rank < self.peers.len()).collect();
        self.monitor.lock().wait_graph.record_wait(rank, &ranks);
    }

    /// Returns the suspects after this rank has waited for `ranks` until the timeout.
    pub(super) fn suspects(&self, ranks: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        self.monitor.lock().wait_graph.suspects(self.rank, ranks, wait)
    }

    /// Writes a frame to all ranks without blocking. It fits into the socket buffers: a process sends at most two frames and a
    /// few heartbeats per timeout, which a running rank has read by then.
    fn send_all(&self, kind: u8, payload: &[u8]) {
        let frame = [&[kind][..], &(payload.len() as u32).to_le_bytes(), payload].concat();
        let streams: Vec<_> = self.monitor.lock().control.iter().flatten().cloned().collect();
        for stream in streams {
            // Ignore ranks that have exited.
            let _ = send(&*stream, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    pub(super) fn set_current_call(&self, id: &str, call: Option<&CollectiveCall>) {
        let mut state = self.monitor.lock();
        match call {
            Some(call) => state.current_calls.insert(id.to_owned(), call.clone()),
            None => state.current_calls.remove(id),
        };
    }

    /// Leaves the world and ends the watcher. After a failure, sends the failure once more, so that no rank reports this exit as
    /// the root cause.
    pub(super) fn leave(&self) {
        match self.monitor.failure() {
            Some(failure) => self.send_all(FAIL, &failure.encode()),
            None => self.send_all(LEAVE, &[]),
        }
        self.monitor.lock().stopping = true;
    }

    /// Stores the stream to a rank, which either rank may have opened.
    pub(super) fn arrived(&self, id: &str, rank: usize, stream: UnixStream) {
        let mut state = self.monitor.lock();
        if id == CONTROL {
            (state.connected[rank], state.control[rank]) = (true, Some(Arc::new(stream)));
        } else {
            state.arrived.insert((id.to_owned(), rank), stream);
        }
        drop(state);
        self.monitor.notify();
    }

    /// Returns true if a connection from `rank` for group `id` is expected.
    pub(super) fn is_expected(&self, id: &str, rank: usize) -> bool {
        if rank <= self.rank || rank >= self.peers.len() {
            return false;
        }
        let state = self.monitor.lock();
        if id == CONTROL { !state.connected[rank] } else { !state.arrived.contains_key(&(id.to_owned(), rank)) }
    }

    /// Waits until every other rank is connected to this one.
    pub(super) fn await_all(&self, deadline: Instant, timeout: Duration) -> Result<(), TransportError> {
        let absent = |state: &LocalState| -> Vec<usize> {
            (0..state.connected.len()).filter(|rank| *rank != self.rank && !state.connected[*rank]).collect()
        };
        let state = self.monitor.wait_until(deadline, |state| absent(state).is_empty());
        match (state.failure(), absent(&state)) {
            (Some(failure), _) => Err(TransportError::Failed(failure.clone())),
            (None, absent) if absent.is_empty() => Ok(()),
            (None, absent) => Err(TransportError::ConnectTimeout(absent, timeout)),
        }
    }

    /// Returns the stream to `rank` in group `id`, or `None` at the deadline.
    pub(super) fn await_arrival(
        &self,
        id: &str,
        rank: usize,
        deadline: Instant,
    ) -> Result<Option<UnixStream>, TransportError> {
        let key = (id.to_owned(), rank);
        self.monitor.wait_for(deadline, |state| state.arrived.contains_key(&key), |state| state.arrived.remove(&key))
    }

    /// Returns the reason for a socket error of `rank`, which is `peer` in its group.
    pub(super) fn why_closed(&self, rank: usize, peer: usize, error: io::Error) -> TransportError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        if !matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) {
            return TransportError::Unreachable(peer, error);
        }
        let state = self.monitor.wait_until(deadline(CLOSE_REASON_TIMEOUT), |state| state.left[rank]);
        // Without either, the rank has dropped this group and still runs.
        state.failure().cloned().map_or(TransportError::PeerLeft(peer), TransportError::Failed)
    }

    /// Records that a rank has left.
    pub(super) fn left(&self, rank: usize) {
        self.monitor.lock().left[rank] = true;
        self.monitor.notify();
    }

    /// Waits up to `within` until a rank has left or its control stream has closed.
    pub(super) fn await_exit(&self, rank: usize, within: Duration) {
        self.monitor.wait_for_state(deadline(within), |state| state.left[rank] || state.exited[rank]);
    }

    /// Aborts the world because the control stream of `rank` has closed, unless the rank has left.
    pub(super) fn closed(&self, rank: usize) {
        let mut state = self.monitor.lock();
        state.exited[rank] = true;
        self.monitor.notify();
        if state.left[rank] || state.failure().is_some() || state.stopping {
            return;
        }
        let calls: Vec<String> =
            state.current_calls.values().map(|call| format!("{call} in group {}", call.group)).collect();
        drop(state);
        let calls = if calls.is_empty() { "none".to_owned() } else { calls.join(", ") };
        let message = format!(
            "continue: {} exited without leaving the process group (seen by rank {}, current call: {calls})",
            self.who(rank),
            self.rank
        );
        self.fail(RankFailure { rank, cause: Cause::Exited, message });
    }
}
