//! `trainer clean`: lists and removes the results of a run's folder that later ones replaced.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use super::Ui;
use super::disk_usage::bytes_of;
use crate::checkpoint::{earlier_runs, has_checkpoints, older_checkpoints, remove_checkpoint};
use crate::estimate::format_bytes;
use crate::exit::ExitCode;
use crate::run::lock_existing;
use crate::run_history::{RunFiles, SavedRun};

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer clean runs/my-run
  trainer clean runs/my-run --force
  trainer clean runs/my-run --checkpoints --force
Without --force it lists what it would remove. The files of the current run, its newest model, its best checkpoint and the newest
one that can be resumed stay, as does everything that a run did not write.";

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
    what: &'static str,
    bytes: u64,
}

/// The names of a run's files and folders in its output folder. A later run renames `NAME.ENDING` to `NAME.N.ENDING`.
const NAMES: [(&str, &str); 5] =
    [("run", "json"), ("metrics", "jsonl"), ("samples", "jsonl"), ("tensorboard", ""), ("wandb", "")];

pub(super) fn run(args: &CleanArgs, ui: &Ui) -> Result<ExitCode> {
    let files = RunFiles::of(&args.run);
    files.require(&args.run)?;
    let saved = SavedRun::read(&files.run_json)?.unwrap_or_default();
    let folders = checkpoint_folders(&files.folder, &saved);
    // Held until the end: no run starts meanwhile.
    let _locks = lock_existing(&[std::slice::from_ref(&files.folder), &folders[..]].concat())?;
    let superseded = superseded(&files.folder, &folders, args, &saved)?;
    for it in &superseded {
        ui.print(&format!("{:>10}  {}  {}", format_bytes(it.bytes), it.path.display(), it.what))?;
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

impl Superseded {
    fn new(path: PathBuf, what: &'static str) -> Self {
        Self { bytes: bytes_of(&path), path, what }
    }

    fn remove(&self) -> Result<()> {
        let failed = || format!("failed to remove {}", self.path.display());
        match self.path.is_dir() {
            true => remove_checkpoint(&self.path).with_context(failed),
            false => fs::remove_file(&self.path).with_context(failed),
        }
    }
}

/// Returns the checkpoint folders of a run: those in its folder, and those that run.json names.
fn checkpoint_folders(folder: &Path, saved: &SavedRun) -> Vec<PathBuf> {
    let inside = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let planned = saved.value("/plan/checkpoints").and_then(|plans| plans.as_array()).into_iter().flatten();
    let planned = planned.filter_map(|plan| plan["output_dir"].as_str()).map(PathBuf::from);
    let candidates = inside.chain([folder.to_owned()]).chain(planned);
    let found = candidates.filter(|it| it.is_dir() && has_checkpoints(it));
    // Two paths may be the same folder.
    let mut known = BTreeSet::new();
    let mut found: Vec<PathBuf> = found.filter(|path| known.insert(path.canonicalize().ok())).collect();
    found.sort();
    found
}

fn superseded(folder: &Path, folders: &[PathBuf], args: &CleanArgs, saved: &SavedRun) -> Result<Vec<Superseded>> {
    let mut all: Vec<Superseded> = earlier_files(folder);
    for folder in folders {
        let earlier = earlier_runs(folder)?.into_iter();
        all.extend(earlier.map(|path| Superseded::new(path, "checkpoints of an earlier run")));
        if args.checkpoints {
            let best = saved.count("/metrics/best/iter").map(|step| step as usize);
            let older = older_checkpoints(folder, best)?.into_iter();
            all.extend(older.map(|path| Superseded::new(path, "older checkpoint")));
        }
    }
    Ok(all)
}

/// Returns the files and tracker folders of earlier runs in an output folder.
fn earlier_files(folder: &Path) -> Vec<Superseded> {
    let mut paths: Vec<PathBuf> = fs::read_dir(folder).into_iter().flatten().flatten().map(|it| it.path()).collect();
    paths.retain(|path| NAMES.iter().any(|(stem, extension)| is_numbered(path, stem, extension)));
    paths.sort();
    paths.into_iter().map(|path| Superseded::new(path, "of an earlier run")).collect()
}

/// Returns true for a file `STEM.N.EXTENSION`, or without an extension for a folder `STEM.N`.
fn is_numbered(path: &Path, stem: &str, extension: &str) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let rest = match extension {
        "" => Some(&*name),
        _ => name.strip_suffix(extension).and_then(|name| name.strip_suffix('.')),
    };
    let number = rest.and_then(|name| name.strip_prefix(stem)?.strip_prefix('.'));
    let is_own =
        fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() == extension.is_empty() && !found.is_symlink());
    is_own && number.is_some_and(|n| n.parse::<u32>().is_ok())
}
