//! Errors of checkpoints. All of them end a run with the exit code for checkpoints and disks.

use std::io;
use std::path::{Path, PathBuf};

use candlewick_text::quantity::decimal_bytes;

use super::state::StateError;

/// The reason why a checkpoint cannot be written, found or loaded.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The file system reported an error.
    #[error("{action} {}", path.display())]
    Io {
        /// The operation, such as "write" or "rename".
        action: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The disk filled up while a checkpoint was written. Earlier checkpoints are intact.
    #[error(
        "save to {}: no space left on the disk. The unfinished checkpoint was removed; earlier ones are intact. Free \
         space on the disk of {}, or set a smaller save_total_limit. With auto_resume, the same command then continues \
         from the newest checkpoint", dir.display(), dir.parent().unwrap_or(dir).display()
    )]
    DiskFull {
        /// The checkpoint folder.
        dir: PathBuf,
    },
    /// The disk has too little space for the checkpoints of this run.
    #[error(
        "fit the checkpoints of this run on the disk of {}: they need {} and {} is free. Set a smaller save_total_limit, \
         save less often, or choose another output_dir", output_dir.display(), decimal_bytes(*needed), decimal_bytes(*free)
    )]
    NotEnoughSpace {
        /// The configured folder.
        output_dir: PathBuf,
        /// The peak number of bytes.
        needed: u64,
        /// The bytes available to this user.
        free: u64,
    },
    /// The disk has too little space for one model.
    #[error(
        "fit the model on the disk of {}: it needs {} and {} is free. Choose another output folder, or a smaller dtype",
        output_dir.display(), decimal_bytes(*needed), decimal_bytes(*free)
    )]
    NoSpaceForModel {
        /// The output folder.
        output_dir: PathBuf,
        /// The size of the weights, in bytes.
        needed: u64,
        /// The bytes available to this user.
        free: u64,
    },
    /// A checkpoint whose content differs from what was written.
    #[error("read the checkpoint {}: {reason}", dir.display())]
    Damaged {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The difference.
        reason: String,
    },
    /// There are checkpoints, but none is complete.
    #[error(
        "resume from {}: no checkpoint there is complete ({}). Restore one, or move them away to start from the beginning",
        output_dir.display(), reasons.join("; ")
    )]
    NoneComplete {
        /// The folder that was searched.
        output_dir: PathBuf,
        /// One reason for each checkpoint.
        reasons: Vec<String>,
    },
    /// The checkpoint belongs to a run with another plan or model.
    #[error(
        "resume from {}: the run that wrote it differs in:\n  {}\nRestore these settings, or use another output_dir",
        dir.display(), differences.join("\n  ")
    )]
    Different {
        /// The checkpoint folder.
        dir: PathBuf,
        /// One line for each difference: the key, the value in the checkpoint, the current value.
        differences: Vec<String>,
    },
    /// The checkpoint to resume from does not exist.
    #[error("resume from {}: it does not exist. {}", dir.display(), describe_near(near))]
    NoSuchCheckpoint {
        /// The given folder.
        dir: PathBuf,
        /// The checkpoints of the nearest existing folder, newest first.
        near: Vec<PathBuf>,
    },
    /// The folder to resume from has checkpoints, and is none itself.
    #[error("resume from {}: it is not a checkpoint. The newest one in it is {}", dir.display(), newest.display())]
    NotACheckpoint {
        /// The given folder.
        dir: PathBuf,
        /// The newest checkpoint in it.
        newest: PathBuf,
    },
    /// The run has checkpoints that do not continue the one that it should resume from.
    #[error(
        "resume from {}: this run has a newer checkpoint, {}, which does not continue it. To continue from the \
         newest one, remove `resume_from_checkpoint`: `auto_resume` finds it. To start a new run from the named one, set another \
         output_dir, or move the checkpoints of this run away", given.display(), newest.display()
    )]
    NewerCheckpoint {
        /// The checkpoint of `resume_from_checkpoint`.
        given: PathBuf,
        /// The newest checkpoint of the run.
        newest: PathBuf,
    },
    /// The newest checkpoint in the folder is of a run with another `output_dir`.
    #[error(
        "resume from {}: it is of the run in {}, and output_dir is {}. For a new run, remove `output_dir` from the checkpoint \
         entry: its folder is then below that of the run. To continue the other run, set output_dir={}. To start a new run from \
         this checkpoint, do the former and set resume_from_checkpoint={}",
        dir.display(), written_by.display(), output_dir.display(), written_by.display(), dir.display()
    )]
    OtherRun {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The `output_dir` of the run that wrote it.
        written_by: PathBuf,
        /// The `output_dir` of this run.
        output_dir: PathBuf,
    },
    /// The settings changed since the run was stopped.
    #[error(
        "continue the run that was stopped: these settings changed since:\n  {}\nRestore them. To continue with the new ones, \
         set resume_from_checkpoint={}. To start from the beginning, delete {} or set another output_dir",
        differences.join("\n  "), dir.display(), dir.parent().unwrap_or(dir).display()
    )]
    ChangedSettings {
        /// The checkpoint folder.
        dir: PathBuf,
        /// One line for each setting, with both values.
        differences: Vec<String>,
    },
    /// The frozen weights of a checkpoint's run were others: the base of its adapter, or the vision tower of a multimodal model.
    #[error(
        "use the checkpoint {}: it was trained on other weights than those in {} (hash {trained_on}, found {found}). Give the \
         base model of an adapter with --base, or restore the folder of a multimodal model", dir.display(), base.display()
    )]
    OtherBase {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The folder of the base model.
        base: PathBuf,
        /// The hash in the checkpoint.
        trained_on: String,
        /// The hash of the base model's weights.
        found: String,
    },
    /// A file or folder of another origin has the name of a checkpoint.
    #[error(
        "save to {}: it is {what} and will not be replaced. Move it away, or give the checkpoint another \
         output_dir", dir.display()
    )]
    Occupied {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The kind of the existing entry.
        what: &'static str,
    },
    /// Another rank does not see the checkpoint folder that rank 0 created.
    #[error(
        "save to {}: rank {rank} does not see the folder that rank 0 created. All ranks must see the same folder; give the \
         checkpoint an output_dir on a shared file system", dir.display()
    )]
    NotShared {
        /// The checkpoint folder.
        dir: PathBuf,
        /// The rank that does not see it.
        rank: usize,
    },
    /// The ranks see different checkpoints.
    #[error(
        "resume from {}: rank {rank} sees other checkpoints than rank 0 ({there}, not {here}). All ranks must see the same \
         folder; give the checkpoint an output_dir on a shared file system",
        output_dir.display()
    )]
    DifferentCheckpoints {
        /// The folder that was searched.
        output_dir: PathBuf,
        /// A rank that differs from rank 0.
        rank: usize,
        /// The checkpoints that this rank sees.
        there: String,
        /// The checkpoints that rank 0 sees.
        here: String,
    },
    /// The engine failed to read or load a tensor.
    #[error("{action} the tensor {name}")]
    State {
        /// "read" or "load".
        action: &'static str,
        /// The tensor's global name.
        name: String,
        /// The engine's error.
        source: StateError,
    },
}

/// The number of checkpoints that an error lists.
const MAX_LISTED: usize = 5;

fn describe_near(near: &[PathBuf]) -> String {
    let listed: Vec<String> = near.iter().take(MAX_LISTED).map(|dir| dir.display().to_string()).collect();
    match near.len() {
        0 => "No folder near it has checkpoints".to_owned(),
        n if n > MAX_LISTED => format!("The newest of {n} checkpoints near it are {}", listed.join(", ")),
        _ => format!("The checkpoints near it are {}", listed.join(", ")),
    }
}

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }

    pub(crate) fn damaged(dir: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { dir: dir.to_path_buf(), reason: reason.into() }
    }

    /// Turns "no space left" and "quota exceeded" into [`CheckpointError::DiskFull`].
    pub(crate) fn in_save(self, dir: &Path) -> Self {
        use io::ErrorKind::{QuotaExceeded, StorageFull};
        match self {
            Self::Io { source, .. } if matches!(source.kind(), StorageFull | QuotaExceeded) => {
                Self::DiskFull { dir: dir.to_path_buf() }
            }
            other => other,
        }
    }

    /// Classifies an error of rank `rank`, which writes into the folder that the first rank created.
    pub(crate) fn in_rank_write(self, dir: &Path, rank: usize) -> Self {
        match self {
            Self::Io { source, .. } if rank > 0 && source.kind() == io::ErrorKind::NotFound => {
                Self::NotShared { dir: dir.to_path_buf(), rank }
            }
            other => other.in_save(dir),
        }
    }
}
