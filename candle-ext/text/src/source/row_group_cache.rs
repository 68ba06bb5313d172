//! Process-wide cache of decoded Parquet row groups, with one memory limit for all files.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::SourceError;

/// Limit in bytes of cached text, over all files. One row group per thread is always cached.
const MAX_BYTES: usize = 256 << 20;

static CACHE: Mutex<RowGroupCache> = Mutex::new(RowGroupCache { entries: Vec::new() });
static N_FILES: AtomicU64 = AtomicU64::new(0);

/// Decoded row group: JSON text of its rows and the end offset of each.
#[derive(Default)]
pub(super) struct RowGroup {
    pub(super) text: Vec<u8>,
    pub(super) ends: Vec<usize>,
}

/// Handle to the cached row groups of one file.
pub(super) struct CachedRowGroups {
    file: u64,
}

/// Slot that is empty until a thread has decoded the row group. That thread holds the lock.
type Slot = Arc<Mutex<Option<Arc<RowGroup>>>>;

struct RowGroupCache {
    /// Entries in least-recently-used order, the latest last.
    entries: Vec<Entry>,
}

struct Entry {
    key: (u64, usize),
    n_bytes: usize,
    slot: Slot,
}

impl CachedRowGroups {
    pub(super) fn new() -> Self {
        Self { file: N_FILES.fetch_add(1, Ordering::Relaxed) }
    }

    /// Returns the row group, decoded unless it is cached.
    ///
    /// Threads decode different groups concurrently. Threads that request the same group wait for the first one.
    pub(super) fn get(
        &self,
        group_idx: usize,
        decode: impl FnOnce() -> Result<RowGroup, SourceError>,
    ) -> Result<Arc<RowGroup>, SourceError> {
        let key = (self.file, group_idx);
        let slot = lock(&CACHE).slot(key);
        let mut held = lock(&slot);
        if let Some(group) = &*held {
            return Ok(group.clone());
        }
        let group = Arc::new(decode()?);
        *held = Some(group.clone());
        lock(&CACHE).record_size(key, group.text.len());
        Ok(group)
    }
}

impl Drop for CachedRowGroups {
    fn drop(&mut self) {
        lock(&CACHE).entries.retain(|entry| entry.key.0 != self.file);
    }
}

impl RowGroupCache {
    fn slot(&mut self, key: (u64, usize)) -> Slot {
        let entry = match self.entries.iter().position(|entry| entry.key == key) {
            Some(at) => self.entries.remove(at),
            None => Entry { key, n_bytes: 0, slot: Slot::default() },
        };
        let slot = entry.slot.clone();
        self.entries.push(entry);
        slot
    }

    /// Records the size of a row group, and evicts the least recently used groups above the limit.
    fn record_size(&mut self, key: (u64, usize), n_bytes: usize) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.key == key) {
            entry.n_bytes = n_bytes;
        }
        let mut total: usize = self.entries.iter().map(|entry| entry.n_bytes).sum();
        while total > MAX_BYTES && self.entries.len() > rayon::current_num_threads() {
            total -= self.entries.remove(0).n_bytes;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    fn group(text: &str) -> Result<RowGroup, SourceError> {
        Ok(RowGroup { text: text.into(), ends: vec![text.len()] })
    }

    #[test]
    fn the_files_of_a_process_share_one_bound() {
        let mut kept = RowGroupCache { entries: Vec::new() };
        for file in 0..100 {
            kept.slot((file, 0));
            kept.record_size((file, 0), MAX_BYTES / 4);
        }
        assert_eq!(kept.entries.len(), rayon::current_num_threads().max(4));
        assert_eq!(kept.entries.last().unwrap().key, (99, 0));
        kept.slot((200, 0));
        kept.record_size((200, 0), 2 * MAX_BYTES);
        assert!(kept.entries.len() <= rayon::current_num_threads(), "a group over the bound is read all the same");
        assert_eq!(kept.entries.last().unwrap().key, (200, 0));
    }

    #[test]
    fn a_group_is_decoded_once_and_let_go_with_its_file() {
        let groups = CachedRowGroups::new();
        assert_eq!(groups.get(0, || group("a")).unwrap().text, b"a");
        assert_eq!(groups.get(0, || panic!("it is kept")).unwrap().text, b"a");
        assert!(groups.get(1, || Err(SourceError::empty("x", "y"))).is_err());
        assert_eq!(groups.get(1, || group("b")).unwrap().text, b"b");
        let file = groups.file;
        drop(groups);
        assert!(lock(&CACHE).entries.iter().all(|entry| entry.key.0 != file));
    }

    #[test]
    fn two_groups_are_decoded_concurrently() {
        let groups = CachedRowGroups::new();
        let (to_first, from_second) = channel();
        let (to_second, from_first) = channel();
        let patience = Duration::from_secs(60);
        std::thread::scope(|scope| {
            let groups = &groups;
            scope.spawn(move || {
                groups.get(0, || {
                    to_second.send(()).unwrap();
                    from_second.recv_timeout(patience).expect("the second is being decoded meanwhile");
                    group("a")
                })
            });
            from_first.recv_timeout(patience).unwrap();
            groups.get(1, || group("b")).unwrap();
            to_first.send(()).unwrap();
        });
    }
}
