//! Process group of a program, for synchronization and small exchanges on the host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow};
use candlewick_comm::{Collective, KeepAlive, RankFailure, World, exchange_bytes, is_first_on_node};

use crate::exit::ExitCode;

/// Payload of one rank in an exchange, or its error message.
pub type Payload = Result<Vec<u8>, String>;

/// Process group of all ranks of a program. Methods that return a `Result` are collective: all ranks call them.
#[derive(Clone)]
pub struct ProcessGroup {
    group: Arc<dyn Collective>,
    keep_alive: KeepAlive,
    is_first_of_node: bool,
    /// True if the last [`ProcessGroup::exchange_once`] failed on all ranks.
    failed_together: Arc<AtomicBool>,
}

impl ProcessGroup {
    /// Creates the process group of `world`.
    pub fn new(world: &World) -> Result<Self> {
        let group = world.group();
        let is_first_of_node = is_first_on_node(&*group)?;
        Ok(Self { group, keep_alive: world.keep_alive(), is_first_of_node, failed_together: Arc::default() })
    }

    /// Creates the process group of a single rank.
    pub fn solo() -> Self {
        let world = World::solo();
        let (group, keep_alive) = (world.group(), world.keep_alive());
        Self { group, keep_alive, is_first_of_node: true, failed_together: Arc::default() }
    }

    /// Returns this process group with exchanges over `group`, which has the same ranks in the same order.
    #[must_use]
    pub fn over(&self, group: Arc<dyn Collective>) -> Self {
        Self { group, ..self.clone() }
    }

    /// Returns the group of all ranks for CPU tensors.
    pub fn group(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.group)
    }

    /// Returns this rank.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Returns true on rank 0, which logs and writes shared files.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the handle that sends heartbeats while this rank is busy.
    pub fn keep_alive(&self) -> KeepAlive {
        self.keep_alive.clone()
    }

    /// Gathers the payloads of all ranks, in rank order. Fails only if the group has failed.
    pub fn exchange_payloads(&self, own: Payload) -> Result<Vec<Payload>> {
        let (mark, bytes) = match own {
            Ok(bytes) => (b'+', bytes),
            Err(reason) => (b'-', reason.into_bytes()),
        };
        let all = exchange_bytes(&*self.group, &[&[mark], bytes.as_slice()].concat())?;
        let payload = |bytes: Vec<u8>| match bytes.split_first() {
            Some((b'+', payload)) => Ok(payload.to_vec()),
            marked => Err(String::from_utf8_lossy(marked.map_or(&[], |(_, reason)| reason)).into_owned()),
        };
        Ok(all.into_iter().map(payload).collect())
    }

    /// Gathers the bytes of all ranks, in rank order. If a rank passes an error, all ranks fail with it.
    pub fn exchange(&self, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let payloads = self.exchange_payloads(own.as_ref().map_err(|error| format!("{error:#}")).cloned());
        // This rank's own error has more detail than its text.
        own?;
        let payloads = payloads?.into_iter().enumerate();
        let failed = |rank, reason| anyhow!("rank {rank}: {reason}").context(ExitCode::Peer);
        payloads.map(|(rank, payload)| payload.map_err(|reason| failed(rank, reason))).collect()
    }

    /// Returns this rank's value after all ranks have succeeded. If a rank passes an error, all ranks fail with it.
    pub fn all_ok<T>(&self, own: Result<T>) -> Result<T> {
        keep_value(own, |own| self.exchange(own))
    }

    /// Gathers the bytes of all ranks like [`ProcessGroup::exchange`], for programs that print an error once.
    ///
    /// If ranks pass equal errors, the first of them returns its own. The other ranks return one that names this rank.
    pub fn exchange_once(&self, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let own_text = own.as_ref().err().map(|error| format!("{error:#}"));
        let payloads = self.exchange_payloads(own.as_ref().cloned().map_err(|error| format!("{error:#}")));
        let is_own = |rank, reason: &str| rank == self.rank() || own_text.as_deref().is_some_and(|own| own != reason);
        let has_failed = payloads.as_ref().is_ok_and(|payloads| payloads.iter().any(Result::is_err));
        self.failed_together.store(has_failed, Ordering::Relaxed);
        match payloads {
            Err(failed) => own.and(Err(failed)),
            Ok(payloads) => match payloads.iter().enumerate().find_map(|(rank, it)| Some((rank, it.as_ref().err()?))) {
                None => Ok(payloads.into_iter().flatten().collect()),
                Some((rank, reason)) if is_own(rank, reason) => own.and(Err(elsewhere(rank))),
                Some((rank, _)) => Err(elsewhere(rank)),
            },
        }
    }

    /// Returns true if the last [`ProcessGroup::exchange_once`] failed on all ranks.
    pub fn has_failed_together(&self) -> bool {
        self.failed_together.load(Ordering::Relaxed)
    }

    /// Returns this rank's value after all ranks have succeeded. Errors are those of [`ProcessGroup::exchange_once`].
    pub fn all_ok_once<T>(&self, own: Result<T>) -> Result<T> {
        keep_value(own, |own| self.exchange_once(own))
    }

    /// Runs `f` on rank 0 while the other ranks wait, and returns its bytes on all ranks.
    ///
    /// If it fails, rank 0 returns its error, and the other ranks one that names rank 0.
    pub fn broadcast_from_first(&self, f: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let own = if self.is_first() { self.keep_alive().during(f) } else { Ok(Vec::new()) };
        self.exchange_once(own)?.into_iter().next().context("failed to receive from rank 0")
    }

    /// Runs `f` on rank 0 while the other ranks wait. If it fails, all ranks fail.
    pub fn on_first_rank<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.all_ok(if self.is_first() { self.keep_alive().during(f).map(Some) } else { Ok(None) })
    }

    /// Runs `f` on one rank per node and then on the others, which reuse its downloads and caches.
    ///
    /// If it fails on one rank, all ranks fail.
    pub fn one_rank_per_node_first<T>(&self, f: impl Fn() -> Result<T>) -> Result<T> {
        let first = self.on_first_rank_of_node(&f)?;
        self.on_other_ranks_of_node(first, f)
    }

    /// Runs `f` like [`ProcessGroup::one_rank_per_node_first`]. Errors are those of [`ProcessGroup::exchange_once`].
    pub fn one_rank_per_node_first_once<T>(&self, f: impl Fn() -> Result<T>) -> Result<T> {
        let is_first = self.is_first_of_node;
        let first = self.all_ok_once(is_first.then(|| self.keep_alive().during(&f)).transpose())?;
        self.all_ok_once(first.map_or_else(|| self.keep_alive().during(f), Ok))
    }

    /// Runs `f` on one rank per node while the others wait. If it fails, all ranks fail.
    pub fn on_first_rank_of_node<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.all_ok(if self.is_first_of_node { self.keep_alive().during(f).map(Some) } else { Ok(None) })
    }

    /// Runs `f` on the ranks without a value of [`ProcessGroup::on_first_rank_of_node`]. If it fails, all ranks fail.
    pub fn on_other_ranks_of_node<T>(&self, first: Option<T>, f: impl FnOnce() -> Result<T>) -> Result<T> {
        match first {
            Some(value) => self.all_ok(Ok(value)),
            None => self.all_ok(self.keep_alive().during(f)),
        }
    }
}

/// Returns this rank's value after `exchange` of its success or error.
fn keep_value<T>(own: Result<T>, exchange: impl FnOnce(Result<Vec<u8>>) -> Result<Vec<Vec<u8>>>) -> Result<T> {
    let (value, own) = match own {
        Ok(value) => (Some(value), Ok(Vec::new())),
        Err(error) => (None, Err(error)),
    };
    exchange(own)?;
    value.context("failed to report an error")
}

/// Returns the error of a rank that ends because of an error that rank `rank` prints.
fn elsewhere(rank: usize) -> Error {
    anyhow!("failed to continue: rank {rank} failed; see the log of rank {rank}").context(ExitCode::Peer)
}

/// Ends this rank after [`ProcessGroup::has_failed_together`], and returns the error to exit with.
///
/// Ranks without an error of their own wait for the exit of those that have one. A launcher that stops all ranks at the
/// first exit therefore gets the cause and its exit code.
pub fn exit_after_failed_rank(world: World, (code, error): (ExitCode, Error)) -> Error {
    match code {
        ExitCode::Peer => drop(world.await_failure(EXIT_WAIT)),
        // The connections close at the exit of this process, after it has printed the error.
        _ => std::mem::forget(world),
    }
    error
}

/// The longest wait of a rank for the exit of another one.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// Aborts the world because this rank exits with an error, and returns the error to exit with.
///
/// If another rank's failure caused the error, returns that of `ended_by` and aborts nothing.
pub fn fail(
    world: &World,
    program: &str,
    (code, error): (ExitCode, Error),
    ended_by: impl FnOnce(&RankFailure) -> Error,
) -> Error {
    match RankFailure::find_in(&*error) {
        Some(failure) => ended_by(failure),
        // The rank with the original error reports it.
        _ if code == ExitCode::Peer => error,
        _ => {
            world.fail(format!("{program}: {error:#}"));
            error
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Mutex;

    use candlewick_comm::{Error as CommError, Options, threads};

    use super::*;

    /// Runs `rank` on three ranks and returns their values.
    fn of_three<T: Send>(rank: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
        let run = |world: &World| Ok::<_, CommError>(rank(&ProcessGroup::new(world).unwrap()));
        threads::run(3, Options::default(), run).unwrap()
    }

    #[test]
    fn one_rank_per_node_runs_before_the_others() {
        let order = Mutex::new(Vec::new());
        let numbers = of_three(|ranks| {
            ranks.one_rank_per_node_first(|| {
                order.lock().unwrap().push(ranks.rank());
                Ok(ranks.rank())
            })
        });
        assert_eq!(numbers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(order.lock().unwrap()[0], 0);
    }

    #[test]
    fn a_rank_with_heartbeats_does_not_time_out() {
        let options = Options { timeout: Duration::from_millis(500), ..Options::default() };
        let rank = |world: &World| {
            let ranks = ProcessGroup::new(world)?;
            let slow = || Ok(world.await_failure(Duration::from_millis(1500)).is_none());
            let is_there = ranks.one_rank_per_node_first(slow)?;
            ranks.on_first_rank(slow)?;
            Ok::<_, Error>(is_there)
        };
        assert_eq!(threads::run(3, options, rank).unwrap(), [true; 3]);
    }

    #[test]
    fn if_one_rank_fails_all_ranks_fail_with_its_error() {
        for bad in 0..3 {
            let errors = of_three(|ranks| {
                assert_eq!(ranks.exchange(Ok(vec![ranks.rank() as u8])).unwrap(), [[0], [1], [2]]);
                let f = || if ranks.rank() == bad { Err(anyhow!("the disk is full")) } else { Ok(()) };
                format!("{:#}", ranks.one_rank_per_node_first(f).unwrap_err())
            });
            for (rank, error) in errors.iter().enumerate() {
                let own = rank == bad;
                let want = if own { "the disk is full".to_owned() } else { format!("rank {bad}: the disk is full") };
                assert!(error.contains(&want), "{errors:?}");
            }
        }
    }

    #[test]
    fn an_error_of_several_ranks_is_reported_by_the_first_of_them() {
        let errors = |of: [Option<&str>; 3]| {
            of_three(|ranks| {
                let own = of[ranks.rank()].map_or(Ok(()), |text| Err(anyhow!("{text}")));
                ranks.all_ok_once(own).map_or_else(|error| format!("{error:#}"), |()| String::new())
            })
        };
        let see = |rank: usize| format!("failed to continue: rank {rank} failed; see the log of rank {rank}");
        assert_eq!(errors([None; 3]), [""; 3]);
        for (of, want) in [
            ([Some("a"); 3], ["a".to_owned(), see(0), see(0)]),
            ([None, Some("a"), Some("a")], [see(1), "a".to_owned(), see(1)]),
            ([Some("a"), None, Some("b")], ["a".to_owned(), see(0), "b".to_owned()]),
        ] {
            assert!(errors(of).iter().zip(&want).all(|(got, want)| got.ends_with(want.as_str())), "{:?}", errors(of));
        }
    }

    #[test]
    fn all_ranks_get_the_bytes_of_rank_0() {
        let bytes = of_three(|ranks| ranks.broadcast_from_first(|| Ok(vec![ranks.rank() as u8, 7])).unwrap());
        assert_eq!(bytes, [[0, 7]; 3]);
    }
}
