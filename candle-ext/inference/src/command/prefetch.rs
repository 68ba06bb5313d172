//! The command `prefetch`: downloads the Hub files that a run needs, and writes a lock file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::is_present;
use candlewick_text::hub::{DownloadCallback, Hub, HubError, HubLock, HubSettings, LockContext, LockFault, LockedRepo};
use clap::Args;

use super::portable_folder::PortableFolder;
use candlewick_runtime::exit::ExitCode;

/// Options of `prefetch`.
#[derive(Debug, Args)]
pub struct PrefetchOptions {
    /// Do not download: check that the cache has every locked file with its size and SHA-256
    #[arg(long, conflicts_with_all = ["update", "output"])]
    pub check: bool,
    /// Lock the current commits of branches and tags; by default, locked commits stay
    #[arg(long)]
    pub update: bool,
    /// Also write a folder for a machine without a network: lock file, local files, and the Hub files as HF_HOME. Must
    /// be empty or missing
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,
}

/// Lock file of a `prefetch` command, and its options.
pub struct Prefetch<'a> {
    /// The lock file.
    pub lock: &'a Path,
    /// Command that writes the lock file.
    pub command: String,
    /// Options.
    pub options: &'a PrefetchOptions,
    /// Callback for download progress.
    pub on_progress: Option<DownloadCallback>,
}

/// Largest number of faults that an error lists.
const MAX_FAULTS: usize = 8;

impl Prefetch<'_> {
    /// Runs the command and returns its report. `open` opens everything that a run reads, and returns the local paths.
    pub fn run(self, settings: HubSettings, open: impl FnOnce(&Hub) -> Result<Vec<PathBuf>>) -> Result<String> {
        match self.options.check {
            true => self.check(settings, open),
            false => self.download(settings, open),
        }
    }

    fn download(&self, settings: HubSettings, open: impl FnOnce(&Hub) -> Result<Vec<PathBuf>>) -> Result<String> {
        let folder = self.options.output.as_deref().map(PortableFolder::create).transpose()?;
        let kept = match is_present(self.lock) && !self.options.update {
            true => Some(HubLock::read(self.lock).map_err(usage)?),
            false => None,
        };
        let mut hub = Hub::new(settings).map_err(failed)?.with_recorder(kept);
        if let Some(on_progress) = &self.on_progress {
            hub = hub.with_progress(on_progress.clone());
        }
        let mut local = open(&hub)?;
        let lock = hub.recorded();
        lock.write(self.lock).map_err(failed)?;
        let mut report: Vec<String> = lock.repositories.iter().map(describe).collect();
        let total = total(&lock);
        report.push(format!("wrote {}: {total}, in {}", self.lock.display(), hub.settings().cache.display()));
        if let Some(folder) = folder {
            local.push(self.lock.to_owned());
            report.extend(folder.fill(&hub, &lock, &local)?);
        }
        Ok(report.join("\n"))
    }

    fn check(&self, settings: HubSettings, open: impl FnOnce(&Hub) -> Result<Vec<PathBuf>>) -> Result<String> {
        let hub = self.context().locked_hub(settings).map_err(usage)?;
        let (lock, _) = hub.lock().context("failed to check: there is no lock")?;
        let faults = hub.verify(lock).map_err(failed)?;
        if !faults.is_empty() {
            return Err(anyhow!(self.faulty(&faults, &hub)).context(ExitCode::Data));
        }
        open(&hub)?;
        Ok(format!("{}: {} are whole, in {}", self.lock.display(), total(lock), hub.settings().cache.display()))
    }

    fn context(&self) -> LockContext {
        LockContext { path: self.lock.to_owned(), prefetch: self.command.clone() }
    }

    fn faulty(&self, faults: &[LockFault], hub: &Hub) -> String {
        let line = |fault: &LockFault| format!("{} of {}: {}", fault.file, fault.id, fault.problem);
        let mut lines: Vec<String> = faults.iter().take(MAX_FAULTS).map(line).collect();
        if let Some(more @ 1..) = faults.len().checked_sub(MAX_FAULTS) {
            lines.push(format!("and {more} more"));
        }
        format!(
            "failed to verify the files of {} in {}: {}\nrun `{}` with a network to download them again",
            self.lock.display(),
            hub.settings().cache.display(),
            lines.join("\n  "),
            self.command
        )
    }
}

/// Describes a locked repository in a line.
fn describe(repo: &LockedRepo) -> String {
    let LockedRepo { kind, id, revision, commit, files } = repo;
    let n_bytes: u64 = files.iter().map(|file| file.size).sum();
    format!("{} {id} at {revision}: commit {commit}, {}", kind.name(), count(files.len(), n_bytes))
}

fn total(lock: &HubLock) -> String {
    count(lock.n_files(), lock.n_bytes())
}

fn count(n_files: usize, n_bytes: u64) -> String {
    let plural = if n_files == 1 { "" } else { "s" };
    format!("{n_files} file{plural} of {:.1} MB", n_bytes as f64 / 1e6)
}

fn failed(error: HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Data)
}

fn usage(error: HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Usage)
}
