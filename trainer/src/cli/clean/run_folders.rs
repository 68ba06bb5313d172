//! The folders that `trainer clean` may change: those of one run.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::checkpoint::{
    CheckpointFormat, CheckpointPlan, Scores, has_checkpoints, newest_run_start, read_state, search,
};
use crate::plan::EVAL_LOSS;
use crate::run_history::{RunFiles, RunHistory, SavedRun};

/// The current run of a folder.
pub(super) struct CleanedRun {
    /// The output folder, canonical.
    pub(super) folder: PathBuf,
    /// The path of the folder as the user gave it.
    given: PathBuf,
    saved: SavedRun,
}

/// Folders that a clean leaves, each with the reason.
type SkippedFolders = Vec<(PathBuf, String)>;

impl CleanedRun {
    /// Reads the current run of a folder, also if `path` is a file of an earlier one.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let files = RunFiles::of(path);
        files.require(path)?;
        let given = if files.folder == Path::new("") { PathBuf::from(".") } else { files.folder };
        let saved = SavedRun::read(&given.join("run.json"))?.unwrap_or_default();
        let folder = given.canonicalize().with_context(|| format!("failed to find {}", given.display()))?;
        Ok(Self { folder, given, saved })
    }

    /// Returns the folders that a clean may change: the run's, and those with its checkpoints.
    pub(super) fn folders(&self) -> Result<Vec<PathBuf>> {
        let (own, _) = self.own_folders()?;
        Ok([vec![self.folder.clone()], own].concat())
    }

    /// Returns true if the run keeps its best checkpoint, or if that is unknown.
    pub(super) fn keeps_best(&self) -> bool {
        self.saved.value("/plan/best").is_some() || self.saved.value("/plan").is_none()
    }

    /// Returns the folders with checkpoints of this run, and the others with checkpoints that its plan names.
    pub(super) fn own_folders(&self) -> Result<(Vec<PathBuf>, SkippedFolders)> {
        let (mut own, mut skipped, mut known) = (Vec::new(), Vec::new(), BTreeSet::new());
        for folder in self.inside().into_iter().chain(self.plans().map(|plan| self.path_of(&plan.output_dir))) {
            let is_found = folder.is_absolute() || folder.starts_with(&self.given);
            let is_empty = is_found && !has_checkpoints(&folder);
            if is_empty || folder.canonicalize().is_ok_and(|folder| !known.insert(folder)) {
                continue;
            }
            match self.reason_to_skip(&folder)? {
                Some(reason) => skipped.push((folder, reason)),
                None => own.push(folder),
            }
        }
        own.sort();
        Ok((own, skipped))
    }

    /// Lists the run's folder and the folders directly in it, without links and the folders of other runs.
    fn inside(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.given).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.file_type().is_ok_and(|found| found.is_dir()));
        let folders = folders.map(|entry| self.given.join(entry.file_name()));
        let inside = folders.filter(|folder| !folder.join("run.json").exists()).chain([self.given.clone()]);
        inside.filter(|folder| has_checkpoints(folder)).collect()
    }

    /// Returns the checkpoint entries of the plan.
    fn plans(&self) -> impl Iterator<Item = CheckpointPlan> {
        let entries = self.saved.value("/plan/checkpoints").and_then(Value::as_array).into_iter().flatten();
        entries.filter_map(|entry| serde_json::from_value(entry.clone()).ok())
    }

    /// Returns the folder of an entry. One below the planned `output_dir` is below the folder of this run.
    fn path_of(&self, output_dir: &Path) -> PathBuf {
        let within = self.saved.text("/plan/log/output_dir").and_then(|folder| output_dir.strip_prefix(folder).ok());
        let is_below = |path: &&Path| path.components().all(|part| matches!(part, Component::Normal(_)));
        match within.filter(is_below) {
            Some(within) => self.given.join(within),
            None => output_dir.to_owned(),
        }
    }

    /// Returns the reason why the checkpoints in a folder are not known to be this run's.
    fn reason_to_skip(&self, folder: &Path) -> Result<Option<String>> {
        let is_inside = folder.canonicalize().is_ok_and(|folder| folder.starts_with(&self.folder));
        let run_id = self.saved.count("/run_id");
        if !is_inside {
            let written_in = self.saved.text("/folder").map(Path::new);
            if !folder.is_absolute() {
                return Ok(Some("its path is relative to the folder in which the run was started".to_owned()));
            }
            if written_in != Some(&self.folder) {
                return Ok(Some("it belongs to the run folder from which this one was copied or moved".to_owned()));
            }
        }
        let newest = newest_run_start(folder)?;
        // A run without a checkpoint in its own folder has only those of earlier runs there.
        let is_own = newest == run_id && newest.is_some() || is_inside && (newest.is_none() || run_id.is_none());
        Ok((!is_own).then(|| "its newest checkpoint is not of this run".to_owned()))
    }
}

/// Returns the entry of the plan that writes into a folder, or one without limits.
pub(super) fn plan_of(run: &CleanedRun, folder: &Path, format: CheckpointFormat) -> CheckpointPlan {
    let is_entry = |plan: &CheckpointPlan| {
        plan.format == format && run.path_of(&plan.output_dir).canonicalize().ok() == folder.canonicalize().ok()
    };
    let plan = run.plans().find(is_entry).unwrap_or_else(|| CheckpointPlan::of_stopped_run(PathBuf::new()));
    CheckpointPlan { format, output_dir: folder.to_owned(), ..plan }
}

/// Returns the evaluations that select the best checkpoint: those of the newest checkpoint and of metrics.jsonl. Returns
/// `None` if the metric or its direction is unknown.
pub(super) fn best_scores(run: &CleanedRun, folders: &[PathBuf]) -> Result<Option<Scores>> {
    let run_id = run.saved.count("/run_id");
    let mut scores = Scores::default();
    for folder in folders {
        let newest = search(folder)?.complete.into_iter().next();
        let newest = newest.filter(|found| Some(found.manifest.run_start) == run_id);
        let of_state = newest.and_then(|found| read_state(&found).ok()).map(|state| state.scores);
        scores = of_state.filter(|found| found.values.len() > scores.values.len()).unwrap_or(scores);
    }
    let Some(best) = run.saved.value("/plan/best") else { return Ok(None) };
    let planned = (best["metric"].as_str(), best["greater_is_better"].as_bool());
    if let (Some(metric), Some(greater_is_better)) = planned
        && !scores.has_metric_of(&Scores::of(metric.to_owned(), greater_is_better))
    {
        scores = Scores::of(metric.to_owned(), greater_is_better);
    }
    let name = if scores.metric == EVAL_LOSS { EVAL_LOSS.to_owned() } else { format!("eval/{}", scores.metric) };
    let history = RunHistory::read(&run.given)?;
    history.rows.series(&name).iter().for_each(|point| scores.add(point.step as usize, point.value));
    Ok(Some(scores).filter(|scores| !scores.metric.is_empty()))
}
