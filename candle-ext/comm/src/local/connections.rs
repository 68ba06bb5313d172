//! Sockets of one group, which send and receive concurrently.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::rank::LocalRank;
use crate::liveness::Wait;
use crate::transport::{Connections, TransportError};

/// Largest write to one rank before the other ranks' sockets are served.
const MAX_WRITE_BYTES: usize = 1 << 18;

/// Sockets of one rank in one group.
pub(super) struct UnixSocketConnections {
    streams: Vec<Option<UnixStream>>,
    /// World ranks of the group's ranks.
    members: Vec<usize>,
    shared: Arc<LocalRank>,
    timeout: Duration,
}

impl UnixSocketConnections {
    pub(super) fn new(
        streams: Vec<Option<UnixStream>>,
        members: Vec<usize>,
        shared: Arc<LocalRank>,
        timeout: Duration,
    ) -> Self {
        Self { streams, members, shared, timeout }
    }

    /// Waits until a pending socket is ready, the world has failed, or `left` has passed. Returns the peers of the ready
    /// sockets.
    fn await_any(&self, send: &[&[u8]], recv: &[&mut [u8]], left: Duration) -> Result<Vec<usize>, TransportError> {
        let mut fds = vec![PollFd::new(self.shared.ended(), PollFlags::IN)];
        let mut peers = Vec::with_capacity(self.streams.len());
        for (peer, stream) in self.streams.iter().enumerate() {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, !send[peer].is_empty());
            flags.set(PollFlags::IN, !recv[peer].is_empty());
            if let (Some(stream), false) = (stream, flags.is_empty()) {
                fds.push(PollFd::new(stream, flags));
                peers.push(peer);
            }
        }
        let left = Timespec { tv_sec: left.as_secs().min(1 << 30) as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(TransportError::Local(format!("poll the sockets of the other ranks: {error}"))),
        }
        let ready = fds[1..].iter().zip(peers).filter(|(fd, _)| !fd.revents().is_empty());
        Ok(ready.map(|(_, peer)| peer).collect())
    }
}

impl Connections for UnixSocketConnections {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        // Remaining bytes of each peer.
        let mut send = send.to_vec();
        let mut recv: Vec<&mut [u8]> = recv.iter_mut().map(|place| &mut **place).collect();
        let mut wait = Wait::begin(self.timeout);
        let mut ready: Vec<usize> = (0..self.streams.len()).collect();
        loop {
            let mut moved = false;
            for peer in ready {
                let Some(stream) = &self.streams[peer] else { continue };
                let turn = write_some(stream, &mut send[peer])
                    .and_then(|wrote| Ok(wrote | read_some(stream, &mut recv[peer])?));
                moved |= turn.map_err(|error| self.shared.why_closed(self.members[peer], peer, error))?;
            }
            if send.iter().all(|left| left.is_empty()) && recv.iter().all(|left| left.is_empty()) {
                return Ok(());
            }
            if moved {
                wait.progress();
            } else if let Some(failure) = self.shared.monitor.failure() {
                return Err(TransportError::Failed(failure));
            }
            let waits_for = || late(&send, &recv).into_iter().map(|peer| self.members[peer]).collect::<Vec<_>>();
            if wait.is_heartbeat_due() {
                self.shared.send_wait(&waits_for());
            }
            if wait.is_timed_out()
                && let Some(silent) = self.shared.suspects(&waits_for(), &wait)
            {
                return Err(TransportError::PeersTimedOut(silent, self.timeout));
            }
            ready = self.await_any(&send, &recv, wait.next_check_in())?;
        }
    }
}

fn write_some(mut stream: &UnixStream, left: &mut &[u8]) -> io::Result<bool> {
    if left.is_empty() {
        return Ok(false);
    }
    let Some(n) = unless_would_block(stream.write(&left[..left.len().min(MAX_WRITE_BYTES)]))? else { return Ok(false) };
    *left = &left[n..];
    Ok(true)
}

fn read_some(mut stream: &UnixStream, left: &mut &mut [u8]) -> io::Result<bool> {
    if left.is_empty() {
        return Ok(false);
    }
    match unless_would_block(stream.read(left))? {
        Some(0) => Err(ErrorKind::UnexpectedEof.into()),
        Some(n) => {
            *left = &mut std::mem::take(left)[n..];
            Ok(true)
        }
        None => Ok(false),
    }
}

/// Returns the number of bytes, or `None` if the socket would block.
fn unless_would_block(done: io::Result<usize>) -> io::Result<Option<usize>> {
    match done {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        done => done.map(Some),
    }
}

/// Returns the peers with missing bytes; if there are none, the peers with unsent bytes.
fn late(send: &[&[u8]], recv: &[&mut [u8]]) -> Vec<usize> {
    let silent: Vec<usize> = (0..recv.len()).filter(|peer| !recv[*peer].is_empty()).collect();
    if silent.is_empty() { (0..send.len()).filter(|peer| !send[*peer].is_empty()).collect() } else { silent }
}
