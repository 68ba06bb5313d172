//! `trainer clean`: lists and removes the results of a run's folder that later ones replaced.

mod run_folders;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use self::run_folders::{CleanedRun, best_scores, plan_of};
use super::Ui;
use super::disk_usage::bytes_of;
use crate::checkpoint::{
    CheckpointFormat, earlier_runs, older_checkpoints, remove_checkpoint, remove_earlier_run, run_starts,
};
use crate::estimate::format_bytes;
use crate::exit::ExitCode;
use crate::metrics::numbered_files;
use crate::run::lock_existing;
use crate::run_history::SavedRun;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer clean runs/my-run
  trainer clean runs/my-run --force
  trainer clean runs/my-run --checkpoints --force
Without --force it lists what it would remove. The files of the current run, its newest model, its best checkpoint and the newest
one that can be resumed stay, as does everything that another run or no run wrote.";

#[derive(Debug, Args)]
pub(super) struct CleanArgs {
    /// Output folder of a run
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Also remove the current run's checkpoints and models that are older than its newest
    #[arg(long)]
    checkpoints: bool,
    /// Remove the listed files and folders
    #[arg(long)]
    force: bool,
}

/// A file or folder that later results replaced.
struct Superseded {
    path: PathBuf,
    kind: SupersededKind,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SupersededKind {
    File,
    EarlierRun,
    Checkpoint,
}

/// The results that a clean removes, and the folders that it leaves, each with the reason.
#[derive(Default)]
struct CleanPlan {
    superseded: Vec<Superseded>,
    skipped: Vec<(PathBuf, String)>,
}

pub(super) fn run(args: &CleanArgs, ui: &Ui) -> Result<ExitCode> {
    let run = CleanedRun::read(&args.run)?;
    // Held until the end: no run starts meanwhile.
    let _locks = lock_existing(&run.folders()?)?;
    let CleanPlan { superseded, skipped } = plan(&run, args)?;
    for (path, reason) in &skipped {
        ui.print(&format!("{:>10}  {}  {reason}", "skipped", path.display()))?;
    }
    for it in &superseded {
        ui.print(&format!("{:>10}  {}  {}", format_bytes(it.bytes), it.path.display(), it.kind.describe()))?;
    }
    let total = format_bytes(superseded.iter().map(|it| it.bytes).sum());
    match (superseded.as_slice(), args.force) {
        ([], _) => return ui.print("nothing to remove"),
        (_, false) => return ui.print(&format!("{total:>10}  in all; --force removes them")),
        (_, true) => {}
    }
    superseded.iter().try_for_each(Superseded::remove)?;
    ui.print(&format!("{total:>10}  removed"))
}

impl SupersededKind {
    fn describe(self) -> &'static str {
        match self {
            Self::File => "of an earlier run",
            Self::EarlierRun => "checkpoints of an earlier run",
            Self::Checkpoint => "older checkpoint",
        }
    }
}

impl Superseded {
    fn new(path: PathBuf, kind: SupersededKind) -> Self {
        Self { bytes: bytes_of(&path), path, kind }
    }

    fn remove(&self) -> Result<()> {
        let failed = || format!("failed to remove {}", self.path.display());
        match self.kind {
            SupersededKind::EarlierRun => remove_earlier_run(&self.path).with_context(failed),
            SupersededKind::Checkpoint => remove_checkpoint(&self.path).with_context(failed),
            SupersededKind::File if self.path.is_dir() => fs::remove_dir_all(&self.path).with_context(failed),
            SupersededKind::File => fs::remove_file(&self.path).with_context(failed),
        }
    }
}

fn plan(run: &CleanedRun, args: &CleanArgs) -> Result<CleanPlan> {
    let (own, skipped) = run.own_folders()?;
    let mut plan = CleanPlan { skipped, ..CleanPlan::default() };
    // Runs whose checkpoints stay keep their files.
    let mut kept = BTreeSet::new();
    for folder in &own {
        kept.extend(run_starts(folder)?);
        for earlier in earlier_runs(folder)? {
            match earlier.is_newest {
                true => {
                    let reason = "no newer run has a complete checkpoint like those in it".to_owned();
                    plan.skipped.push((earlier.folder, reason));
                    kept.extend(earlier.run_starts);
                }
                false => plan.superseded.push(Superseded::new(earlier.folder, SupersededKind::EarlierRun)),
            }
        }
    }
    let files = earlier_files(&run.folder, &kept)?;
    plan.superseded.splice(0..0, files);
    if args.checkpoints {
        own.iter().try_for_each(|folder| plan.add_older_checkpoints(run, folder, &own))?;
    }
    Ok(plan)
}

impl CleanPlan {
    /// Adds the current run's checkpoints that a `save_total_limit` of 1 would delete.
    fn add_older_checkpoints(&mut self, run: &CleanedRun, folder: &Path, own: &[PathBuf]) -> Result<()> {
        for format in [CheckpointFormat::Sharded, CheckpointFormat::HuggingFace] {
            let entry = plan_of(run, folder, format);
            let scores = best_scores(run, own)?;
            let older = older_checkpoints(&entry, scores.as_ref().unwrap_or(&Default::default()))?;
            let steps: Vec<usize> = format.list(folder)?.iter().map(|(tag, _)| tag.step).collect();
            let is_known = scores.is_some_and(|scores| scores.best_of(&steps).is_some());
            if !older.is_empty() && run.keeps_best() && !is_known {
                let reason =
                    "its older checkpoints stay: the best one is unknown, because no evaluation of it is recorded";
                self.skipped.push((folder.to_owned(), reason.to_owned()));
                continue;
            }
            self.superseded.extend(older.into_iter().map(|dir| Superseded::new(dir, SupersededKind::Checkpoint)));
        }
        Ok(())
    }
}

/// Returns the files and tracker folders of earlier runs in an output folder, except those of the runs `kept`.
fn earlier_files(folder: &Path, kept: &BTreeSet<u64>) -> Result<Vec<Superseded>> {
    let mut files = Vec::new();
    for (n, path) in numbered_files(folder) {
        let saved = SavedRun::read(&folder.join(format!("run.{n}.json")))?;
        let run_start = saved.and_then(|saved| saved.count("/run_id"));
        if run_start.is_none_or(|run_start| !kept.contains(&run_start)) {
            files.push(Superseded::new(path, SupersededKind::File));
        }
    }
    Ok(files)
}
