//! The folders of a run's logs, laid out as torchrun's: `LOG_DIR/ID_x/attempt_N/LOCAL_RANK/stdout.log`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::plan::OutputPlan;
use crate::streams::StdStream;

/// The folder of one run.
#[derive(Debug)]
pub struct LogDir {
    path: PathBuf,
    /// Nobody asked for the folder: it goes when it turns out to be empty.
    temporary: Option<PathBuf>,
}

/// The folder of one attempt.
#[derive(Clone, Debug)]
pub struct AttemptLogDir(PathBuf);

impl LogDir {
    /// Makes the folder of a run.
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

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folders of an attempt, one a worker.
    pub fn attempt_dir(&self, attempt: usize, n_workers: usize) -> io::Result<AttemptLogDir> {
        let dir = AttemptLogDir(self.path.join(format!("attempt_{attempt}")));
        match fs::remove_dir_all(&dir.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        (0..n_workers).try_for_each(|local_rank| fs::create_dir_all(dir.worker_dir(local_rank)))?;
        Ok(dir)
    }

    /// Removes the folder if nobody asked for it and nothing is in it.
    pub fn remove_if_empty(self) {
        if let Some(base) = self.temporary.filter(|base| !contains_files(base)) {
            // A folder left over does no harm.
            let _ = fs::remove_dir_all(base);
        }
    }
}

impl AttemptLogDir {
    /// Returns the folders that a first attempt would have. The run's own folder gets its name when it is made.
    pub fn for_dry_run(plan: &OutputPlan, run_id: &str) -> Self {
        let base = plan.log_dir.clone().unwrap_or_else(|| "LOG_DIR".into());
        Self(base.join(format!("{run_id}_x")).join("attempt_0"))
    }

    /// Returns the folder of a worker.
    pub fn worker_dir(&self, local_rank: usize) -> PathBuf {
        self.0.join(local_rank.to_string())
    }

    /// Returns the file of one of a worker's streams.
    pub fn stream_file(&self, local_rank: usize, stream: StdStream) -> PathBuf {
        self.worker_dir(local_rank).join(format!("{}.log", stream.name()))
    }

    /// Returns the file in which a worker says why it failed.
    pub fn error_file(&self, local_rank: usize) -> PathBuf {
        self.worker_dir(local_rank).join("error.json")
    }

    /// Returns the file of the lines that were picked out of a stream of all workers.
    pub fn filtered_file(&self, stream: StdStream) -> PathBuf {
        self.0.join(format!("filtered_{}.log", stream.name()))
    }
}

/// Says whether there is a file in a folder or in those below it.
pub fn contains_files(dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(dir) else { return false };
    entries.flatten().any(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => contains_files(&entry.path()),
        _ => true,
    })
}
