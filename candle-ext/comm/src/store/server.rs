//! Server of a store: one thread accepts connections, and one thread per connection answers its queries.

use std::collections::HashMap;
use std::io::{BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::table::{ClientId, KeyValueTable};
use super::wire::{MAGIC, MAX_QUERY_BYTES, MAX_UNTRUSTED_BYTES, Query, STOP_WAITING};
use super::{Error, Result, StoreSecret};
use crate::sync::lock;

/// Timeout for the first query of a connection, so that a port scanner does not occupy a thread.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Server of a key-value store. Dropping it closes every connection.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    shared: Arc<ServerShared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `addr`, for example `("0.0.0.0", 29500)`. With port 0 the system chooses a port.
    pub fn bind(addr: impl ToSocketAddrs + std::fmt::Debug) -> Result<Self> {
        Self::bind_with_secret(addr, None)
    }

    /// Listens on `addr`. With a secret, clients must send it.
    pub fn bind_with_secret(addr: impl ToSocketAddrs + std::fmt::Debug, secret: Option<StoreSecret>) -> Result<Self> {
        let named = format!("{addr:?}");
        TcpListener::bind(addr)
            .and_then(|listener| Self::start(listener, HANDSHAKE_TIMEOUT, secret))
            .map_err(|source| Error::Bind { addr: named, source })
    }

    /// Listens on the address of this machine that clients use as `host`; on all addresses if it cannot be determined.
    pub fn bind_for(host: &str, port: u16, secret: Option<StoreSecret>) -> Result<Self> {
        if let Some(address) = address_of_clients(host) {
            match Self::bind_with_secret((address, port), secret.clone()) {
                // The address may be that of a router in front of this machine.
                Err(Error::Bind { source, .. }) if source.kind() != std::io::ErrorKind::AddrInUse => {}
                done => return done,
            }
        }
        Self::bind_any_with_secret(port, secret)
    }

    /// Listens on `port` of every interface, over IPv6 and IPv4 if the machine has both.
    pub fn bind_any(port: u16) -> Result<Self> {
        Self::bind_any_with_secret(port, None)
    }

    fn bind_any_with_secret(port: u16, secret: Option<StoreSecret>) -> Result<Self> {
        match Self::bind_with_secret((Ipv6Addr::UNSPECIFIED, port), secret.clone()) {
            Err(Error::Bind { source, .. }) if source.kind() != std::io::ErrorKind::AddrInUse => {
                Self::bind_with_secret((Ipv4Addr::UNSPECIFIED, port), secret)
            }
            done => done,
        }
    }

    /// Returns the server's address, with the chosen port.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the server's port.
    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    fn start(listener: TcpListener, handshake_timeout: Duration, secret: Option<StoreSecret>) -> std::io::Result<Self> {
        let addr = listener.local_addr()?;
        let shared = Arc::new(ServerShared {
            stopping: AtomicBool::default(),
            state: Mutex::default(),
            handshake_timeout,
            secret,
        });
        let accepting = Arc::clone(&shared);
        let acceptor =
            thread::Builder::new().name("store-accept".to_owned()).spawn(move || accept(&listener, &accepting))?;
        Ok(Self { addr, shared, acceptor: Some(acceptor) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // `accept` cannot be interrupted: wake it with a connection, after which it reads `stopping`.
        let woken = TcpStream::connect_timeout(&reachable(self.addr), Duration::from_secs(1));
        if let (Ok(_), Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
        for stream in self.shared.lock().streams.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[derive(Debug)]
struct ServerShared {
    stopping: AtomicBool,
    state: Mutex<ServerState>,
    handshake_timeout: Duration,
    /// Secret that clients must send; `None` for no secret.
    secret: Option<StoreSecret>,
}

#[derive(Debug, Default)]
struct ServerState {
    table: KeyValueTable,
    streams: HashMap<ClientId, Arc<TcpStream>>,
}

impl ServerShared {
    // Poisoning is ignored: one call applies a query completely.
    fn lock(&self) -> MutexGuard<'_, ServerState> {
        lock(&self.state)
    }
}

fn accept(listener: &TcpListener, shared: &Arc<ServerShared>) {
    for client in 0.. {
        let accepted = listener.accept();
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            // Most likely no file descriptor is free. Retry, because others may be closed soon.
            thread::sleep(Duration::from_millis(10));
            continue;
        };
        let stream = Arc::new(stream);
        shared.lock().streams.insert(client, Arc::clone(&stream));
        let serving = Arc::clone(shared);
        let spawned =
            thread::Builder::new().name("store-serve".to_owned()).spawn(move || serve(client, &stream, &serving));
        if spawned.is_err() {
            shared.lock().streams.remove(&client);
        }
    }
}

/// Answers one client until it disconnects. An invalid query closes only this client's connection.
fn serve(client: ClientId, stream: &TcpStream, shared: &ServerShared) {
    let _ = answer(client, stream, shared);
    let mut state = shared.lock();
    state.table.cancel_wait(client);
    state.streams.remove(&client);
    let _ = stream.shutdown(Shutdown::Both);
}

fn answer(client: ClientId, mut stream: &TcpStream, shared: &ServerShared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(shared.handshake_timeout))?;
    let mut queries = BufReader::new(stream);
    if Query::read(&mut queries, MAX_UNTRUSTED_BYTES)? != Some(Query::Validate(MAGIC)) {
        return Ok(());
    }
    if let Some(secret) = &shared.secret {
        match Query::read(&mut queries, MAX_UNTRUSTED_BYTES)? {
            Some(Query::Authenticate(sent)) if sent == *secret => {}
            Some(Query::Authenticate(_)) => return refuse(stream, Query::read(&mut queries, MAX_UNTRUSTED_BYTES)?),
            query => return refuse(stream, query),
        }
    }
    stream.set_read_timeout(None)?;
    while let Some(query) = Query::read(&mut queries, MAX_QUERY_BYTES)? {
        let reply = {
            let mut state = shared.lock();
            let Ok(outcome) = state.table.apply(client, query) else { return Ok(()) };
            // Send under the lock, before the answer to a later cancellation.
            for woken in outcome.wake.iter().filter_map(|woken| state.streams.get(woken)) {
                if wake(woken).is_err() {
                    let _ = woken.shutdown(Shutdown::Both);
                }
            }
            outcome.reply
        };
        stream.write_all(&reply)?;
    }
    Ok(())
}

/// Refuses a client without the secret. Our client detects the wrong answer to its ping.
fn refuse(mut stream: &TcpStream, query: Option<Query>) -> std::io::Result<()> {
    static LOGGED: Once = Once::new();
    LOGGED.call_once(|| {
        tracing::warn!(
            "the store refused a client without its secret; clients of torch need `launch --allow-torch-clients`"
        );
    });
    match query {
        Some(Query::Ping(nonce)) => stream.write_all(&(!nonce).to_le_bytes()),
        _ => Ok(()),
    }
}

/// Ends a client's wait without blocking. The socket buffer of a client that waits has space for one byte.
#[cfg(target_os = "linux")]
fn wake(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::{SendFlags, send};
    send(stream, &[STOP_WAITING], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn wake(mut stream: &TcpStream) -> std::io::Result<()> {
    stream.write_all(&[STOP_WAITING])
}

/// Returns the address of `host`, or `None` if clients may use another.
///
/// Many systems list their own name as a loopback address, which other machines cannot use.
fn address_of_clients(host: &str) -> Option<IpAddr> {
    if host == "localhost" {
        return Some(Ipv4Addr::LOCALHOST.into());
    }
    if let Ok(address) = host.parse() {
        return Some(address);
    }
    let mut addresses = (host, 0u16).to_socket_addrs().ok()?.map(|address| address.ip());
    let first = addresses.next().filter(|address| !address.is_loopback())?;
    addresses.all(|address| address == first).then_some(first)
}

/// Returns an address at which this process reaches a listener bound to `addr`.
fn reachable(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V4(v4) if v4.ip().is_unspecified() => (Ipv4Addr::LOCALHOST, v4.port()).into(),
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => (Ipv6Addr::LOCALHOST, v6.port()).into(),
        named => named,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_connection_that_sends_nothing_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server::start(listener, Duration::from_millis(10), None).unwrap();
        let mut silent = TcpStream::connect(server.addr()).unwrap();
        silent.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(silent.read(&mut [0]).unwrap(), 0);
        let mut half = TcpStream::connect(server.addr()).unwrap();
        half.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        // The server may close the connection before these bytes arrive, which resets it.
        let _ = half.write_all(&[0, 1]);
        let end = half.read(&mut [0]).map_err(|error| error.kind());
        assert!(matches!(end, Ok(0) | Err(std::io::ErrorKind::ConnectionReset)), "{end:?}");
    }

    #[test]
    fn a_server_listens_on_the_address_that_clients_use() {
        let address = |host| Server::bind_for(host, 0, None).unwrap().addr().ip();
        assert_eq!(address("127.0.0.1"), Ipv4Addr::LOCALHOST);
        assert_eq!(address("127.77.0.1"), Ipv4Addr::new(127, 77, 0, 1));
        assert_eq!(address("localhost"), Ipv4Addr::LOCALHOST);
        // An address of another machine, and a name without an address.
        assert!(address("192.0.2.1").is_unspecified());
        assert!(address("no\0host").is_unspecified());
    }
}
