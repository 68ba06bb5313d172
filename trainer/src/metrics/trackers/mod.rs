//! The trackers of a run, one module each.

mod event;
mod http;
mod mlflow;
mod tensorboard;
mod uploader;
mod wandb;

use std::io;

use super::console::Terminal;
use super::jsonl::{MetricsFile, SamplesFile};
use super::plan::LogPlan;
use super::tracker::{RunStart, Tracker};

/// Opens the trackers of a plan. Only the files of metrics and samples can fail here: they come first, and are always local.
pub(super) fn open(plan: &LogPlan, start: RunStart, terminal: &Terminal) -> io::Result<Vec<Box<dyn Tracker>>> {
    let (tracking, metrics_path) = (&plan.tracking, &plan.metrics_path);
    let file = metrics_path.as_deref().map(|path| MetricsFile::open(path, start)).transpose()?;
    let samples = plan.samples_path.as_deref().map(|path| SamplesFile::open(path, start)).transpose()?;
    let tensorboard = tracking.tensorboard.as_deref().map(tensorboard::TensorBoard::new);
    let wandb = tracking.wandb.as_ref().map(|plan| wandb::Wandb::new(plan, metrics_path.clone(), terminal.clone()));
    let mlflow = tracking.mlflow.as_ref().map(|plan| mlflow::Mlflow::new(plan, metrics_path.clone(), terminal.clone()));
    let all = [boxed(file), boxed(samples), boxed(tensorboard), boxed(wandb), boxed(mlflow)];
    Ok(all.into_iter().flatten().collect())
}

fn boxed<T: Tracker + 'static>(tracker: Option<T>) -> Option<Box<dyn Tracker>> {
    tracker.map(|tracker| Box::new(tracker) as Box<dyn Tracker>)
}
