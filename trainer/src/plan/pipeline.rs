//! The stages of a pipeline, as a plan has them: how many, which blocks each has, and in which order they compute.

use candlewick_model::{Config, Model, ParamSpec};
use candlewick_parallel::{PipelineLayout, PipelineScheduleKind};
use serde::Serialize;

use crate::recipe::PipelineSchedule;

/// The stages of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PipelinePlan {
    /// How many there are.
    pub stages: usize,
    /// Runs of blocks that each has.
    pub chunks: usize,
    /// The order of forwards and backwards.
    pub schedule: PipelineSchedule,
    /// The number of blocks of each run; `None` shares them out by time.
    pub layers: Option<Vec<usize>>,
}

impl PipelinePlan {
    /// The plan without a pipeline.
    pub fn alone() -> Self {
        Self { stages: 1, chunks: 1, schedule: PipelineSchedule::OneForwardOneBackward, layers: None }
    }

    /// Returns which stage has which blocks of a model.
    pub fn layout(&self, config: &Config) -> PipelineLayout {
        match &self.layers {
            Some(layers) => PipelineLayout::new(self.stages, layers),
            None => PipelineLayout::balanced(config.n_layers(), self.stages, self.chunks, head(config)),
        }
    }

    /// Returns the order of forwards and backwards, as the engine knows it.
    pub fn order(&self) -> PipelineScheduleKind {
        match self.schedule {
            PipelineSchedule::OneForwardOneBackward => PipelineScheduleKind::OneForwardOneBackward,
            PipelineSchedule::AllForwardAllBackward => PipelineScheduleKind::GPipe,
        }
    }
}

/// How many blocks take as long as the head: by the weights that a token is multiplied by.
fn head(config: &Config) -> f64 {
    let Ok(model) = Model::new(config.clone(), None) else { return 0.0 };
    let block: usize = model.units().get(1).map_or(0, |unit| unit.params.iter().map(ParamSpec::numel).sum());
    (config.vocab_size() * config.hidden_size()) as f64 / block.max(1) as f64
}
