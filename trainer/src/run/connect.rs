//! The compute device and the process group of this rank.

use std::time::Duration;

use anyhow::{Error, Result, anyhow};
use candle_core::Device;
use candlewick_comm::rank_env::RankEnv;
use candlewick_comm::store::Error as StoreError;
use candlewick_comm::{CommBackend, Error as CommError, HostBackend, Options, World};
use candlewick_ops::{DeviceChoice, gpus};

use super::ranks::peer_failure;
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::recipe::DdpBackend;

/// Opens this rank's device and joins the process group.
pub fn connect(plan: &Plan, env: &RankEnv) -> Result<(World, Device)> {
    let device = device_of(plan.device, plan.ranks.backend, env.local_rank, gpus().len())?;
    let device = device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    let engine = engine(plan.ranks.backend, &device, env);
    let options = Options { timeout: Duration::from_secs(plan.ranks.timeout as u64), record: false };
    let world = World::join(env, &engine, options).map_err(|error| join_error(error, env))?;
    Ok((world, device))
}

/// Adds advice to an error of joining the process group.
fn join_error(error: CommError, env: &RankEnv) -> Error {
    let by_agent = env.master.as_ref().is_ok_and(|master| master.agent_hosts_store);
    let host = if by_agent { "the launcher" } else { "rank 0" };
    let (code, advice) = match &error {
        CommError::Failed(failure) => return peer_failure(failure),
        CommError::Absent { .. } => (ExitCode::Peer, "see its log; raise ddp_timeout if it starts slowly".to_owned()),
        CommError::OtherSize { .. } => (ExitCode::Usage, "start all ranks with the same WORLD_SIZE".to_owned()),
        CommError::Store(StoreError::Bind { .. } | StoreError::NotAStore { .. } | StoreError::Unanswered { .. }) => (
            ExitCode::Failed,
            "set another MASTER_PORT for all ranks, or stop the process that uses this one".to_owned(),
        ),
        CommError::Store(StoreError::Connect { .. }) => {
            let advice = format!("{host} hosts the store: see its log, and check MASTER_ADDR and MASTER_PORT");
            (ExitCode::Peer, advice)
        }
        CommError::Store(_) => (ExitCode::Peer, format!("{host} hosts the store and may have exited: see its log")),
        CommError::Join { .. } | CommError::OtherHost { .. } => {
            return anyhow!("failed to {error}").context(ExitCode::Usage);
        }
        _ => return anyhow!("failed to {error}"),
    };
    anyhow!("failed to {error}; {advice}").context(code)
}

/// Chooses the device of one of a machine's ranks: by default the GPU with its local rank. If a rank sees a single GPU,
/// its launcher selected that GPU.
fn device_of(choice: DeviceChoice, backend: DdpBackend, local_rank: usize, n_gpus: usize) -> Result<DeviceChoice> {
    match choice {
        DeviceChoice::Auto if n_gpus == 0 => Ok(DeviceChoice::Cpu),
        DeviceChoice::Auto | DeviceChoice::Cuda(0) if n_gpus > 0 => match backend {
            DdpBackend::Staged => Ok(DeviceChoice::Cuda(local_rank % n_gpus)),
            _ if local_rank < n_gpus => Ok(DeviceChoice::Cuda(local_rank)),
            _ if n_gpus == 1 => Ok(DeviceChoice::Cuda(0)),
            _ => {
                let why = "set ddp_backend: staged to let ranks share GPUs";
                let error = anyhow!("failed to start local rank {local_rank} of a machine with {n_gpus} GPUs; {why}");
                Err(error.context(ExitCode::Usage))
            }
        },
        other => Ok(other),
    }
}

fn engine(backend: DdpBackend, device: &Device, env: &RankEnv) -> CommBackend {
    match backend {
        DdpBackend::Local => CommBackend::Host(HostBackend::Local),
        DdpBackend::Mpi => CommBackend::Host(HostBackend::Mpi),
        DdpBackend::Nccl => CommBackend::Nccl(device.clone()),
        DdpBackend::Staged => CommBackend::Staged(HostBackend::of(env), device.clone()),
        DdpBackend::Auto if device.is_cpu() => CommBackend::Host(HostBackend::of(env)),
        DdpBackend::Auto => CommBackend::Nccl(device.clone()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candlewick_comm::rank_env::Launcher;

    #[test]
    fn each_rank_uses_the_gpu_of_its_local_rank() {
        use DdpBackend::{Auto, Nccl, Staged};
        use DeviceChoice::{Cpu, Cuda};
        for (choice, backend, local_rank, n_gpus, want) in [
            (DeviceChoice::Auto, Auto, 0, 0, Cpu),
            (DeviceChoice::Auto, Auto, 3, 0, Cpu),
            (Cpu, Auto, 3, 8, Cpu),
            (DeviceChoice::Auto, Auto, 3, 8, Cuda(3)),
            (Cuda(0), Nccl, 3, 8, Cuda(3)),
            (Cuda(0), Nccl, 3, 1, Cuda(0)),
            (Cuda(0), Staged, 3, 2, Cuda(1)),
            (Cuda(0), Staged, 3, 1, Cuda(0)),
            (Cuda(1), Staged, 3, 2, Cuda(1)),
            // There is no GPU: opening it reports why.
            (Cuda(0), Auto, 1, 0, Cuda(0)),
        ] {
            let found = device_of(choice, backend, local_rank, n_gpus).unwrap();
            assert_eq!(found, want, "{choice} {backend:?} {local_rank} of {n_gpus}");
        }
        let error = device_of(Cuda(0), Nccl, 2, 2).unwrap_err();
        assert!(
            format!("{error:#}").contains("local rank 2 of a machine with 2 GPUs; set ddp_backend: staged"),
            "{error:#}"
        );
    }

    #[test]
    fn auto_selects_a_transport_that_reaches_all_ranks() {
        let env =
            |launcher, local_world_size| RankEnv { launcher, local_world_size, world_size: 4, ..RankEnv::single() };
        for (launcher, local_world_size, want) in [
            (Launcher::Torchrun, 4, HostBackend::Local),
            (Launcher::OpenMpi, 4, HostBackend::Local),
            (Launcher::Torchrun, 2, HostBackend::Local),
            (Launcher::Slurm, 2, if HostBackend::HAS_MPI { HostBackend::Mpi } else { HostBackend::Local }),
            (Launcher::OpenMpi, 2, if HostBackend::HAS_MPI { HostBackend::Mpi } else { HostBackend::Local }),
        ] {
            let engine = engine(DdpBackend::Auto, &Device::Cpu, &env(launcher, local_world_size));
            assert!(
                matches!(engine, CommBackend::Host(host) if host == want),
                "{launcher} {local_world_size}: {engine:?}"
            );
        }
    }
}
