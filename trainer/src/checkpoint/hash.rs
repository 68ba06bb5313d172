//! Hashes of checkpoint files: computed during writing, verified before loading.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use candlewick_text::files::open_regular_file;
use sha2::{Digest, Sha256};

use super::manifest::FileEntry;
use super::storage::{Storage, StoredFile};

/// The number of bytes read at once.
const BLOCK_BYTES: usize = 4 << 20;

/// A file that is hashed while it is written.
pub(crate) struct HashedFile {
    file: Box<dyn StoredFile>,
    hash: blake3::Hasher,
    size: u64,
}

impl HashedFile {
    pub(crate) fn create(storage: &dyn Storage, path: &Path) -> io::Result<Self> {
        Ok(Self { file: storage.create_file(path)?, hash: blake3::Hasher::new(), size: 0 })
    }

    /// Writes and hashes in parallel.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Self { file, hash, .. } = self;
        let (written, _) = rayon::join(|| file.write_all(bytes), || hash.update(bytes));
        self.size += bytes.len() as u64;
        written
    }

    /// Syncs the file to disk and returns its manifest entry.
    pub(crate) fn finish(mut self, name: &str) -> io::Result<FileEntry> {
        self.file.sync()?;
        let blake3 = Some(self.hash.finalize().to_string());
        Ok(FileEntry { name: name.to_owned(), size: self.size, blake3, sha256: None })
    }
}

/// Returns true if the hash of a file in `dir` differs from its manifest entry.
pub(crate) fn hash_differs(dir: &Path, entry: &FileEntry) -> io::Result<bool> {
    let path = dir.join(&entry.name);
    if let Some(sha256) = &entry.sha256 {
        let mut hash = Sha256::new();
        read(&path, |block| hash.update(block))?;
        let hex: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        return Ok(hex != *sha256);
    }
    let mut hash = blake3::Hasher::new();
    read(&path, |block| _ = hash.update(block))?;
    Ok(Some(hash.finalize().to_string()) != entry.blake3)
}

/// Passes a file's bytes to `take` in blocks, and reads the next block in parallel.
fn read(path: &Path, mut take: impl FnMut(&[u8]) + Send) -> io::Result<()> {
    let mut file = open_regular_file(path)?;
    let (mut block, mut next) = (Vec::new(), Vec::new());
    loop {
        let (n_read, ()) = rayon::join(|| read_block(&mut file, &mut next), || take(&block));
        if n_read? == 0 {
            return Ok(());
        }
        std::mem::swap(&mut block, &mut next);
    }
}

fn read_block(file: &mut File, block: &mut Vec<u8>) -> io::Result<usize> {
    block.clear();
    file.take(BLOCK_BYTES as u64).read_to_end(block)
}
