//! Record of the verified SHA-256 of cached files, by path, size, modification time and inode.
//!
//! A locked run compares the SHA-256 of each file. The record spares it the second hash of a file that has not changed.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::cache::HubCache;
use super::partial_download::hex;
use super::{ListedFile, LockedFile, RepoId};
use crate::files::{open_regular_file, read_regular_file, replace_atomically};

/// Size limit of a record in bytes.
const MAX_RECORD_BYTES: u64 = 64 << 10;

/// Identity of a file on disk, as long as no program restores its modification time.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct FileIdentity {
    /// Resolved path.
    path: PathBuf,
    size: u64,
    modified_seconds: i64,
    modified_nanoseconds: i64,
    inode: u64,
}

impl FileIdentity {
    fn of(path: &Path) -> io::Result<Self> {
        let (path, found) = (fs::canonicalize(path)?, fs::metadata(path)?);
        Ok(Self {
            path,
            size: found.len(),
            modified_seconds: found.mtime(),
            modified_nanoseconds: found.mtime_nsec(),
            inode: found.ino(),
        })
    }
}

impl HubCache {
    /// Returns the difference between a cached file and its locked SHA-256. Hashes a file once until it changes.
    ///
    /// Other processes wait meanwhile, so that the ranks of a machine hash each file once.
    pub(super) fn locked_file_fault(&self, repo: &RepoId, commit: &str, file: &LockedFile) -> Option<String> {
        if self.is_verified(repo, commit, file) {
            return None;
        }
        // A cache that is not writable has no locks. Each run then hashes the file.
        let _lock = self.lock(repo, &file.sha256).ok();
        match self.is_verified(repo, commit, file) {
            true => None,
            false => self.fault(repo, commit, file),
        }
    }

    /// Returns the difference between a cached file and its entry. Hashes the file, and records the SHA-256.
    pub(super) fn fault(&self, repo: &RepoId, commit: &str, file: &LockedFile) -> Option<String> {
        let path = self.pointer(repo, commit, &file.path);
        let before = match FileIdentity::of(&path) {
            Ok(identity) => identity,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Some("it is not in the cache".to_owned()),
            Err(error) => return Some(error.to_string()),
        };
        if before.size != file.size {
            return Some(format!("it has {} bytes, expected {}", before.size, file.size));
        }
        match sha256_of(&path) {
            Ok(sha256) if sha256.eq_ignore_ascii_case(&file.sha256) => {
                self.record(repo, &before, &sha256);
                None
            }
            Ok(sha256) => Some(format!("its sha256 is {sha256}, expected {}", file.sha256)),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Hashes a cached file, and records the SHA-256.
    pub(super) fn hashed(&self, repo: &RepoId, commit: &str, listed: &ListedFile) -> io::Result<String> {
        let path = self.pointer(repo, commit, &listed.path);
        let before = FileIdentity::of(&path)?;
        let sha256 = sha256_of(&path)?;
        self.record(repo, &before, &sha256);
        Ok(sha256)
    }

    fn is_verified(&self, repo: &RepoId, commit: &str, file: &LockedFile) -> bool {
        let record = read_regular_file(&self.record_path(repo, &file.sha256), MAX_RECORD_BYTES).ok();
        let recorded: Option<FileIdentity> = record.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let current = FileIdentity::of(&self.pointer(repo, commit, &file.path)).ok();
        recorded.is_some() && recorded == current
    }

    fn record(&self, repo: &RepoId, identity: &FileIdentity, sha256: &str) {
        let path = self.record_path(repo, sha256);
        let text = serde_json::to_vec(identity).unwrap_or_default();
        let written = self.create_parent(repo, &path).map_err(|error| error.to_string());
        let write = || {
            replace_atomically(&path, |unfinished| std::fs::write(unfinished, &text)).map_err(|error| error.to_string())
        };
        if let Err(error) = written.and_then(|()| write()) {
            tracing::debug!("the SHA-256 of {} is not recorded: {error}", identity.path.display());
        }
    }

    fn record_path(&self, repo: &RepoId, sha256: &str) -> PathBuf {
        self.repo_folder(repo).join(".verified").join(format!("{}.json", sha256.to_ascii_lowercase()))
    }
}

/// Returns the SHA-256 of a file in hexadecimal digits.
pub(super) fn sha256_of(path: &Path) -> io::Result<String> {
    let (mut hasher, mut file) = (Sha256::new(), open_regular_file(path)?);
    let mut piece = vec![0; 1 << 20];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(&piece[..n]),
        }
    }
}
