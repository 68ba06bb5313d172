//! A model that is too large for one rank: some have it together, and there may be several copies of it.

use std::sync::Arc;

use anyhow::{Error, Result, anyhow, ensure};
use candle_core::{Device, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Collective, KeepAlive, Reduce, Solo};
use candlewick_model::Config;
use candlewick_ops::{AttentionHeads, to_host};
use candlewick_parallel::ParallelGroups;

use candlewick_runtime::exit::ExitCode;

/// Who has what of a copy of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParallelConfig {
    /// Ranks that share every matrix.
    pub tensor_parallel: usize,
    /// Stages of a pipeline, which have some blocks each.
    pub pipeline_parallel: usize,
    /// Whether all ranks keep one copy, in shares besides: a unit's weights are gathered when they are wanted (ZeRO stage 3), and
    /// each rank computes the same.
    pub zero3: bool,
}

/// The ranks that answer together.
#[derive(Clone)]
pub struct InferenceGroup {
    /// All of them.
    pub world: Arc<dyn Collective>,
    /// Those that answer different requests: this one, and its like in every other copy of the model.
    pub data_parallel: Arc<dyn Collective>,
    /// Those that have this copy of the model together.
    pub replica: Arc<dyn Collective>,
    /// Whether this one says what its copy has answered: one rank of each does.
    pub reports: bool,
    /// What keeps the others waiting while this rank is busy, if anything does.
    pub keep_alive: Option<KeepAlive>,
}

impl ParallelConfig {
    /// A whole model on each rank.
    pub const WHOLE: Self = Self { tensor_parallel: 1, pipeline_parallel: 1, zero3: false };

    /// Tells whether each rank has all of the model.
    pub fn is_whole(self) -> bool {
        self == Self::WHOLE
    }

    /// Refuses a number of ranks that does not fall into copies.
    pub fn check_ranks(self, n_ranks: usize) -> Result<()> {
        let Self { tensor_parallel, pipeline_parallel, .. } = self;
        let n_parts = tensor_parallel * pipeline_parallel;
        ensure!(
            n_ranks.is_multiple_of(n_parts),
            usage(format!(
                "{n_ranks} ranks cannot hold copies of a model over {n_parts} ranks each (--tensor-parallel-size {tensor_parallel} times \
                 --pipeline-parallel-size {pipeline_parallel}); start a multiple of {n_parts}"
            ))
        );
        Ok(())
    }

    /// Makes the groups of `world`'s ranks, which all call it.
    pub fn groups(self, world: &dyn Collective) -> Result<ParallelGroups> {
        self.check_ranks(world.size())?;
        let rest = world.size() / (self.tensor_parallel * self.pipeline_parallel);
        let (dp_replicate, dp_shard) = if self.zero3 { (1, rest) } else { (rest, 1) };
        let degrees = Degrees {
            pp: self.pipeline_parallel,
            tp: self.tensor_parallel,
            dp_replicate,
            dp_shard,
            ..Degrees::default()
        };
        let mesh = Mesh::new(degrees, world.size()).map_err(|error| usage(error.to_string()))?;
        Ok(ParallelGroups::new(&mesh, world)?)
    }

    /// Makes the groups of a process by itself.
    pub fn alone() -> Result<ParallelGroups> {
        Self::WHOLE.groups(&Solo)
    }

    /// Refuses parallel_config that a model does not fall into.
    pub fn check(self, config: &Config) -> Result<()> {
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
        Ok(())
    }
}

fn usage(problem: String) -> Error {
    anyhow!("failed to start: {problem}").context(ExitCode::Usage)
}

impl InferenceGroup {
    /// The ranks of `all`, with a whole model each.
    pub fn replicated(world: Arc<dyn Collective>) -> Self {
        Self { data_parallel: Arc::clone(&world), world, replica: Arc::new(Solo), reports: true, keep_alive: None }
    }

    /// The ranks of `all` with their groups: weights may be in shares, of which each copy is put together when it is computed.
    pub fn from_groups(world: Arc<dyn Collective>, groups: &ParallelGroups, zero3: bool) -> Self {
        let (data_parallel, replica) = match zero3 {
            true => (&groups.dp_replicate, &groups.model_parallel_shard),
            false => (&groups.dp, &groups.model_parallel),
        };
        Self {
            world,
            data_parallel: Arc::clone(data_parallel),
            replica: Arc::clone(replica),
            reports: replica.rank() == 0,
            keep_alive: None,
        }
    }

    /// The same, which keep each other waiting by `keep_alive`.
    #[must_use]
    pub fn with_keep_alive(self, keep_alive: KeepAlive) -> Self {
        Self { keep_alive: Some(keep_alive), ..self }
    }

    /// Does what waits for no other rank, while the others wait for this one as long as it takes.
    pub(crate) fn alone<T>(&self, what: impl FnOnce() -> T) -> T {
        let _working = self.keep_alive.as_ref().map(KeepAlive::begin);
        what()
    }

    /// Does this copy's work, while the other copies wait. Ranks that have the copy together wait for each other in it, which
    /// must end if one of them hangs; so they show that they are at work by [`InferenceGroup::step`] only.
    pub(crate) fn together<T>(&self, what: impl FnOnce() -> T) -> T {
        if self.is_single_rank_replica() { self.alone(what) } else { what() }
    }

    /// Shows the other copies that this one has done another step of [`InferenceGroup::together`]. A rank that has a copy for itself
    /// shows it all the while.
    pub(crate) fn step(&self) {
        if let Some(keep_alive) = self.keep_alive.as_ref().filter(|_| !self.is_single_rank_replica()) {
            keep_alive.beat();
        }
    }

    fn is_single_rank_replica(&self) -> bool {
        self.replica.size() == 1
    }

    /// Returns true if any rank of this copy passes true. All ranks of the copy call it.
    pub fn any_in_replica(&self, own: bool) -> Result<bool> {
        let all = self.replica.all_reduce(&Tensor::new(u32::from(own), &Device::Cpu)?, Reduce::Max)?;
        Ok(to_host(&all)?.to_scalar::<u32>()? > 0)
    }
}
