//! What a store's server remembers, and what it answers; no sockets, so every rule is tested as plain calls.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::wire::{Bytes, NOT_READY, Query, READY, STOP_WAITING, WAIT_CANCELED};

/// One connection's number.
pub(super) type ClientId = u64;

/// Keys, queues, and who waits for them.
#[derive(Debug, Default)]
pub(super) struct Table {
    values: BTreeMap<String, Vec<u8>>,
    queues: HashMap<String, VecDeque<Vec<u8>>>,
    /// The keys that each waiting client still misses.
    waiting: BTreeMap<ClientId, Vec<String>>,
}

/// What a query leads to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Goes to the client that asked; empty when the query is not answered.
    pub(super) reply: Vec<u8>,
    /// Clients whose wait is over: each is sent [`STOP_WAITING`].
    pub(super) wake: Vec<ClientId>,
}

/// A query that cannot be answered; the connection is closed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("add to key {key:?}: its value is not a number")]
pub(super) struct NotANumber {
    key: String,
}

impl Table {
    /// Carries out one query of `client`.
    pub(super) fn apply(&mut self, client: ClientId, query: Query) -> Result<Outcome, NotANumber> {
        let outcome = match query {
            Query::Validate(_) => Outcome::default(),
            Query::Ping(nonce) => reply(nonce.to_le_bytes()),
            Query::Set { key, value } => self.set(key, value),
            Query::CompareSet { key, expected, desired } => self.compare_set(key, expected, desired),
            Query::Get { key } => reply(empty().value(self.get(&key)).0),
            Query::Add { key, amount } => self.add(key, amount)?,
            Query::Check { keys } => reply([if self.missing(keys).is_empty() { READY } else { NOT_READY }]),
            Query::Wait { keys } => self.wait(client, keys),
            Query::NumKeys => reply((self.values.len() as i64).to_le_bytes()),
            Query::Delete { key } => reply(i64::from(self.values.remove(&key).is_some()).to_le_bytes()),
            Query::Append { key, value } => self.append(key, &value),
            Query::MultiGet { keys } => reply(keys.iter().fold(empty(), |bytes, key| bytes.value(self.get(key))).0),
            Query::MultiSet { pairs } => self.multi_set(pairs),
            Query::CancelWait => {
                self.waiting.remove(&client);
                reply([WAIT_CANCELED])
            }
            Query::QueuePush { key, value } => self.queue_push(key, value),
            Query::QueuePop { key } => self.queue_pop(&key),
            Query::QueueLen { key } => reply((self.queues.get(&key).map_or(0, VecDeque::len) as i64).to_le_bytes()),
            Query::ListKeys => {
                reply(self.values.keys().fold(empty().count(self.values.len()), |bytes, key| bytes.string(key)).0)
            }
        };
        Ok(outcome)
    }

    /// Forgets a client whose connection is closed.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.waiting.remove(&client);
    }

    fn get(&self, key: &str) -> &[u8] {
        self.values.get(key).map_or(&[], Vec::as_slice)
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> Outcome {
        let wake = self.arrived(&key);
        self.values.insert(key, value);
        Outcome { wake, ..Outcome::default() }
    }

    // An absent key equals an empty value. When it is absent and something else was expected, the caller is told what
    // it expected, as torch does.
    fn compare_set(&mut self, key: String, expected: Vec<u8>, desired: Vec<u8>) -> Outcome {
        let now = match self.values.get(&key) {
            Some(stored) if *stored != expected => stored.clone(),
            None if !expected.is_empty() => expected,
            _ => {
                let wake = self.set(key, desired.clone()).wake;
                return Outcome { reply: empty().value(&desired).0, wake };
            }
        };
        reply(empty().value(&now).0)
    }

    fn add(&mut self, key: String, amount: i64) -> Result<Outcome, NotANumber> {
        let before = match self.values.get(&key) {
            None => 0,
            Some(value) => match std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok()) {
                Some(number) => number,
                None => return Err(NotANumber { key }),
            },
        };
        let after = before.wrapping_add(amount);
        let wake = self.set(key, after.to_string().into_bytes()).wake;
        Ok(Outcome { reply: after.to_le_bytes().to_vec(), wake })
    }

    fn append(&mut self, key: String, value: &[u8]) -> Outcome {
        let wake = self.arrived(&key);
        self.values.entry(key).or_default().extend_from_slice(value);
        Outcome { wake, ..Outcome::default() }
    }

    fn multi_set(&mut self, pairs: Vec<(String, Vec<u8>)>) -> Outcome {
        let wake = pairs.into_iter().flat_map(|(key, value)| self.set(key, value).wake).collect();
        Outcome { wake, ..Outcome::default() }
    }

    fn wait(&mut self, client: ClientId, keys: Vec<String>) -> Outcome {
        let missing = self.missing(keys);
        if missing.is_empty() {
            return reply([STOP_WAITING]);
        }
        self.waiting.insert(client, missing);
        Outcome::default()
    }

    // A pushed value is for one client, so one is woken: the longest connected.
    fn queue_push(&mut self, key: String, value: Vec<u8>) -> Outcome {
        let first = self.waiting.iter().find(|(_, missing)| missing.contains(&key)).map(|(client, _)| *client);
        let wake = first.filter(|client| self.arrived_for(*client, &key));
        self.queues.entry(key).or_default().push_back(value);
        Outcome { wake: wake.into_iter().collect(), ..Outcome::default() }
    }

    fn queue_pop(&mut self, key: &str) -> Outcome {
        let Some(queue) = self.queues.get_mut(key) else { return reply(0i64.to_le_bytes()) };
        let length = empty().count(queue.len());
        let bytes = match queue.pop_front() {
            Some(value) => length.value(&value),
            None => length,
        };
        reply(bytes.0)
    }

    fn missing(&self, keys: Vec<String>) -> Vec<String> {
        let queued = |key: &String| self.queues.get(key).is_some_and(|queue| !queue.is_empty());
        keys.into_iter().filter(|key| !self.values.contains_key(key) && !queued(key)).collect()
    }

    fn arrived(&mut self, key: &str) -> Vec<ClientId> {
        let clients: Vec<_> = self.waiting.keys().copied().collect();
        clients.into_iter().filter(|client| self.arrived_for(*client, key)).collect()
    }

    /// Whether `key` was the last that `client` waited for.
    fn arrived_for(&mut self, client: ClientId, key: &str) -> bool {
        let Some(missing) = self.waiting.get_mut(&client) else { return false };
        missing.retain(|other| other != key);
        let done = missing.is_empty();
        if done {
            self.waiting.remove(&client);
        }
        done
    }
}

fn empty() -> Bytes {
    Bytes(Vec::new())
}

fn reply(bytes: impl Into<Vec<u8>>) -> Outcome {
    Outcome { reply: bytes.into(), wake: Vec::new() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn set(table: &mut Table, key: &str, value: &[u8]) -> Vec<ClientId> {
        table.apply(0, Query::Set { key: key.to_owned(), value: value.to_vec() }).unwrap().wake
    }

    fn wait(table: &mut Table, client: ClientId, keys: &[&str]) -> Outcome {
        table.apply(client, Query::Wait { keys: keys.iter().map(|key| (*key).to_owned()).collect() }).unwrap()
    }

    fn compare_set(table: &mut Table, expected: &[u8], desired: &[u8]) -> Vec<u8> {
        let (expected, desired) = (expected.to_vec(), desired.to_vec());
        table.apply(0, Query::CompareSet { key: "k".to_owned(), expected, desired }).unwrap().reply[8..].to_vec()
    }

    #[test]
    fn a_wait_ends_with_the_last_of_its_keys() {
        let mut table = Table::default();
        assert_eq!(wait(&mut table, 1, &["a", "b"]), Outcome::default());
        assert_eq!(wait(&mut table, 2, &["b"]), Outcome::default());
        assert_eq!(set(&mut table, "b", b""), [2]);
        assert_eq!(set(&mut table, "b", b"again"), [0; 0]);
        assert_eq!(set(&mut table, "a", b""), [1]);
        assert_eq!(wait(&mut table, 3, &["a", "b"]).reply, [STOP_WAITING]);
    }

    #[test]
    fn a_cancelled_wait_is_not_woken() {
        let mut table = Table::default();
        wait(&mut table, 1, &["a"]);
        wait(&mut table, 2, &["a"]);
        assert_eq!(table.apply(1, Query::CancelWait).unwrap().reply, [WAIT_CANCELED]);
        table.forget(2);
        assert_eq!(set(&mut table, "a", b""), [0; 0]);
    }

    #[test]
    fn one_pushed_value_wakes_one_client() {
        let mut table = Table::default();
        wait(&mut table, 1, &["q"]);
        wait(&mut table, 2, &["q"]);
        let push = |table: &mut Table| {
            table.apply(0, Query::QueuePush { key: "q".to_owned(), value: b"v".to_vec() }).unwrap().wake
        };
        assert_eq!((push(&mut table), push(&mut table), push(&mut table)), (vec![1], vec![2], vec![]));
        assert_eq!(wait(&mut table, 3, &["q"]).reply, [STOP_WAITING]);
    }

    #[test]
    fn compare_set_changes_only_what_was_expected() {
        let mut table = Table::default();
        assert_eq!(compare_set(&mut table, b"x", b"y"), b"x", "an absent key is told as expected");
        assert_eq!(compare_set(&mut table, b"", b"one"), b"one");
        assert_eq!(compare_set(&mut table, b"", b"two"), b"one");
        assert_eq!(compare_set(&mut table, b"one", b"two"), b"two");
    }

    #[test]
    fn adding_to_text_is_refused() {
        let mut table = Table::default();
        set(&mut table, "k", b"text");
        let error = table.apply(0, Query::Add { key: "k".to_owned(), amount: 1 }).unwrap_err();
        assert_eq!(error.to_string(), "add to key \"k\": its value is not a number");
    }
}
