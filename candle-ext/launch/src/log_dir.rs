//! The log directory of a run, with torchrun's layout: `LOG_DIR/ID_x/attempt_N/LOCAL_RANK/stdout.log`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::plan::OutputPlan;
use crate::streams::StdStream;

/// The log directory of one run.
#[derive(Debug)]
pub struct LogDir {
    path: PathBuf,
    /// The directory created without `--log-dir`. It is removed if it stays empty.
    temporary: Option<PathBuf>,
}

/// The log directory of one attempt.
#[derive(Clone, Debug)]
pub struct AttemptLogDir(PathBuf);

impl LogDir {
    /// Creates the log directory of a run.
    pub fn create(plan: &OutputPlan, run_id: &str) -> io::Result<Self> {
        let (base, temporary) = match &plan.log_dir {
            Some(base) => (std::path::absolute(base)?, None),
            None => {
                let base = tempfile::Builder::new().prefix("launch_").tempdir()?.keep();
                (base.clone(), Some(base))
            }
        };
        fs::create_dir_all(&base)?;
        let prefix = format!("{}_", run_id.replace('/', "_"));
        let path = tempfile::Builder::new().prefix(&prefix).tempdir_in(base)?.keep();
        Ok(Self { path, temporary })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directories of an attempt, one per worker.
    pub fn attempt_dir(&self, attempt: usize, n_workers: usize) -> io::Result<AttemptLogDir> {
        let dir = AttemptLogDir(self.path.join(format!("attempt_{attempt}")));
        match fs::remove_dir_all(&dir.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        (0..n_workers).try_for_each(|local_rank| fs::create_dir_all(dir.worker_dir(local_rank)))?;
        Ok(dir)
    }

    /// Removes a temporary directory that contains no files.
    pub fn remove_if_empty(self) {
        if let Some(base) = self.temporary.filter(|base| !contains_files(base)) {
            // A leftover directory does no harm.
            let _ = fs::remove_dir_all(base);
        }
    }
}

impl AttemptLogDir {
    /// Returns the directories of a first attempt, without creating them. `x` stands for the random suffix.
    pub fn for_dry_run(plan: &OutputPlan, run_id: &str) -> Self {
        let base = plan.log_dir.clone().unwrap_or_else(|| "LOG_DIR".into());
        Self(base.join(format!("{run_id}_x")).join("attempt_0"))
    }

    /// Returns the directory of a worker.
    pub fn worker_dir(&self, local_rank: usize) -> PathBuf {
        self.0.join(local_rank.to_string())
    }

    /// Returns the log file of a worker's stream.
    pub fn stream_file(&self, local_rank: usize, stream: StdStream) -> PathBuf {
        self.worker_dir(local_rank).join(format!("{}.log", stream.name()))
    }

    /// Returns the error file of a worker.
    pub fn error_file(&self, local_rank: usize) -> PathBuf {
        self.worker_dir(local_rank).join("error.json")
    }

    /// Returns the file of the filtered lines of a stream of all workers.
    pub fn filtered_file(&self, stream: StdStream) -> PathBuf {
        self.0.join(format!("filtered_{}.log", stream.name()))
    }
}

/// Returns whether a directory or a subdirectory contains a file.
pub fn contains_files(dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(dir) else { return false };
    entries.flatten().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => contains_files(&entry.path()),
        _ => true,
    })
}
