//! Client of a store: one connection, one request at a time.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{
    MAGIC, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Query, READY, STOP_WAITING, WAIT_CANCELED, read_i64, read_u32,
    read_value,
};
use super::{Error, Result, StoreSecret};
use crate::liveness::deadline;
use crate::sync::lock;

/// Timeout of a request to a connected server, except for waits.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Connection to a [`Server`](super::Server) or to torch's TCPStore.
///
/// Clones share the connection: while one thread waits for a key, the others block. A thread that must not block calls
/// [`Client::new_connection`].
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<Mutex<Connection>>,
    host: String,
    port: u16,
    timeout: Duration,
    prefix: String,
    secret: Option<StoreSecret>,
}

impl Client {
    /// Connects, and retries until `timeout` has passed: a server may start later than its clients.
    ///
    /// `timeout` also bounds every [`Client::get`] and [`Client::wait`].
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_with_secret(host, port, timeout, None)
    }

    /// Connects as [`Client::connect`] does, and sends the store's secret first. torch's servers know no secret.
    pub fn connect_with_secret(host: &str, port: u16, timeout: Duration, secret: Option<StoreSecret>) -> Result<Self> {
        let stream = Some(open(host, port, timeout, secret.as_ref())?);
        let connection = Arc::new(Mutex::new(Connection { stream, answer_timeout: ANSWER_TIMEOUT }));
        Ok(Self { connection, host: host.to_owned(), port, timeout, prefix: String::new(), secret })
    }

    /// Opens a second connection to the same server, with the same prefix.
    pub fn new_connection(&self) -> Result<Self> {
        let fresh = Self::connect_with_secret(&self.host, self.port, self.timeout, self.secret.clone())?;
        Ok(Self { prefix: self.prefix.clone(), ..fresh })
    }

    /// Opens a second connection on which every answer must arrive within `timeout`.
    pub fn new_connection_with_timeout(&self, timeout: Duration) -> Result<Self> {
        let fresh = Self { timeout, ..self.new_connection()? };
        fresh.lock().answer_timeout(timeout)?;
        Ok(fresh)
    }

    /// Returns this client with the prefix `prefix/` for all keys, like torch's `PrefixStore`.
    pub fn with_prefix(&self, prefix: &str) -> Self {
        Self { prefix: format!("{}{prefix}/", self.prefix), ..self.clone() }
    }

    /// Returns the host of the server.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the timeout of [`Client::get`] and [`Client::wait`].
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Stores `value` under `key`. The server sends no answer, so other connections may see the value a moment later.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.lock().request(&Query::Set { key: self.key(key)?, value: bounded(value)? }, |_| Ok(()))
    }

    /// Waits until `key` exists and returns its value.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        let mut connection = self.lock();
        connection.wait(vec![self.key(key)?], self.timeout)?;
        connection.request(&Query::Get { key: self.key(key)? }, read_value)
    }

    /// Adds `amount` to the number under `key`, which is 0 if absent, and returns the sum.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.lock().request(&Query::Add { key: self.key(key)?, amount }, read_i64)
    }

    /// Stores `desired` if the value equals `expected`, or if the key is absent and `expected` is empty.
    ///
    /// Returns the value now stored, or `expected` if the key is absent, as torch does.
    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let (expected, desired) = (bounded(expected)?, bounded(desired)?);
        self.lock().request(&Query::CompareSet { key: self.key(key)?, expected, desired }, read_value)
    }

    /// Returns true if all of `keys` exist.
    pub fn check(&self, keys: &[&str]) -> Result<bool> {
        let answer = self.lock().request(&Query::Check { keys: self.keys(keys)? }, read_u8)?;
        Ok(answer == READY)
    }

    /// Waits up to [`Client::timeout`] until all of `keys` exist.
    pub fn wait(&self, keys: &[&str]) -> Result<()> {
        self.wait_for(keys, self.timeout)
    }

    /// Waits up to `timeout` until all of `keys` exist.
    pub fn wait_for(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.lock().wait(self.keys(keys)?, timeout)
    }

    /// Appends `value` to the value of `key`.
    pub fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.lock().request(&Query::Append { key: self.key(key)?, value: bounded(value)? }, |_| Ok(()))
    }

    /// Deletes `key`. Returns true if it existed.
    pub fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.lock().request(&Query::Delete { key: self.key(key)? }, read_i64)? > 0)
    }

    /// Returns the number of keys in the store, with any prefix.
    pub fn num_keys(&self) -> Result<i64> {
        self.lock().request(&Query::NumKeys, read_i64)
    }

    // torch's client also prefixes each key with a slash.
    fn key(&self, key: &str) -> Result<String> {
        let key = format!("/{}{key}", self.prefix);
        check("bytes in a key", key.len(), MAX_KEY_BYTES)?;
        Ok(key)
    }

    fn keys(&self, keys: &[&str]) -> Result<Vec<String>> {
        check("keys in one query", keys.len(), MAX_KEYS)?;
        keys.iter().map(|key| self.key(key)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }
}

fn bounded(value: &[u8]) -> Result<Vec<u8>> {
    check("bytes in a value", value.len(), MAX_VALUE_BYTES)?;
    Ok(value.to_vec())
}

fn check(what: &'static str, n: usize, bound: u64) -> Result<()> {
    if n as u64 > bound { Err(Error::TooLarge { what, n, bound }) } else { Ok(()) }
}

/// Connection without an outstanding answer. The stream is `None` after an incomplete answer.
struct Connection {
    stream: Option<TcpStream>,
    answer_timeout: Duration,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection(open: {})", self.stream.is_some())
    }
}

impl Connection {
    fn answer_timeout(&mut self, timeout: Duration) -> Result<()> {
        self.answer_timeout = timeout;
        let stream = self.stream.as_ref().ok_or_else(unusable)?;
        set_timeouts(stream, timeout).map_err(|source| Error::Lost { source })
    }

    fn request<T>(&mut self, query: &Query, read: impl Fn(&mut TcpStream) -> io::Result<T>) -> Result<T> {
        // Restore the stream only after a complete answer: a later request would misread the rest of it.
        let mut stream = self.stream.take().ok_or_else(unusable)?;
        let answer = send(&mut stream, query).and_then(|()| read(&mut stream));
        let answer = answer.map_err(|source| Error::Lost { source })?;
        self.stream = Some(stream);
        Ok(answer)
    }

    fn wait(&mut self, keys: Vec<String>, timeout: Duration) -> Result<()> {
        let query = Query::Wait { keys };
        let afterwards = self.answer_timeout;
        let arrived = self.request(&query, |stream| read_within(stream, timeout, afterwards))?;
        if arrived.is_some() || self.request(&Query::CancelWait, read_cancelled)? {
            return Ok(());
        }
        let Query::Wait { keys } = query else { unreachable!("the query is a wait") };
        let keys = keys.iter().map(|key| key.trim_start_matches('/')).collect::<Vec<_>>().join(", ");
        Err(Error::Timeout { keys, timeout })
    }
}

fn unusable() -> Error {
    Error::Lost {
        source: io::Error::new(io::ErrorKind::NotConnected, "the connection was broken by an earlier request"),
    }
}

fn open(host: &str, port: u16, timeout: Duration, secret: Option<&StoreSecret>) -> Result<TcpStream> {
    let deadline = deadline(timeout);
    loop {
        let error = match try_open(host, port, deadline, secret) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        // A retry does not help if another service or another job listens there.
        if matches!(error, Error::NotAStore { .. } | Error::Refused { .. })
            || Instant::now() + RETRY_INTERVAL >= deadline
        {
            return Err(error);
        }
        thread::sleep(RETRY_INTERVAL);
    }
}

fn try_open(host: &str, port: u16, deadline: Instant, secret: Option<&StoreSecret>) -> Result<TcpStream> {
    let failed = |source| Error::Connect { host: host.to_owned(), port, source };
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
    for addr in (host, port).to_socket_addrs().map_err(failed)? {
        let left = deadline.saturating_duration_since(Instant::now()).max(RETRY_INTERVAL);
        let opened = TcpStream::connect_timeout(&addr, left).and_then(|stream| match is_to_itself(&stream) {
            Ok(false) => Ok(stream),
            Ok(true) => Err(io::ErrorKind::ConnectionRefused.into()),
            Err(error) => Err(error),
        });
        match opened {
            Ok(stream) => {
                let unanswered = |source| Error::Unanswered { host: host.to_owned(), port, source };
                return match handshake(&stream, deadline, secret).map_err(unanswered)? {
                    HandshakeAnswer::Accepted => Ok(stream),
                    HandshakeAnswer::Refused => Err(Error::Refused { host: host.to_owned(), port }),
                    HandshakeAnswer::OfAnotherService => Err(not_a_store(host, port)),
                };
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

fn not_a_store(host: &str, port: u16) -> Error {
    Error::NotAStore { host: host.to_owned(), port }
}

/// Returns true if TCP has connected the stream to itself: the system chose the server's port for a client without a server.
fn is_to_itself(stream: &TcpStream) -> io::Result<bool> {
    Ok(stream.local_addr()? == stream.peer_addr()?)
}

/// Answer to a handshake.
enum HandshakeAnswer {
    Accepted,
    /// The store requires another secret.
    Refused,
    /// Another service listens on the port.
    OfAnotherService,
}

/// Validates the connection, sends the secret and pings the server.
///
/// A server that is shutting down closes the connection, and the caller retries.
fn handshake(mut stream: &TcpStream, deadline: Instant, secret: Option<&StoreSecret>) -> io::Result<HandshakeAnswer> {
    let nonce = std::process::id();
    stream.set_nodelay(true)?;
    set_timeouts(stream, ANSWER_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()).max(RETRY_INTERVAL)))?;
    let secret = secret.map(|secret| Query::Authenticate(secret.clone()).encode()).unwrap_or_default();
    stream.write_all(&[Query::Validate(MAGIC).encode(), secret, Query::Ping(nonce).encode()].concat())?;
    let answer = read_u32(&mut stream)?;
    set_timeouts(stream, ANSWER_TIMEOUT)?;
    Ok(match answer {
        answer if answer == nonce => HandshakeAnswer::Accepted,
        answer if answer == !nonce => HandshakeAnswer::Refused,
        _ => HandshakeAnswer::OfAnotherService,
    })
}

fn set_timeouts(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))
}

fn send(stream: &mut TcpStream, query: &Query) -> io::Result<()> {
    stream.write_all(&query.encode())
}

fn read_u8(stream: &mut TcpStream) -> io::Result<u8> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    Ok(byte[0])
}

/// Reads the byte that ends a wait, or returns `None` after `timeout`. Then resets the read timeout to `afterwards`.
fn read_within(stream: &mut TcpStream, timeout: Duration, afterwards: Duration) -> io::Result<Option<u8>> {
    stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
    let answer = read_u8(stream);
    stream.set_read_timeout(Some(afterwards))?;
    match answer {
        Ok(byte) => Ok(Some(byte)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the answer to a cancellation. Returns true if the wait had ended just before.
fn read_cancelled(stream: &mut TcpStream) -> io::Result<bool> {
    match read_u8(stream)? {
        WAIT_CANCELED => Ok(false),
        STOP_WAITING => read_u8(stream).map(|_| true),
        other => {
            Err(io::Error::new(io::ErrorKind::InvalidData, format!("unexpected answer {other} to a cancelled wait")))
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, TcpListener};

    use rustix::net::{AddressFamily, SocketType, bind, connect, getsockname, socket};

    use super::*;

    #[test]
    fn a_stream_to_itself_is_detected() {
        let own = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&own, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        connect(&own, &getsockname(&own).unwrap()).unwrap();
        assert!(is_to_itself(&TcpStream::from(own)).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_to_itself(&TcpStream::connect(listener.local_addr().unwrap()).unwrap()).unwrap());
    }
}
