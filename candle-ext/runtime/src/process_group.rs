//! Process group of a program, for synchronization and small exchanges on the host.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use candlewick_comm::{Cause, Collective, KeepAlive, RankFailure, World, exchange_bytes, is_first_on_node};

use crate::exit::ExitCode;
use crate::peer_error::PeerError;

/// Payload of one rank in an exchange, or its error message.
pub type Payload = Result<Vec<u8>, String>;

/// Process group of all ranks of a program. Methods that return a `Result` are collective: all ranks call them.
///
/// If a rank passes an error, all ranks fail. The first rank with this error returns it. The other ranks with an equal
/// error, or with none, return a [`PeerError`].
#[derive(Clone)]
pub struct ProcessGroup {
    group: Arc<dyn Collective>,
    keep_alive: KeepAlive,
    is_first_of_node: bool,
}

impl ProcessGroup {
    /// Creates the process group of `world`.
    pub fn new(world: &World) -> Result<Self> {
        let group = world.group();
        let is_first_of_node = is_first_on_node(&*group)?;
        Ok(Self { group, keep_alive: world.keep_alive(), is_first_of_node })
    }

    /// Creates the process group of a single rank.
    pub fn solo() -> Self {
        let world = World::solo();
        let (group, keep_alive) = (world.group(), world.keep_alive());
        Self { group, keep_alive, is_first_of_node: true }
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

    /// Gathers the bytes of all ranks, in rank order.
    pub fn exchange(&self, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let own_text = own.as_ref().err().map(|error| format!("{error:#}"));
        let payloads = self.exchange_payloads(own.as_ref().cloned().map_err(|error| format!("{error:#}")));
        // This rank's own error has more detail than the failure of the group.
        let Ok(payloads) = payloads else { return own.and(payloads.map(|_| Vec::new())) };
        let is_first = |(_, it): &(usize, &Payload)| match (it, &own_text) {
            (Err(text), Some(own)) => text == own,
            (it, own) => it.is_err() && own.is_none(),
        };
        match payloads.iter().enumerate().find(is_first) {
            Some((rank, Err(text))) if rank != self.rank() => Err(PeerError::new(rank, text).into()),
            _ => own.and(Ok(payloads.into_iter().flatten().collect())),
        }
    }

    /// Returns this rank's value after all ranks have succeeded.
    pub fn all_ok<T>(&self, own: Result<T>) -> Result<T> {
        let (value, own) = match own {
            Ok(value) => (Some(value), Ok(Vec::new())),
            Err(error) => (None, Err(error)),
        };
        self.exchange(own)?;
        value.context("failed to report an error")
    }

    /// Runs `f` on rank 0 while the other ranks wait, and returns its bytes on all ranks.
    pub fn broadcast_from_first(&self, f: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let own = if self.is_first() { self.keep_alive().during(f) } else { Ok(Vec::new()) };
        self.exchange(own)?.into_iter().next().context("failed to receive from rank 0")
    }

    /// Runs `f` on rank 0 while the other ranks wait.
    pub fn on_first_rank<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.all_ok(if self.is_first() { self.keep_alive().during(f).map(Some) } else { Ok(None) })
    }

    /// Runs `f` on one rank per node and then on the others, which reuse its downloads and caches.
    pub fn one_rank_per_node_first<T>(&self, f: impl Fn() -> Result<T>) -> Result<T> {
        let first = self.on_first_rank_of_node(&f)?;
        self.on_other_ranks_of_node(first, f)
    }

    /// Runs `f` on one rank per node while the others wait.
    pub fn on_first_rank_of_node<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.all_ok(if self.is_first_of_node { self.keep_alive().during(f).map(Some) } else { Ok(None) })
    }

    /// Runs `f` on the ranks without a value of [`ProcessGroup::on_first_rank_of_node`].
    pub fn on_other_ranks_of_node<T>(&self, first: Option<T>, f: impl FnOnce() -> Result<T>) -> Result<T> {
        match first {
            Some(value) => self.all_ok(Ok(value)),
            None => self.all_ok(self.keep_alive().during(f)),
        }
    }
}

/// Prepares the exit of this rank because of `error`.
///
/// If another rank reported the cause, waits for that rank's exit. A launcher that stops all ranks at the first exit
/// therefore gets the cause and its exit code.
pub fn exit_after_peer(world: World, error: &Error) {
    let failure = world.failure().filter(|it| it.rank != world.rank());
    let reported = || failure.as_ref().filter(|it| it.cause == Cause::Reported);
    let peer = error.downcast_ref::<PeerError>().map(|peer| peer.rank).or_else(|| Some(reported()?.rank));
    match peer {
        Some(rank) => world.await_exit(rank, EXIT_WAIT),
        // All ranks know the rank that hangs or has exited. A hung one must not see this exit as another failure.
        None if failure.is_some() => drop(world),
        // The other ranks see this exit after the error has been printed.
        None => world.leave_at_exit(),
    }
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

    use anyhow::anyhow;
    use candlewick_comm::{Error as CommError, Options, threads};

    use super::*;
    use crate::exit::report;

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
        let timeout = Duration::from_secs(1);
        let options = Options { timeout, ..Options::default() };
        let rank = |world: &World| {
            let ranks = ProcessGroup::new(world)?;
            let slow = || Ok(world.await_failure(timeout * 3 / 2).is_none());
            let is_there = ranks.one_rank_per_node_first(slow)?;
            ranks.on_first_rank(slow)?;
            Ok::<_, Error>(is_there)
        };
        // A busy machine may suspend a waiting rank for longer than the timeout.
        let mut runs = (0..5).map(|_| threads::run(3, options, rank));
        assert!(runs.any(|run| run.is_ok_and(|are_there| are_there == [true; 3])), "each of five runs timed out");
    }

    #[test]
    fn if_one_rank_fails_all_ranks_fail_with_its_error() {
        for bad in 0..3 {
            let errors = of_three(|ranks| {
                assert_eq!(ranks.exchange(Ok(vec![ranks.rank() as u8])).unwrap(), [[0], [1], [2]]);
                let f = || if ranks.rank() == bad { Err(anyhow!("the disk is full")) } else { Ok(()) };
                ranks.one_rank_per_node_first(f).unwrap_err()
            });
            for (rank, error) in errors.iter().enumerate() {
                let peer = error.downcast_ref::<PeerError>().map(|peer| peer.rank);
                assert_eq!(peer, (rank != bad).then_some(bad), "{errors:?}");
                assert!(format!("{error:#}").ends_with("the disk is full"), "{errors:?}");
            }
        }
    }

    #[test]
    fn each_error_is_printed_once_with_its_rank() {
        let printed = |of: [Option<&str>; 3]| {
            of_three(|ranks| {
                let own = of[ranks.rank()].map_or(Ok(()), |text| Err(anyhow!("{text}")));
                ranks.all_ok(own).map_or_else(|error| report(&error), |()| String::new())
            })
        };
        let see = |rank: usize| format!("error: failed to continue: rank {rank} failed; see the log of rank {rank}\n");
        let own = |text: &str| format!("error: {text}\n");
        assert_eq!(printed([None; 3]), [""; 3]);
        for (of, want) in [
            ([Some("a"); 3], [own("a"), see(0), see(0)]),
            ([None, Some("a"), Some("a")], [see(1), own("a"), see(1)]),
            ([Some("a"), None, Some("b")], [own("a"), see(0), own("b")]),
        ] {
            assert_eq!(printed(of), want);
        }
    }

    #[test]
    fn all_ranks_get_the_bytes_of_rank_0() {
        let bytes = of_three(|ranks| ranks.broadcast_from_first(|| Ok(vec![ranks.rank() as u8, 7])).unwrap());
        assert_eq!(bytes, [[0, 7]; 3]);
    }
}
