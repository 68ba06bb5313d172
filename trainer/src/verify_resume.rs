//! Compares a run that stops and resumes from its checkpoint with an uninterrupted run of the same recipe.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::Device;
use candlewick_comm::World;
use candlewick_runtime::process_group::ProcessGroup;
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_text_file};
use candlewick_text::hub::Hub;
use candlewick_text::quantity::counted;
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::{CheckpointFormat, CheckpointPlan, FileEntry, newest_complete};
use crate::exit::ExitCode;
use crate::metrics::{LogPlan, StepRecord, TrackingPlan};
use crate::plan::{ExitPlan, Plan, RoutingReplayPlan};
use crate::run::train;

/// The steps of a comparison, and its folder.
#[derive(Clone, Copy, Debug)]
pub struct ResumeCheck<'a> {
    /// The number of steps.
    pub steps: usize,
    /// The number of steps before the second run stops and resumes.
    pub stop_after: usize,
    /// The folder of both runs, which must be missing.
    pub folder: &'a Path,
}

/// The result of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct ResumeReport {
    /// The number of ranks.
    pub n_ranks: usize,
    /// The number of steps before the second run stopped.
    pub stopped_after: usize,
    /// The step from which the second run resumed.
    pub resumed_from: usize,
    /// The steps of both runs.
    pub steps: Vec<StepComparison>,
    /// The number of weight and optimizer files in the last checkpoint.
    pub n_files: usize,
    /// The names of the files that differ.
    pub different_files: Vec<String>,
}

/// The numbers of a step in both runs.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepComparison {
    /// The step, counted from 1.
    pub step: usize,
    /// The step without an interruption.
    pub uninterrupted: StepNumbers,
    /// The step of the run that stops and resumes.
    pub resumed: StepNumbers,
}

/// The numbers of a step that must be equal to the bit.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepNumbers {
    /// The loss.
    pub loss: f64,
    /// The gradient norm before clipping.
    pub grad_norm: f64,
    /// The learning rate.
    pub lr: f64,
    /// The tokens without padding.
    pub tokens: u64,
}

/// Trains `check.steps` steps of `plan`, then as many with a stop and a resume, and compares both on rank 0.
///
/// Both runs write their checkpoints below `check.folder`, which remains unless a run fails. All ranks of `world` call this.
pub fn verify_resume(
    plan: &Plan,
    hub: &Hub,
    (world, device): (&World, &Device),
    check: ResumeCheck,
) -> Result<Option<ResumeReport>> {
    let process = ProcessGroup::new(world)?;
    process.on_first_rank(|| refuse_existing(check.folder))?;
    let run_to = |name: &str, last_step| {
        let plan = shortened(plan, &check.folder.join(name), last_step);
        let log = in_folder(plan.log.clone(), process.is_first().then(|| check.folder.join(name)));
        match train(&Plan { log, ..plan }, hub, world, device)? {
            ExitCode::Ok => Ok(()),
            code => Err(anyhow!("failed to compare: the run was stopped").context(code)),
        }
    };
    let done = run_to(UNINTERRUPTED, check.steps)
        .and_then(|()| run_to(RESUMED, check.stop_after))
        .and_then(|()| run_to(RESUMED, check.steps))
        .and_then(|()| process.on_first_rank(|| compare(world.size(), check)));
    if done.is_err() && process.is_first() {
        // The same command can start again after the correction.
        let _ = fs::remove_dir_all(check.folder);
    }
    done
}

/// The folders of the two runs.
const UNINTERRUPTED: &str = "uninterrupted";
const RESUMED: &str = "resumed";
/// The folder of a run's checkpoints.
const CHECKPOINTS: &str = "checkpoints";
const METRICS: &str = "metrics.jsonl";

fn refuse_existing(folder: &Path) -> Result<()> {
    match folder.exists() {
        true => Err(anyhow!("failed to start: {} exists; remove it, or choose another --output", folder.display())
            .context(ExitCode::Usage)),
        false => Ok(()),
    }
}

/// Returns the plan of a run in `folder` that ends with a checkpoint after `last_step` steps of the whole schedule.
///
/// It has no evaluations, exports and trackers, which do not change the steps.
fn shortened(plan: &Plan, folder: &Path, last_step: usize) -> Plan {
    let mut plan = plan.clone();
    plan.exit = ExitPlan { iteration: Some(last_step), iteration_this_run: None, kill_switch_path: None };
    plan.checkpoints = vec![checkpoint_in(folder.join(CHECKPOINTS))];
    (plan.stop_checkpoint, plan.resume_from_checkpoint) = (None, None);
    if let Some(moe) = &mut plan.moe
        && matches!(moe.routing_replay, Some(RoutingReplayPlan::Record(_)))
    {
        moe.routing_replay = None;
    }
    Plan { eval: None, tasks: None, best: None, early_stopping: None, generate: None, ..plan }
}

/// Returns the log settings of a run whose metrics are in `folder`, or of a rank without metrics.
fn in_folder(log: LogPlan, folder: Option<PathBuf>) -> LogPlan {
    LogPlan {
        metrics_path: folder.as_ref().map(|folder| folder.join(METRICS)),
        output_dir: folder,
        samples_path: None,
        train_log_iter_interval: 1,
        tracking: TrackingPlan::default(),
        ..log
    }
}

fn checkpoint_in(output_dir: PathBuf) -> CheckpointPlan {
    CheckpointPlan {
        format: CheckpointFormat::Sharded,
        output_dir,
        auto_resume: true,
        save_every_n_steps: 0,
        save_every_n_epochs: 0,
        save_fraction: None,
        save_end_of_training: true,
        save_total_limit: Some(1),
        save_retain_interval: None,
        async_save: false,
        dtype: None,
    }
}

fn compare(n_ranks: usize, check: ResumeCheck) -> Result<ResumeReport> {
    let [(steps, files), (other_steps, other_files)] =
        [UNINTERRUPTED, RESUMED].map(|name| check.folder.join(name)).map(|folder| (steps(&folder), files(&folder)));
    let (steps, other_steps, files, other_files) = (steps?, other_steps?, files?, other_files?);
    let resumed_from = resumed_from(&check.folder.join(RESUMED))?;
    ensure!(
        steps.len() == check.steps && other_steps.len() == check.steps,
        "failed to compare {}: the run has {}; lower --steps",
        counted(check.steps, "step"),
        steps.len().min(other_steps.len())
    );
    ensure!(
        steps.iter().map(|(step, _)| step).eq(other_steps.iter().map(|(step, _)| step)),
        "failed to compare: the two runs recorded different steps"
    );
    let pairs = steps.into_iter().zip(other_steps);
    Ok(ResumeReport {
        n_ranks,
        stopped_after: check.stop_after,
        resumed_from,
        steps: pairs
            .map(|((step, uninterrupted), (_, resumed))| StepComparison { step, uninterrupted, resumed })
            .collect(),
        n_files: files.len(),
        different_files: different_files(&files, &other_files),
    })
}

/// Returns the names of the files that are in one run only, or have other contents in the other.
fn different_files(files: &[FileEntry], other_files: &[FileEntry]) -> Vec<String> {
    let missing = |from: &[FileEntry], others: &[FileEntry]| -> BTreeSet<String> {
        from.iter().filter(|file| !others.contains(file)).map(|file| file.name.clone()).collect()
    };
    (&missing(files, other_files) | &missing(other_files, files)).into_iter().collect()
}

/// Returns the recorded steps of a run, by number.
fn steps(folder: &Path) -> Result<Vec<(usize, StepNumbers)>> {
    let path = folder.join(METRICS);
    let text = read_regular_text_file(&path, MAX_GENERATED_FILE_BYTES)
        .with_context(|| format!("failed to read {}", path.display()))?;
    let records = text.lines().filter_map(|line| serde_json::from_str::<StepRecord>(line).ok());
    Ok(records
        .map(|StepRecord { iter, loss, grad_norm, lr, tokens, .. }| (iter, StepNumbers { loss, grad_norm, lr, tokens }))
        .collect())
}

/// Returns the files of weights and optimizer state in the newest checkpoint of a run.
fn files(folder: &Path) -> Result<Vec<FileEntry>> {
    let folder = folder.join(CHECKPOINTS);
    let Some(newest) = newest_complete(&folder)? else { bail!("failed to find a checkpoint in {}", folder.display()) };
    let is_tensors = |file: &FileEntry| file.name.ends_with(".safetensors");
    Ok(newest.manifest.files.into_iter().filter(is_tensors).collect())
}

/// Returns the step of the checkpoint from which a run resumed, which its metrics name.
fn resumed_from(folder: &Path) -> Result<usize> {
    let text = read_regular_text_file(&folder.join(METRICS), MAX_GENERATED_FILE_BYTES)
        .context("failed to read the metrics")?;
    let records = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut resumes = records.filter(|record| record.get("resumed_from").is_some());
    let step = resumes.find_map(|record| record["iter"].as_u64());
    step.map(|step| step as usize).context("failed to compare: the second run did not resume from its checkpoint")
}

impl StepComparison {
    fn is_equal(&self) -> bool {
        let bits = |it: &StepNumbers| ([it.loss, it.grad_norm, it.lr].map(f64::to_bits), it.tokens);
        bits(&self.uninterrupted) == bits(&self.resumed)
    }
}

impl ResumeReport {
    /// Returns true if both runs are equal to the bit.
    pub fn passes(&self) -> bool {
        self.different_files.is_empty() && self.first_difference().is_none() && self.n_files > 0
    }

    /// Returns the first step that differs.
    fn first_difference(&self) -> Option<usize> {
        self.steps.iter().find(|step| !step.is_equal()).map(|step| step.step)
    }
}

/// Formats the numbers with all digits.
impl fmt::Display for StepNumbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { loss, grad_norm, lr, tokens } = self;
        write!(f, "loss {loss}, grad norm {grad_norm}, lr {lr}, {}", counted(*tokens, "token"))
    }
}

/// Formats a line for each step, and the result.
impl fmt::Display for ResumeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_ranks, stopped_after, resumed_from, .. } = self;
        let n_steps = self.steps.len();
        writeln!(
            f,
            "world size {n_ranks}: {n_steps} steps with a stop after step {stopped_after} and a resume from the checkpoint of step \
             {resumed_from}, compared with {n_steps} uninterrupted steps"
        )?;
        writeln!(f, "  step          loss     grad norm")?;
        for step in &self.steps {
            let StepNumbers { loss, grad_norm, .. } = step.resumed;
            write!(f, "  {:>4}  {loss:>12.6}  {grad_norm:>12.6}", step.step)?;
            match step.is_equal() {
                true => writeln!(f)?,
                false => writeln!(f, "  DIFFERENT: {}; without a stop: {}", step.resumed, step.uninterrupted)?,
            }
        }
        match (self.first_difference(), self.different_files.as_slice()) {
            (None, []) => {
                write!(f, "equal to the bit: losses, gradient norms, weights and optimizer state")
            }
            (Some(step), _) if step <= *stopped_after => {
                write!(f, "not equal from step {step}, before the stop: training is not deterministic on this device")
            }
            (Some(step), _) => write!(f, "not equal from step {step}"),
            (None, files) => write!(f, "not equal: these files of the last checkpoint differ: {}", files.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(losses: [f64; 4], files: &[&str]) -> ResumeReport {
        let numbers = |loss| StepNumbers { loss, grad_norm: 1.0, lr: 1e-3, tokens: 8 };
        let step = |(i, loss): (usize, f64)| StepComparison {
            step: i + 1,
            uninterrupted: numbers(1.0),
            resumed: numbers(loss),
        };
        ResumeReport {
            n_ranks: 2,
            stopped_after: 2,
            resumed_from: 2,
            steps: losses.into_iter().enumerate().map(step).collect(),
            n_files: 3,
            different_files: files.iter().map(|file| (*file).to_owned()).collect(),
        }
    }

    #[test]
    fn a_file_of_one_run_only_is_a_difference() {
        let file =
            |name: &str, hash: &str| FileEntry { name: name.into(), size: 1, blake3: Some(hash.into()), sha256: None };
        let (one, two) = ([file("a", "1")], [file("a", "1"), file("b", "1")]);
        assert_eq!(different_files(&one, &two), ["b"]);
        assert_eq!(different_files(&two, &one), ["b"]);
        assert_eq!(different_files(&one, &[file("a", "2")]), ["a"]);
        assert_eq!(different_files(&two, &two), [""; 0]);
    }

    #[test]
    fn one_bit_of_a_loss_or_a_file_is_a_difference() {
        let next = 1.0 + f64::EPSILON;
        for (losses, files, passes, said) in [
            ([1.0; 4], &[][..], true, "equal to the bit: losses, gradient norms, weights"),
            ([1.0, 1.0, next, 1.0], &[], false, "not equal from step 3"),
            ([1.0, 1.0, next, 1.0], &[], false, "DIFFERENT: loss 1.0000000000000002, grad norm 1, lr 0.001, 8 tokens;"),
            ([1.0, next, 1.0, 1.0], &[], false, "not equal from step 2, before the stop"),
            ([1.0; 4], &["shard_00001_00000.safetensors"], false, "differ: shard_00001_00000.safetensors"),
        ] {
            let report = report(losses, files);
            assert_eq!(report.passes(), passes, "{report}");
            assert!(report.to_string().contains(said), "{report}");
        }
    }
}
