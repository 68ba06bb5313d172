//! How a process gets into the world that it was started for, and what connects it there.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;

use crate::place::{Master, Place, Source};
use crate::store::{Client, Server};
use crate::{Error, Options, Result, Staged, World};

/// What connects the ranks of a world.
#[derive(Clone, Debug)]
pub enum Engine {
    /// Tensors of the CPU travel.
    Host(Host),
    /// Tensors of this GPU travel, by NCCL: one rank a GPU. Those of the CPU go over it.
    Nccl(Device),
    /// Tensors of this device travel through the host: several ranks may have one GPU. See [`Staged`].
    Staged(Host, Device),
}

/// What connects ranks that compute on the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// Processes of one machine, with nothing installed.
    Local,
    /// Whatever an installed MPI reaches. Only in builds with the feature `mpi`.
    Mpi,
}

impl Host {
    /// Whether this build has what connects ranks by MPI.
    pub const HAS_MPI: bool = cfg!(feature = "mpi");

    /// Returns what reaches all ranks of `place`: MPI if it or Slurm has started them on several machines. The nodes of a launcher
    /// may be one machine; if not, `Local` says so.
    pub fn of(place: &Place) -> Self {
        match place.source {
            Source::OpenMpi | Source::Pmi | Source::Slurm if Self::HAS_MPI && !place.is_one_machine() => Self::Mpi,
            _ => Self::Local,
        }
    }
}

impl Engine {
    /// Whether this build has what connects GPUs.
    pub const HAS_NCCL: bool = cfg!(feature = "cuda");
}

impl World {
    /// Joins the world of `place` by `engine`, which is the same on all ranks. But for MPI they meet in a store; rank 0 hosts
    /// it, unless the launcher does.
    pub fn join(place: &Place, engine: &Engine, options: Options) -> Result<Self> {
        match (engine, place.world_size) {
            (_, 1) => Ok(Self::solo()),
            (Engine::Host(host), _) => join_on_host(place, *host, options),
            (Engine::Nccl(device), _) => join_nccl(place, device, options),
            (Engine::Staged(host, device), _) => {
                Ok(join_on_host(place, *host, options)?.over(|group| Arc::new(Staged::new(group, device))))
            }
        }
    }
}

fn join_on_host(place: &Place, host: Host, options: Options) -> Result<World> {
    match host {
        Host::Local => join_local(place, options),
        Host::Mpi => join_mpi(place, options),
    }
}

/// How long the store outlives a failure of its rank to join: others find there why they cannot.
const LINGER: Duration = Duration::from_secs(1);

/// The store where the ranks meet, and this rank's end of it.
fn meet(place: &Place, options: Options) -> Result<(Client, Option<Server>)> {
    let master = place.master.as_ref().map_err(|error| refuse(place, error.to_string()))?;
    let Master { addr, port, agent_hosts_store } = master;
    let host = (place.rank == 0 && !agent_hosts_store).then(|| Server::bind_any(*port)).transpose()?;
    let store = Client::connect(addr, *port, options.timeout)?;
    Ok((store.with_prefix(&format!("candlewick/{}", place.restart)), host))
}

fn refuse(place: &Place, why: String) -> Error {
    Error::Join { rank: place.rank, size: place.world_size, why }
}

#[cfg(target_os = "linux")]
fn join_local(place: &Place, options: Options) -> Result<World> {
    let (store, host) = meet(place, options)?;
    let joined = crate::local::join(&store, place.rank, place.world_size, options);
    if joined.is_err() && host.is_some() {
        std::thread::sleep(LINGER);
    }
    Ok(joined?.with_host(host))
}

#[cfg(not(target_os = "linux"))]
fn join_local(place: &Place, _options: Options) -> Result<World> {
    Err(refuse(place, "processes of one machine are connected on Linux only".to_owned()))
}

#[cfg(feature = "mpi")]
fn join_mpi(place: &Place, options: Options) -> Result<World> {
    crate::mpi::join(place.rank, place.world_size, options)
}

#[cfg(not(feature = "mpi"))]
fn join_mpi(place: &Place, _options: Options) -> Result<World> {
    Err(refuse(place, "this program was built without the feature `mpi`".to_owned()))
}

#[cfg(feature = "cuda")]
fn join_nccl(place: &Place, device: &Device, options: Options) -> Result<World> {
    let (store, host) = meet(place, options)?;
    crate::nccl::join(&store, place.rank, place.world_size, device, host, options)
}

#[cfg(not(feature = "cuda"))]
fn join_nccl(place: &Place, _device: &Device, _options: Options) -> Result<World> {
    Err(refuse(place, "this program was built without the feature `cuda`".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::{Reduce, exchange_bytes};
    use candle_core::Tensor;

    /// Joins three ranks by way of a launcher's store.
    #[cfg(target_os = "linux")]
    #[track_caller]
    fn check(engine: &Engine) {
        let server = Server::bind("127.0.0.1:0").expect("there is a port");
        let master = Master { addr: "127.0.0.1".to_owned(), port: server.port(), agent_hosts_store: true };
        let join = |rank| {
            let place =
                Place { rank, world_size: 3, local_world_size: 3, master: Ok(master.clone()), ..Place::alone() };
            let engine = engine.clone();
            thread::spawn(move || {
                let options = Options { timeout: Duration::from_secs(60), record: false };
                let world = World::join(&place, &engine, options)?;
                let sum = world.group().all_reduce(&Tensor::new(rank as f32, &Device::Cpu)?, Reduce::Sum)?;
                let told = exchange_bytes(&*world.group(), &vec![rank as u8; rank])?;
                Ok::<_, Error>((sum.to_scalar::<f32>()?, told))
            })
        };
        let ranks: Vec<_> = (0..3).map(join).collect();
        for rank in ranks {
            let (sum, told) = rank.join().expect("the rank did not panic").expect("it joins");
            assert_eq!((sum, told), (3.0, vec![vec![], vec![1], vec![2, 2]]));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_find_each_other_through_the_launchers_store() {
        check(&Engine::Host(Host::Local));
        check(&Engine::Staged(Host::Local, Device::Cpu));
    }

    #[test]
    fn one_rank_asks_nobody() -> Result<()> {
        for engine in [Engine::Host(Host::Local), Engine::Host(Host::Mpi), Engine::Staged(Host::Local, Device::Cpu)] {
            let world = World::join(&Place::alone(), &engine, Options::default())?;
            assert_eq!((world.rank(), world.size()), (0, 1));
            assert_eq!(exchange_bytes(&*world.group(), b"mine")?, [b"mine"]);
        }
        Ok(())
    }

    #[test]
    fn what_is_not_built_in_says_so() {
        let place = Place { world_size: 2, ..Place::alone() };
        let said = |engine| World::join(&place, &engine, Options::default()).err().map(|error| error.to_string());
        if !Host::HAS_MPI {
            assert!(said(Engine::Host(Host::Mpi)).is_some_and(|said| said.ends_with("without the feature `mpi`")));
        }
        if !Engine::HAS_NCCL {
            assert!(said(Engine::Nccl(Device::Cpu)).is_some_and(|said| said.ends_with("without the feature `cuda`")));
        }
    }
}
