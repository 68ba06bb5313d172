//! A model that is too large for one rank: some have it together, and there may be several copies of it.

use std::sync::Arc;

use anyhow::{Error, Result, anyhow, ensure};
use candle_core::{Device, Tensor};
use candlewick_comm::mesh::{Degrees, Mesh};
use candlewick_comm::{Collective, KeepAlive, Reduce, Solo};
use candlewick_model::Config;
use candlewick_ops::{AttentionHeads, to_host};
use candlewick_parallel::Groups;

use candlewick_runtime::exit::ExitCode;

/// Who has what of a copy of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// Ranks that share every matrix.
    pub tensor: usize,
    /// Stages of a pipeline, which have some blocks each.
    pub stages: usize,
    /// Whether all ranks keep one copy, in shares besides: a unit's weights are gathered when they are wanted (ZeRO stage 3), and
    /// each rank computes the same.
    pub in_shares: bool,
}

/// The ranks that answer together.
#[derive(Clone)]
pub struct Crew {
    /// All of them.
    pub all: Arc<dyn Collective>,
    /// Those that answer different requests: this one, and its like in every other copy of the model.
    pub copies: Arc<dyn Collective>,
    /// Those that have this copy of the model together.
    pub copy: Arc<dyn Collective>,
    /// Whether this one says what its copy has answered: one rank of each does.
    pub speaks: bool,
    /// What keeps the others waiting while this rank is busy, if anything does.
    pub at_work: Option<KeepAlive>,
}

impl Parts {
    /// A whole model on each rank.
    pub const WHOLE: Self = Self { tensor: 1, stages: 1, in_shares: false };

    /// Tells whether each rank has all of the model.
    pub fn is_whole(self) -> bool {
        self == Self::WHOLE
    }

    /// Refuses a number of ranks that does not fall into copies.
    pub fn check_ranks(self, n_ranks: usize) -> Result<()> {
        let Self { tensor, stages, .. } = self;
        let n_parts = tensor * stages;
        ensure!(
            n_ranks.is_multiple_of(n_parts),
            usage(format!(
                "{n_ranks} ranks cannot have copies of a model in {n_parts} parts each (--tensor-parallel-size {tensor} times \
                 --pipeline-parallel-size {stages}); start a multiple of {n_parts}"
            ))
        );
        Ok(())
    }

    /// Makes the groups of `world`'s ranks, which all call it.
    pub fn groups(self, world: &dyn Collective) -> Result<Groups> {
        self.check_ranks(world.size())?;
        let rest = world.size() / (self.tensor * self.stages);
        let (dp_replicate, dp_shard) = if self.in_shares { (1, rest) } else { (rest, 1) };
        let degrees = Degrees { pp: self.stages, tp: self.tensor, dp_replicate, dp_shard, ..Degrees::default() };
        let mesh = Mesh::new(degrees, world.size()).map_err(|error| usage(error.to_string()))?;
        Ok(Groups::new(&mesh, world)?)
    }

    /// Makes the groups of a process by itself.
    pub fn alone() -> Result<Groups> {
        Self::WHOLE.groups(&Solo)
    }

    /// Refuses parts that a model does not fall into.
    pub fn check(self, config: &Config) -> Result<()> {
        let AttentionHeads { n_query, n_kv, .. } = config.attention_heads();
        let (width, n_layers) = (config.intermediate_size(), config.n_layers());
        let fits = |n: usize| [n_query, n_kv, width].iter().all(|whole| whole.is_multiple_of(n));
        let possible: Vec<String> = (1..=n_kv).filter(|n| fits(*n)).map(|n| n.to_string()).collect();
        ensure!(
            fits(self.tensor),
            usage(format!(
                "--tensor-parallel-size {}: {n_query} attention heads, {n_kv} key heads and an MLP of {width} cannot be shared \
                 so; use {}",
                self.tensor,
                possible.join(" or ")
            ))
        );
        ensure!(
            self.stages <= n_layers,
            usage(format!("--pipeline-parallel-size {}: the model has {n_layers} blocks", self.stages))
        );
        Ok(())
    }
}

fn usage(problem: String) -> Error {
    anyhow!("failed to start: {problem}").context(ExitCode::Usage)
}

impl Crew {
    /// The ranks of `all`, with a whole model each.
    pub fn of_copies(all: Arc<dyn Collective>) -> Self {
        Self { copies: Arc::clone(&all), all, copy: Arc::new(Solo), speaks: true, at_work: None }
    }

    /// The ranks of `all` with their groups: weights may be in shares, of which each copy is put together when it is computed.
    pub fn of(all: Arc<dyn Collective>, groups: &Groups, in_shares: bool) -> Self {
        let (copies, copy) = match in_shares {
            true => (&groups.dp_replicate, &groups.model_parallel_shard),
            false => (&groups.dp, &groups.model_parallel),
        };
        Self { all, copies: Arc::clone(copies), copy: Arc::clone(copy), speaks: copy.rank() == 0, at_work: None }
    }

    /// The same, which keep each other waiting by `at_work`.
    #[must_use]
    pub fn with_at_work(self, at_work: KeepAlive) -> Self {
        Self { at_work: Some(at_work), ..self }
    }

    /// Does what waits for no other rank, while the others wait for this one as long as it takes.
    pub(crate) fn alone<T>(&self, what: impl FnOnce() -> T) -> T {
        let _working = self.at_work.as_ref().map(KeepAlive::begin);
        what()
    }

    /// Does this copy's work, while the other copies wait. Ranks that have the copy together wait for each other in it, which
    /// must end if one of them hangs; so they show that they are at work by [`Crew::step`] only.
    pub(crate) fn together<T>(&self, what: impl FnOnce() -> T) -> T {
        if self.has_copy_alone() { self.alone(what) } else { what() }
    }

    /// Shows the other copies that this one has done another step of [`Crew::together`]. A rank that has a copy for itself
    /// shows it all the while.
    pub(crate) fn step(&self) {
        if let Some(at_work) = self.at_work.as_ref().filter(|_| !self.has_copy_alone()) {
            at_work.beat();
        }
    }

    fn has_copy_alone(&self) -> bool {
        self.copy.size() == 1
    }

    /// Returns true if any rank of this copy passes true. All ranks of the copy call it.
    pub fn any_of_copy(&self, own: bool) -> Result<bool> {
        let all = self.copy.all_reduce(&Tensor::new(u32::from(own), &Device::Cpu)?, Reduce::Max)?;
        Ok(to_host(&all)?.to_scalar::<u32>()? > 0)
    }
}
