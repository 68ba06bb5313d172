//! Batches that a guard keeps: of a loss spike, or of a loss or gradient that is not finite. `trainer replay` reads them.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file, without_links, write_atomically};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::{Batch, GlobalBatch, IGNORE_INDEX, TrainSteps};
use crate::exit::ExitCode;
use crate::metrics::KEPT_BATCHES;

use super::session::Session;
use super::step::StepOutcome;

/// The most batches that a process keeps.
const MOST: usize = 16;

/// A batch with all that a replay needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KeptBatch {
    /// The version of this format.
    pub format: u32,
    /// The step's number, counted from 1.
    pub step: usize,
    /// Epochs done before the step.
    pub epoch: usize,
    /// The reason to keep it.
    pub reason: String,
    /// The mean loss over the target tokens; `None` if it is not finite.
    pub loss: Option<f64>,
    /// The largest loss whose update is applied, if there is a limit.
    pub max_loss: Option<f64>,
    /// The gradient norm before clipping; `None` if it is not finite.
    pub grad_norm: Option<f64>,
    /// The newest checkpoint of the run at this time, if there was one.
    pub checkpoint: Option<PathBuf>,
    /// The folder at which the recipe's relative paths start.
    pub folder: PathBuf,
    /// The recipe file.
    pub recipe_path: PathBuf,
    /// The recipe with its bases and arguments.
    pub recipe: Value,
    /// The modules that `precision.exclude_slower_modules` kept in the compute dtype.
    #[serde(default)]
    pub slower_modules: Option<Vec<String>>,
    /// The micro-batches of all ranks.
    pub micro_batches: Vec<KeptMicroBatch>,
}

/// A micro-batch of a kept batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KeptMicroBatch {
    /// The token ids.
    pub ids: Vec<u32>,
    /// The target of each token, or -100.
    pub targets: Vec<i64>,
    /// The start of each sequence and the end of the last.
    pub cu_seqlens: Vec<usize>,
    /// The pad tokens.
    #[serde(default)]
    pub padding: Vec<Range<usize>>,
    /// The tokens without padding.
    pub n_tokens: usize,
    /// The file and row of each sequence's samples.
    pub sources: Vec<Vec<String>>,
}

impl KeptBatch {
    /// Reads a kept batch: a file, or the last one of a run's output folder, or of its `step`.
    pub fn read(path: &Path, step: Option<usize>) -> Result<Self> {
        let file = if path.is_dir() { find(path, step)? } else { path.to_owned() };
        let failed = || format!("failed to read {}: `trainer replay` needs a file of {KEPT_BATCHES}", file.display());
        let bytes = read_regular_file(&file, MAX_GENERATED_FILE_BYTES).with_context(failed).context(ExitCode::Data)?;
        serde_json::from_slice(&bytes).with_context(failed).context(ExitCode::Data)
    }

    /// Returns the global batch.
    pub fn global_batch(&self) -> GlobalBatch {
        GlobalBatch::new(self.epoch, self.micro_batches.iter().map(KeptMicroBatch::batch).collect())
    }
}

impl KeptMicroBatch {
    fn of(batch: &Batch, stream: &TrainSteps) -> Self {
        let Batch { ids, targets, cu_seqlens, padding, n_tokens, samples, .. } = batch.clone();
        let places: Vec<String> = samples.iter().map(|sample| stream.locate(*sample)).collect();
        let n_sequences = cu_seqlens.len().saturating_sub(1);
        // A fused row is one sequence with several samples.
        let sources = match places.len() == n_sequences {
            true => places.into_iter().map(|place| vec![place]).collect(),
            false => vec![places; n_sequences],
        };
        Self { ids, targets, cu_seqlens, padding, n_tokens, sources }
    }

    fn batch(&self) -> Batch {
        let Self { ids, targets, cu_seqlens, padding, .. } = self.clone();
        // Files of earlier versions do not say which tokens are padding. All tokens count then, as they did in that run.
        let n_tokens = ids.len() - padding.iter().map(Range::len).sum::<usize>();
        let positions = cu_seqlens.windows(2).flat_map(|ends| 0..(ends[1] - ends[0]) as u32).collect();
        let n_targets = targets.iter().filter(|target| **target != IGNORE_INDEX).count();
        Batch { ids, targets, positions, cu_seqlens, padding, n_targets, n_tokens, samples: Vec::new() }
    }

    /// Returns the sequences, each as a micro-batch of its own.
    pub fn sequences(&self) -> impl Iterator<Item = (Batch, &[String])> {
        let sources = self.sources.iter().map(Vec::as_slice).chain(std::iter::repeat(&[][..]));
        self.cu_seqlens.windows(2).zip(sources).map(|(ends, sources)| {
            let within = |range: &Range<usize>| range.start.max(ends[0])..range.end.min(ends[1]);
            let padding = self.padding.iter().map(within).filter(|range| !range.is_empty());
            let padding: Vec<_> = padding.map(|range| range.start - ends[0]..range.end - ends[0]).collect();
            let part = Self {
                ids: self.ids[ends[0]..ends[1]].to_vec(),
                targets: self.targets[ends[0]..ends[1]].to_vec(),
                cu_seqlens: vec![0, ends[1] - ends[0]],
                padding,
                ..Self::default()
            };
            (part.batch(), sources)
        })
    }
}

impl Session<'_> {
    /// Writes the batch of a step on the first rank, and returns the file. A failed write only warns.
    pub(super) fn keep_batch(&mut self, step: &GlobalBatch, outcome: &StepOutcome, reason: &str) -> Option<PathBuf> {
        let folder = self.run.plan.log.output_dir.as_ref()?.join(KEPT_BATCHES);
        if self.n_kept_batches >= MOST {
            return None;
        }
        self.n_kept_batches += 1;
        let path = folder.join(file_name(outcome.number));
        let kept = self.kept_batch(step, outcome, reason);
        let written = fs::create_dir_all(&folder)
            .and_then(|()| Ok(serde_json::to_vec(&kept)?))
            .and_then(|bytes| write_atomically(&path, |file| std::io::Write::write_all(file, &bytes)));
        match written {
            Ok(()) => Some(path),
            Err(error) => {
                tracing::warn!("failed to keep the batch in {}: {error}", path.display());
                None
            }
        }
    }

    fn kept_batch(&self, step: &GlobalBatch, outcome: &StepOutcome, reason: &str) -> KeptBatch {
        let finite = |value: f64| value.is_finite().then_some(value);
        let plan = self.run.plan;
        KeptBatch {
            format: 1,
            step: outcome.number,
            epoch: step.epoch,
            reason: reason.to_owned(),
            loss: finite(outcome.loss),
            max_loss: finite(outcome.max_loss),
            grad_norm: finite(outcome.decision.norm),
            checkpoint: self.checkpointer.newest_sharded().map(without_links),
            folder: std::env::current_dir().unwrap_or_default(),
            recipe_path: plan.recipe.clone(),
            recipe: plan.merged_recipe.clone(),
            slower_modules: self.run.slower_modules.map(<[String]>::to_vec),
            micro_batches: step.micro_batches.iter().map(|batch| KeptMicroBatch::of(batch, &self.stream)).collect(),
        }
    }
}

fn file_name(step: usize) -> String {
    format!("step_{step}.json")
}

/// Finds the kept batch of `step`, or of the last step, in the output folder of a run.
fn find(run: &Path, step: Option<usize>) -> Result<PathBuf> {
    let folder =
        if run.file_name().is_some_and(|name| name == KEPT_BATCHES) { run.to_owned() } else { run.join(KEPT_BATCHES) };
    let steps = fs::read_dir(&folder).into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        name.strip_prefix("step_")?.strip_suffix(".json")?.parse::<usize>().ok()
    });
    let mut steps: Vec<usize> = steps.collect();
    steps.sort_unstable();
    let found = step.map_or(steps.last(), |step| steps.iter().find(|known| **known == step));
    found.map(|step| folder.join(file_name(*step))).ok_or_else(|| {
        let known = match steps.as_slice() {
            [] => "it has none; loss_watchdog and on_nonfinite keep the batch of a loss that they refuse".to_owned(),
            steps => format!("it has steps {steps:?}"),
        };
        let wanted = step.map_or_else(String::new, |step| format!(" of step {step}"));
        anyhow!("failed to find a kept batch{wanted} in {}: {known}", folder.display()).context(ExitCode::Data)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn kept() -> KeptMicroBatch {
        KeptMicroBatch {
            ids: vec![5, 6, 0, 7, 8, 9, 0],
            targets: vec![6, IGNORE_INDEX, IGNORE_INDEX, 8, 9, IGNORE_INDEX, IGNORE_INDEX],
            cu_seqlens: vec![0, 3, 7],
            padding: vec![2..3, 6..7],
            n_tokens: 5,
            sources: vec![vec!["a.jsonl:1".to_owned()], vec!["a.jsonl:2".to_owned(), "b.jsonl:9".to_owned()]],
        }
    }

    #[test]
    fn positions_and_targets_follow_from_the_sequences() {
        let batch = kept().batch();
        assert_eq!((batch.positions, batch.n_targets), (vec![0, 1, 2, 0, 1, 2, 3], 3));
        let sequences: Vec<_> =
            kept().sequences().map(|(batch, sources)| (batch.ids, batch.n_targets, sources.len())).collect();
        assert_eq!(sequences, [(vec![5, 6, 0], 1, 1), (vec![7, 8, 9, 0], 2, 2)]);
        let padding: Vec<_> = kept().sequences().map(|(batch, _)| (batch.padding[0].clone(), batch.n_tokens)).collect();
        assert_eq!(padding, [(2..3, 2), (3..4, 3)]);
    }

    #[test]
    fn the_last_batch_of_a_run_is_found_and_a_missing_one_names_the_others() {
        let run = tempfile::tempdir().unwrap();
        let error = |step| format!("{:#}", KeptBatch::read(run.path(), step).unwrap_err());
        assert!(error(None).contains("it has none"), "{}", error(None));
        fs::create_dir(run.path().join(KEPT_BATCHES)).unwrap();
        for step in [3, 20, 100] {
            fs::write(run.path().join(KEPT_BATCHES).join(file_name(step)), "{}").unwrap();
        }
        assert!(find(run.path(), None).unwrap().ends_with("kept_batches/step_100.json"));
        assert!(find(&run.path().join(KEPT_BATCHES), Some(3)).unwrap().ends_with("kept_batches/step_3.json"));
        assert!(error(Some(4)).contains("of step 4") && error(Some(4)).contains("[3, 20, 100]"), "{}", error(Some(4)));
        assert!(error(Some(3)).contains("step_3.json"), "{}", error(Some(3)));
    }
}
