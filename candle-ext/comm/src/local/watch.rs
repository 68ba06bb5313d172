//! Watcher thread: accepts connections, and reads the control connections for failures, heartbeats and exits.

use std::io::{self, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::socket_peercred;

use super::rank::{BEAT, FAIL, LEAVE, LocalRank, WAITS};
use crate::error::MAX_FAILURE_BYTES;
use crate::liveness::deadline;
use crate::{Cause, RankFailure};

/// Timeout for the hello of a new connection, which a rank writes before it is accepted.
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// Sockets that are ready to read.
struct Ready {
    woken: bool,
    acceptable: bool,
    readable: Vec<(usize, Arc<UnixStream>)>,
}

/// State of the watcher thread.
pub(super) struct Watcher {
    pub(super) shared: Arc<LocalRank>,
    pub(super) listener: UnixListener,
    /// True while connections are accepted. The listener stays open afterwards, so that a rank that connects reads the failure
    /// instead of an error of the socket.
    pub(super) accepts: bool,
    /// Becomes readable when a connection was added or the watcher must stop.
    pub(super) woken: UnixStream,
}

impl Watcher {
    pub(super) fn start(self) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name("comm-watch".to_owned()).spawn(move || self.run())
    }

    fn run(mut self) {
        loop {
            let (stopping, control) = {
                let state = self.shared.monitor.lock();
                (state.stopping, state.control.clone())
            };
            if stopping {
                return;
            }
            let ready = match self.await_any(&control) {
                Ok(ready) => ready,
                Err(error) => {
                    self.fail_world(&format!("poll the control connections: {error}"));
                    return;
                }
            };
            if ready.woken {
                let _ = self.woken.read(&mut [0; 64]);
            }
            if ready.acceptable
                && let Err(error) = self.accept()
            {
                self.accepts = false;
                self.fail_world(&format!("accept a connection: {error}"));
            }
            for (rank, stream) in ready.readable {
                self.read_from(rank, &stream);
            }
        }
    }

    fn fail_world(&self, why: &str) {
        let rank = self.shared.rank;
        let message = format!("continue: {} failed to {why}", self.shared.who(rank));
        self.shared.fail(RankFailure { rank, cause: Cause::Reported, message });
    }

    fn await_any(&self, control: &[Option<Arc<UnixStream>>]) -> io::Result<Ready> {
        let streams: Vec<_> =
            control.iter().enumerate().filter_map(|(r, stream)| Some((r, stream.as_ref()?))).collect();
        let mut fds = vec![PollFd::new(&self.woken, PollFlags::IN)];
        fds.extend(streams.iter().map(|(_, stream)| PollFd::new(&***stream, PollFlags::IN)));
        if self.accepts {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        while let Err(error) = poll(&mut fds, None) {
            if error != rustix::io::Errno::INTR {
                return Err(error.into());
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let readable = streams.iter().zip(&ready[1..]).filter(|(_, ready)| **ready);
        Ok(Ready {
            woken: ready[0],
            readable: readable.map(|((rank, stream), _)| (*rank, Arc::clone(stream))).collect(),
            acceptable: ready[1 + streams.len()..].contains(&true),
        })
    }

    /// Accepts one connection. Fails if this process cannot accept any.
    fn accept(&self) -> io::Result<()> {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock) => return Ok(()),
            Err(error) => return Err(error),
        };
        // Any process can connect to an abstract socket. Accept only those of this user.
        let ours = socket_peercred(&stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid());
        if !ours || stream.set_nonblocking(false).is_err() {
            return Ok(());
        }
        if let Ok((id, rank)) = read_hello(&stream)
            && self.shared.is_expected(&id, rank)
        {
            self.shared.arrived(&id, rank, stream);
        }
        Ok(())
    }

    fn read_from(&self, rank: usize, stream: &UnixStream) {
        match read_frame(stream) {
            Ok((LEAVE, _)) => return self.shared.left(rank),
            Ok((BEAT, _)) => return self.shared.on_beat(rank),
            Ok((WAITS, payload)) => return self.shared.on_wait(rank, &payload),
            Ok((FAIL, payload)) => {
                if let Some(failure) = RankFailure::decode(&payload) {
                    self.shared.adopt(failure);
                    return;
                }
            }
            _ => {}
        }
        self.shared.closed(rank);
        if let Some(stream) = self.shared.monitor.lock().control.get_mut(rank) {
            *stream = None;
        }
    }
}

/// Encodes the first message of a connection: the dialing rank and the group's id.
pub(super) fn encode_hello(id: &str, rank: usize) -> Vec<u8> {
    [&(rank as u32).to_le_bytes()[..], &(id.len() as u32).to_le_bytes(), id.as_bytes()].concat()
}

/// Reads the hello of a connection within a short timeout, because other connections wait meanwhile.
fn read_hello(stream: &UnixStream) -> io::Result<(String, usize)> {
    let mut within = DeadlineReader { stream, deadline: deadline(HELLO_TIMEOUT) };
    let rank = read_u32(&mut within)? as usize;
    let mut id = vec![0; (read_u32(&mut within)? as usize).min(1 << 16)];
    within.read_exact(&mut id)?;
    stream.set_read_timeout(None)?;
    Ok((String::from_utf8_lossy(&id).into_owned(), rank))
}

/// Reader of a stream with a deadline for all reads together.
struct DeadlineReader<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(into)
    }
}

fn read_frame(mut stream: &UnixStream) -> io::Result<(u8, Vec<u8>)> {
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    let mut payload = vec![0; (read_u32(&mut stream)? as usize).min(MAX_FAILURE_BYTES)];
    stream.read_exact(&mut payload)?;
    Ok((kind[0], payload))
}

fn read_u32(stream: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}
