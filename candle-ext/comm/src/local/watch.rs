//! The thread that listens to all other ranks, whether or not anything is being exchanged: who calls, who leaves, who
//! fails, who dies.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;

use crate::fabric::Trouble;
use crate::store::Client;
use crate::{Call, Failure};

/// How long a caller may take to say who it is; it has already written that when it is accepted.
const INTRODUCE_WITHIN: Duration = Duration::from_secs(2);

/// How long the farewell or the death of a rank may come after its other sockets closed.
const EXPLAIN_WITHIN: Duration = Duration::from_secs(5);

/// The key under which the world's first failure is found.
const FAILURE: &str = "failure";

const LEAVE: u8 = 1;
const FAIL: u8 = 2;

/// What a process knows of its world.
pub(super) struct Shared {
    rank: usize,
    pids: Vec<u32>,
    arbiter: Client,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    left: Vec<bool>,
    /// Streams that nobody has asked for yet, by group and rank.
    arrived: HashMap<(String, usize), UnixStream>,
    control: Vec<Option<Arc<UnixStream>>>,
    doing: BTreeMap<String, Call>,
    stopping: bool,
}

impl Shared {
    pub(super) fn new(rank: usize, pids: Vec<u32>, arbiter: Client) -> Self {
        let state = State { left: vec![false; pids.len()], ..State::default() };
        Self { rank, pids, arbiter, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn who(&self, rank: usize) -> String {
        format!("rank {rank} (pid {})", self.pids[rank])
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        self.lock().failure.clone()
    }

    /// Tells all ranks of a failure, unless there was one before. The store knows whose came first; without it each
    /// rank keeps what it learns first.
    pub(super) fn fail(&self, failure: Failure) -> Failure {
        if let Some(first) = self.failure() {
            return first;
        }
        let first = self.arbiter.compare_set(FAILURE, &[], &encode(&failure)).ok().and_then(|bytes| decode(&bytes));
        let mut state = self.lock();
        let first = state.failure.get_or_insert(first.unwrap_or(failure)).clone();
        state.tell(FAIL, &encode(&first));
        self.changed.notify_all();
        first
    }

    pub(super) fn doing(&self, id: &str, call: Option<&Call>) {
        let mut state = self.lock();
        match call {
            Some(call) => state.doing.insert(id.to_owned(), call.clone()),
            None => state.doing.remove(id),
        };
    }

    /// Says goodbye to all, and lets the watcher end.
    pub(super) fn leave(&self) {
        let mut state = self.lock();
        state.tell(LEAVE, &[]);
        state.stopping = true;
    }

    pub(super) fn listen_to(&self, control: Vec<Option<UnixStream>>) {
        self.lock().control = control.into_iter().map(|stream| stream.map(Arc::new)).collect();
    }

    pub(super) fn arrived(&self, id: &str, rank: usize, stream: UnixStream) {
        self.lock().arrived.insert((id.to_owned(), rank), stream);
        self.changed.notify_all();
    }

    /// Returns the stream to `rank` in group `id`; `None` when it has not come by the deadline.
    pub(super) fn await_arrival(
        &self,
        id: &str,
        rank: usize,
        deadline: Instant,
    ) -> Result<Option<UnixStream>, Trouble> {
        let key = (id.to_owned(), rank);
        let (mut state, _) =
            self.wait_until(deadline, |state| state.failure.is_some() || state.arrived.contains_key(&key));
        match (state.arrived.remove(&key), &state.failure) {
            (None, Some(failure)) => Err(Trouble::Failed(failure.clone())),
            (stream, _) => Ok(stream),
        }
    }

    /// Says why the socket of `rank`, which is `peer` in its group, has closed.
    pub(super) fn why_closed(&self, rank: usize, peer: usize) -> Trouble {
        let deadline = Instant::now() + EXPLAIN_WITHIN;
        let (state, _) = self.wait_until(deadline, |state| state.failure.is_some() || state.left[rank]);
        // Without either it has dropped this group and lives on.
        state.failure.clone().map_or(Trouble::Left(peer), Trouble::Failed)
    }

    fn wait_until(&self, deadline: Instant, done: impl Fn(&State) -> bool) -> (MutexGuard<'_, State>, bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |state| !done(state));
        let (state, out) = waited.unwrap_or_else(PoisonError::into_inner);
        (state, !out.timed_out())
    }

    fn left(&self, rank: usize) {
        self.lock().left[rank] = true;
        self.changed.notify_all();
    }

    fn adopt(&self, failure: Failure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    /// The control stream of `rank` has closed: was that to be expected?
    fn closed(&self, rank: usize) {
        let state = self.lock();
        if state.left[rank] || state.failure.is_some() || state.stopping {
            return;
        }
        let doing: Vec<String> = state.doing.values().map(|call| format!("{call} of group {}", call.group)).collect();
        drop(state);
        let doing = if doing.is_empty() { "no call".to_owned() } else { doing.join(", ") };
        let message =
            format!("go on: {} ended without leaving (seen by rank {}, in {doing})", self.who(rank), self.rank);
        self.fail(Failure { rank, message });
    }

    // What it guards is whole between any two statements.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Writes a frame to everyone. It always fits: a process sends two in its life.
    fn tell(&self, kind: u8, payload: &[u8]) {
        let mut frame = vec![kind];
        frame.extend((payload.len() as u32).to_le_bytes());
        frame.extend(payload);
        for stream in self.control.iter().flatten() {
            // Who is gone need not be told.
            let _ = (&**stream).write_all(&frame);
        }
    }
}

/// What the thread owns.
pub(super) struct Watcher {
    pub(super) shared: Arc<Shared>,
    pub(super) listener: UnixListener,
    /// Becomes readable when there is something new to watch, or when it is time to stop.
    pub(super) woken: UnixStream,
}

impl Watcher {
    pub(super) fn start(self) -> io::Result<JoinHandle<()>> {
        self.listener.set_nonblocking(true)?;
        thread::Builder::new().name("comm-watch".to_owned()).spawn(move || self.run())
    }

    fn run(mut self) {
        loop {
            let (stopping, control) = {
                let state = self.shared.lock();
                (state.stopping, state.control.clone())
            };
            if stopping {
                return;
            }
            let Ok(ready) = self.await_news(&control) else { return };
            if ready[0] {
                let _ = self.woken.read(&mut [0; 64]);
            }
            if ready[1] {
                self.accept();
            }
            let spoke = control.iter().enumerate().filter_map(|(rank, stream)| Some((rank, stream.as_deref()?)));
            for ((rank, stream), _) in spoke.zip(&ready[2..]).filter(|(_, ready)| **ready) {
                self.hear(rank, stream);
            }
        }
    }

    /// Returns who has something to say: the waker, the listener, the control streams that there are.
    fn await_news(&self, control: &[Option<Arc<UnixStream>>]) -> io::Result<Vec<bool>> {
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(control.iter().flatten().map(|stream| PollFd::new(&**stream, PollFlags::IN)));
        loop {
            match poll(&mut fds, None) {
                Ok(_) => return Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn accept(&self) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        // The name of an abstract socket is no secret: only this user's processes are listened to.
        let ours = socket_peercred(&stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid());
        if !ours || stream.set_nonblocking(false).is_err() {
            return;
        }
        if let Ok((id, rank)) = read_hello(&stream) {
            self.shared.arrived(&id, rank, stream);
        }
    }

    fn hear(&self, rank: usize, stream: &UnixStream) {
        match read_frame(stream) {
            Ok((LEAVE, _)) => return self.shared.left(rank),
            Ok((FAIL, payload)) => {
                if let Some(failure) = decode(&payload) {
                    return self.shared.adopt(failure);
                }
            }
            _ => {}
        }
        self.shared.closed(rank);
        if let Some(stream) = self.shared.lock().control.get_mut(rank) {
            *stream = None;
        }
    }
}

/// What a caller says first: its rank and the group it calls for.
pub(super) fn hello(id: &str, rank: usize) -> Vec<u8> {
    [&(rank as u32).to_le_bytes()[..], &(id.len() as u32).to_le_bytes(), id.as_bytes()].concat()
}

fn read_hello(mut stream: &UnixStream) -> io::Result<(String, usize)> {
    stream.set_read_timeout(Some(INTRODUCE_WITHIN))?;
    let rank = read_u32(stream)? as usize;
    let mut id = vec![0; (read_u32(stream)? as usize).min(1 << 16)];
    stream.read_exact(&mut id)?;
    stream.set_read_timeout(None)?;
    Ok((String::from_utf8_lossy(&id).into_owned(), rank))
}

fn read_frame(mut stream: &UnixStream) -> io::Result<(u8, Vec<u8>)> {
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    let mut payload = vec![0; (read_u32(stream)? as usize).min(1 << 20)];
    stream.read_exact(&mut payload)?;
    Ok((kind[0], payload))
}

fn read_u32(mut stream: &UnixStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn encode(failure: &Failure) -> Vec<u8> {
    [&(failure.rank as u32).to_le_bytes()[..], failure.message.as_bytes()].concat()
}

fn decode(bytes: &[u8]) -> Option<Failure> {
    let (rank, message) = bytes.split_first_chunk()?;
    Some(Failure { rank: u32::from_le_bytes(*rank) as usize, message: String::from_utf8_lossy(message).into_owned() })
}
