//! LRU cache of bounded size.
//!
//! A training step repeats its shapes, so they stay cached. Evaluation produces new lengths all the time, which are
//! evicted.

use std::collections::HashMap;
use std::hash::Hash;

pub(super) struct LruCache<K, V> {
    capacity: usize,
    clock: u64,
    entries: HashMap<K, Entry<V>>,
}

struct Entry<V> {
    used: u64,
    value: V,
}

impl<K: Copy + Eq + Hash, V> LruCache<K, V> {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, entries: HashMap::new() }
    }

    pub(super) fn get(&mut self, key: &K) -> Option<&mut V> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.clock;
        Some(&mut entry.value)
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }

    pub(super) fn insert(&mut self, key: K, value: V) {
        self.clock += 1;
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key);
            oldest.and_then(|oldest| self.entries.remove(&oldest));
        }
        self.entries.insert(key, Entry { used: self.clock, value });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_entry_is_evicted() {
        let mut map = LruCache::new(3);
        (1..=3).for_each(|key| map.insert(key, 10 * key));
        assert_eq!(map.get(&1), Some(&mut 10));
        map.insert(4, 40);
        assert_eq!([1, 2, 3, 4].map(|key| map.get(&key).copied()), [Some(10), None, Some(30), Some(40)]);
        map.clear();
        assert_eq!(map.get(&1), None);
    }

    #[test]
    fn an_entry_that_is_inserted_again_removes_no_other() {
        let mut map = LruCache::new(2);
        [(1, 'a'), (2, 'b'), (2, 'c')].into_iter().for_each(|(key, value)| map.insert(key, value));
        assert_eq!([1, 2].map(|key| map.get(&key).copied()), [Some('a'), Some('c')]);
    }

    #[test]
    fn ever_new_keys_never_exceed_the_bound() {
        let mut map = LruCache::new(8);
        for key in 0..1000 {
            map.insert(key, key);
            assert!(map.entries.len() <= 8 && map.get(&key) == Some(&mut { key }));
        }
    }
}
