//! Watchdog over the rendezvous store, for backends without a control channel between ranks.
//!
//! A thread of each rank writes heartbeats to the store and polls for the first failure. After a timeout, the heartbeats show
//! which rank has not entered the call.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::{FAILURE, FailureMonitor, StoreArbiter};
use crate::liveness::{HeartbeatRecord, StalledCall, deadline};
use crate::peer::PeerInfo;
use crate::store::{self, Client, Server};
use crate::transport::{FailureChannel, TransportError};
use crate::{Cause, CollectiveCall, RankFailure, Result};

/// Store key that counts the ranks that have left.
const LEFT: &str = "left";

/// Interval between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Watchdog of one rank. Dropping it leaves the world; the rank that hosts the store waits until the others have left.
pub(crate) struct Watchdog {
    shared: Arc<WatchdogShared>,
    arbiter: StoreArbiter,
    /// Store, if this rank hosts it.
    host: Option<Server>,
}

/// State that the watchdog shares with its thread.
struct WatchdogShared {
    own: PeerInfo,
    peers: Vec<PeerInfo>,
    timeout: Duration,
    monitor: FailureMonitor<WatchdogState>,
}

#[derive(Default)]
struct WatchdogState {
    heartbeat: HeartbeatRecord,
    /// Time of the last heartbeat of this rank's own work.
    last_busy: Option<Instant>,
    leaving: bool,
}

impl Watchdog {
    /// Starts the watchdog thread of the rank `own` of `peers`.
    pub(crate) fn start(store: &Client, own: PeerInfo, peers: Vec<PeerInfo>, timeout: Duration) -> Result<Self> {
        let shared = Arc::new(WatchdogShared { own, peers, timeout, monitor: FailureMonitor::default() });
        let (heartbeats, arbiter) = (store.new_connection()?, StoreArbiter::connect(store)?);
        let beating = Arc::clone(&shared);
        // The thread ends after this rank has left. It is not joined, because it may be blocked in a wait.
        let beat = thread::Builder::new().name("comm-watchdog".to_owned()).spawn(move || beating.beat(&heartbeats));
        beat.map_err(candle_core::Error::wrap)?;
        Ok(Self { shared, arbiter, host: None })
    }

    /// Hosts the store, if given, until the other ranks have left.
    pub(crate) fn with_host(mut self, host: Option<Server>) -> Self {
        self.host = host;
        self
    }

    /// Returns the timeout of a call.
    #[cfg(feature = "cuda")]
    pub(crate) fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// Opens another connection to the store, for requests that may block.
    pub(crate) fn store(&self) -> Result<Client, TransportError> {
        self.arbiter
            .store()
            .new_connection_with_timeout(self.shared.timeout)
            .map_err(|error| TransportError::Local(error.to_string()))
    }

    /// Records that group `id` begins a call.
    pub(crate) fn begin(&self, id: &str, call: &CollectiveCall) {
        self.shared.monitor.lock().heartbeat.record(id, call);
    }

    /// Returns the rank because of which `call` of the group `id` of `members` has timed out, by the heartbeats of all ranks.
    ///
    /// Returns `None` while another rank is busy.
    pub(crate) fn diagnose_timeout(
        &self,
        id: &str,
        members: &[usize],
        call: &CollectiveCall,
    ) -> Option<TransportError> {
        let own = members.iter().position(|rank| *rank == self.rank()).unwrap_or(0);
        let names: Vec<String> = members.iter().map(|rank| self.who(*rank)).collect();
        let before: Vec<_> = members.iter().map(|rank| self.heartbeat(*rank)).collect();
        if let Some(failure) = self.await_failure(3 * HEARTBEAT_INTERVAL) {
            return Some(TransportError::Failed(failure));
        }
        let pair = |(before, rank): (_, &usize)| [before, self.heartbeat(*rank)];
        let heartbeats: Vec<_> = before.into_iter().zip(members).map(pair).collect();
        let stalled = StalledCall { call, group_id: id, names: &names, own };
        let (rank, why) = stalled.diagnose(&heartbeats)?;
        Some(TransportError::CallStalled(rank, format!("timed out after {:?}: {why}", self.shared.timeout)))
    }

    fn heartbeat(&self, rank: usize) -> Option<HeartbeatRecord> {
        let (store, key) = (self.arbiter.store(), heartbeat_key(rank));
        let is_there = store.check(&[&key]).ok()?;
        is_there.then(|| HeartbeatRecord::decode(&store.get(&key).ok()?)).flatten()
    }

    /// Waits until all other ranks have left, because they need the store.
    fn await_peers_left(&self) {
        let n_others = self.shared.peers.len() as i64;
        let deadline = deadline(self.shared.timeout);
        let all_left = || self.arbiter.store().add(LEFT, 0).is_ok_and(|n_left| n_left >= n_others);
        while !all_left() && self.failure().is_none() && Instant::now() < deadline {
            thread::sleep(HEARTBEAT_INTERVAL / 20);
        }
    }
}

impl FailureChannel for Watchdog {
    fn rank(&self) -> usize {
        self.shared.own.rank
    }

    fn who(&self, rank: usize) -> String {
        self.shared.peers[rank].to_string()
    }

    fn fail(&self, failure: RankFailure) -> RankFailure {
        // The other ranks read the failure from the store.
        self.shared.monitor.fail(failure, |own| self.arbiter.first(own), |_| ())
    }

    fn failure(&self) -> Option<RankFailure> {
        self.shared.monitor.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.shared.monitor.await_failure(within)
    }

    fn beat(&self) {
        self.shared.monitor.lock().last_busy = Some(Instant::now());
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.monitor.lock().leaving = true;
        let _ = self.arbiter.store().add(LEFT, 1);
        if self.host.is_some() {
            self.await_peers_left();
        }
    }
}

impl WatchdogShared {
    /// Writes heartbeats until the world fails or this rank leaves.
    fn beat(&self, store: &Client) {
        while let Some(heartbeat) = self.next_heartbeat() {
            let key = heartbeat_key(self.own.rank);
            let waited = store.set(&key, &heartbeat).and_then(|()| store.wait_for(&[FAILURE], HEARTBEAT_INTERVAL));
            let failure = match waited {
                Err(store::Error::Timeout { .. }) => continue,
                Ok(()) => store.get(FAILURE).ok().and_then(|bytes| RankFailure::decode(&bytes)),
                Err(_) => None,
            };
            if !self.monitor.lock().leaving {
                self.monitor.adopt(failure.unwrap_or_else(|| self.lost(store)), |_| ());
            }
            return;
        }
    }

    /// Returns the next heartbeat, or `None` after this rank has left or the world has failed.
    fn next_heartbeat(&self) -> Option<Vec<u8>> {
        let mut state = self.monitor.lock();
        if state.leaving || state.failure().is_some() {
            return None;
        }
        state.heartbeat.count += 1;
        // The interval between two heartbeats of busy work is shorter than this.
        state.heartbeat.is_busy = state.last_busy.is_some_and(|busy| busy.elapsed() < self.timeout / 4);
        Some(state.heartbeat.encode())
    }

    fn lost(&self, store: &Client) -> RankFailure {
        let (host, port, rank) = (store.host(), store.port(), self.own.rank);
        let message = format!(
            "continue: the store at {host}:{port} does not answer (seen by rank {rank}); its host process has exited"
        );
        RankFailure { rank: 0, cause: Cause::Exited, message }
    }
}

fn heartbeat_key(rank: usize) -> String {
    format!("{rank}/heartbeat")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::{Op, Reduce};

    fn peer(rank: usize) -> PeerInfo {
        let (host, pid) = ("node7".to_owned(), 40 + rank as u32);
        PeerInfo { host, pid, ..PeerInfo::this_process(rank, 3, format!("GPU-{rank}")) }
    }

    /// Starts the watchdogs of three ranks. The first hosts the store.
    fn watchdogs(timeout: Duration) -> Vec<Watchdog> {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let store = Client::connect("127.0.0.1", server.port(), Duration::from_secs(60)).unwrap();
        let mut host = Some(server);
        let peers: Vec<PeerInfo> = (0..3).map(peer).collect();
        let start = |rank| Watchdog::start(&store, peer(rank), peers.clone(), timeout).unwrap().with_host(host.take());
        (0..3).map(start).collect()
    }

    #[test]
    fn all_ranks_report_the_first_failure() {
        let watchdogs = watchdogs(Duration::from_secs(60));
        let fail = |rank: usize| {
            watchdogs[rank].fail(RankFailure { rank, cause: Cause::Reported, message: format!("read row {rank}") })
        };
        let first = fail(1);
        assert_eq!((first.rank, fail(2)), (1, first.clone()));
        for watchdog in &watchdogs {
            assert_eq!(watchdog.await_failure(Duration::from_secs(60)), Some(first.clone()));
        }
    }

    #[test]
    fn the_store_is_hosted_until_all_ranks_have_left() {
        let mut watchdogs = watchdogs(Duration::from_secs(60));
        let first = watchdogs.remove(0);
        let left = thread::spawn(move || drop(first));
        // The store still answers.
        assert!(watchdogs.iter().all(|watchdog| watchdog.store().unwrap().add("count", 1).is_ok()));
        assert!(!left.is_finished() && watchdogs.iter().all(|watchdog| watchdog.failure().is_none()));
        drop(watchdogs);
        left.join().unwrap();
    }

    #[test]
    fn a_lost_store_aborts_the_world() {
        let mut watchdogs = watchdogs(Duration::ZERO);
        drop(watchdogs.remove(0));
        let failure = watchdogs[0].await_failure(Duration::from_secs(60)).unwrap();
        assert!(failure.rank == 0 && failure.message.contains("does not answer (seen by rank 1)"), "{failure}");
    }

    #[test]
    fn a_rank_without_heartbeats_differs_from_one_that_has_not_entered_the_call() {
        let mut watchdogs = watchdogs(Duration::from_secs(60));
        let call = |number| {
            let (op, dtype) = (Op::AllReduce(Reduce::Sum), Some(DType::F32));
            CollectiveCall { group: "world".into(), number, op, dtype, shape: vec![3] }
        };
        let diagnose = |watchdog: &Watchdog| match watchdog.diagnose_timeout("world", &[0, 1, 2], &call(2)) {
            Some(TransportError::CallStalled(rank, why)) => (rank, why),
            other => panic!("{other:?}"),
        };
        for (watchdog, number) in watchdogs.iter().zip([2, 1, 2]) {
            watchdog.begin("world", &call(number));
        }
        let not_entered = "timed out after 60s: rank 1 (pid 41 on node7) has not entered the call; its last call was all_reduce 1 (sum, f32 [3])";
        assert_eq!(diagnose(&watchdogs[0]), (1, not_entered.to_owned()));
        // The heartbeats end with the watchdog.
        drop(watchdogs.remove(2));
        let (rank, why) = diagnose(&watchdogs[0]);
        assert_eq!((rank, why.as_str()), (2, "timed out after 60s: rank 2 (pid 42 on node7) sends no heartbeats"));
        // Drop the host of the store last: it waits for the others.
        drop(watchdogs.pop());
    }
}
