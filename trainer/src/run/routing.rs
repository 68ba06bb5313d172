//! The record of experts that a run writes or replays.

use anyhow::{Context, Result};

use super::context::TrainingRun;
use crate::data::TrainSteps;
use crate::plan::{Plan, RoutingReplayPlan};
use crate::routing::{RoutedModel, RoutingFiles, RoutingRecorder, RoutingReplay};

/// Opens the record that the plan names, for the steps after the data cursor; `None` without one. All ranks call this.
pub(super) fn open(run: &TrainingRun, stream: &TrainSteps) -> Result<Option<RoutingFiles>> {
    let Some(planned) = run.plan.moe.as_ref().and_then(|moe| moe.routing_replay.clone()) else { return Ok(None) };
    let model =
        RoutedModel::of(run.engine.model()).context("failed to record or replay experts: the model has none")?;
    let (process, n_done) = (&run.ranks.process, stream.cursor().step);
    Ok(Some(match planned {
        RoutingReplayPlan::Record(dir) => {
            let recorder = RoutingRecorder { dir, model, rank: process.rank(), run: run.run_id.run };
            process.on_first_rank(|| Ok(recorder.prepare(n_done)?))?;
            RoutingFiles::Record(recorder)
        }
        RoutingReplayPlan::Replay(dir) => {
            let replay = RoutingReplay { dir, model };
            let checked = replay.check_steps(n_done + 1..=last_step(run.plan, stream));
            process.all_ok(checked.map_err(Into::into))?;
            RoutingFiles::Replay(replay)
        }
    }))
}

/// Returns the last step of this process, unless a stop is requested.
fn last_step(plan: &Plan, stream: &TrainSteps) -> usize {
    let of_process = plan.exit.iteration_this_run.map(|n| stream.cursor().step + n);
    [Some(stream.total_steps()), plan.exit.iteration, of_process].into_iter().flatten().min().unwrap_or_default()
}
