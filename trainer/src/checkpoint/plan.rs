//! When a run saves, where, and under which name.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::recipe::FloatDtype;

/// Describes one entry of a recipe's `checkpoint` list, resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointPlan {
    /// What is written.
    #[serde(rename = "kind")]
    pub format: CheckpointFormat,
    /// The folder that receives one folder a save.
    pub output_dir: PathBuf,
    /// Start from the newest complete save found there (`Sharded` only).
    pub auto_resume: bool,
    /// Save each time that this many optimizer steps are done; 0 is never.
    pub save_every_n_steps: usize,
    /// Save each time that this many epochs are done; 0 is never.
    pub save_every_n_epochs: usize,
    /// Save after the last step.
    pub save_end_of_training: bool,
    /// Delete all but this many of the newest saves; `None` keeps all.
    #[serde(rename = "keep")]
    pub save_total_limit: Option<usize>,
    /// Written while training goes on (`Sharded` only).
    #[serde(default)]
    pub async_save: bool,
    /// The dtype of exported weights (`HuggingFace` only); `None` is the model's.
    #[serde(default)]
    pub dtype: Option<FloatDtype>,
}

/// Names what a save holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointFormat {
    /// Everything that a bit-exact resume needs.
    Sharded,
    /// The weights alone, as a folder that transformers loads.
    HuggingFace,
}

/// Says where a run stands after an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Optimizer steps done since the run's very first.
    pub step: usize,
    /// Epochs done, where this step was the last one of an epoch.
    pub finished_epoch: Option<usize>,
    /// Whether this was the run's last step.
    pub end_of_training: bool,
}

/// Names one save: the weights of step N carry the tag N.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    /// Optimizer steps done.
    pub step: usize,
    /// Epochs done.
    pub epoch: usize,
}

impl CheckpointPlan {
    /// Tells whether to save now.
    pub fn is_due(&self, moment: Moment) -> bool {
        let every = |n: usize, count: usize| n > 0 && count > 0 && count.is_multiple_of(n);
        every(self.save_every_n_steps, moment.step)
            || moment.finished_epoch.is_some_and(|done| every(self.save_every_n_epochs, done))
            || (self.save_end_of_training && moment.end_of_training)
    }

    /// Returns the folder of a save.
    pub fn dir(&self, tag: Tag) -> PathBuf {
        self.output_dir.join(self.format.dir_name(tag))
    }

    /// Counts the saves that are still to come after `done` steps of a run whose epochs end at the steps `epoch_ends`.
    pub fn n_checkpoints(&self, done: usize, total_steps: usize, epoch_ends: &[usize]) -> usize {
        (done + 1..=total_steps).filter(|&step| self.is_due(Moment::of(step, total_steps, epoch_ends))).count()
    }
}

/// Describes the entry in one line, for people.
impl fmt::Display for CheckpointPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = match self.format {
            CheckpointFormat::Sharded => "sharded",
            CheckpointFormat::HuggingFace => "huggingface",
        };
        write!(f, "{format} in {}", self.output_dir.display())?;
        let every = [(self.save_every_n_steps, "steps"), (self.save_every_n_epochs, "epochs")];
        every.iter().filter(|(n, _)| *n > 0).try_for_each(|(n, unit)| write!(f, ", every {n} {unit}"))?;
        let flags = [
            (self.save_end_of_training, ", at the end"),
            (self.auto_resume, ", auto_resume"),
            (self.async_save, ", in the background"),
        ];
        flags.iter().filter(|(is_so, _)| *is_so).try_for_each(|(_, words)| f.write_str(words))?;
        self.save_total_limit.map_or(Ok(()), |save_total_limit| write!(f, ", save_total_limit {save_total_limit}"))
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
    /// Returns the name of a save's folder: `epoch_E_global_step_N` or `global_step_N`.
    pub fn dir_name(self, tag: Tag) -> String {
        match self {
            CheckpointFormat::Sharded => format!("epoch_{}_global_step_{}", tag.epoch, tag.step),
            CheckpointFormat::HuggingFace => format!("global_step_{}", tag.step),
        }
    }

    /// Reads a tag back from a folder's name. A `global_step_N` has no epoch and reads as 0.
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

    /// Lists the saves in a folder, newest first. A folder that does not exist has none.
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
        save_end_of_training: false,
        save_total_limit: None,
        async_save: false,
        dtype: None,
    };

    /// The steps at which a run of 10 steps saves, with epochs ending at 4, 8 and 10.
    #[track_caller]
    fn check(plan: CheckpointPlan, want: &[usize]) {
        let ends = [4, 8, 10];
        let is_due: Vec<usize> = (0..=10).filter(|&s| plan.is_due(Moment::of(s, 10, &ends))).collect();
        assert_eq!(is_due, want);
        assert_eq!(plan.n_checkpoints(0, 10, &ends), want.len());
    }

    #[test]
    fn nothing_asked_saves_nothing() {
        check(NEVER, &[]);
    }

    #[test]
    fn every_n_steps_counts_from_the_first_step_done() {
        check(CheckpointPlan { save_every_n_steps: 3, ..NEVER }, &[3, 6, 9]);
        check(CheckpointPlan { save_every_n_steps: 11, ..NEVER }, &[]);
    }

    #[test]
    fn every_n_epochs_saves_only_where_an_epoch_ends() {
        check(CheckpointPlan { save_every_n_epochs: 1, ..NEVER }, &[4, 8, 10]);
        check(CheckpointPlan { save_every_n_epochs: 2, ..NEVER }, &[8]);
    }

    #[test]
    fn several_reasons_at_one_step_are_one_save() {
        let plan =
            CheckpointPlan { save_every_n_steps: 5, save_every_n_epochs: 1, save_end_of_training: true, ..NEVER };
        check(plan, &[4, 5, 8, 10]);
    }

    #[test]
    fn the_end_is_due_when_no_interval_falls_on_it() {
        check(CheckpointPlan { save_end_of_training: true, ..NEVER }, &[10]);
    }

    #[test]
    fn names_read_back_and_look_alikes_do_not() {
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
