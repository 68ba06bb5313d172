//! This process among those that evaluate together.

use std::sync::Arc;

use anyhow::{Context, Error, Result, anyhow};
use candle_core::Device;
use candlewick_comm::place::Place;
use candlewick_comm::{AtWork, Collective, Engine, Failure, Host, Options, World, exchange_bytes, is_first_of_machine};
use candlewick_ops::{DeviceChoice, why_no_gpu};
use candlewick_parallel::Groups;

use crate::exit::{ExitCode, classify};
use crate::parts::{Crew, Parts};

/// This rank and the others.
pub struct Ranks<'w> {
    world: &'w World,
    is_first_here: bool,
    /// What each has of a model, and who has the rest.
    pub parts: Parts,
    /// See [`Parts::groups`].
    pub groups: Groups,
}

/// This process's place among those that were started together, as torchrun, MPI or Slurm tell it.
pub fn place() -> Result<Place> {
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let place = Place::from_variables(&variables.collect());
    place.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))
}

/// Joins those that were started together, as the variables of the process tell it, does this rank's part on the device that
/// `choice` means for it, and leaves. If it fails, the other ranks are told and fail, too. They have a model in `parts`.
pub fn together<T>(parts: Parts, choice: DeviceChoice, part: impl FnOnce(&Ranks, Device) -> Result<T>) -> Result<T> {
    let place = place()?;
    parts.check_ranks(place.world_size)?;
    let device = device(choice, place.local_rank).open();
    let device = device.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    // Ranks with a whole model each tell each other text and numbers, on the host.
    let engine = match parts.is_whole() || device.is_cpu() {
        true => Engine::Host(Host::of(&place)),
        false => Engine::Nccl(device.clone()),
    };
    let world = World::join(&place, &engine, Options::default()).map_err(|error| anyhow!("failed to {error}"))?;
    let value = Ranks::run(&world, parts, |ranks| part(ranks, device))?;
    world.leave().context("failed to end together with the other ranks")?;
    Ok(value)
}

impl<'w> Ranks<'w> {
    /// One rank of `world`. All ranks call it.
    pub fn new(world: &'w World, parts: Parts) -> Result<Self> {
        let is_first_here = is_first_of_machine(&*world.group())?;
        Ok(Self { world, is_first_here, parts, groups: parts.groups(&*world.group())? })
    }

    /// Returns those who answer together.
    pub fn crew(&self) -> Crew {
        Crew::of(self.group(), &self.groups, self.parts.in_shares).with_at_work(self.at_work())
    }

    /// What keeps the others waiting while this rank does something that takes long and waits for none of them.
    pub fn at_work(&self) -> AtWork {
        self.world.at_work()
    }

    /// Returns the group of all ranks.
    pub fn group(&self) -> Arc<dyn Collective> {
        self.world.group()
    }

    /// Tells whether this is the one rank that reports and writes.
    pub fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Does something on one rank of the machine before the others do it: they find what it has downloaded. If one fails,
    /// all do. All ranks call it.
    pub fn in_turn<T>(&self, what: impl Fn() -> Result<T>) -> Result<T> {
        let first = if self.is_first_here { self.at_work().during(&what).map(Some) } else { Ok(None) };
        match self.share(first)? {
            Some(value) => self.share(Ok(value)),
            None => self.share(self.at_work().during(what)),
        }
    }

    /// Lets the first rank do something, and the others wait until it is done; if it fails, all fail. All ranks call it.
    pub fn first_does(&self, what: impl FnOnce() -> Result<()>) -> Result<()> {
        self.share(if self.is_first() { self.at_work().during(what) } else { Ok(()) })
    }

    /// Passes on what this rank has come to, once no rank has failed; else all fail. All ranks call it.
    pub fn share<T>(&self, own: Result<T>) -> Result<T> {
        let told = own.as_ref().map_or_else(|error| format!("{error:#}"), |_| String::new());
        let all = exchange_bytes(&*self.group(), told.as_bytes());
        let value = own?;
        match all?.iter().enumerate().find(|(_, told)| !told.is_empty()) {
            None => Ok(value),
            Some((rank, told)) => {
                Err(anyhow!("rank {rank}: {}", String::from_utf8_lossy(told)).context(ExitCode::Peer))
            }
        }
    }

    fn run<T>(world: &World, parts: Parts, part: impl FnOnce(&Ranks) -> Result<T>) -> Result<T> {
        let done = Ranks::new(world, parts).and_then(|ranks| part(&ranks));
        done.map_err(|error| blame(world, error))
    }
}

/// The device of one of a machine's ranks: each takes a GPU of its own, unless one is named.
fn device(choice: DeviceChoice, local_rank: usize) -> DeviceChoice {
    match choice {
        DeviceChoice::Auto if why_no_gpu().is_none() => DeviceChoice::Cuda(local_rank),
        choice => choice,
    }
}

/// Tells the other ranks why this one ends; if it ends because another did, says so instead.
fn blame(world: &World, error: Error) -> Error {
    match Failure::behind(&*error) {
        // Only what another rank's end has caused here is that rank's failure.
        Some(failure) => anyhow!("failed to {failure}").context(ExitCode::Peer),
        _ if classify(&error) == ExitCode::Peer => error,
        _ => {
            world.fail(format!("evaluate: {error:#}"));
            error
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use candlewick_comm::{Error as CommError, threads};

    use super::*;

    /// What each of three ranks returns.
    fn of_three<T: Send>(rank: impl Fn(&Ranks) -> T + Sync) -> Vec<T> {
        let run = |world: &World| Ok::<_, CommError>(rank(&Ranks::new(world, Parts::WHOLE).unwrap()));
        threads::run(3, Options::default(), run).unwrap()
    }

    #[test]
    fn one_rank_goes_before_the_others() {
        let order = Mutex::new(Vec::new());
        let numbers = of_three(|ranks| {
            ranks.in_turn(|| {
                order.lock().unwrap().push(ranks.world.rank());
                Ok(ranks.world.rank())
            })
        });
        assert_eq!(numbers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(order.lock().unwrap()[0], 0);
    }

    #[test]
    fn a_rank_that_downloads_or_reports_is_waited_for_beyond_the_time_out() {
        let options = Options { timeout: Duration::from_millis(500), ..Options::default() };
        let rank = |world: &World| {
            let ranks = Ranks::new(world, Parts::WHOLE)?;
            let slow = || Ok(world.await_failure(Duration::from_millis(1500)).is_none());
            let is_there = ranks.in_turn(slow)?;
            ranks.first_does(|| slow().map(drop))?;
            Ok::<_, Error>(is_there)
        };
        assert_eq!(threads::run(3, options, rank).unwrap(), [true; 3]);
    }

    #[test]
    fn if_one_fails_all_fail_with_its_reason() {
        for bad in 0..3 {
            let errors = of_three(|ranks| {
                let what = || if ranks.world.rank() == bad { Err(anyhow!("the disk is full")) } else { Ok(()) };
                format!("{:#}", ranks.in_turn(what).unwrap_err())
            });
            for (rank, error) in errors.iter().enumerate() {
                let said =
                    if rank == bad { "the disk is full".to_owned() } else { format!("rank {bad}: the disk is full") };
                assert!(error.contains(&said), "{errors:?}");
            }
        }
    }
}
