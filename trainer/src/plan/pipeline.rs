//! The pipeline stages of a plan: their number, their blocks, and the schedule.

use candlewick_model::{Config, FsdpUnit, FsdpUnitKind, Model, ParamSpec};
use candlewick_parallel::{PipelineLayout, PipelineScheduleKind};
use serde::Serialize;

use crate::recipe::PipelineScheduleName;

/// The pipeline of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PipelinePlan {
    /// The number of pipeline stages.
    pub stages: usize,
    /// The number of model chunks (virtual stages) of each stage.
    pub chunks: usize,
    /// The schedule of forwards and backwards.
    pub schedule: PipelineScheduleName,
    /// The number of blocks of each model chunk; `None` balances them by time.
    pub layers: Option<Vec<usize>>,
}

impl PipelinePlan {
    /// Returns the plan without a pipeline.
    pub fn alone() -> Self {
        Self { stages: 1, chunks: 1, schedule: PipelineScheduleName::OneForwardOneBackward, layers: None }
    }

    /// Returns the assignment of a model's blocks to stages.
    pub fn layout(&self, config: &Config) -> PipelineLayout {
        match &self.layers {
            Some(layers) => PipelineLayout::new(self.stages, layers),
            None => PipelineLayout::balanced(config.n_layers(), self.stages, self.chunks, head_time(config)),
        }
    }

    /// Returns the schedule as the engine's type.
    pub fn schedule_kind(&self) -> PipelineScheduleKind {
        match self.schedule {
            PipelineScheduleName::OneForwardOneBackward => PipelineScheduleKind::OneForwardOneBackward,
            PipelineScheduleName::AllForwardAllBackward => PipelineScheduleKind::GPipe,
        }
    }
}

/// Estimates the time of head and MTP layers in units of a block's time, by their numbers of weights. Each MTP layer uses the
/// output layer again.
fn head_time(config: &Config) -> f64 {
    let Ok(model) = Model::new(config.clone(), None) else { return 0.0 };
    let numel = |unit: &FsdpUnit| unit.params.iter().map(ParamSpec::numel).sum::<usize>();
    let block = model.units().get(1).map_or(0, numel);
    let of_mtp: usize = model.units().iter().filter(|unit| matches!(unit.kind, FsdpUnitKind::Mtp(_))).map(numel).sum();
    let of_outputs = (1 + config.n_mtp_layers()) * config.vocab_size() * config.hidden_size();
    (of_outputs + of_mtp) as f64 / block.max(1) as f64
}
