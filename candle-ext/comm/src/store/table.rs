//! State of a store's server and its answers, without sockets.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::wire::{Bytes, MAX_ANSWER_BYTES, MAX_VALUE_BYTES, NOT_READY, Query, READY, STOP_WAITING, WAIT_CANCELED};

/// Id of a connection.
pub(super) type ClientId = u64;

/// Memory of an entry besides its key and value: allocations and its part of the tables.
const ENTRY_BYTES: usize = 128;

/// Largest size of all keys and values, in bytes, those of waiting clients included. It bounds the memory that clients can allocate.
pub(super) const MAX_TABLE_BYTES: usize = 256 * 1024 * 1024;

/// Values, queues, and the clients that wait for them.
#[derive(Debug, Default)]
pub(super) struct KeyValueTable {
    /// Size of all keys and values in bytes, queues and waits included.
    n_bytes: usize,
    values: BTreeMap<String, Vec<u8>>,
    queues: HashMap<String, VecDeque<Vec<u8>>>,
    /// Missing keys of each waiting client.
    waiting: HashMap<ClientId, HashSet<String>>,
    /// Clients that wait for each key, the longest connected first.
    waiters: HashMap<String, BTreeSet<ClientId>>,
}

/// Outcome of a query.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct QueryOutcome {
    /// Reply to the client. Empty if the query has no answer.
    pub(super) reply: Vec<u8>,
    /// Clients whose wait has ended. The server sends each [`STOP_WAITING`].
    pub(super) wake: Vec<ClientId>,
}

/// Error of a rejected query. The server closes the connection.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum QueryError {
    #[error("add to key {key:?}: its value is not a number")]
    NotANumber { key: String },
    #[error("append to key {key:?}: {n} bytes, at most {MAX_VALUE_BYTES} are allowed")]
    TooLong { key: String, n: usize },
    #[error("answer with {n} bytes: at most {MAX_ANSWER_BYTES} are allowed")]
    AnswerTooLong { n: usize },
    #[error("store key {key:?}: all keys and values together take at most {MAX_TABLE_BYTES} bytes")]
    Full { key: String },
}

impl KeyValueTable {
    /// Applies one query of `client`.
    pub(super) fn apply(&mut self, client: ClientId, query: Query) -> Result<QueryOutcome, QueryError> {
        let outcome = match query {
            Query::Validate(_) | Query::Authenticate(_) => QueryOutcome::default(),
            Query::Ping(nonce) => reply(nonce.to_le_bytes()),
            Query::Set { key, value } => self.set(key, value)?,
            Query::CompareSet { key, expected, desired } => self.compare_set(key, expected, desired)?,
            Query::Get { key } => reply(empty().value(self.get(&key)).0),
            Query::Add { key, amount } => self.add(key, amount)?,
            Query::Check { keys } => reply([if self.missing(keys).is_empty() { READY } else { NOT_READY }]),
            Query::Wait { keys } => self.wait(client, keys)?,
            Query::NumKeys => reply((self.values.len() as i64).to_le_bytes()),
            Query::Delete { key } => reply(i64::from(self.delete(&key)).to_le_bytes()),
            Query::Append { key, value } => self.append(key, &value)?,
            Query::MultiGet { keys } => reply(self.multi_get(&keys)?.0),
            Query::MultiSet { pairs } => self.multi_set(pairs)?,
            Query::CancelWait => {
                self.cancel_wait(client);
                reply([WAIT_CANCELED])
            }
            Query::QueuePush { key, value } => self.queue_push(key, value)?,
            Query::QueuePop { key } => self.queue_pop(&key),
            Query::QueueLen { key } => reply((self.queues.get(&key).map_or(0, VecDeque::len) as i64).to_le_bytes()),
            Query::ListKeys => reply(self.list_keys()?.0),
        };
        Ok(outcome)
    }

    /// Cancels the wait of a client that has disconnected or timed out.
    pub(super) fn cancel_wait(&mut self, client: ClientId) {
        for key in self.waiting.remove(&client).unwrap_or_default() {
            self.remove_waiter(client, &key);
        }
    }

    fn get(&self, key: &str) -> &[u8] {
        self.values.get(key).map_or(&[], Vec::as_slice)
    }

    fn multi_get(&self, keys: &[String]) -> Result<Bytes, QueryError> {
        check_answer(keys.iter().map(|key| self.get(key).len()))?;
        Ok(keys.iter().fold(empty(), |bytes, key| bytes.value(self.get(key))))
    }

    fn list_keys(&self) -> Result<Bytes, QueryError> {
        check_answer(self.values.keys().map(String::len))?;
        Ok(self.values.keys().fold(empty().count(self.values.len()), |bytes, key| bytes.string(key)))
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> Result<QueryOutcome, QueryError> {
        let before = self.values.get(&key).map_or(0, |old| entry_bytes(&key, old.len()));
        self.resize(&key, before, entry_bytes(&key, value.len()))?;
        let wake = self.arrived(&key);
        self.values.insert(key, value);
        Ok(QueryOutcome { wake, ..QueryOutcome::default() })
    }

    fn delete(&mut self, key: &str) -> bool {
        let old = self.values.remove(key);
        self.n_bytes -= old.as_ref().map_or(0, |old| entry_bytes(key, old.len()));
        old.is_some()
    }

    /// Accounts for an entry whose size changes from `before` to `after` bytes. Fails if the store is full.
    fn resize(&mut self, key: &str, before: usize, after: usize) -> Result<(), QueryError> {
        let n_bytes = self.n_bytes - before + after;
        if n_bytes > MAX_TABLE_BYTES && after > before {
            return Err(QueryError::Full { key: key.to_owned() });
        }
        self.n_bytes = n_bytes;
        Ok(())
    }

    // An absent key equals an empty value. If the key is absent and `expected` is not empty, the reply is `expected`, as in
    // torch.
    fn compare_set(&mut self, key: String, expected: Vec<u8>, desired: Vec<u8>) -> Result<QueryOutcome, QueryError> {
        let now = match self.values.get(&key) {
            Some(stored) if *stored != expected => stored.clone(),
            None if !expected.is_empty() => expected,
            _ => {
                let wake = self.set(key, desired.clone())?.wake;
                return Ok(QueryOutcome { reply: empty().value(&desired).0, wake });
            }
        };
        Ok(reply(empty().value(&now).0))
    }

    fn add(&mut self, key: String, amount: i64) -> Result<QueryOutcome, QueryError> {
        let before = match self.values.get(&key) {
            None => 0,
            Some(value) => match std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok()) {
                Some(number) => number,
                None => return Err(QueryError::NotANumber { key }),
            },
        };
        let after = before.wrapping_add(amount);
        let wake = self.set(key, after.to_string().into_bytes())?.wake;
        Ok(QueryOutcome { reply: after.to_le_bytes().to_vec(), wake })
    }

    fn append(&mut self, key: String, value: &[u8]) -> Result<QueryOutcome, QueryError> {
        let n = self.get(&key).len() + value.len();
        if n as u64 > MAX_VALUE_BYTES {
            return Err(QueryError::TooLong { key, n });
        }
        let before = self.values.get(&key).map_or(0, |old| entry_bytes(&key, old.len()));
        self.resize(&key, before, entry_bytes(&key, n))?;
        let wake = self.arrived(&key);
        self.values.entry(key).or_default().extend_from_slice(value);
        Ok(QueryOutcome { wake, ..QueryOutcome::default() })
    }

    fn multi_set(&mut self, pairs: Vec<(String, Vec<u8>)>) -> Result<QueryOutcome, QueryError> {
        // Reject the query as a whole, so that an error does not drop the wake-ups of earlier pairs.
        let n_bytes: usize = pairs.iter().map(|(key, value)| entry_bytes(key, value.len())).sum();
        if let Some((key, _)) = pairs.first().filter(|_| self.n_bytes + n_bytes > MAX_TABLE_BYTES) {
            return Err(QueryError::Full { key: key.clone() });
        }
        let mut wake = Vec::new();
        for (key, value) in pairs {
            wake.extend(self.set(key, value)?.wake);
        }
        Ok(QueryOutcome { wake, ..QueryOutcome::default() })
    }

    fn wait(&mut self, client: ClientId, keys: Vec<String>) -> Result<QueryOutcome, QueryError> {
        let missing: HashSet<String> = self.missing(keys).into_iter().collect();
        self.cancel_wait(client);
        let Some(first) = missing.iter().next() else { return Ok(reply([STOP_WAITING])) };
        self.resize(first, 0, missing.iter().map(|key| wait_bytes(key)).sum())?;
        for key in &missing {
            self.waiters.entry(key.clone()).or_default().insert(client);
        }
        self.waiting.insert(client, missing);
        Ok(QueryOutcome::default())
    }

    // One client receives a pushed value: the longest connected one that waits for no other key.
    fn queue_push(&mut self, key: String, value: Vec<u8>) -> Result<QueryOutcome, QueryError> {
        self.resize(&key, 0, entry_bytes(&key, value.len()))?;
        let waiters = self.waiters.get(&key).cloned().unwrap_or_default();
        let wake = waiters.into_iter().find(|client| self.arrived_for(*client, &key));
        self.queues.entry(key).or_default().push_back(value);
        Ok(QueryOutcome { wake: wake.into_iter().collect(), ..QueryOutcome::default() })
    }

    fn queue_pop(&mut self, key: &str) -> QueryOutcome {
        let Some(queue) = self.queues.get_mut(key) else { return reply(0i64.to_le_bytes()) };
        let length = empty().count(queue.len());
        let Some(value) = queue.pop_front() else { return reply(length.0) };
        if queue.is_empty() {
            self.queues.remove(key);
        }
        self.n_bytes -= entry_bytes(key, value.len());
        reply(length.value(&value).0)
    }

    fn missing(&self, keys: Vec<String>) -> Vec<String> {
        let queued = |key: &String| self.queues.get(key).is_some_and(|queue| !queue.is_empty());
        keys.into_iter().filter(|key| !self.values.contains_key(key) && !queued(key)).collect()
    }

    fn arrived(&mut self, key: &str) -> Vec<ClientId> {
        let waiters = self.waiters.get(key).cloned().unwrap_or_default();
        waiters.into_iter().filter(|client| self.arrived_for(*client, key)).collect()
    }

    /// Removes `key` from the wait of `client`. Returns true if it was the last missing key.
    fn arrived_for(&mut self, client: ClientId, key: &str) -> bool {
        self.remove_waiter(client, key);
        let Some(missing) = self.waiting.get_mut(&client) else { return false };
        missing.remove(key);
        let done = missing.is_empty();
        if done {
            self.waiting.remove(&client);
        }
        done
    }

    fn remove_waiter(&mut self, client: ClientId, key: &str) {
        let Some(waiters) = self.waiters.get_mut(key) else { return };
        if waiters.remove(&client) {
            self.n_bytes -= wait_bytes(key);
        }
        if waiters.is_empty() {
            self.waiters.remove(key);
        }
    }
}

/// Returns the memory of a stored value.
fn entry_bytes(key: &str, n_value: usize) -> usize {
    key.len() + n_value + ENTRY_BYTES
}

/// Returns the memory of a client's wait for one key. Two tables have the key.
fn wait_bytes(key: &str) -> usize {
    2 * (key.len() + ENTRY_BYTES)
}

/// Fails if the answer with these items is too large.
fn check_answer(items: impl Iterator<Item = usize>) -> Result<(), QueryError> {
    let n = items.fold(8usize, |n, item| n.saturating_add(item + 8));
    if n > MAX_ANSWER_BYTES { Err(QueryError::AnswerTooLong { n }) } else { Ok(()) }
}

fn empty() -> Bytes {
    Bytes(Vec::new())
}

fn reply(bytes: impl Into<Vec<u8>>) -> QueryOutcome {
    QueryOutcome { reply: bytes.into(), wake: Vec::new() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn set(table: &mut KeyValueTable, key: &str, value: &[u8]) -> Vec<ClientId> {
        table.apply(0, Query::Set { key: key.to_owned(), value: value.to_vec() }).unwrap().wake
    }

    fn wait(table: &mut KeyValueTable, client: ClientId, keys: &[&str]) -> QueryOutcome {
        table.apply(client, Query::Wait { keys: keys.iter().map(|key| (*key).to_owned()).collect() }).unwrap()
    }

    fn compare_set(table: &mut KeyValueTable, expected: &[u8], desired: &[u8]) -> Vec<u8> {
        let (expected, desired) = (expected.to_vec(), desired.to_vec());
        table.apply(0, Query::CompareSet { key: "k".to_owned(), expected, desired }).unwrap().reply[8..].to_vec()
    }

    #[test]
    fn a_wait_ends_with_the_last_of_its_keys() {
        let mut table = KeyValueTable::default();
        assert_eq!(wait(&mut table, 1, &["a", "b"]), QueryOutcome::default());
        assert_eq!(wait(&mut table, 2, &["b"]), QueryOutcome::default());
        assert_eq!(set(&mut table, "b", b""), [2]);
        assert_eq!(set(&mut table, "b", b"again"), [0; 0]);
        assert_eq!(set(&mut table, "a", b""), [1]);
        assert_eq!(wait(&mut table, 3, &["a", "b"]).reply, [STOP_WAITING]);
    }

    #[test]
    fn a_cancelled_wait_is_not_woken() {
        let mut table = KeyValueTable::default();
        wait(&mut table, 1, &["a"]);
        wait(&mut table, 2, &["a"]);
        assert_eq!(table.apply(1, Query::CancelWait).unwrap().reply, [WAIT_CANCELED]);
        table.cancel_wait(2);
        assert_eq!(set(&mut table, "a", b""), [0; 0]);
    }

    #[test]
    fn one_pushed_value_wakes_one_client() {
        let mut table = KeyValueTable::default();
        wait(&mut table, 1, &["q"]);
        wait(&mut table, 2, &["q"]);
        let push = |table: &mut KeyValueTable| {
            table.apply(0, Query::QueuePush { key: "q".to_owned(), value: b"v".to_vec() }).unwrap().wake
        };
        assert_eq!((push(&mut table), push(&mut table), push(&mut table)), (vec![1], vec![2], vec![]));
        assert_eq!(wait(&mut table, 3, &["q"]).reply, [STOP_WAITING]);
    }

    #[test]
    fn a_pushed_value_goes_to_a_client_that_waits_for_nothing_else() {
        let mut table = KeyValueTable::default();
        wait(&mut table, 1, &["q", "other"]);
        wait(&mut table, 2, &["q"]);
        let push = Query::QueuePush { key: "q".to_owned(), value: b"v".to_vec() };
        assert_eq!(table.apply(0, push).unwrap().wake, [2]);
        assert_eq!(set(&mut table, "other", b""), [1]);
        assert!(table.waiting.is_empty() && table.waiters.is_empty());
    }

    #[test]
    fn the_size_of_an_appended_value_is_bounded() {
        let mut table = KeyValueTable::default();
        let half = vec![0; MAX_VALUE_BYTES as usize / 2 + 1];
        let mut append = || table.apply(0, Query::Append { key: "k".to_owned(), value: half.clone() });
        append().unwrap();
        let error = append().unwrap_err().to_string();
        assert_eq!(error, "append to key \"k\": 8388610 bytes, at most 8388608 are allowed");
    }

    #[test]
    fn a_full_store_rejects_values_until_one_is_deleted() {
        let mut table = KeyValueTable::default();
        let large = vec![0; MAX_VALUE_BYTES as usize];
        let mut set = |key: String| table.apply(0, Query::Set { key, value: large.clone() });
        let rejected = (0..).map(|idx| set(format!("{idx:03}"))).position(|done| done.is_err());
        assert_eq!(rejected, Some(MAX_TABLE_BYTES / (large.len() + 3)));
        set("000".to_owned()).unwrap();
        table.apply(0, Query::Delete { key: "000".to_owned() }).unwrap();
        table.apply(0, Query::QueuePush { key: "q".to_owned(), value: large.clone() }).unwrap();
        let error = table.apply(0, Query::Set { key: "k".to_owned(), value: large.clone() }).unwrap_err();
        assert!(error.to_string().starts_with("store key \"k\""), "{error}");
        table.apply(0, Query::QueuePop { key: "q".to_owned() }).unwrap();
        table.apply(0, Query::Set { key: "k".to_owned(), value: large }).unwrap();
    }

    #[test]
    fn hostile_queries_are_refused_before_memory_is_allocated() {
        let mut table = KeyValueTable::default();
        set(&mut table, "large", &vec![0; MAX_VALUE_BYTES as usize]);
        let many = |key: &str, n: usize| vec![key.to_owned(); n];
        let error = table.apply(0, Query::MultiGet { keys: many("large", 450) }).unwrap_err();
        assert_eq!(error.to_string(), "answer with 3774877208 bytes: at most 67108864 are allowed");
        assert!(table.apply(0, Query::MultiGet { keys: many("large", 8) }).is_err());
        assert_eq!(
            table.apply(0, Query::MultiGet { keys: many("large", 7) }).unwrap().reply.len(),
            7 * (8 + (8 << 20))
        );
        // The same key is one wait.
        assert_eq!(table.apply(1, Query::Wait { keys: many("never", 1000) }), Ok(QueryOutcome::default()));
        let before = table.n_bytes;
        let unknown =
            |client: usize| (0..8000).map(|n| format!("{client} {n} {}", "k".repeat(1000))).collect::<Vec<_>>();
        let refused = (0..40)
            .position(|client| table.apply(2 + client as ClientId, Query::Wait { keys: unknown(client) }).is_err());
        assert_eq!(refused, Some(14));
        assert!(table.apply(0, Query::Set { key: "k".to_owned(), value: vec![0; 8 << 20] }).is_err());
        (0..40).for_each(|client| table.cancel_wait(2 + client));
        assert_eq!(table.n_bytes, before);
        set(&mut table, "never", b"");
        assert_eq!(table.n_bytes, entry_bytes("large", 8 << 20) + entry_bytes("never", 0));
    }

    #[test]
    fn an_empty_queue_takes_no_memory() {
        let mut table = KeyValueTable::default();
        table.apply(0, Query::QueuePush { key: "q".to_owned(), value: b"v".to_vec() }).unwrap();
        table.apply(0, Query::QueuePop { key: "q".to_owned() }).unwrap();
        assert!(table.n_bytes == 0 && table.queues.is_empty());
    }

    #[test]
    fn compare_set_replaces_only_the_expected_value() {
        let mut table = KeyValueTable::default();
        assert_eq!(compare_set(&mut table, b"x", b"y"), b"x", "the reply for an absent key is the expected value");
        assert_eq!(compare_set(&mut table, b"", b"one"), b"one");
        assert_eq!(compare_set(&mut table, b"", b"two"), b"one");
        assert_eq!(compare_set(&mut table, b"one", b"two"), b"two");
    }

    #[test]
    fn adding_to_text_is_rejected() {
        let mut table = KeyValueTable::default();
        set(&mut table, "k", b"text");
        let error = table.apply(0, Query::Add { key: "k".to_owned(), amount: 1 }).unwrap_err();
        assert_eq!(error.to_string(), "add to key \"k\": its value is not a number");
    }
}
