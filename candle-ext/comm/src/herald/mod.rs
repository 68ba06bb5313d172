//! Ends a world through the store where its ranks met: for engines that have no other way to talk beside their tensors.
//!
//! The first failure that the store is told of stands. A thread of each rank waits for it, and leaves a sign of life meanwhile:
//! who is late is found out by these.

mod pulse;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::deadline::deadline;
use crate::fabric::{Alarm, Trouble};
use crate::store::{self, Client, Server};
use crate::{Call, Cause, Failure, Result};
use pulse::Pulse;

/// The key under which the world's first failure is found.
const FAILURE: &str = "failure";

/// The key that counts the ranks that have left.
const LEFT: &str = "left";

/// How often a rank shows that it lives.
const BEAT: Duration = Duration::from_secs(1);

/// How long the store may take to say whose failure was the first.
const ARBITRATE_WITHIN: Duration = Duration::from_secs(2);

/// Changes with what is said between ranks, so that different programs do not misread each other.
const PROTOCOL: &str = "candlewick-herald-2";

/// A rank's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) rank: usize,
    /// The number of ranks it was started for.
    pub(crate) size: usize,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Differs between any two devices.
    pub(crate) device: String,
}

impl About {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { rank: _, size, host, pid, device } = self;
        format!("{PROTOCOL}\n{size}\n{host}\n{pid}\n{device}").into_bytes()
    }

    pub(crate) fn decode(rank: usize, bytes: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(bytes).ok()?.split('\n').map(str::to_owned);
        if lines.next()? != PROTOCOL {
            return None;
        }
        let (size, host) = (lines.next()?.parse().ok()?, lines.next()?);
        Some(Self { rank, size, host, pid: lines.next()?.parse().ok()?, device: lines.next()? })
    }
}

/// `rank 2 (pid 4711 on node7)`
impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, host, pid, .. } = self;
        write!(f, "rank {rank} (pid {pid} on {host})")
    }
}

/// One rank's end. Dropping it leaves; the rank that keeps the store waits for the others to do so.
pub(crate) struct Herald {
    shared: Arc<Shared>,
    /// Asked when a failure is told, or somebody is late.
    arbiter: Client,
    /// The store, if it is this rank's.
    host: Option<Server>,
}

struct Shared {
    rank: usize,
    others: Vec<About>,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    pulse: Pulse,
    /// When this rank last showed that it is at work.
    worked: Option<Instant>,
    leaving: bool,
}

impl Herald {
    /// Begins to listen in `store` as rank `rank` of `others`.
    pub(crate) fn start(
        store: &Client,
        rank: usize,
        others: Vec<About>,
        host: Option<Server>,
        timeout: Duration,
    ) -> Result<Self> {
        let shared = Arc::new(Shared { rank, others, timeout, state: Mutex::default(), changed: Condvar::new() });
        let (listener, arbiter) = (store.reconnect()?, store.reconnect_within(ARBITRATE_WITHIN)?);
        let listens = Arc::clone(&shared);
        // It ends when this rank leaves, and nobody waits for that: it may be within a wait of its own.
        let listen = thread::Builder::new().name("comm-herald".to_owned()).spawn(move || listens.listen(&listener));
        listen.map_err(candle_core::Error::wrap)?;
        Ok(Self { shared, arbiter, host })
    }

    /// How long a rank may be silent.
    #[cfg(feature = "cuda")]
    pub(crate) fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// A connection of its own to the store, for what may wait.
    pub(crate) fn store(&self) -> Result<Client, Trouble> {
        self.arbiter.reconnect_within(self.shared.timeout).map_err(lost)
    }

    /// Notes that group `id` begins a call.
    pub(crate) fn begin(&self, id: &str, call: &Call) {
        self.shared.lock().pulse.note(id, call);
    }

    /// Says who keeps `call` of the group `id` of `members` from its end, after `waited`: looks at everyone's signs of life.
    /// Nobody does if one of them is at work on something else.
    pub(crate) fn late(&self, id: &str, members: &[usize], call: &Call, waited: Duration) -> Option<Trouble> {
        let own = members.iter().position(|rank| *rank == self.shared.rank).unwrap_or(0);
        let names: Vec<String> = members.iter().map(|rank| self.who(*rank)).collect();
        let before: Vec<_> = members.iter().map(|rank| self.pulse(*rank)).collect();
        if let Some(failure) = self.await_failure(3 * BEAT) {
            return Some(Trouble::Failed(failure));
        }
        let pulses: Vec<_> =
            before.into_iter().zip(members).map(|(before, rank)| [before, self.pulse(*rank)]).collect();
        let (rank, why) = pulse::blame(call, id, &names, own, &pulses)?;
        Some(Trouble::Overdue(rank, format!("not within {waited:?}: {why}")))
    }

    fn pulse(&self, rank: usize) -> Option<Pulse> {
        let is_there = self.arbiter.check(&[&pulse_key(rank)]).ok()?;
        is_there.then(|| Pulse::decode(&self.arbiter.get(&pulse_key(rank)).ok()?)).flatten()
    }

    /// Ends the world because this rank cannot be connected.
    #[cfg(feature = "cuda")]
    pub(crate) fn unconnected(&self, trouble: Trouble) -> Failure {
        let everyone: Vec<usize> = (0..self.shared.others.len()).collect();
        match trouble.tell(self, &everyone) {
            Ok((rank, cause, why)) => {
                let message = format!("connect rank {} to the others: {why}", self.rank());
                self.fail(Failure { rank, cause, message })
            }
            Err(failure) => failure,
        }
    }

    /// Waits until all other ranks have left: they need the store.
    fn await_others(&self) {
        let n_others = self.shared.others.len() as i64;
        let deadline = deadline(self.shared.timeout);
        let all_left = || self.arbiter.add(LEFT, 0).is_ok_and(|n_left| n_left >= n_others);
        while !all_left() && self.failure().is_none() && Instant::now() < deadline {
            thread::sleep(BEAT / 20);
        }
    }
}

impl Alarm for Herald {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn who(&self, rank: usize) -> String {
        self.shared.others[rank].to_string()
    }

    fn fail(&self, failure: Failure) -> Failure {
        if let Some(first) = self.failure() {
            return first;
        }
        let failure = failure.shortened();
        let first = self.arbiter.compare_set(FAILURE, &[], &failure.encode()).ok();
        self.shared.adopt(first.and_then(|bytes| Failure::decode(&bytes)).unwrap_or(failure))
    }

    fn failure(&self) -> Option<Failure> {
        self.shared.lock().failure.clone()
    }

    fn await_failure(&self, within: Duration) -> Option<Failure> {
        let waits = |state: &mut State| state.failure.is_none();
        let left = deadline(within).saturating_duration_since(Instant::now());
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), left, waits);
        waited.unwrap_or_else(PoisonError::into_inner).0.failure.clone()
    }

    fn beat(&self) {
        self.shared.lock().worked = Some(Instant::now());
    }
}

impl Drop for Herald {
    fn drop(&mut self) {
        self.shared.lock().leaving = true;
        let _ = self.arbiter.add(LEFT, 1);
        if self.host.is_some() {
            self.await_others();
        }
    }
}

impl Shared {
    /// Shows that this rank lives until the world ends, or this rank leaves.
    fn listen(&self, store: &Client) {
        loop {
            let pulse = {
                let mut state = self.lock();
                if state.leaving || state.failure.is_some() {
                    return;
                }
                state.pulse.beat += 1;
                // Longer than one sign of work and the next are apart.
                state.pulse.is_at_work = state.worked.is_some_and(|worked| worked.elapsed() < self.timeout / 4);
                state.pulse.encode()
            };
            let heard = store.set(&pulse_key(self.rank), &pulse).and_then(|()| store.wait_for(&[FAILURE], BEAT));
            let failure = match heard {
                Err(store::Error::Timeout { .. }) => continue,
                Ok(()) => store.get(FAILURE).ok().and_then(|bytes| Failure::decode(&bytes)),
                Err(_) => None,
            };
            if !self.lock().leaving {
                let (host, port) = (store.host(), store.port());
                let message = format!("go on: the store at {host}:{port} does not answer (seen by rank {})", self.rank);
                self.adopt(failure.unwrap_or(Failure { rank: 0, cause: Cause::Died, message }));
            }
            return;
        }
    }

    /// Keeps the world's first failure, and returns it.
    fn adopt(&self, failure: Failure) -> Failure {
        let first = self.lock().failure.get_or_insert(failure).clone();
        self.changed.notify_all();
        first
    }

    // What it guards is whole between any two statements.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn pulse_key(rank: usize) -> String {
    format!("{rank}/pulse")
}

fn lost(error: store::Error) -> Trouble {
    Trouble::Own(error.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::{Op, Reduce};

    fn about(rank: usize) -> About {
        About { rank, size: 3, host: "node7".to_owned(), pid: 40 + rank as u32, device: format!("GPU-{rank}") }
    }

    /// Three ranks that met in the store of the first.
    fn heralds(timeout: Duration) -> Vec<Herald> {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let store = Client::connect("127.0.0.1", server.port(), Duration::from_secs(60)).unwrap();
        let mut host = Some(server);
        let others: Vec<About> = (0..3).map(about).collect();
        (0..3).map(|rank| Herald::start(&store, rank, others.clone(), host.take(), timeout).unwrap()).collect()
    }

    #[test]
    fn a_rank_is_read_as_it_was_written() {
        assert_eq!(About::decode(2, &about(2).encode()), Some(about(2)));
        assert_eq!(about(2).to_string(), "rank 2 (pid 42 on node7)");
        assert_eq!(About::decode(2, b"another-program\n3\nnode7\n42\nGPU-2"), None);
    }

    #[test]
    fn the_first_failure_stands_on_all_ranks() {
        let heralds = heralds(Duration::from_secs(60));
        let fail =
            |rank: usize| heralds[rank].fail(Failure { rank, cause: Cause::Told, message: format!("read row {rank}") });
        let first = fail(1);
        assert_eq!((first.rank, fail(2)), (1, first.clone()));
        for herald in &heralds {
            assert_eq!(herald.await_failure(Duration::from_secs(60)), Some(first.clone()));
        }
    }

    #[test]
    fn the_store_is_kept_until_all_have_left() {
        let mut heralds = heralds(Duration::from_secs(60));
        let first = heralds.remove(0);
        let left = thread::spawn(move || drop(first));
        // The others still have it.
        assert!(heralds.iter().all(|herald| herald.store().unwrap().add("count", 1).is_ok()));
        assert!(!left.is_finished() && heralds.iter().all(|herald| herald.failure().is_none()));
        drop(heralds);
        left.join().unwrap();
    }

    #[test]
    fn a_store_that_goes_away_ends_the_world() {
        let mut heralds = heralds(Duration::ZERO);
        drop(heralds.remove(0));
        let failure = heralds[0].await_failure(Duration::from_secs(60)).unwrap();
        assert!(failure.rank == 0 && failure.message.contains("does not answer (seen by rank 1)"), "{failure}");
    }

    #[test]
    fn a_silent_rank_is_told_from_one_that_is_behind() {
        let mut heralds = heralds(Duration::from_secs(60));
        let call = |number| {
            let (op, dtype) = (Op::AllReduce(Reduce::Sum), Some(DType::F32));
            Call { group: "world".into(), number, op, dtype, shape: vec![3] }
        };
        let late = |herald: &Herald| match herald.late("world", &[0, 1, 2], &call(2), Duration::from_secs(7)) {
            Some(Trouble::Overdue(rank, why)) => (rank, why),
            other => panic!("{other:?}"),
        };
        for (herald, number) in heralds.iter().zip([2, 1, 2]) {
            herald.begin("world", &call(number));
        }
        let behind =
            "not within 7s: rank 1 (pid 41 on node7) has not begun it: it began all_reduce 1 (sum, f32 [3]) last";
        assert_eq!(late(&heralds[0]), (1, behind.to_owned()));
        // Its thread ends with it.
        drop(heralds.remove(2));
        let (rank, why) = late(&heralds[0]);
        assert_eq!((rank, why.as_str()), (2, "not within 7s: rank 2 (pid 42 on node7) shows no sign of life"));
        // The first waits for the others.
        drop(heralds.pop());
    }
}
