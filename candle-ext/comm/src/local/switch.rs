//! One process's connections to all others: how a group's sockets come about, and how a failure is told.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_send_buffer_size;

use super::about::About;
use super::links::Wires;
use super::shared::{CONTROL, Shared};
use super::watch::{Watcher, hello};
use crate::deadline::deadline;
use crate::fabric::{Alarm, Fabric, Links, Trouble};
use crate::store::Client;
use crate::{Call, Failure, Result};

/// How long the store may take to say whose failure was the first.
const ARBITRATE_WITHIN: Duration = Duration::from_secs(2);

/// What is asked of the kernel for each socket; it may grant less.
const BUFFER_BYTES: usize = 1 << 20;

/// A socket that others find by name.
pub(super) struct Listening {
    name: String,
    listener: UnixListener,
}

impl Listening {
    /// Listens on an abstract socket: nothing is left behind in the file system, however the process ends.
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

/// See [`Fabric`].
pub(super) struct Switch {
    rank: usize,
    others: Vec<About>,
    shared: Arc<Shared>,
    timeout: Duration,
    watcher: Option<JoinHandle<()>>,
    wake: UnixStream,
}

impl Switch {
    /// Starts to listen to all others, and to listen for their connections.
    pub(super) fn connect(
        rank: usize,
        others: Vec<About>,
        listening: Listening,
        store: &Client,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Self> {
        let arbiter = store.reconnect_within(ARBITRATE_WITHIN)?;
        let pids = others.iter().map(|about| about.pid).collect();
        let system = |error: io::Error| candle_core::Error::wrap(error);
        let shared = Arc::new(Shared::new(rank, pids, arbiter).map_err(system)?);
        let (wake, woken) = UnixStream::pair().map_err(system)?;
        listening.listener.set_nonblocking(true).map_err(system)?;
        let watcher = Watcher { shared: Arc::clone(&shared), listener: listening.listener, accepts: true, woken };
        let watcher = Some(watcher.start().map_err(system)?);
        let switch = Self { rank, others, shared, timeout, watcher, wake };
        switch.meet(deadline).map_err(|trouble| switch.unconnected(trouble))?;
        Ok(switch)
    }

    /// Connects to everyone; each is listened to from when it is connected.
    fn meet(&self, deadline: Instant) -> Result<(), Trouble> {
        for rank in 0..self.rank {
            let stream = self.call(CONTROL, rank).map_err(|error| uncalled(rank, error))?;
            self.shared.arrived(CONTROL, rank, stream);
            self.poke();
        }
        self.shared.await_all(deadline, self.timeout)
    }

    /// Connects to each of `members`: the higher rank calls, the lower is called.
    fn streams(&self, id: &str, members: &[usize]) -> Result<Vec<Option<UnixStream>>, Trouble> {
        let deadline = deadline(self.timeout);
        for (index, rank) in members.iter().enumerate().filter(|(_, rank)| **rank < self.rank) {
            let stream = self.call(id, *rank).map_err(|error| uncalled(index, error))?;
            self.shared.arrived(id, *rank, stream);
        }
        let await_one = |(index, rank): (usize, &usize)| {
            if *rank == self.rank {
                return Ok(None);
            }
            let stream = self.shared.await_arrival(id, *rank, deadline)?;
            stream.map(Some).ok_or(Trouble::Late(vec![index], self.timeout))
        };
        members.iter().enumerate().map(await_one).collect()
    }

    fn call(&self, id: &str, rank: usize) -> io::Result<UnixStream> {
        let addr = SocketAddr::from_abstract_name(&self.others[rank].socket)?;
        let mut stream = UnixStream::connect_addr(&addr)?;
        stream.write_all(&hello(id, self.rank))?;
        Ok(stream)
    }

    fn poke(&self) {
        // A full pipe is as good as another byte in it.
        let _ = (&self.wake).write(&[1]);
    }

    fn unconnected(&self, trouble: Trouble) -> Failure {
        let everyone: Vec<usize> = (0..self.others.len()).collect();
        let (rank, cause, why) = match trouble.tell(self, &everyone) {
            Ok(told) => told,
            Err(failure) => return failure,
        };
        let message = format!("connect rank {} to the others: {why}", self.rank);
        self.fail(Failure { rank, cause, message })
    }
}

impl Alarm for Switch {
    fn rank(&self) -> usize {
        self.rank
    }

    fn who(&self, rank: usize) -> String {
        self.shared.who(rank)
    }

    fn fail(&self, failure: Failure) -> Failure {
        self.shared.fail(failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.shared.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<Failure> {
        self.shared.await_failure(within)
    }

    fn beat(&self) {
        self.shared.beat();
    }
}

impl Fabric for Switch {
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Links>, Trouble> {
        let streams = self.streams(id, members)?;
        for stream in streams.iter().flatten() {
            // A smaller buffer than asked for is slower, not wrong.
            let _ = set_socket_send_buffer_size(stream, BUFFER_BYTES);
            stream.set_nonblocking(true).map_err(|error| Trouble::Own(error.to_string()))?;
        }
        Ok(Box::new(Wires::new(streams, members.to_vec(), Arc::clone(&self.shared), self.timeout)))
    }

    fn doing(&self, id: &str, call: Option<&Call>) {
        self.shared.doing(id, call);
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.shared.leave();
        self.poke();
        if let Some(watcher) = self.watcher.take() {
            let _ = watcher.join();
        }
    }
}

/// Says whose fault it is that a call did not get through.
fn uncalled(peer: usize, error: io::Error) -> Trouble {
    use io::ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset};
    if matches!(error.kind(), BrokenPipe | ConnectionRefused | ConnectionReset) {
        return Trouble::Unreachable(peer, error);
    }
    Trouble::Own(format!("connect to another rank: {error}"))
}
