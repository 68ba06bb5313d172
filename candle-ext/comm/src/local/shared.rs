//! What a process knows of its world: whom it is connected to, who has left, why the world has ended.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendFlags, send};

use crate::deadline::deadline;
use crate::fabric::Trouble;
use crate::signs::{Signs, Wait};
use crate::store::Client;
use crate::{Call, Cause, Failure};

/// How long the farewell or the death of a rank may come after its other sockets closed.
const EXPLAIN_WITHIN: Duration = Duration::from_secs(5);

/// The group in which failures and farewells are told.
pub(super) const CONTROL: &str = "control";

/// The key under which the world's first failure is found.
const FAILURE: &str = "failure";

pub(super) const LEAVE: u8 = 1;
pub(super) const FAIL: u8 = 2;
pub(super) const BEAT: u8 = 3;
pub(super) const WAITS: u8 = 4;

/// The end of this process that its threads share.
pub(super) struct Shared {
    pub(super) rank: usize,
    pids: Vec<u32>,
    arbiter: Client,
    /// Becomes readable, for good, when the world has ended.
    ended: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    failure: Option<Failure>,
    left: Vec<bool>,
    /// Streams that nobody has asked for yet, by group and rank.
    arrived: HashMap<(String, usize), UnixStream>,
    /// Who has ever been connected to this rank; what is in `control` may have closed since.
    met: Vec<bool>,
    pub(super) control: Vec<Option<Arc<UnixStream>>>,
    doing: BTreeMap<String, Call>,
    signs: Signs,
    pub(super) stopping: bool,
}

impl Shared {
    pub(super) fn new(rank: usize, pids: Vec<u32>, arbiter: Client) -> io::Result<Self> {
        let n = pids.len();
        let state = State { left: vec![false; n], met: vec![false; n], control: vec![None; n], ..State::default() };
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { rank, pids, arbiter, ended, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// What becomes readable when the world has ended.
    pub(super) fn ended(&self) -> &OwnedFd {
        &self.ended
    }

    pub(super) fn who(&self, rank: usize) -> String {
        format!("rank {rank} (pid {})", self.pids[rank])
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    pub(super) fn await_failure(&self, within: Duration) -> Option<Failure> {
        self.wait_until(deadline(within), |state| state.failure.is_some()).failure.clone()
    }

    /// Tells all ranks of a failure, unless there was one before. The store knows whose came first; without it each
    /// rank keeps what it learns first.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        if let Some(first) = self.failure() {
            return first;
        }
        let failure = failure.shortened();
        let first = self.arbiter.compare_set(FAILURE, &[], &failure.encode()).ok();
        let first = first.and_then(|bytes| Failure::decode(&bytes)).unwrap_or(failure);
        let (first, is_new) = self.adopt(first);
        if is_new {
            self.tell(FAIL, &first.encode());
        }
        first
    }

    /// Keeps the world's first failure; returns it, and whether it is `failure`.
    pub(super) fn adopt(&self, failure: Failure) -> (Failure, bool) {
        let mut state = self.lock();
        let is_new = state.failure.is_none();
        let first = state.failure.get_or_insert(failure).clone();
        drop(state);
        self.changed.notify_all();
        // Waits are many, failures few: the number in it never gets large.
        let _ = rustix::io::write(&self.ended, &1u64.to_ne_bytes());
        (first, is_new)
    }

    /// Shows everyone that this rank is at work.
    pub(super) fn beat(&self) {
        self.lock().signs.at_work(self.rank);
        self.tell(BEAT, &[]);
    }

    /// Another rank is at work.
    pub(super) fn heard_beat(&self, rank: usize) {
        self.lock().signs.at_work(rank);
    }

    /// Shows everyone for whom this rank waits.
    pub(super) fn wait_for(&self, ranks: &[usize]) {
        let payload: Vec<u8> = ranks.iter().flat_map(|rank| (*rank as u32).to_le_bytes()).collect();
        self.lock().signs.waits(self.rank, ranks);
        self.tell(WAITS, &payload);
    }

    /// Another rank waits for these, as [`Shared::wait_for`] has written them.
    pub(super) fn heard_wait(&self, rank: usize, payload: &[u8]) {
        let ranks = payload.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize);
        let ranks: Vec<usize> = ranks.filter(|rank| *rank < self.pids.len()).collect();
        self.lock().signs.waits(rank, &ranks);
    }

    /// Returns whom this rank has waited for in vain, if it has.
    pub(super) fn blamed(&self, ranks: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        self.lock().signs.blamed(self.rank, ranks, wait)
    }

    /// Writes a frame to everyone, without waiting: it fits. A process sends two in its life, and a few signs a time-out,
    /// which who lives has read by then.
    fn tell(&self, kind: u8, payload: &[u8]) {
        let frame = [&[kind][..], &(payload.len() as u32).to_le_bytes(), payload].concat();
        let streams: Vec<_> = self.lock().control.iter().flatten().cloned().collect();
        for stream in streams {
            // Who is gone need not be told.
            let _ = send(&*stream, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    pub(super) fn doing(&self, id: &str, call: Option<&Call>) {
        let mut state = self.lock();
        match call {
            Some(call) => state.doing.insert(id.to_owned(), call.clone()),
            None => state.doing.remove(id),
        };
    }

    /// Says goodbye to all, and lets the watcher end. Who leaves a world that has ended says why: another may not have heard of
    /// it yet, and must not take this for the reason.
    pub(super) fn leave(&self) {
        match self.failure() {
            Some(failure) => self.tell(FAIL, &failure.encode()),
            None => self.tell(LEAVE, &[]),
        }
        self.lock().stopping = true;
    }

    /// Takes the stream to a rank, which either has opened.
    pub(super) fn arrived(&self, id: &str, rank: usize, stream: UnixStream) {
        let mut state = self.lock();
        if id == CONTROL {
            (state.met[rank], state.control[rank]) = (true, Some(Arc::new(stream)));
        } else {
            state.arrived.insert((id.to_owned(), rank), stream);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a caller may say that it is `rank`, calling for group `id`.
    pub(super) fn is_expected(&self, id: &str, rank: usize) -> bool {
        if rank <= self.rank || rank >= self.pids.len() {
            return false;
        }
        let state = self.lock();
        if id == CONTROL { !state.met[rank] } else { !state.arrived.contains_key(&(id.to_owned(), rank)) }
    }

    /// Returns when every other rank is listened to.
    pub(super) fn await_all(&self, deadline: Instant, timeout: Duration) -> Result<(), Trouble> {
        let absent = |state: &State| -> Vec<usize> {
            (0..state.met.len()).filter(|rank| *rank != self.rank && !state.met[*rank]).collect()
        };
        let state = self.wait_until(deadline, |state| state.failure.is_some() || absent(state).is_empty());
        match (&state.failure, absent(&state)) {
            (Some(failure), _) => Err(Trouble::Failed(failure.clone())),
            (None, absent) if absent.is_empty() => Ok(()),
            (None, absent) => Err(Trouble::Late(absent, timeout)),
        }
    }

    /// Returns the stream to `rank` in group `id`; `None` when it has not come by the deadline.
    pub(super) fn await_arrival(
        &self,
        id: &str,
        rank: usize,
        deadline: Instant,
    ) -> Result<Option<UnixStream>, Trouble> {
        let key = (id.to_owned(), rank);
        let mut state = self.wait_until(deadline, |state| state.failure.is_some() || state.arrived.contains_key(&key));
        match (state.arrived.remove(&key), &state.failure) {
            (None, Some(failure)) => Err(Trouble::Failed(failure.clone())),
            (stream, _) => Ok(stream),
        }
    }

    /// Says why the socket of `rank`, which is `peer` in its group, gave this error.
    pub(super) fn why_closed(&self, rank: usize, peer: usize, error: io::Error) -> Trouble {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        if !matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof) {
            return Trouble::Unreachable(peer, error);
        }
        let state = self.wait_until(deadline(EXPLAIN_WITHIN), |state| state.failure.is_some() || state.left[rank]);
        // Without either it has dropped this group and lives on.
        state.failure.clone().map_or(Trouble::Left(peer), Trouble::Failed)
    }

    fn wait_until(&self, deadline: Instant, done: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |state| !done(state));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    pub(super) fn left(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.changed.notify_all();
    }

    /// The control stream of `rank` has closed: was that to be expected?
    pub(super) fn closed(&self, rank: usize) {
        let state = self.lock();
        if state.left[rank] || state.failure.is_some() || state.stopping {
            return;
        }
        let doing: Vec<String> = state.doing.values().map(|call| format!("{call} of group {}", call.group)).collect();
        drop(state);
        let doing = if doing.is_empty() { "no call".to_owned() } else { doing.join(", ") };
        let message =
            format!("go on: {} ended without leaving (seen by rank {}, in {doing})", self.who(rank), self.rank);
        self.fail(Failure { rank, cause: Cause::Died, message });
    }

    // What it guards is whole between any two statements.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
