//! The state of a process in its world: the ranks it is connected to, those that have left, and why the world has ended.

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
use crate::{Call, Cause, RankFailure};

/// How long the farewell or the death of a rank may come after its other sockets closed.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_secs(5);

/// The group in which failures and farewells are told.
pub(super) const CONTROL: &str = "control";

pub(super) const LEAVE: u8 = 1;
pub(super) const FAIL: u8 = 2;
pub(super) const BEAT: u8 = 3;
pub(super) const WAITS: u8 = 4;

/// The end of this process that its threads share.
pub(super) struct LocalRank {
    pub(super) rank: usize,
    pub(super) peers: Vec<PeerInfo>,
    pub(super) monitor: FailureMonitor<LocalState>,
    arbiter: StoreArbiter,
    /// Becomes readable, for good, when the world has ended.
    ended: OwnedFd,
}

#[derive(Default)]
pub(super) struct LocalState {
    left: Vec<bool>,
    /// Streams that no thread has asked for yet, by group and rank.
    arrived: HashMap<(String, usize), UnixStream>,
    /// The ranks that were ever connected to this one; what is in `control` may have closed since.
    connected: Vec<bool>,
    pub(super) control: Vec<Option<Arc<UnixStream>>>,
    doing: BTreeMap<String, Call>,
    wait_graph: WaitGraph,
    pub(super) stopping: bool,
}

impl LocalRank {
    pub(super) fn new(rank: usize, peers: Vec<PeerInfo>, arbiter: StoreArbiter) -> io::Result<Self> {
        let n = peers.len();
        let state = LocalState {
            left: vec![false; n],
            connected: vec![false; n],
            control: vec![None; n],
            ..LocalState::default()
        };
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { rank, peers, monitor: FailureMonitor::new(state), arbiter, ended })
    }

    /// Returns what becomes readable when the world has ended.
    pub(super) fn ended(&self) -> &OwnedFd {
        &self.ended
    }

    /// Names a rank. All run on one machine, which the name leaves out.
    pub(super) fn who(&self, rank: usize) -> String {
        format!("rank {rank} (pid {})", self.peers[rank].pid)
    }

    /// Ends the world and reports its first failure to all ranks.
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

    /// Takes over the failure that another rank reports.
    pub(super) fn adopt(&self, failure: RankFailure) {
        self.monitor.adopt(failure, |_| self.wake_exchanges());
    }

    fn wake_exchanges(&self) {
        let _ = rustix::io::write(&self.ended, &1u64.to_ne_bytes());
    }

    /// Shows all ranks that this one is busy.
    pub(super) fn beat(&self) {
        self.on_beat(self.rank);
        self.send_all(BEAT, &[]);
    }

    /// Notes that a rank is busy.
    pub(super) fn on_beat(&self, rank: usize) {
        self.monitor.lock().wait_graph.record_busy(rank);
    }

    /// Shows all ranks for which ranks this one waits.
    pub(super) fn send_wait(&self, ranks: &[usize]) {
        let payload: Vec<u8> = ranks.iter().flat_map(|rank| (*rank as u32).to_le_bytes()).collect();
        self.monitor.lock().wait_graph.record_wait(self.rank, ranks);
        self.send_all(WAITS, &payload);
    }

    /// Notes that another rank waits for these, as [`LocalRank::send_wait`] has written them.
    pub(super) fn on_wait(&self, rank: usize, payload: &[u8]) {
        let ranks = payload.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        let ranks: Vec<usize> = ranks.filter(|rank| *rank < self.peers.len()).collect();
        self.monitor.lock().wait_graph.record_wait(rank, &ranks);
    }

    /// Returns the ranks that this one has waited for in vain.
    pub(super) fn suspects(&self, ranks: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        self.monitor.lock().wait_graph.suspects(self.rank, ranks, wait)
    }

    /// Writes a frame to all ranks without waiting, because it fits. A process sends two in its life, and a few signs of life
    /// in a time-out, which a living rank has read by then.
    fn send_all(&self, kind: u8, payload: &[u8]) {
        let frame = [&[kind][..], &(payload.len() as u32).to_le_bytes(), payload].concat();
        let streams: Vec<_> = self.monitor.lock().control.iter().flatten().cloned().collect();
        for stream in streams {
            // A rank that is gone needs no frame.
            let _ = send(&*stream, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    pub(super) fn set_current_call(&self, id: &str, call: Option<&Call>) {
        let mut state = self.monitor.lock();
        match call {
            Some(call) => state.doing.insert(id.to_owned(), call.clone()),
            None => state.doing.remove(id),
        };
    }

    /// Leaves, and lets the watcher end. After a failure this sends the failure: a rank that does not have it yet must not take
    /// this end for the reason.
    pub(super) fn leave(&self) {
        match self.monitor.failure() {
            Some(failure) => self.send_all(FAIL, &failure.encode()),
            None => self.send_all(LEAVE, &[]),
        }
        self.monitor.lock().stopping = true;
    }

    /// Takes the stream to a rank, which either has opened.
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

    /// Returns whether a caller may say that it is `rank`, calling for group `id`.
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
            (None, absent) => Err(TransportError::Timeout(absent, timeout)),
        }
    }

    /// Returns the stream to `rank` in group `id`; `None` when it has not come by the deadline.
    pub(super) fn await_arrival(
        &self,
        id: &str,
        rank: usize,
        deadline: Instant,
    ) -> Result<Option<UnixStream>, TransportError> {
        let key = (id.to_owned(), rank);
        self.monitor.wait_for(deadline, |state| state.arrived.contains_key(&key), |state| state.arrived.remove(&key))
    }

    /// Returns why the socket of `rank`, which is `peer` in its group, gave this error.
    pub(super) fn why_closed(&self, rank: usize, peer: usize, error: io::Error) -> TransportError {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        if !matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) {
            return TransportError::Unreachable(peer, error);
        }
        let state = self.monitor.wait_until(deadline(CLOSE_REASON_TIMEOUT), |state| state.left[rank]);
        // Without either it has dropped this group and lives on.
        state.failure().cloned().map_or(TransportError::PeerLeft(peer), TransportError::Failed)
    }

    /// Notes that a rank has left.
    pub(super) fn left(&self, rank: usize) {
        self.monitor.lock().left[rank] = true;
        self.monitor.notify();
    }

    /// Ends the world because the control stream of `rank` has closed, unless that was to be expected.
    pub(super) fn closed(&self, rank: usize) {
        let state = self.monitor.lock();
        if state.left[rank] || state.failure().is_some() || state.stopping {
            return;
        }
        let doing: Vec<String> = state.doing.values().map(|call| format!("{call} of group {}", call.group)).collect();
        drop(state);
        let doing = if doing.is_empty() { "no call".to_owned() } else { doing.join(", ") };
        let message =
            format!("go on: {} ended without leaving (seen by rank {}, in {doing})", self.who(rank), self.rank);
        self.fail(RankFailure { rank, cause: Cause::Exited, message });
    }
}
