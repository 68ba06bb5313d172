//! The experts of a step: read from a record, or written to one.

use anyhow::Result;
use candlewick_parallel::{RoutedMicro, StepRouting};

use crate::data::GlobalBatch;
use crate::routing::{MicroPosition, RoutingFiles};

/// The replayed experts of a rank's micro-batches; empty without a replay.
#[derive(Default)]
pub(super) struct StepExperts(Vec<Option<RoutedMicro>>);

impl StepExperts {
    /// Reads the experts of the micro-batches `own` of a step. A rank selects the experts of a filler itself.
    pub(super) fn read(files: Option<&RoutingFiles>, number: usize, step: &GlobalBatch, own: &[usize]) -> Result<Self> {
        let Some(RoutingFiles::Replay(replay)) = files else { return Ok(Self::default()) };
        replay.check_micro_batches(number, step.micro_batches.len())?;
        let of_micro = |micro_idx: &usize| {
            let Some(batch) = step.micro_batches.get(*micro_idx) else { return Ok(None) };
            Ok(Some(replay.read(MicroPosition { step: number, micro_idx: *micro_idx }, &batch.ids)?))
        };
        Ok(Self(own.iter().map(of_micro).collect::<Result<_>>()?))
    }

    /// Returns the choice of the step's experts.
    pub(super) fn routing(&self, files: Option<&RoutingFiles>) -> StepRouting<'_> {
        match files {
            None => StepRouting::Select,
            Some(RoutingFiles::Record(_)) => StepRouting::Record,
            Some(RoutingFiles::Replay(_)) => StepRouting::Replay(&self.0),
        }
    }
}

/// Writes the experts of the micro-batches `own` of a step, if the run records them. Fillers are not written.
pub(super) fn record_experts(
    files: Option<&RoutingFiles>,
    number: usize,
    step: &GlobalBatch,
    own: impl Iterator<Item = (usize, RoutedMicro)>,
) -> Result<()> {
    let Some(RoutingFiles::Record(recorder)) = files else { return Ok(()) };
    for (micro_idx, experts) in own {
        if let Some(batch) = step.micro_batches.get(micro_idx) {
            recorder.write(MicroPosition { step: number, micro_idx }, experts, &batch.ids)?;
        }
    }
    Ok(())
}
