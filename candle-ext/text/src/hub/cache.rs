//! The Hugging Face cache layout.
//!
//! `snapshots/<commit>/<path>` are links to `blobs/<etag>`. `refs/<revision>` holds the commit, and `.locks`
//! serializes downloads of one blob. `.listings/<commit>.json` is added by this crate.
//!
//! hf-hub 1.0 keeps its functions for this layout private. Its public `scan_cache` walks every repository, and
//! `local_files_only` returns any file that exists. These functions add checks:
//!
//! | function | check that hf-hub lacks |
//! |---|---|
//! | `verify_or_evict`, `has` | a file has the listed size |
//! | `listing`, `set_listing` | offline, a snapshot has every file that the Hub listed |
//! | `set_commit` | a revision is recorded, by a rename, after all its files are cached |
//! | `commit_of` | a reference holds a commit hash and is below `refs` |
//! | `lock` | waits for a lock as long as the other download runs, not ten seconds |
//! | `link` | a link is replaced by a rename, never removed first |
//! | `create_parent`, `evict` | no link leads a write or a removal out of the repository's folder |

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use super::{HubError, ListedFile, RepoId};
use crate::files::{
    MAX_CONFIG_FILE_BYTES, MAX_GENERATED_FILE_BYTES, read_regular_file, read_regular_text_file, replace_atomically,
};

pub(crate) struct HubCache {
    root: PathBuf,
}

impl HubCache {
    pub(crate) fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Returns the folder of a repository.
    pub(crate) fn repo_folder(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }

    pub(crate) fn snapshot(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.repo_folder(repo).join("snapshots").join(commit)
    }

    pub(crate) fn pointer(&self, repo: &RepoId, commit: &str, path: &str) -> PathBuf {
        self.snapshot(repo, commit).join(path)
    }

    pub(crate) fn blob(&self, repo: &RepoId, etag: &str) -> PathBuf {
        self.repo_folder(repo).join("blobs").join(etag)
    }

    /// Returns the commit of `revision` at the last request to the Hub.
    pub(crate) fn commit_of(&self, repo: &RepoId, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = read_regular_text_file(&self.ref_path(repo, revision)?, MAX_CONFIG_FILE_BYTES).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records `commit` as the commit of `revision`.
    pub(crate) fn set_commit(&self, repo: &RepoId, revision: &str, commit: &str) -> Result<(), HubError> {
        match self.ref_path(repo, revision).filter(|_| !is_commit(revision)) {
            Some(path) => self.write(repo, &path, commit.as_bytes()),
            None => Ok(()),
        }
    }

    /// Returns the file list of a commit, if it was downloaded.
    pub(crate) fn listing(&self, repo: &RepoId, commit: &str) -> Option<Vec<ListedFile>> {
        serde_json::from_slice(&read_regular_file(&self.listing_path(repo, commit), MAX_GENERATED_FILE_BYTES).ok()?)
            .ok()
    }

    /// Stores the file list of a commit. Offline runs need it to check that a snapshot is complete.
    pub(crate) fn set_listing(&self, repo: &RepoId, commit: &str, files: &[ListedFile]) -> Result<(), HubError> {
        if self.listing(repo, commit).is_some_and(|known| known == files) {
            return Ok(());
        }
        let text = serde_json::to_vec(files).expect("paths and sizes are JSON");
        self.write(repo, &self.listing_path(repo, commit), &text)
    }

    /// Lists the files of a snapshot whose links lead to a blob.
    pub(crate) fn files(&self, repo: &RepoId, commit: &str) -> Result<Vec<ListedFile>, HubError> {
        let root = self.snapshot(repo, commit);
        let mut files = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let path = root.join(&folder);
            let entries = match fs::read_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries.map_err(|e| HubError::cache(&path, e))?,
            };
            for entry in entries.flatten() {
                let name = format!("{folder}{}", entry.file_name().to_string_lossy());
                match fs::metadata(entry.path()) {
                    Ok(found) if found.is_dir() => folders.push(format!("{name}/")),
                    Ok(found) => files.push(ListedFile { path: name, size: found.len(), sha256: None }),
                    Err(_) => {}
                }
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    /// Returns true if the file is cached with its listed size. Removes a cached file of another size.
    pub(crate) fn verify_or_evict(&self, repo: &RepoId, commit: &str, listed: &ListedFile) -> Result<bool, HubError> {
        let pointer = self.pointer(repo, commit, &listed.path);
        match fs::metadata(&pointer) {
            Ok(found) if found.len() == listed.size => Ok(true),
            Ok(found) => {
                let (size, file) = (found.len(), &listed.path);
                tracing::warn!("cached {file} has {size} bytes, not {}: removed", listed.size);
                self.evict(repo, commit, &listed.path).map(|()| false)
            }
            Err(_) => Ok(false),
        }
    }

    /// Removes a file from a snapshot, and the blob that it links to. A blob that is a link itself loses the link alone.
    pub(crate) fn evict(&self, repo: &RepoId, commit: &str, path: &str) -> Result<(), HubError> {
        let pointer = self.pointer(repo, commit, path);
        self.create_parent(repo, &pointer)?;
        let removed = |path: &Path| match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(HubError::cache(path, error)),
            _ => Ok(()),
        };
        if let Some(blob) = self.blob_of(repo, &pointer) {
            self.create_parent(repo, &blob)?;
            removed(&blob)?;
        }
        removed(&pointer)
    }

    /// Returns the entry in `blobs` that a link of a snapshot names.
    fn blob_of(&self, repo: &RepoId, pointer: &Path) -> Option<PathBuf> {
        let target = pointer.parent()?.join(fs::read_link(pointer).ok()?);
        let blob = self.blob(repo, target.file_name()?.to_str()?);
        let folders = [target.parent()?, blob.parent()?].map(|folder| fs::canonicalize(folder).ok());
        (folders[0].is_some() && folders[0] == folders[1]).then_some(blob)
    }

    /// Creates the folder of a file in the repository's folder. Refuses a link that leads out of it.
    pub(crate) fn create_parent(&self, repo: &RepoId, path: &Path) -> Result<(), HubError> {
        let own = self.repo_folder(repo);
        let parent = path.parent().unwrap_or(path);
        let create = || {
            fs::create_dir_all(&own)?;
            let existing = parent.ancestors().find(|folder| folder.exists()).unwrap_or(parent);
            if !fs::canonicalize(existing)?.starts_with(fs::canonicalize(&own)?) {
                let problem = format!(
                    "a link leads from {} out of the repository's folder; remove the link, or move the whole folder",
                    existing.display()
                );
                return Err(io::Error::other(problem));
            }
            fs::create_dir_all(parent)
        };
        create().map_err(|error| HubError::cache(parent, error))
    }

    fn write(&self, repo: &RepoId, path: &Path, bytes: &[u8]) -> Result<(), HubError> {
        self.create_parent(repo, path)?;
        // The name is replaced, also if it is a link.
        replace_atomically(path, |unfinished| fs::write(unfinished, bytes))
            .map_err(|error| HubError::cache(path, error))
    }

    /// Returns true if the file is cached with its listed size. Never removes a file.
    pub(crate) fn has(&self, repo: &RepoId, commit: &str, listed: &ListedFile) -> bool {
        fs::metadata(self.pointer(repo, commit, &listed.path)).is_ok_and(|found| found.len() == listed.size)
    }

    /// Returns the ETag of a file in an earlier snapshot.
    pub(crate) fn etag(&self, repo: &RepoId, commit: &str, path: &str) -> Option<String> {
        let blob = fs::canonicalize(self.pointer(repo, commit, path)).ok()?;
        Some(blob.file_name()?.to_str()?.to_owned())
    }

    /// Locks a blob against other threads and processes until the lock is dropped.
    pub(crate) fn lock(&self, repo: &RepoId, etag: &str) -> Result<File, HubError> {
        let path = self.root.join(".locks").join(repo.folder()).join(format!("{etag}.lock"));
        make_parent(&path)?;
        // A link is not followed, and no file is emptied.
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path).map_err(|e| HubError::cache(&path, e))?;
        file.lock().map_err(|e| HubError::cache(&path, e))?;
        Ok(file)
    }

    /// Creates the link from a snapshot to a blob.
    pub(crate) fn link(&self, repo: &RepoId, commit: &str, path: &str, etag: &str) -> Result<(), HubError> {
        let pointer = self.pointer(repo, commit, path);
        self.create_parent(repo, &pointer)?;
        let up = "../".repeat(2 + path.split('/').count() - 1);
        let relative = format!("{up}blobs/{etag}");
        let linked = replace_atomically(&pointer, |unfinished| symlink(&relative, unfinished));
        linked.map_err(|e| HubError::cache(pointer, e))
    }

    fn listing_path(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.repo_folder(repo).join(".listings").join(format!("{commit}.json"))
    }

    fn ref_path(&self, repo: &RepoId, revision: &str) -> Option<PathBuf> {
        is_inside(revision).then(|| self.repo_folder(repo).join("refs").join(revision))
    }
}

/// Returns true if an untrusted path stays inside the folder that it is joined to.
pub(crate) fn is_inside(path: &str) -> bool {
    let mut parts = Path::new(path).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

pub(crate) fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|e| HubError::cache(parent, e))
}
