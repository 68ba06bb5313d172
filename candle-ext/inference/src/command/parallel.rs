//! Parallelism options of the command line.

use anyhow::{Result, anyhow, ensure};
use clap::Args;

use crate::parallel_config::ParallelConfig;
use crate::ranks::EvalRanks;
use candlewick_runtime::exit::ExitCode;

/// Sizes of tensor and pipeline parallelism, and the ZeRO stage.
#[derive(Clone, Debug, Args)]
pub struct ParallelArgs {
    /// Tensor-parallel size
    #[arg(long, alias = "tensor_parallel_size", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    tensor_parallel_size: usize,
    /// Pipeline-parallel size
    #[arg(long, alias = "pipeline_parallel_size", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pipeline_parallel_size: usize,
    /// Expert-parallel size: ranks that divide the experts of each layer
    #[arg(long, alias = "expert_parallel_size", value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    expert_parallel_size: usize,
    /// ZeRO stage: 3 shards the weights over all ranks, 0 replicates them
    #[arg(long, alias = "zero_stage", value_name = "STAGE", default_value = "0", value_parser = ["0", "3"])]
    zero_stage: String,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of at least 1".into())
}

impl ParallelArgs {
    /// Returns the parallelism of one model replica.
    pub fn config(&self) -> ParallelConfig {
        ParallelConfig {
            tensor_parallel: self.tensor_parallel_size,
            pipeline_parallel: self.pipeline_parallel_size,
            expert_parallel: self.expert_parallel_size,
            zero3: self.zero_stage == "3",
        }
    }
}

/// Checks that all ranks compute one conversation together.
pub(super) fn check_single_replica(ranks: &EvalRanks) -> Result<()> {
    let group = ranks.inference_group();
    let (n_ranks, n_in_replica) = (group.world.size(), group.replica.size());
    ensure!(
        group.n_independent_replicas() == 1,
        anyhow!(
            "failed to start: a chat uses one copy of the model, and {n_ranks} ranks hold {}; start {n_in_replica}, or \
             divide the model over all with --tensor-parallel-size, --pipeline-parallel-size or --zero-stage 3",
            n_ranks / n_in_replica
        )
        .context(ExitCode::Usage)
    );
    Ok(())
}
