//! The components of a run, its progress, and the reasons for its end.

use std::time::Duration;

use candlewick_ops::ScalerState;
use candlewick_parallel::Engine;
use candlewick_runtime::run_id::RunId;
use candlewick_text::quantity::counted;

use crate::checkpoint::{EarlyStoppingState, LossHistory, RunState, Scores};
use crate::data::PreparedData;
use crate::metrics::PeakRate;
use crate::plan::Plan;
use crate::signals::{StopRequest, StopSignals};

use super::tasks::Tasks;
use super::{Assets, RankContext};

/// The components of a run, as they are before its first step.
#[derive(Clone, Copy)]
pub(super) struct TrainingRun<'a> {
    pub(super) plan: &'a Plan,
    pub(super) ranks: &'a RankContext<'a>,
    pub(super) assets: &'a Assets,
    pub(super) engine: &'a Engine,
    /// Notes about the engine for the user.
    pub(super) notes: &'a [String],
    /// Peak rate of the device's matmuls at the start, if known.
    pub(super) peak: Option<PeakRate>,
    /// Modules that `precision.exclude_slower_modules` keeps in the compute dtype.
    pub(super) slower_modules: Option<&'a [String]>,
    pub(super) prepared: &'a PreparedData,
    pub(super) tasks: Option<&'a Tasks<'a>>,
    /// The metric that selects the best checkpoint, without values.
    pub(super) scores: &'a Scores,
    /// The metric of early stopping, without values.
    pub(super) early_stopping: &'a EarlyStoppingState,
    pub(super) run_id: RunId,
    pub(super) stop: &'a StopSignals,
}

/// The state of a run without its weights and its data cursor.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// The training time of earlier processes. In a checkpoint, the total training time.
    pub(super) before: Duration,
    /// The metric that selects the best checkpoint, and its values.
    pub(super) scores: Scores,
    /// The last step whose evaluations are done.
    pub(super) evaluated: Option<usize>,
    /// The evaluations of early stopping.
    pub(super) early_stopping: EarlyStoppingState,
    /// The last losses and the number of loss spikes.
    pub(super) loss_history: LossHistory,
    /// The number of steps skipped because of a non-finite loss or gradient.
    pub(super) n_skipped: usize,
    /// The state of the gradient scaler.
    pub(super) scaler: Option<ScalerState>,
}

/// The reason why the training loop ended.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum EndReason {
    /// All steps are done.
    Horizon,
    /// The step of this recipe key was reached: `exit_iteration` or `exit_iteration_this_run`.
    Exit(&'static str),
    /// The metric of early stopping has stopped to improve.
    EarlyStopping(EarlyStoppingState),
    /// A stop was requested.
    Stop(StopRequest),
}

impl Progress {
    pub(super) fn of(state: &RunState) -> Self {
        let before = Duration::from_secs_f64(state.elapsed_s);
        let RunState { evaluated, n_skipped, scaler, .. } = *state;
        let RunState { scores, early_stopping, loss_history, .. } = state.clone();
        Self { before, scores, evaluated, early_stopping, loss_history, n_skipped, scaler }
    }
}

impl EndReason {
    pub(super) fn reason(&self) -> String {
        match self {
            EndReason::Horizon => "all steps are done".to_string(),
            EndReason::Exit(key) => format!("{key} was reached"),
            EndReason::EarlyStopping(state) => {
                let EarlyStoppingState { metric, best, n_without_improvement: n, .. } = state;
                let best = best.map_or_else(String::new, |(step, value)| format!(" since step {step} ({value})"));
                format!("early stopping: {metric} has not improved in {}{best}", counted(*n, "evaluation"))
            }
            EndReason::Stop(stop) => format!("stopped by {stop}"),
        }
    }

    /// Returns the change of the recipe with which a run that has ended trains on; `None` if the same command does.
    pub(super) fn remedy(&self) -> Option<String> {
        match self {
            EndReason::Horizon => Some("raise epochs, train_iters or train_tokens".to_owned()),
            EndReason::Exit("exit_iteration") => Some("raise or remove exit_iteration".to_owned()),
            EndReason::EarlyStopping(_) => Some("raise early_stopping.patience, or remove early_stopping".to_owned()),
            EndReason::Exit(_) | EndReason::Stop(_) => None,
        }
    }
}
