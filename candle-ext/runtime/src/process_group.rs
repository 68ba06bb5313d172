//! The ranks of a program, with the ways in which they wait for each other on the host.

use std::sync::Arc;

use anyhow::{Context, Error, Result, anyhow};
use candlewick_comm::{Collective, KeepAlive, RankFailure, World, exchange_bytes, is_first_on_node};

use crate::exit::ExitCode;

/// The payload of one rank in an exchange, or the error that it reports.
pub type Payload = Result<Vec<u8>, String>;

/// One rank of a program and the others. Every method that returns a `Result` is called by all ranks.
#[derive(Clone)]
pub struct ProcessGroup {
    group: Arc<dyn Collective>,
    keep_alive: KeepAlive,
    is_first_of_node: bool,
}

impl ProcessGroup {
    /// Makes one of the ranks of `world`.
    pub fn new(world: &World) -> Result<Self> {
        let group = world.group();
        let is_first_of_node = is_first_on_node(&*group)?;
        Ok(Self { group, keep_alive: world.keep_alive(), is_first_of_node })
    }

    /// Makes the only rank of a program.
    pub fn solo() -> Self {
        let world = World::solo();
        Self { group: world.group(), keep_alive: world.keep_alive(), is_first_of_node: true }
    }

    /// Returns these ranks with exchanges over `group`, which has all of them in the same order.
    #[must_use]
    pub fn over(&self, group: Arc<dyn Collective>) -> Self {
        Self { group, ..self.clone() }
    }

    /// Returns the group of all ranks, on the host.
    pub fn group(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.group)
    }

    /// Returns this rank's number.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Tells whether this is the rank that reports, and writes what is written once.
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// Returns the guard that extends the other ranks' time-out while this one is busy.
    pub fn keep_alive(&self) -> KeepAlive {
        self.keep_alive.clone()
    }

    /// Gives every rank the payload of each rank, in rank order. Fails only if the group has failed.
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

    /// Gives every rank the bytes of each rank, in rank order. If a rank failed, all fail with its reason.
    pub fn exchange(&self, own: Result<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let payloads = self.exchange_payloads(own.as_ref().map_err(|error| format!("{error:#}")).cloned());
        // A rank's own error says more than the text of it.
        own?;
        let payloads = payloads?.into_iter().enumerate();
        let failed = |rank, reason| anyhow!("rank {rank}: {reason}").context(ExitCode::Peer);
        payloads.map(|(rank, payload)| payload.map_err(|reason| failed(rank, reason))).collect()
    }

    /// Returns this rank's value once no rank has failed. If a rank failed, all fail with its reason.
    pub fn all_ok<T>(&self, own: Result<T>) -> Result<T> {
        let (value, own) = match own {
            Ok(value) => (Some(value), Ok(Vec::new())),
            Err(error) => (None, Err(error)),
        };
        self.exchange(own)?;
        value.context("failed to report an error")
    }

    /// Runs `f` on the first rank while the others wait. If it fails, all fail.
    pub fn on_first_rank<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        self.all_ok(if self.is_first() { self.keep_alive().during(f).map(Some) } else { Ok(None) })
    }

    /// Runs `f` on one rank of each node before the others, which find its downloads and caches. If a rank fails, all fail.
    pub fn one_rank_per_node_first<T>(&self, f: impl Fn() -> Result<T>) -> Result<T> {
        let first = if self.is_first_of_node { self.keep_alive().during(&f).map(Some) } else { Ok(None) };
        match self.all_ok(first)? {
            Some(value) => self.all_ok(Ok(value)),
            None => self.all_ok(self.keep_alive().during(f)),
        }
    }
}

/// Reports to the other ranks of `world` that this one ends with an error of an exit code. Returns the error to end with: that
/// of `ended_by` if another rank's failure caused it.
pub fn fail(
    world: &World,
    program: &str,
    (code, error): (ExitCode, Error),
    ended_by: impl FnOnce(&RankFailure) -> Error,
) -> Error {
    match RankFailure::find_in(&*error) {
        Some(failure) => ended_by(failure),
        // The rank whose error this is reports it.
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
    use std::time::Duration;

    use candlewick_comm::{Error as CommError, Options, threads};

    use super::*;

    /// Returns the values of three ranks.
    fn of_three<T: Send>(rank: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
        let run = |world: &World| Ok::<_, CommError>(rank(&ProcessGroup::new(world).unwrap()));
        threads::run(3, Options::default(), run).unwrap()
    }

    #[test]
    fn one_rank_of_a_node_goes_before_the_others() {
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
    fn a_busy_rank_is_waited_for_beyond_the_time_out() {
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
    fn if_one_rank_fails_all_fail_with_its_reason() {
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
}
