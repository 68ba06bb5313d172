//! Parallelism of inference: model replicas, each sharded over several ranks.

use std::sync::Arc;

use anyhow::{Error, Result, anyhow, ensure};
use candle_core::{Device, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Collective, KeepAlive, Reduce, Solo};
use candlewick_model::Config;
use candlewick_ops::{AttentionHeads, to_host};
use candlewick_parallel::ParallelGroups;
use candlewick_text::quantity::counted;

use candlewick_runtime::exit::ExitCode;

/// Parallelism of one model replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParallelConfig {
    /// Tensor parallel size.
    pub tensor_parallel: usize,
    /// Pipeline parallel size.
    pub pipeline_parallel: usize,
    /// Expert parallel size: ranks that divide the experts of each layer.
    pub expert_parallel: usize,
    /// True to shard the weights over all ranks (ZeRO stage 3). A unit's weights are all-gathered before use, and each
    /// rank computes the same.
    pub zero3: bool,
}

/// Process groups of batched inference.
#[derive(Clone)]
pub struct InferenceGroup {
    /// All ranks.
    pub world: Arc<dyn Collective>,
    /// Data parallel ranks, one per model replica, which process different requests.
    pub data_parallel: Arc<dyn Collective>,
    /// Ranks of this model replica.
    pub replica: Arc<dyn Collective>,
    /// Ranks that run equally many forwards because they share experts; `None` if replicas are independent.
    pub lockstep: Option<Arc<dyn Collective>>,
    /// True on the one rank of each replica that returns responses.
    pub reports: bool,
    /// Keep-alive signals that prevent timeouts of waiting ranks.
    pub keep_alive: Option<KeepAlive>,
}

impl ParallelConfig {
    /// One whole model per rank.
    pub const SINGLE_RANK: Self = Self { tensor_parallel: 1, pipeline_parallel: 1, expert_parallel: 1, zero3: false };

    /// Returns true if each rank has the whole model.
    pub fn is_single_rank(self) -> bool {
        self == Self::SINGLE_RANK
    }

    /// Checks that `n_ranks` is divisible by the ranks of a replica.
    pub fn check_ranks(self, n_ranks: usize) -> Result<()> {
        let Self { tensor_parallel, pipeline_parallel, .. } = self;
        let n_parts = tensor_parallel * pipeline_parallel;
        ensure!(
            n_ranks.is_multiple_of(n_parts),
            usage(format!(
                "{} cannot hold copies of a model over {n_parts} ranks each (--tensor-parallel-size {tensor_parallel} times \
                 --pipeline-parallel-size {pipeline_parallel}); start a multiple of {n_parts}",
                counted(n_ranks, "rank")
            ))
        );
        let (n_in_stage, expert_parallel) = (n_ranks / pipeline_parallel, self.expert_parallel);
        ensure!(
            n_in_stage.is_multiple_of(expert_parallel),
            usage(format!(
                "--expert-parallel-size {expert_parallel}: the {} of a pipeline stage cannot be divided by it",
                counted(n_in_stage, "rank")
            ))
        );
        Ok(())
    }

    /// Creates the process groups. Collective: all ranks of `world` must call it.
    pub fn groups(self, world: &dyn Collective) -> Result<ParallelGroups> {
        self.check_ranks(world.size())?;
        let rest = world.size() / (self.tensor_parallel * self.pipeline_parallel);
        let (dp_replicate, dp_shard) = if self.zero3 { (1, rest) } else { (rest, 1) };
        let degrees = Degrees {
            pp: self.pipeline_parallel,
            tp: self.tensor_parallel,
            dp_replicate,
            dp_shard,
            ep: self.expert_parallel,
            ..Degrees::default()
        };
        let mesh = Mesh::new(degrees, world.size()).map_err(|error| usage(error.to_string()))?;
        Ok(ParallelGroups::new(&mesh, world)?.with_experts(&mesh, world)?)
    }

    /// Creates the process groups of a single process.
    pub fn single_rank_groups() -> Result<ParallelGroups> {
        Self::SINGLE_RANK.groups(&Solo)
    }

    /// Checks that the model's heads, MLP and layers can be split by these sizes.
    pub fn check_can_split(self, config: &Config) -> Result<()> {
        let AttentionHeads { n_query, n_kv, .. } = config.attention_heads();
        let (width, n_layers) = (config.intermediate_size(), config.n_layers());
        let fits = |n: usize| [n_query, n_kv, width].iter().all(|whole| whole.is_multiple_of(n));
        let possible: Vec<String> = (1..=n_kv).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
        ensure!(
            fits(self.tensor_parallel),
            usage(format!(
                "--tensor-parallel-size {}: {n_query} attention heads, {n_kv} KV heads and an MLP of {width} cannot \
                 all be divided by it; use {}",
                self.tensor_parallel,
                possible.join(" or ")
            ))
        );
        ensure!(
            self.pipeline_parallel <= n_layers,
            usage(format!("--pipeline-parallel-size {}: the model has {n_layers} blocks", self.pipeline_parallel))
        );
        let n_experts = config.moe().map_or(1, |moe| moe.n_experts);
        ensure!(
            n_experts.is_multiple_of(self.expert_parallel),
            usage(match config.moe() {
                None => "--expert-parallel-size: the model has no experts".to_owned(),
                Some(_) => {
                    format!(
                        "--expert-parallel-size {}: {n_experts} experts cannot be divided by it",
                        self.expert_parallel
                    )
                }
            })
        );
        Ok(())
    }
}

fn usage(problem: String) -> Error {
    anyhow!("failed to start: {problem}").context(ExitCode::Usage)
}

impl InferenceGroup {
    /// Creates a group of ranks with a whole model each.
    pub fn replicated(world: Arc<dyn Collective>) -> Self {
        let (data_parallel, replica) = (Arc::clone(&world), Arc::new(Solo));
        Self { data_parallel, world, replica, lockstep: None, reports: true, keep_alive: None }
    }

    /// Creates a group of sharded replicas. With `zero3` each replica spans the `dp_shard` ranks.
    pub fn from_groups(world: Arc<dyn Collective>, groups: &ParallelGroups, zero3: bool) -> Self {
        let (data_parallel, replica) = match zero3 {
            true => (&groups.dp_replicate, &groups.model_parallel_shard),
            false => (&groups.dp, &groups.model_parallel),
        };
        Self {
            lockstep: groups.replicas_share_experts(zero3).then(|| Arc::clone(&world)),
            world,
            data_parallel: Arc::clone(data_parallel),
            replica: Arc::clone(replica),
            reports: replica.rank() == 0,
            keep_alive: None,
        }
    }

    /// Sets the keep-alive signals.
    #[must_use]
    pub fn with_keep_alive(self, keep_alive: KeepAlive) -> Self {
        Self { keep_alive: Some(keep_alive), ..self }
    }

    /// Runs `what`, which waits for no other rank. Keep-alive signals prevent timeouts of the others meanwhile.
    pub(crate) fn alone<T>(&self, what: impl FnOnce() -> T) -> T {
        let _working = self.keep_alive.as_ref().map(KeepAlive::begin);
        what()
    }

    /// Runs this replica's work while other replicas wait.
    ///
    /// Among several ranks that compute together a hang must still time out, so [`InferenceGroup::step`] alone sends
    /// keep-alive signals.
    pub(crate) fn together<T>(&self, what: impl FnOnce() -> T) -> T {
        if self.computes_alone() { self.alone(what) } else { what() }
    }

    /// Sends a keep-alive signal after a step of [`InferenceGroup::together`]. A rank that computes alone signals
    /// continuously instead.
    pub(crate) fn step(&self) {
        if let Some(keep_alive) = self.keep_alive.as_ref().filter(|_| !self.computes_alone()) {
            keep_alive.beat();
        }
    }

    fn computes_alone(&self) -> bool {
        self.replica.size() == 1 && self.lockstep.is_none()
    }

    /// Returns the number of replicas that may process different requests. Replicas that share experts process equal ones.
    pub(crate) fn n_independent_replicas(&self) -> usize {
        if self.lockstep.is_some() { 1 } else { self.data_parallel.size() }
    }

    /// Returns the index of this rank's replica among [`InferenceGroup::n_independent_replicas`].
    pub(crate) fn replica_index(&self) -> usize {
        if self.lockstep.is_some() { 0 } else { self.data_parallel.rank() }
    }

    /// Returns true if any rank of this replica passes true. Collective: all ranks of the replica must call it.
    pub fn any_in_replica(&self, own: bool) -> Result<bool> {
        let all = self.replica.all_reduce(&Tensor::new(u32::from(own), &Device::Cpu)?, Reduce::Max)?;
        Ok(to_host(&all)?.to_scalar::<u32>()? > 0)
    }
}
