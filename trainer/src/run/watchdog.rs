//! The loss watchdog: skips the update of a loss spike, loads the newest checkpoint, or ends the run.
//!
//! The limit of a step depends on earlier losses only, and the gradient scaler compares the loss with it on the device. So
//! no step waits for the host, and all ranks decide alike.

use anyhow::{Context, Result};
use candlewick_ops::UpdateOutcome;

use crate::checkpoint::Resumed;
use crate::data::{Cursor, GlobalBatch, TrainSteps};
use crate::metrics::{LossSpikeEvent, LossSpikeRecord};
use crate::plan::LossWatchdogPlan;
use crate::recipe::SpikeAction;
use crate::step_error::LossSpike;

use super::context::TrainingRun;
use super::session::Session;
use super::step::{StepOutcome, StepOutput};

impl Session<'_> {
    /// Returns the largest loss of a step whose update is applied; infinity for none.
    pub(super) fn max_loss(&self, step: usize) -> f64 {
        let Some(plan) = &self.run.plan.loss_watchdog else { return f64::INFINITY };
        let LossWatchdogPlan { rolling_interval_length, sigma_factor, warmup_steps, max_loss, .. } = *plan;
        let limit = self.progress.loss_history.limit(step, rolling_interval_length, sigma_factor);
        let limit = limit.filter(|_| step > warmup_steps);
        limit.into_iter().chain(max_loss).fold(f64::INFINITY, f64::min)
    }

    /// Records the loss of a step, and reacts if it is a spike. `position` follows the step's batch in the data.
    pub(super) fn watch_loss(&mut self, output: &StepOutput, position: Cursor) -> Result<()> {
        let Some(plan) = self.run.plan.loss_watchdog.clone() else { return Ok(()) };
        let StepOutput { step, outcome } = output;
        let history = &mut self.progress.loss_history;
        history.add(outcome.number, outcome.loss, plan.rolling_interval_length);
        if outcome.decision.outcome != UpdateOutcome::LossSpike {
            return Ok(());
        }
        history.add_spike(outcome.number);
        let is_last = history.n_spikes > plan.max_events;
        let kept = self.keep_batch(step, outcome, "the loss watchdog found a loss spike");
        let action = if is_last { SpikeAction::Stop } else { plan.action };
        let rewound_to = match action {
            SpikeAction::Rewind => self.rewind(position)?,
            SpikeAction::Skip | SpikeAction::Stop => None,
        };
        let rewound_to = rewound_to.map(|resumed| resumed.run.step);
        let event = LossSpikeEvent { loss: outcome.loss, max_loss: outcome.max_loss, action, rewound_to, kept };
        self.report_spike(step, outcome, &event);
        match action {
            SpikeAction::Stop => Err(loss_spike(outcome, &event, is_last.then_some(plan.max_events)).into()),
            SpikeAction::Skip | SpikeAction::Rewind => Ok(()),
        }
    }

    fn report_spike(&mut self, step: &GlobalBatch, outcome: &StepOutcome, event: &LossSpikeEvent) {
        let done = match (event.action, event.rewound_to) {
            (SpikeAction::Stop, _) => "the run ends".to_owned(),
            (SpikeAction::Rewind, Some(to)) => {
                format!(
                    "loaded the checkpoint of step {to}; the steps since then are undone, and their data are skipped"
                )
            }
            (SpikeAction::Rewind, None) => "skipped the update: there is no checkpoint to rewind to yet".to_owned(),
            (SpikeAction::Skip, _) => "skipped the update".to_owned(),
        };
        let (number, loss, max_loss) = (outcome.number, outcome.loss, outcome.max_loss);
        let line = format!("loss spike in step {number}: {loss:.4}, above the limit {max_loss:.4}; {done}");
        self.reporter.terminal().line(&line);
        let record = LossSpikeRecord { epoch: step.epoch, iter: number, loss_spike: event.clone() };
        self.reporter.log_loss_spike(&record);
        let n_spikes = self.progress.loss_history.n_spikes;
        self.update_run_json(|report| report.metrics["loss_spikes"] = n_spikes.into());
    }

    /// Loads the newest checkpoint, and continues at `position` in the data. Does nothing before the first checkpoint.
    ///
    /// Steps in flight are discarded and computed again. All ranks call this.
    fn rewind(&mut self, position: Cursor) -> Result<Option<Resumed>> {
        if self.checkpointer.newest_sharded().is_none() {
            return Ok(None);
        }
        self.discard_in_flight()?;
        self.finish_async_save(true)?;
        let TrainingRun { plan, prepared, ranks, .. } = self.run;
        let n_undone = |to: usize| position.step - to;
        let resumed = self.checkpointer.load_newest()?.context("failed to rewind: there is no complete checkpoint")?;
        self.progress.n_skipped = resumed.run.n_skipped + n_undone(resumed.run.step);
        self.progress.loss_history.rewind_to(&resumed.run.loss_history);
        self.progress.scaler = resumed.run.scaler;
        self.reset_scaler(resumed.run.step)?;
        self.stream = TrainSteps::new(prepared, &plan.data, position, ranks.reader())?;
        Ok(Some(resumed))
    }
}

fn loss_spike(outcome: &StepOutcome, event: &LossSpikeEvent, max_events: Option<usize>) -> LossSpike {
    let why = max_events.map_or_else(String::new, |n| format!(" (after {n} spikes: loss_watchdog.max_events)"));
    let kept = event.kept.as_ref();
    let kept =
        kept.map_or_else(String::new, |path| format!("See the batch with `trainer replay {}`. ", path.display()));
    LossSpike { step: outcome.number, loss: outcome.loss, max_loss: outcome.max_loss, why, kept }
}
