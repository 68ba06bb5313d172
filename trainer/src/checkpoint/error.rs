//! What can go wrong with a save. All of it ends a run with the exit code for checkpoints and disks.

use std::io;
use std::path::{Path, PathBuf};

use super::state::StateError;

/// Says why a save could not be made, found or taken up.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system refused something.
    #[error("{action} {}", path.display())]
    Io {
        /// What was being done, as "write" or "rename".
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The disk filled up during a save. Earlier saves are untouched.
    #[error(
        "save to {}: no space left on the disk. The unfinished save was removed and earlier ones are \
         intact; free some space, or set the checkpoint's save_total_limit to delete old saves", dir.display()
    )]
    DiskFull {
        /// The save's folder.
        dir: PathBuf,
    },
    /// The saves of this run will not fit.
    #[error(
        "fit the saves of this run onto the disk of {}: they need {} and {} is free. Set a smaller save_total_limit, \
         save less often, or choose another output_dir", output_dir.display(), gigabytes(*needed), gigabytes(*free)
    )]
    NotEnoughSpace {
        /// The folder that was asked for.
        output_dir: PathBuf,
        /// Bytes that will be there at once.
        needed: u64,
        /// Bytes available to this user.
        free: u64,
    },
    /// A save that is not as it was written.
    #[error("use the save {}: {reason}", dir.display())]
    Damaged {
        /// The save's folder.
        dir: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// There are saves, and none is whole.
    #[error(
        "resume from {}: no save there is whole ({}). Restore one, or move them away to start from the beginning",
        output_dir.display(), reasons.join("; ")
    )]
    NoneComplete {
        /// The folder that was searched.
        output_dir: PathBuf,
        /// One reason a save.
        reasons: Vec<String>,
    },
    /// The save belongs to a run with another plan or model.
    #[error(
        "resume from {}: it was written by a run that differs in:\n  {}\nSet these back, or use another output_dir",
        dir.display(), differences.join("\n  ")
    )]
    Different {
        /// The save's folder.
        dir: PathBuf,
        /// One line a difference: the key, the saved value, the present one.
        differences: Vec<String>,
    },
    /// Something else has the name of a checkpoint.
    #[error(
        "save to {}: it is {what}, and nothing of another origin is replaced. Move it away, or give the checkpoint another \
         output_dir", dir.display()
    )]
    Occupied {
        /// The checkpoint's folder.
        dir: PathBuf,
        /// The thing that is there.
        what: &'static str,
    },
    /// The folder that the first rank made for a save is not there for another.
    #[error(
        "save to {}: rank {rank} does not find what rank 0 run_start there. All ranks must see one folder under this name; \
         give the checkpoint an output_dir on a file system that their machines share", dir.display()
    )]
    NotShared {
        /// The save's folder.
        dir: PathBuf,
        /// This rank.
        rank: usize,
    },
    /// The ranks see different saves.
    #[error(
        "resume from {}: rank {rank} sees other saves than rank 0 ({there}, not {here}). All ranks must see one folder \
         under this name; give the checkpoint an output_dir on a file system that their machines share",
        output_dir.display()
    )]
    DifferentCheckpoints {
        /// The folder that was searched.
        output_dir: PathBuf,
        /// A rank.
        rank: usize,
        /// What it sees.
        there: String,
        /// What rank 0 sees.
        here: String,
    },
    /// The engine could not give or take a tensor.
    #[error("{action} the tensor {name}")]
    State {
        /// "read" or "load".
        action: &'static str,
        /// The tensor's global name.
        name: String,
        /// The engine's reason.
        source: StateError,
    },
}

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn damaged(dir: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { dir: dir.to_path_buf(), reason: reason.into() }
    }

    /// Turns "no space left" (or a quota) into its own error.
    pub(crate) fn in_save(self, dir: &Path) -> Self {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded) => {
                Self::DiskFull { dir: dir.to_path_buf() }
            }
            other => other,
        }
    }

    /// The same for what rank `rank` writes into the folder that the first one has made.
    pub(crate) fn in_rank_write(self, dir: &Path, rank: usize) -> Self {
        match self {
            Self::Io { source, .. } if rank > 0 && source.kind() == io::ErrorKind::NotFound => {
                Self::NotShared { dir: dir.to_path_buf(), rank }
            }
            other => other.in_save(dir),
        }
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.2} GB", bytes as f64 / 1e9)
}
