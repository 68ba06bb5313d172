//! Selection of the backend, and initialization of a rank's process group.

use std::sync::Arc;
use std::time::Duration;

use candle_core::Device;

use crate::rank_env::{Launcher, Master, RankEnv};
#[cfg(any(target_os = "linux", feature = "cuda"))]
use crate::rendezvous::PeerRendezvous;
use crate::store::{Client, Server, StoreSecret};
use crate::{Error, Options, Result, StagedGroup, World};

/// Communication backend of a world.
#[derive(Clone, Debug)]
pub enum CommBackend {
    /// Sends CPU tensors.
    Host(HostBackend),
    /// Sends tensors of this GPU over NCCL, one rank per GPU. CPU tensors are copied through the GPU.
    Nccl(Device),
    /// Sends tensors of this device through host memory. Several ranks may share one GPU. See [`StagedGroup`].
    Staged(HostBackend, Device),
}

/// Communication backend of CPU tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostBackend {
    /// Unix sockets between the processes of one node.
    Local,
    /// Installed MPI. Requires a build with the feature `mpi`.
    Mpi,
}

impl HostBackend {
    /// True if this build has the feature `mpi`.
    pub const HAS_MPI: bool = cfg!(feature = "mpi");

    /// Returns the backend that connects all ranks of `env`: MPI if `mpirun` or `srun` started them on several nodes.
    ///
    /// The agents of torchrun may share one node, so its ranks use `Local`, which fails if they do not.
    pub fn of(env: &RankEnv) -> Self {
        match env.launcher {
            Launcher::OpenMpi | Launcher::Pmi | Launcher::Slurm if Self::HAS_MPI && !env.is_single_node() => Self::Mpi,
            _ => Self::Local,
        }
    }
}

impl CommBackend {
    /// True if this build has the feature `cuda`.
    pub const HAS_NCCL: bool = cfg!(feature = "cuda");
}

impl World {
    /// Joins the world as the rank in `env`. All ranks pass the same `backend`.
    ///
    /// The ranks rendezvous in a store, which rank 0 hosts unless the launcher's agent does. MPI needs no store.
    pub fn join(env: &RankEnv, backend: &CommBackend, options: Options) -> Result<Self> {
        match (backend, env.world_size) {
            (_, 1) => Ok(Self::solo()),
            (CommBackend::Host(host), _) => join_on_host(env, *host, options),
            (CommBackend::Nccl(device), _) => join_nccl(env, device, options),
            (CommBackend::Staged(host, device), _) => {
                Ok(join_on_host(env, *host, options)?.wrap_group(|group| Arc::new(StagedGroup::new(group, device))))
            }
        }
    }
}

fn join_on_host(env: &RankEnv, host: HostBackend, options: Options) -> Result<World> {
    match host {
        HostBackend::Local => join_local(env, options),
        HostBackend::Mpi => join_mpi(env, options),
    }
}

/// Lifetime of the store after its rank has failed to join. The other ranks read the reason from it.
const STORE_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Connects to the rendezvous store, and hosts it on rank 0 unless the launcher's agent does.
fn connect_to_store(env: &RankEnv, options: Options) -> Result<(Client, Option<Server>)> {
    let master = env.master.as_ref().map_err(|error| join_error(env, error.to_string()))?;
    let Master { addr, port, agent_hosts_store } = master;
    let secret = env.store_secret.clone();
    if secret.is_none() && !agent_hosts_store && !env.is_single_node() {
        let variable = StoreSecret::VARIABLE;
        return Err(join_error(env, format!("{variable} is not set; set it to one secret for the ranks of all nodes")));
    }
    let is_host = env.rank == 0 && !agent_hosts_store;
    let host = is_host.then(|| Server::bind_for(addr, *port, secret.clone())).transpose()?;
    let store = Client::connect_with_secret(addr, *port, options.timeout, secret)?;
    Ok((store.with_prefix(&format!("candlewick/{}", env.restart)), host))
}

fn join_error(env: &RankEnv, why: String) -> Error {
    Error::Join { rank: env.rank, size: env.world_size, why }
}

/// Begins the rendezvous of the rank in `env`. Its log lines name the launcher.
#[cfg(any(target_os = "linux", feature = "cuda"))]
fn rendezvous(env: &RankEnv, store: &Client, options: Options) -> Result<PeerRendezvous> {
    let rendezvous = PeerRendezvous::new(store.clone(), env.rank, env.world_size, options.timeout)?;
    Ok(rendezvous.with_launcher(env.launcher))
}

#[cfg(target_os = "linux")]
fn join_local(env: &RankEnv, options: Options) -> Result<World> {
    let (store, host) = connect_to_store(env, options)?;
    let joined = rendezvous(env, &store.with_prefix("local"), options)
        .and_then(|rendezvous| crate::local::join_peers(&rendezvous, options));
    if joined.is_err() && host.is_some() {
        std::thread::sleep(STORE_GRACE_PERIOD);
    }
    Ok(joined?.with_host(host))
}

#[cfg(not(target_os = "linux"))]
fn join_local(env: &RankEnv, _options: Options) -> Result<World> {
    Err(join_error(env, "the backend `local` is available on Linux only; use `mpi`".to_owned()))
}

#[cfg(feature = "mpi")]
fn join_mpi(env: &RankEnv, options: Options) -> Result<World> {
    crate::mpi::join(env.rank, env.world_size, options)
}

#[cfg(not(feature = "mpi"))]
fn join_mpi(env: &RankEnv, _options: Options) -> Result<World> {
    Err(join_error(env, "this build lacks MPI; rebuild with the feature `mpi`".to_owned()))
}

#[cfg(feature = "cuda")]
fn join_nccl(env: &RankEnv, device: &Device, options: Options) -> Result<World> {
    let (store, host) = connect_to_store(env, options)?;
    crate::nccl::join_peers(&rendezvous(env, &store.with_prefix("nccl"), options)?, device, host, options)
}

#[cfg(not(feature = "cuda"))]
fn join_nccl(env: &RankEnv, _device: &Device, _options: Options) -> Result<World> {
    Err(join_error(env, "this build lacks NCCL; rebuild with the feature `cuda`".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::{Reduce, exchange_bytes};
    use candle_core::Tensor;

    /// Joins three ranks through a launcher's store.
    #[cfg(target_os = "linux")]
    #[track_caller]
    fn check(backend: &CommBackend) {
        let server = Server::bind("127.0.0.1:0").expect("a port is free");
        let master = Master { addr: "127.0.0.1".to_owned(), port: server.port(), agent_hosts_store: true };
        let join = |rank| {
            let env =
                RankEnv { rank, world_size: 3, local_world_size: 3, master: Ok(master.clone()), ..RankEnv::single() };
            let backend = backend.clone();
            thread::spawn(move || {
                let options = Options { timeout: Duration::from_secs(60), record: false };
                let world = World::join(&env, &backend, options)?;
                let sum = world.group().all_reduce(&Tensor::new(rank as f32, &Device::Cpu)?, Reduce::Sum)?;
                let gathered = exchange_bytes(&*world.group(), &vec![rank as u8; rank])?;
                Ok::<_, Error>((sum.to_scalar::<f32>()?, gathered))
            })
        };
        let ranks: Vec<_> = (0..3).map(join).collect();
        for rank in ranks {
            let (sum, gathered) = rank.join().expect("the rank did not panic").expect("it joins");
            assert_eq!((sum, gathered), (3.0, vec![vec![], vec![1], vec![2, 2]]));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_rendezvous_in_the_launchers_store() {
        check(&CommBackend::Host(HostBackend::Local));
        check(&CommBackend::Staged(HostBackend::Local, Device::Cpu));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ranks_of_several_nodes_need_a_secret_of_their_own_store() {
        for rank in 0..2 {
            let master = Master { addr: "127.0.0.1".to_owned(), port: 1, agent_hosts_store: false };
            let env = RankEnv { rank, world_size: 2, master: Ok(master), ..RankEnv::single() };
            let error = World::join(&env, &CommBackend::Host(HostBackend::Local), Options::default()).err();
            let message = error.expect("the secret is missing").to_string();
            assert!(message.contains("CANDLEWICK_STORE_SECRET is not set"), "{message}");
        }
    }

    #[test]
    fn one_rank_needs_no_store() -> Result<()> {
        for backend in [
            CommBackend::Host(HostBackend::Local),
            CommBackend::Host(HostBackend::Mpi),
            CommBackend::Staged(HostBackend::Local, Device::Cpu),
        ] {
            let world = World::join(&RankEnv::single(), &backend, Options::default())?;
            assert_eq!((world.rank(), world.size()), (0, 1));
            assert_eq!(exchange_bytes(&*world.group(), b"mine")?, [b"mine"]);
        }
        Ok(())
    }

    #[test]
    fn a_backend_without_its_feature_names_the_feature() {
        let env = RankEnv { world_size: 2, ..RankEnv::single() };
        let message = |backend| World::join(&env, &backend, Options::default()).err().map(|error| error.to_string());
        if !HostBackend::HAS_MPI {
            assert!(
                message(CommBackend::Host(HostBackend::Mpi))
                    .is_some_and(|text| text.ends_with("with the feature `mpi`"))
            );
        }
        if !CommBackend::HAS_NCCL {
            assert!(
                message(CommBackend::Nccl(Device::Cpu)).is_some_and(|text| text.ends_with("with the feature `cuda`"))
            );
        }
    }
}
