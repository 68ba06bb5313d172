//! Transport over Unix sockets: connections of each group, and reports of failures.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;

use super::connections::UnixSocketConnections;
use super::rank::{CONTROL, LocalRank};
use super::watch::{Watcher, encode_hello};
use crate::failure::StoreArbiter;
use crate::liveness::deadline;
use crate::peer::PeerInfo;
use crate::rendezvous::PeerRendezvous;
use crate::transport::{Connections, FailureChannel, Transport, TransportError};
use crate::{CollectiveCall, Options, RankFailure, Result};

/// Requested send buffer of a socket. The kernel may grant less.
const BUFFER_BYTES: usize = 1 << 20;

/// Listener with a name that other ranks connect to.
pub(super) struct NamedListener {
    name: String,
    listener: UnixListener,
}

impl NamedListener {
    /// Listens on an abstract socket, which leaves no file however the process ends.
    pub(super) fn start() -> io::Result<Self> {
        let random = RandomState::new().build_hasher().finish();
        let name = format!("candlewick-{}-{random:016x}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        Ok(Self { name, listener })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }
}

/// Transport of one rank over Unix sockets.
pub(super) struct UnixSocketTransport {
    shared: Arc<LocalRank>,
    timeout: Duration,
    watcher: Option<JoinHandle<()>>,
    wake: UnixStream,
}

impl UnixSocketTransport {
    /// Connects this rank to `peers` and starts the watcher of the connections.
    pub(super) fn connect(
        rendezvous: &PeerRendezvous,
        peers: Vec<PeerInfo>,
        listening: NamedListener,
        options: &Options,
    ) -> Result<Self> {
        let system = |error: io::Error| candle_core::Error::wrap(error);
        let arbiter = StoreArbiter::connect(rendezvous.store())?;
        let shared = Arc::new(LocalRank::new(rendezvous.rank(), peers, arbiter).map_err(system)?);
        let (wake, woken) = UnixStream::pair().map_err(system)?;
        listening.listener.set_nonblocking(true).map_err(system)?;
        let watcher = Watcher { shared: Arc::clone(&shared), listener: listening.listener, accepts: true, woken };
        let watcher = Some(watcher.start().map_err(system)?);
        let transport = Self { shared, timeout: options.timeout, watcher, wake };
        let all_ranks: Vec<usize> = (0..transport.shared.peers.len()).collect();
        transport.connect_all(rendezvous.deadline()).map_err(|error| error.fail_connect(&transport, &all_ranks))?;
        Ok(transport)
    }

    /// Opens the control connections to all ranks. The watcher reads each from then on.
    fn connect_all(&self, deadline: Instant) -> Result<(), TransportError> {
        for rank in 0..self.shared.rank {
            let stream = self.dial(CONTROL, rank).map_err(|error| dial_error(rank, error))?;
            self.shared.arrived(CONTROL, rank, stream);
            self.wake_watcher();
        }
        self.shared.await_all(deadline, self.timeout)
    }

    /// Connects to each of `members`. The higher rank dials the lower one.
    fn streams(&self, id: &str, members: &[usize]) -> Result<Vec<Option<UnixStream>>, TransportError> {
        let deadline = deadline(self.timeout);
        for (index, rank) in members.iter().enumerate().filter(|(_, rank)| **rank < self.shared.rank) {
            let stream = self.dial(id, *rank).map_err(|error| dial_error(index, error))?;
            self.shared.arrived(id, *rank, stream);
        }
        let await_one = |(index, rank): (usize, &usize)| {
            if *rank == self.shared.rank {
                return Ok(None);
            }
            let stream = self.shared.await_arrival(id, *rank, deadline)?;
            stream.map(Some).ok_or(TransportError::ConnectTimeout(vec![index], self.timeout))
        };
        members.iter().enumerate().map(await_one).collect()
    }

    fn dial(&self, id: &str, rank: usize) -> io::Result<UnixStream> {
        let addr = SocketAddr::from_abstract_name(&self.shared.peers[rank].address)?;
        let mut stream = UnixStream::connect_addr(&addr)?;
        stream.write_all(&encode_hello(id, self.shared.rank))?;
        Ok(stream)
    }

    fn wake_watcher(&self) {
        // A full pipe also wakes the watcher.
        let _ = (&self.wake).write(&[1]);
    }
}

impl FailureChannel for UnixSocketTransport {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn who(&self, rank: usize) -> String {
        self.shared.who(rank)
    }

    fn fail(&self, failure: RankFailure) -> RankFailure {
        self.shared.fail(failure)
    }

    fn failure(&self) -> Option<RankFailure> {
        self.shared.monitor.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.shared.monitor.await_failure(within)
    }

    fn await_exit(&self, rank: usize, within: Duration) {
        self.shared.await_exit(rank, within);
    }

    fn detects_exits(&self) -> bool {
        true
    }

    fn beat(&self) {
        self.shared.beat();
    }
}

impl Transport for UnixSocketTransport {
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Connections>, TransportError> {
        let streams = self.streams(id, members)?;
        for stream in streams.iter().flatten() {
            // A smaller buffer is only slower.
            let _ = set_socket_send_buffer_size(stream, BUFFER_BYTES);
            stream.set_nonblocking(true).map_err(|error| TransportError::Local(error.to_string()))?;
        }
        Ok(Box::new(UnixSocketConnections::new(streams, members.to_vec(), Arc::clone(&self.shared), self.timeout)))
    }

    fn set_current_call(&self, id: &str, call: Option<&CollectiveCall>) {
        self.shared.set_current_call(id, call);
    }
}

impl Drop for UnixSocketTransport {
    fn drop(&mut self) {
        self.shared.leave();
        self.wake_watcher();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Returns the error of a failed connection: the peer's, or this process's own.
fn dial_error(peer: usize, error: io::Error) -> TransportError {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset) {
        return TransportError::Unreachable(peer, error);
    }
    TransportError::Local(format!("connect to another rank: {error}"))
}
