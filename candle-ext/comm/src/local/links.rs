//! The sockets of one group, all of them sending and receiving at once.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::watch::Shared;
use crate::fabric::{Links, Trouble};

/// How often a waiting rank looks whether the world has ended.
const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// How much is written to one rank before the others get their turn.
const TURN_BYTES: usize = 1 << 18;

/// One rank's sockets in one group.
pub(super) struct Wires {
    streams: Vec<Option<UnixStream>>,
    /// The world ranks of the group's ranks.
    members: Vec<usize>,
    shared: Arc<Shared>,
    timeout: Duration,
}

impl Wires {
    pub(super) fn new(
        streams: Vec<Option<UnixStream>>,
        members: Vec<usize>,
        shared: Arc<Shared>,
        timeout: Duration,
    ) -> Self {
        Self { streams, members, shared, timeout }
    }

    /// Waits until a socket that has something to do can do it, or until it is time to look around.
    fn await_any(&self, send: &[&[u8]], recv: &[&mut [u8]]) {
        let mut fds = Vec::with_capacity(self.streams.len());
        for (peer, stream) in self.streams.iter().enumerate() {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, !send[peer].is_empty());
            flags.set(PollFlags::IN, !recv[peer].is_empty());
            if let (Some(stream), false) = (stream, flags.is_empty()) {
                fds.push(PollFd::new(stream, flags));
            }
        }
        // Whatever poll says, the sockets are tried next.
        let _ = poll(&mut fds, Some(&LOOK_EVERY));
    }
}

impl Links for Wires {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), Trouble> {
        // What is left of each.
        let mut send = send.to_vec();
        let mut recv: Vec<&mut [u8]> = recv.iter_mut().map(|place| &mut **place).collect();
        let mut last_moved = Instant::now();
        loop {
            let mut moved = false;
            for (peer, stream) in self.streams.iter().enumerate() {
                let Some(stream) = stream else { continue };
                let turn = write_some(stream, &mut send[peer])
                    .and_then(|wrote| Ok(wrote | read_some(stream, &mut recv[peer])?));
                moved |= turn.map_err(|Closed| self.shared.why_closed(self.members[peer], peer))?;
            }
            if send.iter().all(|left| left.is_empty()) && recv.iter().all(|left| left.is_empty()) {
                return Ok(());
            }
            if moved {
                last_moved = Instant::now();
                continue;
            }
            if let Some(failure) = self.shared.failure() {
                return Err(Trouble::Failed(failure));
            }
            if last_moved.elapsed() > self.timeout {
                return Err(Trouble::Late(late(&send, &recv), self.timeout));
            }
            self.await_any(&send, &recv);
        }
    }
}

/// The other end is gone.
struct Closed;

fn write_some(mut stream: &UnixStream, left: &mut &[u8]) -> Result<bool, Closed> {
    if left.is_empty() {
        return Ok(false);
    }
    match stream.write(&left[..left.len().min(TURN_BYTES)]) {
        Ok(n) => {
            *left = &left[n..];
            Ok(true)
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
        Err(_) => Err(Closed),
    }
}

fn read_some(mut stream: &UnixStream, left: &mut &mut [u8]) -> Result<bool, Closed> {
    if left.is_empty() {
        return Ok(false);
    }
    match stream.read(left) {
        Ok(0) => Err(Closed),
        Ok(n) => {
            *left = &mut std::mem::take(left)[n..];
            Ok(true)
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
        Err(_) => Err(Closed),
    }
}

/// Those from whom something is missing; those who do not take what they are sent, if nothing is.
fn late(send: &[&[u8]], recv: &[&mut [u8]]) -> Vec<usize> {
    let silent: Vec<usize> = (0..recv.len()).filter(|peer| !recv[*peer].is_empty()).collect();
    if silent.is_empty() { (0..send.len()).filter(|peer| !send[*peer].is_empty()).collect() } else { silent }
}
