//! File download into the cache: byte count, SHA-256, resumption after an interruption, verification.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::HubError;
use super::retry::AttemptError;

/// ETag and size of a file, from its HEAD response.
pub(super) struct FileMetadata {
    pub(super) etag: String,
    pub(super) size: u64,
}

/// Partial download of a file on disk.
pub(super) struct PartialDownload<'a> {
    path: PathBuf,
    file: File,
    hash: Sha256,
    pub(super) n_bytes: u64,
    metadata: &'a FileMetadata,
}

impl<'a> PartialDownload<'a> {
    /// Opens the partial download at `path`. Keeps its bytes if a SHA-256 can verify the whole file. Replaces a link or
    /// pipe of that name.
    pub(super) fn resume(path: &Path, metadata: &'a FileMetadata) -> Result<Self, AttemptError> {
        let told = |e| AttemptError::Hub(HubError::cache(path, e));
        if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
            fs::remove_file(path).map_err(told)?;
        }
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).append(true).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(path).map_err(told)?;
        let mut body = Self { path: path.to_owned(), file, hash: Sha256::new(), n_bytes: 0, metadata };
        let n_here = body.file.metadata().map_err(told)?.len();
        if n_here >= metadata.size || metadata.sha256().is_none() {
            body.restart()?;
            return Ok(body);
        }
        let mut piece = vec![0; 1 << 20];
        loop {
            match body.file.read(&mut piece).map_err(told)? {
                0 => return Ok(body),
                n => {
                    body.hash.update(&piece[..n]);
                    body.n_bytes += n as u64;
                }
            }
        }
    }

    pub(super) fn restart(&mut self) -> Result<(), AttemptError> {
        self.file.set_len(0).map_err(|e| AttemptError::Hub(HubError::cache(&self.path, e)))?;
        self.hash = Sha256::new();
        self.n_bytes = 0;
        Ok(())
    }

    pub(super) fn write(&mut self, piece: &[u8]) -> Result<(), AttemptError> {
        self.n_bytes += piece.len() as u64;
        if self.n_bytes > self.metadata.size {
            let problem = format!("more than the {} bytes announced arrived", self.metadata.size);
            return self.discard(problem);
        }
        self.hash.update(piece);
        self.file.write_all(piece).map_err(|e| AttemptError::Hub(HubError::cache(&self.path, e)))
    }

    pub(super) fn verify(mut self) -> Result<(), AttemptError> {
        let (n_bytes, size) = (self.n_bytes, self.metadata.size);
        if n_bytes != size {
            return self.discard(format!("{n_bytes} bytes arrived where {size} were announced"));
        }
        let found = hex(&self.hash.clone().finalize());
        match self.metadata.sha256() {
            Some(sha256) if sha256 != found => {
                self.discard(format!("its sha256 is {found} where {sha256} was announced"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn interrupted(&self, reason: &str) -> AttemptError {
        let (n_bytes, size) = (self.n_bytes, self.metadata.size);
        let next = match self.metadata.sha256() {
            Some(_) if n_bytes > 0 => "they are kept, and the next try continues there",
            _ => "the next try starts over",
        };
        AttemptError::Interrupted(format!("the connection closed after {n_bytes} of {size} bytes ({reason}); {next}"))
    }

    pub(super) fn too_slow(&self, rate: u64) -> AttemptError {
        let (n_bytes, size) = (self.n_bytes, self.metadata.size);
        AttemptError::TooSlow(format!(
            "fewer than {rate} bytes a second arrive, {n_bytes} of {size} are here; try again later, or set HF_ENDPOINT to a \
             mirror"
        ))
    }

    fn discard(&mut self, problem: String) -> Result<(), AttemptError> {
        self.restart()?;
        Err(AttemptError::InvalidResponse(format!("{problem}; what arrived was removed")))
    }
}

impl FileMetadata {
    /// Returns the SHA-256 of the file, if the ETag is one.
    pub(super) fn sha256(&self) -> Option<&str> {
        let is_sha256 = self.etag.len() == 64 && self.etag.bytes().all(|b| b.is_ascii_hexdigit());
        is_sha256.then_some(self.etag.as_str())
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
