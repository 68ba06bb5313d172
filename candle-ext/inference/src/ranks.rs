//! Ranks of a distributed evaluation.

use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use candlewick_comm::rank_env::RankEnv;
use candlewick_comm::{CommBackend, HostBackend, Options, RankFailure, World};
use candlewick_ops::{DeviceChoice, gpu_unavailable_reason};
use candlewick_parallel::ParallelGroups;
use candlewick_runtime::exit::{ExitCode, classify};
use candlewick_runtime::process_group::{ProcessGroup, exit_after_peer, fail};
use candlewick_runtime::progress::{ProgressDisplay, set_progress_display};

use crate::parallel_config::{InferenceGroup, ParallelConfig};

/// This rank of a distributed evaluation.
pub struct EvalRanks {
    /// Process group of all ranks, on the CPU.
    pub process: ProcessGroup,
    /// Parallelism of the model.
    pub parallel_config: ParallelConfig,
    /// Process groups, see [`ParallelConfig::groups`].
    pub groups: ParallelGroups,
}

/// Joins the process group, runs this rank's work and leaves the group. If it fails, all ranks fail.
///
/// `place` is the rank in the launch environment, and `choice` the device option.
pub fn run_on_ranks<T>(
    env: &RankEnv,
    parallel_config: ParallelConfig,
    choice: DeviceChoice,
    part: impl FnOnce(&EvalRanks, Device) -> Result<T>,
) -> Result<T> {
    parallel_config.check_ranks(env.world_size)?;
    if env.local_rank > 0 {
        // The first rank of a machine shows the progress of all.
        set_progress_display(ProgressDisplay::Hidden);
    }
    let device = device(choice, env.local_rank).open();
    let device = device.map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    // Ranks with a whole model each exchange text and numbers only, on the CPU.
    let engine = match parallel_config.is_single_rank() || device.is_cpu() {
        true => CommBackend::Host(HostBackend::of(env)),
        false => CommBackend::Nccl(device.clone()),
    };
    let world = World::join(env, &engine, Options::default()).map_err(|error| anyhow!("failed to {error}"))?;
    let done = EvalRanks::new(&world, parallel_config).and_then(|ranks| part(&ranks, device));
    let ended_by = |failure: &RankFailure| anyhow!("failed to {failure}").context(ExitCode::Peer);
    match done {
        Ok(value) => {
            world.leave().context("failed to end together with the other ranks")?;
            Ok(value)
        }
        Err(error) => {
            let error = fail(&world, "run", (classify(&error), error), ended_by);
            exit_after_peer(world, &error);
            Err(error)
        }
    }
}

impl EvalRanks {
    /// Creates the process groups of this rank. Collective: all ranks of `world` must call it.
    pub fn new(world: &World, parallel_config: ParallelConfig) -> Result<Self> {
        Ok(Self {
            process: ProcessGroup::new(world)?,
            parallel_config,
            groups: parallel_config.groups(&*world.group())?,
        })
    }

    /// Returns the process groups of batched inference.
    pub fn inference_group(&self) -> InferenceGroup {
        InferenceGroup::from_groups(self.process.group(), &self.groups, self.parallel_config.zero3)
            .with_keep_alive(self.process.keep_alive())
    }
}

/// Returns the device of a local rank: the GPU of its index, unless the user chose one.
fn device(choice: DeviceChoice, local_rank: usize) -> DeviceChoice {
    match choice {
        DeviceChoice::Auto if gpu_unavailable_reason().is_none() => DeviceChoice::Cuda(local_rank),
        choice => choice,
    }
}
