//! The token cache: a folder of token stores, each named by a hash of its inputs.
//!
//! Only the owner can read or write the folder and its entries: data are private, and a run trains on an entry's
//! content. An entry of another user is refused. An entry with a wrong checksum is written again.
//!
//! An entry is written under a temporary name, synced and then renamed. A killed run or two concurrent runs therefore
//! leave no partial entry. A run that is stopped by a signal leaves the finished samples under the name of the entry with a
//! dot and `.partial`, and the next run continues them.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, open_regular_file, read_regular_file, read_regular_text_file};

use super::DataError;
use super::cache_key::CacheKey;
use super::token_store::{TokenStore, TokenStoreWriter};
use crate::failpoint::failpoint;

const KEY_FILE: &str = "key.json";
const CHECKSUM_FILE: &str = "checksum";
const UNFINISHED: &str = ".incomplete";
const PARTIAL: &str = ".partial";

/// The time after which an unfinished entry without a write belongs to a killed run.
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A folder of token stores.
pub(crate) struct TokenCache {
    /// The folder whose entries are read.
    folder: PathBuf,
    /// The folder of new entries, if it is another one. A drop removes it.
    scratch: Option<tempfile::TempDir>,
}

/// The result of a cache lookup.
pub(crate) enum CacheLookup {
    Hit(Arc<TokenStore>),
    /// The reason for the miss.
    Miss(String),
}

/// A store that is being written.
pub(crate) struct PartialStore<'a> {
    pub(crate) writer: &'a mut TokenStoreWriter,
    /// The number of samples that a stopped run has written.
    pub(crate) n_done: usize,
}

/// The end of the writing of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FillStatus {
    /// The entry has all samples.
    Complete,
    /// A signal has stopped it.
    Stopped,
}

impl TokenCache {
    pub(crate) fn open(folder: &Path) -> Result<Self, DataError> {
        let cache = Self { folder: folder.to_owned(), scratch: None };
        let create = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        create.map_err(|source| cache.failed(source))?;
        remove_abandoned(folder);
        Ok(cache)
    }

    /// Returns a cache that reads the entries of a folder, which may be missing, and leaves it as it is.
    pub(crate) fn read_only(folder: &Path) -> Result<Self, DataError> {
        let scratch = tempfile::tempdir();
        let scratch = scratch.map_err(|source| DataError::Cache { path: std::env::temp_dir(), source })?;
        Ok(Self { folder: folder.to_owned(), scratch: Some(scratch) })
    }

    /// Returns the folder of new entries.
    fn written_folder(&self) -> &Path {
        self.scratch.as_ref().map_or(&self.folder, tempfile::TempDir::path)
    }

    /// Returns the folder of the store of `key`, which may not exist.
    pub(crate) fn path(&self, key: &CacheKey) -> PathBuf {
        self.folder.join(Self::entry_name(key))
    }

    fn entry_name(key: &CacheKey) -> String {
        let name: String =
            key.name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' || c == '_' { c } else { '-' }).collect();
        let shown = &name[name.len().saturating_sub(40)..];
        format!("{}-{}", shown.trim_matches(['-', '.']), &key.digest()[..16])
    }

    pub(crate) fn find(&self, key: &CacheKey) -> Result<CacheLookup, DataError> {
        let path = self.path(key);
        if !path.exists() {
            return Ok(CacheLookup::Miss(self.why_missing(key)));
        }
        refuse_other_owner(&path).map_err(|source| DataError::Cache { path: path.clone(), source })?;
        Ok(match open(&path) {
            Ok(store) => CacheLookup::Hit(Arc::new(store)),
            Err(error) => CacheLookup::Miss(format!("the entry is corrupt ({error})")),
        })
    }

    /// Writes an entry with the samples that `fill` pushes, after those of a stopped run, whose number it gets.
    ///
    /// If `fill` was stopped, keeps the finished samples for the next run, and fails with [`DataError::Stopped`].
    pub(crate) fn write(
        &self,
        key: &CacheKey,
        fill: impl FnOnce(PartialStore, &(dyn Fn(io::Error) -> DataError + Sync)) -> Result<FillStatus, DataError>,
    ) -> Result<Arc<TokenStore>, DataError> {
        let failed = |source| self.failed(source);
        let private = Permissions::from_mode(0o700);
        let mut builder = tempfile::Builder::new();
        let unfinished = builder.prefix(".").suffix(UNFINISHED).permissions(private);
        let unfinished = unfinished.tempdir_in(self.written_folder()).map_err(failed)?;
        let n_done = self.take_partial(key, unfinished.path());
        let mut writer = match n_done {
            0 => TokenStoreWriter::create(unfinished.path()),
            _ => TokenStoreWriter::resume(unfinished.path()),
        }
        .map_err(failed)?;
        let filled = fill(PartialStore { writer: &mut writer, n_done }, &failed)?;
        writer.finish().map_err(failed)?;
        let parts = serde_json::to_vec_pretty(key).map_err(|error| failed(error.into()))?;
        std::fs::write(unfinished.path().join(KEY_FILE), parts).map_err(failed)?;
        let store = TokenStore::open(unfinished.path()).map_err(failed)?;
        std::fs::write(unfinished.path().join(CHECKSUM_FILE), store.checksum()).map_err(failed)?;
        if filled == FillStatus::Stopped {
            return Err(self.keep_partial(key, unfinished.path(), store.len()));
        }
        let path = self.written_folder().join(Self::entry_name(key));
        sync(unfinished.path()).and_then(|()| rename_into_place(unfinished.path(), &path)).map_err(failed)?;
        open(&path).map(Arc::new).map_err(failed)
    }

    /// Moves the samples of a stopped run into `unfinished`, and returns their number. Damaged ones are dropped.
    fn take_partial(&self, key: &CacheKey, unfinished: &Path) -> usize {
        let partial = self.partial_path(key);
        let taken = || {
            refuse_other_owner(&partial)?;
            let n_done = open(&partial)?.len();
            // Of two concurrent runs, one gets the folder.
            let taken = unfinished.join("taken");
            std::fs::rename(&partial, &taken)?;
            for entry in std::fs::read_dir(&taken)? {
                let entry = entry?;
                std::fs::rename(entry.path(), unfinished.join(entry.file_name()))?;
            }
            std::fs::remove_dir(&taken)?;
            Ok::<_, io::Error>(n_done)
        };
        match partial.exists().then(taken) {
            None => 0,
            Some(Ok(n_done)) => n_done,
            Some(Err(error)) => {
                tracing::warn!("the samples of a stopped run in {} are not used: {error}", partial.display());
                0
            }
        }
    }

    /// Keeps the samples of a stopped run, and returns the error that reports them.
    fn keep_partial(&self, key: &CacheKey, unfinished: &Path, n_samples: usize) -> DataError {
        let partial = self.partial_path(key);
        let replaced = if partial.exists() { std::fs::remove_dir_all(&partial) } else { Ok(()) };
        match replaced.and_then(|()| std::fs::rename(unfinished, &partial)) {
            Ok(()) => {
                DataError::Stopped { kept: format!("{n_samples} samples of {} are tokenized and cached", key.name) }
            }
            Err(source) => DataError::Cache { path: partial, source },
        }
    }

    fn partial_path(&self, key: &CacheKey) -> PathBuf {
        self.written_folder().join(format!(".{}{PARTIAL}", Self::entry_name(key)))
    }

    /// Returns the parts of the key that changed since the most similar entry of the same data set.
    fn why_missing(&self, key: &CacheKey) -> String {
        let nearest = self
            .keys()
            .filter(|other| other.name == key.name)
            .map(|other| key.changed_from(&other))
            .min_by_key(Vec::len);
        match nearest {
            Some(changed) => format!("changed since they were cached: {}", changed.join(", ")),
            None => "not in the cache".into(),
        }
    }

    fn keys(&self) -> impl Iterator<Item = CacheKey> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_entry = |entry: &std::fs::DirEntry| !entry.file_name().to_string_lossy().starts_with('.');
        entries.filter(is_entry).filter_map(|entry| {
            let bytes = read_regular_file(&entry.path().join(KEY_FILE), MAX_CONFIG_FILE_BYTES).ok()?;
            serde_json::from_slice(&bytes).ok()
        })
    }

    fn failed(&self, source: io::Error) -> DataError {
        DataError::Cache { path: self.written_folder().to_owned(), source }
    }
}

/// Returns the default cache folder: `$XDG_CACHE_HOME/candlewick/tokens`, or `~/.cache/candlewick/tokens`.
pub fn default_cache_dir() -> PathBuf {
    candlewick_runtime::cores::cache_folder().join("tokens")
}

/// Opens an entry and verifies its checksum.
fn open(path: &Path) -> io::Result<TokenStore> {
    let store = TokenStore::open(path)?;
    match read_regular_text_file(&path.join(CHECKSUM_FILE), MAX_CONFIG_FILE_BYTES)? == store.checksum() {
        true => Ok(store.with_lock(shared_lock(path))),
        false => Err(io::Error::new(io::ErrorKind::InvalidData, "its checksum does not match")),
    }
}

/// Locks an entry against its removal. Some network file systems do not support locks.
fn shared_lock(path: &Path) -> Option<File> {
    let file = open_regular_file(&path.join(CHECKSUM_FILE)).ok()?;
    file.try_lock_shared().ok().map(|()| file)
}

/// The use of a cache entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CacheEntryUse {
    InUse,
    Unused,
}

/// Returns the source of an entry in a folder of tokens; `None` for files that the cache did not write.
pub(crate) fn describe_cache_entry(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let has_suffix = |suffix: &str| name.starts_with('.') && name.ends_with(suffix) && path.is_dir();
    if has_suffix(PARTIAL) {
        return Some("tokens of a stopped run".into());
    }
    if has_suffix(UNFINISHED) {
        return Some("not finished".into());
    }
    if name.starts_with("snowflake-") && name.ends_with(".jsonl") {
        return Some("rows of a Snowflake query".into());
    }
    let bytes = read_regular_file(&path.join(KEY_FILE), MAX_CONFIG_FILE_BYTES).ok()?;
    serde_json::from_slice(&bytes).ok().map(|key: CacheKey| key.name)
}

/// Removes a file or folder of a cache, unless a run uses it. A file system without locks keeps its entries. Rows of a
/// Snowflake query are removed always: a run that has opened them reads on.
pub(crate) fn remove_cache_entry(path: &Path) -> io::Result<CacheEntryUse> {
    if !path.is_dir() {
        return std::fs::remove_file(path).map(|()| CacheEntryUse::Unused);
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if name.ends_with(UNFINISHED) && last_written(path).is_some_and(|since| since < DAY) {
        return Ok(CacheEntryUse::InUse);
    }
    // An exclusive lock needs a file that is open for writing on network file systems.
    match File::options().read(true).write(true).open(path.join(CHECKSUM_FILE)) {
        Ok(file) if file.try_lock().is_err() => return Ok(CacheEntryUse::InUse),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Rename first: a reader never finds a part of an entry.
    let removed = path.with_file_name(format!(".{}{UNFINISHED}", name.trim_start_matches('.')));
    if removed != path {
        // An interrupted removal leaves it.
        if removed.exists() {
            std::fs::remove_dir_all(&removed)?;
        }
        std::fs::rename(path, &removed)?;
    }
    std::fs::remove_dir_all(removed).map(|()| CacheEntryUse::Unused)
}

/// Refuses an entry that another user owns, unless it is root.
fn refuse_other_owner(path: &Path) -> io::Result<()> {
    // SAFETY: geteuid(2) cannot fail and touches no memory.
    let own = unsafe { libc::geteuid() };
    for entry in std::fs::read_dir(path)?.flatten().map(|entry| entry.path()).chain([path.to_owned()]) {
        let owner = std::fs::symlink_metadata(&entry)?.uid();
        if owner != own && owner != 0 {
            let message = format!("{} belongs to another user (uid {owner})", entry.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
    }
    Ok(())
}

/// Removes the partial entries of killed runs, those without a write for a day, and of stopped runs, those without a write
/// for 30 days.
fn remove_abandoned(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let kept = [(UNFINISHED, DAY), (PARTIAL, 30 * DAY)];
        let kept = kept.iter().find(|(suffix, _)| name.starts_with('.') && name.ends_with(suffix));
        if kept.is_some_and(|(_, kept)| last_written(&entry.path()).is_some_and(|since| since > *kept)) {
            // Another user's entries cannot be removed: the folder may be shared.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Returns the time since the last write to a file of a folder.
fn last_written(folder: &Path) -> Option<Duration> {
    let files = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let times = files.chain([folder.to_owned()]).filter_map(|path| std::fs::metadata(path).ok()?.modified().ok());
    times.max()?.elapsed().ok()
}

/// Waits until the files of a folder are on the disk.
fn sync(folder: &Path) -> io::Result<()> {
    std::fs::read_dir(folder)?.try_for_each(|entry| File::open(entry?.path())?.sync_all())
}

fn rename_into_place(unfinished: &Path, path: &Path) -> io::Result<()> {
    failpoint("cache_written", 0);
    if path.exists() && open(path).is_err() {
        std::fs::remove_dir_all(path)?;
    }
    match std::fs::rename(unfinished, path) {
        // Another run wrote the same content first.
        Err(_) if open(path).is_ok() => Ok(()),
        renamed => renamed,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_text::render::Sample;

    use super::*;

    fn key(tokenizer: &str) -> CacheKey {
        CacheKey::new("data/train.jsonl").with("the rows", "1").with("the tokenizer", tokenizer)
    }

    fn sample(ids: &[u32]) -> Sample {
        Sample { ids: ids.to_vec(), is_target: vec![true; ids.len()], ..Sample::default() }
    }

    fn write(cache: &TokenCache, key: &CacheKey, ids: &[u32]) -> Result<Arc<TokenStore>, DataError> {
        cache.write(key, |store, failed| {
            store.writer.push(0, &sample(ids)).map(|()| FillStatus::Complete).map_err(failed)
        })
    }

    fn why(cache: &TokenCache, key: &CacheKey) -> String {
        match cache.find(key).unwrap() {
            CacheLookup::Hit(_) => "hit".into(),
            CacheLookup::Miss(why) => why,
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_miss_names_the_changed_parts_of_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        assert_eq!(why(&cache, &key("a")), "not in the cache");
        write(&cache, &key("a"), &[1, 2]).unwrap();
        assert_eq!(why(&cache, &key("a")), "hit");
        assert_eq!(why(&cache, &key("b")), "changed since they were cached: the tokenizer");
        let other = key("b").with("sample_count", "3");
        assert_eq!(why(&cache, &other), "changed since they were cached: sample_count, the tokenizer");
    }

    #[test]
    fn an_entry_with_a_changed_byte_is_a_miss() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        write(&cache, &key("a"), &[1, 2]).unwrap();
        let ids = cache.path(&key("a")).join("ids");
        let mut bytes = std::fs::read(&ids).unwrap();
        bytes[0] ^= 1;
        std::fs::write(&ids, bytes).unwrap();
        assert!(why(&cache, &key("a")).contains("its checksum does not match"), "{}", why(&cache, &key("a")));
        assert_eq!(write(&cache, &key("a"), &[1, 2]).unwrap().n_tokens(), 2);
        assert_eq!(why(&cache, &key("a")), "hit");
    }

    #[test]
    fn only_the_owner_can_read_a_new_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("candlewick/tokens");
        let cache = TokenCache::open(&path).unwrap();
        write(&cache, &key("a"), &[1, 2]).unwrap();
        for private in [&path, &cache.path(&key("a"))] {
            assert_eq!(std::fs::metadata(private).unwrap().mode() & 0o777, 0o700, "{}", private.display());
        }
    }

    /// Only root can change the owner of a file, so other users skip this test.
    #[test]
    fn an_entry_of_another_user_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        write(&cache, &key("a"), &[1, 2]).unwrap();
        if std::os::unix::fs::chown(cache.path(&key("a")).join("ids"), Some(4_242), None).is_err() {
            return;
        }
        let error = cache.find(&key("a")).err().unwrap().to_string();
        assert!(error.contains("ids belongs to another user (uid 4242)"), "{error}");
    }

    #[test]
    fn a_failed_write_leaves_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        let error = cache.write(&key("a"), |_, failed| Err(failed(full()))).unwrap_err();
        assert!(error.to_string().contains("data.cache_dir"), "{error}");
        assert_eq!(names(folder.path()), Vec::<String>::new());
    }

    #[test]
    fn an_entry_in_use_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        let store = write(&cache, &key("a"), &[1, 2]).unwrap();
        let path = cache.path(&key("a"));
        assert_eq!(describe_cache_entry(&path), Some("data/train.jsonl".into()));
        assert_eq!(remove_cache_entry(&path).unwrap(), CacheEntryUse::InUse);
        assert_eq!(why(&cache, &key("a")), "hit");
        drop(store);
        std::fs::create_dir(folder.path().join(".b.incomplete")).unwrap();
        assert_eq!(remove_cache_entry(&folder.path().join(".b.incomplete")).unwrap(), CacheEntryUse::InUse);
        assert_eq!(remove_cache_entry(&path).unwrap(), CacheEntryUse::Unused);
        assert_eq!(names(folder.path()), [".b.incomplete"]);
        std::fs::write(folder.path().join("notes.txt"), "mine").unwrap();
        assert_eq!(describe_cache_entry(&folder.path().join("notes.txt")), None);
    }

    #[test]
    fn partial_entries_are_removed_after_a_day() {
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (folder.path().join(".a.incomplete"), folder.path().join(".b.incomplete"));
        for unfinished in [&old, &new] {
            std::fs::create_dir(unfinished).unwrap();
            std::fs::write(unfinished.join("ids"), [0; 8]).unwrap();
        }
        let two_days_ago = std::time::SystemTime::now() - Duration::from_secs(48 * 3600);
        for path in [old.join("ids"), old] {
            File::open(path).unwrap().set_modified(two_days_ago).unwrap();
        }
        TokenCache::open(folder.path()).unwrap();
        assert_eq!(names(folder.path()), [".b.incomplete"]);
    }

    #[test]
    fn a_corrupt_entry_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        write(&cache, &key("a"), &[1, 2]).unwrap();
        std::fs::write(cache.path(&key("a")).join("ids"), [0; 3]).unwrap();
        assert!(why(&cache, &key("a")).contains("corrupt"));
        assert_eq!(write(&cache, &key("a"), &[1, 2]).unwrap().n_tokens(), 2);
        assert_eq!(names(folder.path()).len(), 1);
    }

    /// Pushes samples up to `end`, and returns the number of those before, or the error.
    fn fill(cache: &TokenCache, end: u32, status: FillStatus) -> Result<usize, DataError> {
        let mut before = 0;
        cache.write(&key("a"), |store, failed| {
            before = store.n_done;
            let mut push = |id: u32| store.writer.push(id, &sample(&[id, id])).map_err(failed);
            (before as u32..end).try_for_each(&mut push)?;
            Ok(status)
        })?;
        Ok(before)
    }

    #[test]
    fn a_stopped_entry_is_continued_and_equals_one_written_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        for end in [3, 5] {
            let error = fill(&cache, end, FillStatus::Stopped).unwrap_err();
            assert!(matches!(error, DataError::Stopped { .. }), "{error}");
            assert!(error.to_string().contains(&format!("{end} samples of data/train.jsonl")), "{error}");
            assert_eq!(why(&cache, &key("a")), "not in the cache");
        }
        assert_eq!(fill(&cache, 8, FillStatus::Complete).unwrap(), 5);
        let checksum = |cache: &TokenCache| TokenStore::open(&cache.path(&key("a"))).unwrap().checksum();
        assert_eq!(names(folder.path()).len(), 1);
        let other = tempfile::tempdir().unwrap();
        let whole = TokenCache::open(other.path()).unwrap();
        assert_eq!(fill(&whole, 8, FillStatus::Complete).unwrap(), 0);
        assert_eq!(checksum(&cache), checksum(&whole));
    }

    #[test]
    fn damaged_samples_of_a_stopped_run_are_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        fill(&cache, 3, FillStatus::Stopped).unwrap_err();
        let ids = cache.partial_path(&key("a")).join("ids");
        let mut bytes = std::fs::read(&ids).unwrap();
        bytes[0] ^= 1;
        std::fs::write(ids, bytes).unwrap();
        assert_eq!(fill(&cache, 4, FillStatus::Complete).unwrap(), 0);
    }

    #[test]
    fn the_slower_of_two_concurrent_writers_uses_the_existing_entry() {
        let folder = tempfile::tempdir().unwrap();
        let cache = TokenCache::open(folder.path()).unwrap();
        let store = cache.write(&key("a"), |store, failed| {
            write(&cache, &key("a"), &[1, 2])?;
            store.writer.push(0, &sample(&[1, 2])).map(|()| FillStatus::Complete).map_err(failed)
        });
        assert_eq!(store.unwrap().n_tokens(), 2);
        assert_eq!(names(folder.path()).len(), 1);
    }
}
