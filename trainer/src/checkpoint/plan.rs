//! The schedule, folder and names of a run's checkpoints.

use std::fmt;
use std::path::{Path, PathBuf};

use candlewick_text::quantity::every_n;
use serde::{Deserialize, Serialize};

use crate::recipe::FloatDtype;
use crate::step_fraction::{FractionalInterval, RunLength};

/// A resolved entry of a recipe's `checkpoint` list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointPlan {
    /// The checkpoint format.
    #[serde(rename = "kind")]
    pub format: CheckpointFormat,
    /// The folder that contains the checkpoint folders.
    pub output_dir: PathBuf,
    /// Resume from the newest complete checkpoint in the folder (`Sharded` only).
    pub auto_resume: bool,
    /// Save every this many optimizer steps; 0 disables it.
    pub save_every_n_steps: usize,
    /// Save every this many epochs; 0 disables it.
    pub save_every_n_epochs: usize,
    /// The interval as a fraction of the run or of an epoch, which becomes steps when the data are counted.
    #[serde(default)]
    pub save_fraction: Option<FractionalInterval>,
    /// Save after the last step.
    pub save_end_of_training: bool,
    /// Keep only this many of the newest checkpoints; `None` keeps all.
    #[serde(rename = "keep")]
    pub save_total_limit: Option<usize>,
    /// Also keep the checkpoints whose step is a multiple of this; `None` keeps no further ones.
    #[serde(default)]
    pub save_retain_interval: Option<usize>,
    /// Write the checkpoint in the background while training continues (`Sharded` only).
    #[serde(default)]
    pub async_save: bool,
    /// The dtype of exported weights (`HuggingFace` only); `None` is the model's.
    #[serde(default)]
    pub dtype: Option<FloatDtype>,
}

/// The checkpoint format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointFormat {
    /// Everything that a bit-exact resume needs: weights, optimizer state, loop state.
    Sharded,
    /// The weights only, as a Hugging Face folder.
    HuggingFace,
}

/// The position of a run after an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Optimizer steps done, those before a resume included.
    pub step: usize,
    /// The number of finished epochs, if this step ends an epoch.
    pub finished_epoch: Option<usize>,
    /// True if this is the last step of the run.
    pub end_of_training: bool,
}

/// The identity of a checkpoint: the weights after step N have the tag N.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tag {
    /// Optimizer steps done.
    pub step: usize,
    /// Epochs done.
    pub epoch: usize,
}

impl CheckpointPlan {
    /// Returns the checkpoint that a stopped run without `sharded` entries writes into `output_dir` and resumes from.
    pub fn of_stopped_run(output_dir: PathBuf) -> Self {
        Self {
            format: CheckpointFormat::Sharded,
            output_dir,
            auto_resume: true,
            save_every_n_steps: 0,
            save_every_n_epochs: 0,
            save_end_of_training: false,
            save_total_limit: Some(1),
            save_fraction: None,
            save_retain_interval: None,
            async_save: false,
            dtype: None,
        }
    }

    /// Replaces a fraction by its steps.
    pub fn count_steps(&mut self, run: RunLength) {
        self.save_every_n_steps =
            self.save_fraction.take().map_or(self.save_every_n_steps, |fraction| fraction.steps(run));
    }

    /// Returns true if checkpoints are due before the end of the run.
    pub fn has_interval(&self) -> bool {
        self.save_every_n_steps > 0 || self.save_every_n_epochs > 0 || self.save_fraction.is_some()
    }

    /// Returns true if a checkpoint is due after this step.
    pub fn is_due(&self, moment: Moment) -> bool {
        let every = |n: usize, count: usize| n > 0 && count > 0 && count.is_multiple_of(n);
        every(self.save_every_n_steps, moment.step)
            || moment.finished_epoch.is_some_and(|done| every(self.save_every_n_epochs, done))
            || (self.save_end_of_training && moment.end_of_training)
    }

    /// Returns the folder of a checkpoint.
    pub fn dir(&self, tag: Tag) -> PathBuf {
        self.output_dir.join(self.format.dir_name(tag))
    }

    /// Returns true if `save_total_limit` never deletes the checkpoint of this step.
    pub fn is_retained(&self, step: usize) -> bool {
        self.save_retain_interval.is_some_and(|interval| interval > 0 && step.is_multiple_of(interval))
    }

    /// Counts the checkpoints due after `done` steps of a run whose epochs end at the steps `epoch_ends`.
    pub fn n_checkpoints(&self, done: usize, total_steps: usize, epoch_ends: &[usize]) -> usize {
        self.due_steps(done, total_steps, epoch_ends).count()
    }

    /// Counts those of [`CheckpointPlan::n_checkpoints`] that `save_total_limit` never deletes.
    pub fn n_retained(&self, done: usize, total_steps: usize, epoch_ends: &[usize]) -> usize {
        self.due_steps(done, total_steps, epoch_ends).filter(|step| self.is_retained(*step)).count()
    }

    fn due_steps(&self, done: usize, total_steps: usize, epoch_ends: &[usize]) -> impl Iterator<Item = usize> {
        (done + 1..=total_steps).filter(move |&step| self.is_due(Moment::of(step, total_steps, epoch_ends)))
    }
}

/// Describes the entry in one line.
impl fmt::Display for CheckpointPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = match self.format {
            CheckpointFormat::Sharded => "sharded",
            CheckpointFormat::HuggingFace => "huggingface",
        };
        write!(f, "{format} in {}", self.output_dir.display())?;
        let intervals = [(self.save_every_n_steps, "step"), (self.save_every_n_epochs, "epoch")];
        intervals.iter().filter(|(n, _)| *n > 0).try_for_each(|(n, unit)| write!(f, ", {}", every_n(*n, unit)))?;
        if let Some(fraction) = self.save_fraction {
            let every = if let FractionalInterval::OfRun(_) = fraction { "every " } else { "" };
            write!(f, ", {every}{fraction}")?;
        }
        let flags = [
            (self.save_end_of_training, ", at the end"),
            (self.auto_resume, ", auto_resume"),
            (self.async_save, ", in the background"),
        ];
        flags.iter().filter(|(is_so, _)| *is_so).try_for_each(|(_, words)| f.write_str(words))?;
        let limits = [("save_total_limit", self.save_total_limit), ("save_retain_interval", self.save_retain_interval)];
        let mut limits = limits.into_iter().filter_map(|(name, limit)| Some((name, limit?)));
        limits.try_for_each(|(name, limit)| write!(f, ", {name} {limit}"))
    }
}

impl Moment {
    /// Returns the moment after `step` of a run whose epochs end at the steps `epoch_ends` (ascending).
    pub fn of(step: usize, total_steps: usize, epoch_ends: &[usize]) -> Self {
        let finished_epoch = epoch_ends.binary_search(&step).ok().map(|idx| idx + 1);
        Self { step, finished_epoch, end_of_training: step == total_steps }
    }
}

impl CheckpointFormat {
    /// Returns the name of a checkpoint folder: `epoch_E_global_step_N` or `global_step_N`.
    pub fn dir_name(self, tag: Tag) -> String {
        match self {
            CheckpointFormat::Sharded => format!("epoch_{}_global_step_{}", tag.epoch, tag.step),
            CheckpointFormat::HuggingFace => format!("global_step_{}", tag.step),
        }
    }

    /// Parses the tag in a folder's name. `global_step_N` has no epoch; its epoch is 0.
    pub fn parse_dir_name(self, name: &str) -> Option<Tag> {
        let tag = match self {
            CheckpointFormat::Sharded => {
                let (epoch, step) = name.strip_prefix("epoch_")?.split_once("_global_step_")?;
                Tag { epoch: epoch.parse().ok()?, step: step.parse().ok()? }
            }
            CheckpointFormat::HuggingFace => Tag { epoch: 0, step: name.strip_prefix("global_step_")?.parse().ok()? },
        };
        (self.dir_name(tag) == name).then_some(tag)
    }

    /// Lists the checkpoints in a folder, newest first. Treats a missing folder as empty.
    pub fn list(self, output_dir: &Path) -> std::io::Result<Vec<(Tag, PathBuf)>> {
        let entries = match std::fs::read_dir(output_dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut checkpoints = Vec::new();
        for entry in entries {
            let entry = entry?;
            let tag = entry.file_name().to_str().and_then(|name| self.parse_dir_name(name));
            if let Some(tag) = tag.filter(|_| entry.path().is_dir()) {
                checkpoints.push((tag, entry.path()));
            }
        }
        checkpoints.sort_by_key(|(tag, _)| std::cmp::Reverse(*tag));
        Ok(checkpoints)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const NEVER: CheckpointPlan = CheckpointPlan {
        format: CheckpointFormat::Sharded,
        output_dir: PathBuf::new(),
        auto_resume: false,
        save_every_n_steps: 0,
        save_every_n_epochs: 0,
        save_fraction: None,
        save_end_of_training: false,
        save_total_limit: None,
        save_retain_interval: None,
        async_save: false,
        dtype: None,
    };

    /// Checks the steps at which a run of 10 steps saves. Epochs end at 4, 8 and 10.
    #[track_caller]
    fn check(plan: CheckpointPlan, want: &[usize]) {
        let ends = [4, 8, 10];
        let is_due: Vec<usize> = (0..=10).filter(|&s| plan.is_due(Moment::of(s, 10, &ends))).collect();
        assert_eq!(is_due, want);
        assert_eq!(plan.n_checkpoints(0, 10, &ends), want.len());
    }

    #[test]
    fn an_entry_without_intervals_never_saves() {
        check(NEVER, &[]);
    }

    #[test]
    fn every_n_steps_counts_finished_steps() {
        check(CheckpointPlan { save_every_n_steps: 3, ..NEVER }, &[3, 6, 9]);
        check(CheckpointPlan { save_every_n_steps: 11, ..NEVER }, &[]);
    }

    #[test]
    fn every_n_epochs_saves_only_at_the_end_of_an_epoch() {
        check(CheckpointPlan { save_every_n_epochs: 1, ..NEVER }, &[4, 8, 10]);
        check(CheckpointPlan { save_every_n_epochs: 2, ..NEVER }, &[8]);
    }

    #[test]
    fn a_step_with_several_reasons_saves_once() {
        let plan =
            CheckpointPlan { save_every_n_steps: 5, save_every_n_epochs: 1, save_end_of_training: true, ..NEVER };
        check(plan, &[4, 5, 8, 10]);
    }

    #[test]
    fn the_last_step_is_saved_between_intervals() {
        check(CheckpointPlan { save_end_of_training: true, ..NEVER }, &[10]);
    }

    #[test]
    fn retained_checkpoints_are_the_due_multiples() {
        let plan = CheckpointPlan { save_every_n_steps: 2, save_retain_interval: Some(4), ..NEVER };
        assert_eq!((1..=10).filter(|step| plan.is_retained(*step)).collect::<Vec<_>>(), [4, 8]);
        assert_eq!((plan.n_retained(0, 10, &[]), plan.n_retained(4, 10, &[])), (2, 1));
        assert!(!NEVER.is_retained(0));
    }

    #[test]
    fn folder_names_round_trip_and_others_do_not_parse() {
        let tag = Tag { epoch: 2, step: 140 };
        assert_eq!(CheckpointFormat::Sharded.dir_name(tag), "epoch_2_global_step_140");
        assert_eq!(CheckpointFormat::Sharded.parse_dir_name("epoch_2_global_step_140"), Some(tag));
        assert_eq!(CheckpointFormat::HuggingFace.dir_name(tag), "global_step_140");
        for name in ["epoch_2_global_step_", "epoch_2_global_step_0140", ".epoch_2_global_step_1.tmp", "x"] {
            assert_eq!(CheckpointFormat::Sharded.parse_dir_name(name), None, "{name}");
        }
        assert_eq!(CheckpointFormat::HuggingFace.parse_dir_name("epoch_2_global_step_140"), None);
    }
}
