//! Wire protocol of the store: one type byte, then the arguments. Strings and values have a u64 length prefix.
//!
//! All numbers are little endian, as in torch.

use std::io::{self, Read};

use super::secret::StoreSecret;

/// Number that a client sends first, which distinguishes it from a port scanner.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;

// Bounds of torch's server, which limit the allocations that a client can cause.
pub(super) const MAX_KEYS: u64 = 128 * 1024;
pub(super) const MAX_KEY_BYTES: u64 = 8 * 1024;
pub(super) const MAX_VALUE_BYTES: u64 = 8 * 1024 * 1024;
/// Largest query in bytes, including all keys and values. torch has no such bound.
pub(super) const MAX_QUERY_BYTES: u64 = 64 * 1024 * 1024;

/// Largest query of a client that has not sent the secret.
pub(super) const MAX_UNTRUSTED_BYTES: u64 = 16 * 1024;
/// Largest answer in bytes. torch has no such bound.
pub(super) const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// Answer to [`Query::Check`] if all keys exist.
pub(super) const READY: u8 = 0;
/// Answer to [`Query::Check`] if a key is missing.
pub(super) const NOT_READY: u8 = 1;
/// Answer to [`Query::Wait`] when all keys exist.
pub(super) const STOP_WAITING: u8 = 0;
/// Answer to [`Query::CancelWait`].
pub(super) const WAIT_CANCELED: u8 = 1;

/// Request of a client. Keys have the prefix `/`, which torch's client adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Query {
    /// Opens a connection. No answer.
    Validate(u32),
    /// No answer.
    Set { key: String, value: Vec<u8> },
    /// Answer: the value now stored.
    CompareSet { key: String, expected: Vec<u8>, desired: Vec<u8> },
    /// Answer: the value, empty if the key is missing.
    Get { key: String },
    /// Adds to a decimal number. Answer: the sum.
    Add { key: String, amount: i64 },
    /// Immediate answer: [`READY`] or [`NOT_READY`].
    Check { keys: Vec<String> },
    /// Answer: [`STOP_WAITING`] when all keys exist.
    Wait { keys: Vec<String> },
    /// Answer: an i64.
    NumKeys,
    /// Answer: the number of deleted keys, an i64.
    Delete { key: String },
    /// No answer.
    Append { key: String, value: Vec<u8> },
    /// Answer: the values in order.
    MultiGet { keys: Vec<String> },
    /// No answer.
    MultiSet { pairs: Vec<(String, Vec<u8>)> },
    /// Answer: [`WAIT_CANCELED`], after a [`STOP_WAITING`] that was already sent.
    CancelWait,
    /// Answer: the same number.
    Ping(u32),
    /// No answer.
    QueuePush { key: String, value: Vec<u8> },
    /// Answer: the queue's length, and its first value if it has one.
    QueuePop { key: String },
    /// Answer: an i64.
    QueueLen { key: String },
    /// Answer: an i64 count, and the keys as strings.
    ListKeys,
    /// Sends the store's secret. torch's protocol lacks this query. No answer.
    Authenticate(StoreSecret),
}

impl Query {
    /// Encodes the query.
    pub(super) fn encode(&self) -> Vec<u8> {
        let bytes = match self {
            Self::Validate(magic) => kind(0).raw(&magic.to_le_bytes()),
            Self::Set { key, value } => kind(1).string(key).value(value),
            Self::CompareSet { key, expected, desired } => kind(2).string(key).value(expected).value(desired),
            Self::Get { key } => kind(3).string(key),
            Self::Add { key, amount } => kind(4).string(key).raw(&amount.to_le_bytes()),
            Self::Check { keys } => kind(5).strings(keys),
            Self::Wait { keys } => kind(6).strings(keys),
            Self::NumKeys => kind(7),
            Self::Delete { key } => kind(8).string(key),
            Self::Append { key, value } => kind(9).string(key).value(value),
            Self::MultiGet { keys } => kind(10).strings(keys),
            Self::MultiSet { pairs } => {
                pairs.iter().fold(kind(11).count(pairs.len()), |bytes, (key, value)| bytes.string(key).value(value))
            }
            Self::CancelWait => kind(12),
            Self::Ping(nonce) => kind(13).raw(&nonce.to_le_bytes()),
            Self::QueuePush { key, value } => kind(14).string(key).value(value),
            Self::QueuePop { key } => kind(15).string(key),
            Self::QueueLen { key } => kind(16).string(key),
            Self::ListKeys => kind(17),
            Self::Authenticate(secret) => kind(200).string(secret.text()),
        };
        bytes.0
    }

    /// Reads one query of at most `max_bytes`, or returns `None` if the client has closed the connection between two
    /// queries.
    pub(super) fn read(from: &mut impl Read, max_bytes: u64) -> io::Result<Option<Self>> {
        let mut kind = [0];
        match from.read_exact(&mut kind) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            done => done?,
        }
        let from = &mut from.take(max_bytes);
        let query = match kind[0] {
            0 => Self::Validate(read_u32(from)?),
            1 => Self::Set { key: read_string(from)?, value: read_value(from)? },
            2 => Self::CompareSet { key: read_string(from)?, expected: read_value(from)?, desired: read_value(from)? },
            3 => Self::Get { key: read_string(from)? },
            4 => Self::Add { key: read_string(from)?, amount: read_i64(from)? },
            5 => Self::Check { keys: read_strings(from)? },
            6 => Self::Wait { keys: read_strings(from)? },
            7 => Self::NumKeys,
            8 => Self::Delete { key: read_string(from)? },
            9 => Self::Append { key: read_string(from)?, value: read_value(from)? },
            10 => Self::MultiGet { keys: read_strings(from)? },
            11 => Self::MultiSet {
                pairs: (0..read_count(from)?)
                    .map(|_| Ok((read_string(from)?, read_value(from)?)))
                    .collect::<io::Result<_>>()?,
            },
            12 => Self::CancelWait,
            13 => Self::Ping(read_u32(from)?),
            14 => Self::QueuePush { key: read_string(from)?, value: read_value(from)? },
            15 => Self::QueuePop { key: read_string(from)? },
            16 => Self::QueueLen { key: read_string(from)? },
            17 => Self::ListKeys,
            200 => Self::Authenticate(StoreSecret::new(read_string(from)?)),
            other => return Err(io::Error::new(io::ErrorKind::InvalidData, format!("query of unknown type {other}"))),
        };
        Ok(Some(query))
    }
}

/// Builder of a message.
pub(super) struct Bytes(pub(super) Vec<u8>);

fn kind(kind: u8) -> Bytes {
    Bytes(vec![kind])
}

impl Bytes {
    pub(super) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn count(self, count: usize) -> Self {
        self.raw(&(count as u64).to_le_bytes())
    }

    pub(super) fn value(self, value: &[u8]) -> Self {
        self.count(value.len()).raw(value)
    }

    pub(super) fn string(self, string: &str) -> Self {
        self.value(string.as_bytes())
    }

    fn strings(self, strings: &[String]) -> Self {
        strings.iter().fold(self.count(strings.len()), |bytes, string| bytes.string(string))
    }
}

/// Reads a length and as many bytes.
pub(super) fn read_value(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let n = read_bounded(from, MAX_VALUE_BYTES, "bytes in a value")?;
    read_bytes(from, n)
}

/// Reads an i64.
pub(super) fn read_i64(from: &mut impl Read) -> io::Result<i64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(i64::from_le_bytes(bytes))
}

/// Reads a u32.
pub(super) fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn read_string(from: &mut impl Read) -> io::Result<String> {
    let n = read_bounded(from, MAX_KEY_BYTES, "bytes in a key")?;
    String::from_utf8(read_bytes(from, n)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads `n` bytes. Memory is allocated as they arrive.
fn read_bytes(from: &mut impl Read, n: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match from.take(n).read_to_end(&mut bytes)? as u64 == n {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn read_strings(from: &mut impl Read) -> io::Result<Vec<String>> {
    (0..read_count(from)?).map(|_| read_string(from)).collect()
}

fn read_count(from: &mut impl Read) -> io::Result<u64> {
    read_bounded(from, MAX_KEYS, "keys in one query")
}

fn read_bounded(from: &mut impl Read, bound: u64, what: &str) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    let n = u64::from_le_bytes(bytes);
    if n > bound {
        let message = format!("{n} {what}, at most {bound} are allowed");
        return Err(io::Error::new(io::ErrorKind::InvalidData, message));
    }
    Ok(n)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(query: Query) {
        let bytes = query.encode();
        let mut rest = bytes.as_slice();
        assert_eq!(Query::read(&mut rest, MAX_QUERY_BYTES).unwrap(), Some(query));
        assert!(rest.is_empty(), "{} bytes were not read", rest.len());
        for cut in 1..bytes.len() {
            assert!(
                Query::read(&mut &bytes[..cut], MAX_QUERY_BYTES).is_err(),
                "a query cut after {cut} bytes was accepted"
            );
        }
    }

    #[test]
    fn a_decoded_query_equals_the_encoded_query() {
        let key = || "/k".to_owned();
        let keys = || vec![key(), String::new()];
        let value = || vec![0, 255, 10];
        check(Query::Validate(MAGIC));
        check(Query::Set { key: key(), value: value() });
        check(Query::CompareSet { key: key(), expected: vec![], desired: value() });
        check(Query::Get { key: key() });
        check(Query::Add { key: key(), amount: -3 });
        check(Query::Check { keys: keys() });
        check(Query::Wait { keys: keys() });
        check(Query::NumKeys);
        check(Query::Delete { key: key() });
        check(Query::Append { key: key(), value: value() });
        check(Query::MultiGet { keys: keys() });
        check(Query::MultiSet { pairs: vec![(key(), value()), (key(), vec![])] });
        check(Query::CancelWait);
        check(Query::Ping(7));
        check(Query::QueuePush { key: key(), value: value() });
        check(Query::QueuePop { key: key() });
        check(Query::QueueLen { key: key() });
        check(Query::ListKeys);
        check(Query::Authenticate(StoreSecret::new("s")));
    }

    #[test]
    fn invalid_bytes_are_rejected_before_an_allocation() {
        let error_of = |bytes: &[u8]| Query::read(&mut &*bytes, MAX_QUERY_BYTES).unwrap_err().to_string();
        assert_eq!(error_of(b"GET / HTTP/1.1\r\n\r\n"), "query of unknown type 71");
        let long = [&[3][..], &u64::MAX.to_le_bytes()].concat();
        assert_eq!(error_of(&long), format!("{} bytes in a key, at most 8192 are allowed", u64::MAX));
    }

    #[test]
    fn an_oversized_query_is_rejected() {
        let value = [&MAX_VALUE_BYTES.to_le_bytes()[..], &vec![0; MAX_VALUE_BYTES as usize]].concat();
        let pair = [&0u64.to_le_bytes()[..], &value].concat();
        let head = [&[11][..], &100u64.to_le_bytes()].concat();
        let mut endless = head.chain(Repeated { bytes: &pair, at: 0 });
        assert_eq!(Query::read(&mut endless, MAX_QUERY_BYTES).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    /// Endless reader of repeated bytes.
    struct Repeated<'a> {
        bytes: &'a [u8],
        at: usize,
    }

    impl Read for Repeated<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let n = into.len().min(self.bytes.len() - self.at);
            into[..n].copy_from_slice(&self.bytes[self.at..self.at + n]);
            self.at = (self.at + n) % self.bytes.len();
            Ok(n)
        }
    }
}
