//! Connections of one rank in one group. Splits exchanges into chunks and waits for their completion.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::rank::{Completion, MessageChunk, MpiRank, MpiRequest, ProgressEvent};
use crate::liveness::Wait;
use crate::transport::{Connections, TransportError};

/// Size of a chunk. Each completed chunk counts as progress, so chunks are small.
const CHUNK_BYTES: usize = 1 << 18;

/// Largest number of chunks in flight to each rank, and from each.
const MAX_IN_FLIGHT: usize = 4;

/// Timeout for messages of a rank that has left: its leave message may overtake them. A busy machine may not run this rank's
/// progress thread for seconds.
const LATE_MESSAGES_WITHIN: Duration = Duration::from_secs(10);

/// Connections of one rank in one group.
pub(super) struct MpiConnections {
    shared: Arc<MpiRank>,
    /// World ranks of the group's ranks.
    members: Vec<usize>,
    tag: i32,
    sender: Sender<ProgressEvent>,
    events: Receiver<ProgressEvent>,
    /// Buffers of completed chunks, for reuse.
    free_buffers: Vec<Box<[u8]>>,
}

/// Progress of the transfer to or from one peer, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct TransferProgress {
    len: usize,
    started: usize,
    arrived: usize,
    n_in_flight: usize,
}

impl TransferProgress {
    fn of(len: usize) -> Self {
        Self { len, ..Self::default() }
    }

    fn is_done(&self) -> bool {
        self.arrived == self.len
    }

    /// Returns the range of the next chunk, if one may start.
    fn next(&mut self) -> Option<std::ops::Range<usize>> {
        if self.started == self.len || self.n_in_flight == MAX_IN_FLIGHT {
            return None;
        }
        let start = self.started;
        self.started = (start + CHUNK_BYTES).min(self.len);
        self.n_in_flight += 1;
        Some(start..self.started)
    }

    fn arrived(&mut self, n_bytes: usize) {
        self.arrived += n_bytes;
        self.n_in_flight -= 1;
    }
}

impl MpiConnections {
    pub(super) fn new(shared: Arc<MpiRank>, members: Vec<usize>, tag: i32) -> Self {
        let (sender, events) = channel();
        shared.subscribe(&sender);
        Self { shared, members, tag, sender, events, free_buffers: Vec::new() }
    }

    /// Requests the chunks that may start now.
    fn start(&mut self, send: &[&[u8]], [sends, receives]: &mut [Vec<TransferProgress>; 2]) {
        let mut requests = Vec::new();
        for peer in 0..self.members.len() {
            while let Some(at) = receives[peer].next() {
                let done = self.done(peer, at.start, false);
                let buffer = self.buffer(at.len());
                requests.push(MpiRequest::Receive { from: self.members[peer], tag: self.tag, buffer, done });
            }
            while let Some(at) = sends[peer].next() {
                let done = self.done(peer, at.start, true);
                let mut bytes = self.buffer(at.len());
                bytes.copy_from_slice(&send[peer][at]);
                requests.push(MpiRequest::Send { to: self.members[peer], tag: self.tag, bytes, done });
            }
        }
        if !requests.is_empty() {
            self.shared.request(requests);
        }
    }

    fn done(&self, peer: usize, start: usize, is_sent: bool) -> Completion {
        Completion { events: self.sender.clone(), chunk: MessageChunk { peer, start, is_sent } }
    }

    fn buffer(&mut self, len: usize) -> Box<[u8]> {
        let fits = self.free_buffers.iter().position(|buffer| buffer.len() == len);
        fits.map_or_else(|| vec![0; len].into(), |at| self.free_buffers.swap_remove(at))
    }

    fn recycle(&mut self, buffer: Box<[u8]>) {
        if self.free_buffers.len() < 2 * MAX_IN_FLIGHT * self.members.len() {
            self.free_buffers.push(buffer);
        }
    }

    /// Fails if there is a reason not to wait any longer.
    fn check(&self, [sends, receives]: &[Vec<TransferProgress>; 2], wait: &mut Wait) -> Result<(), TransportError> {
        if let Some(failure) = self.shared.monitor.failure() {
            return Err(TransportError::Failed(failure));
        }
        // The peers with missing bytes; if there are none, the peers with unsent bytes.
        let unfinished = |transfers: &[TransferProgress]| {
            (0..transfers.len()).filter(|peer| !transfers[*peer].is_done()).collect::<Vec<_>>()
        };
        let waits_for =
            Some(unfinished(receives)).filter(|peers| !peers.is_empty()).unwrap_or_else(|| unfinished(sends));
        let gone = waits_for.iter().find(|peer| self.shared.has_left(self.members[**peer]));
        if let Some(peer) = gone.filter(|_| wait.elapsed() >= LATE_MESSAGES_WITHIN) {
            return Err(TransportError::PeerLeft(*peer));
        }
        let waits_for: Vec<usize> = waits_for.into_iter().map(|peer| self.members[peer]).collect();
        if wait.is_heartbeat_due() {
            self.shared.send_wait(&waits_for);
        }
        let silent = self.shared.suspects(&waits_for, wait);
        silent.map_or(Ok(()), |silent| Err(TransportError::PeersTimedOut(silent, self.shared.timeout)))
    }

    fn next_check_in(&self, wait: &Wait) -> Duration {
        let any_has_left = self.members.iter().any(|rank| self.shared.has_left(*rank));
        let late_messages = any_has_left.then(|| LATE_MESSAGES_WITHIN.saturating_sub(wait.elapsed()));
        let late_messages = late_messages.filter(|left| !left.is_zero());
        late_messages.map_or(wait.next_check_in(), |left| left.min(wait.next_check_in()))
    }
}

impl Connections for MpiConnections {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        let mut transfers = [
            send.iter().map(|bytes| TransferProgress::of(bytes.len())).collect::<Vec<_>>(),
            recv.iter().map(|bytes| TransferProgress::of(bytes.len())).collect(),
        ];
        let mut wait = Wait::begin(self.shared.timeout);
        while !transfers.iter().flatten().all(TransferProgress::is_done) {
            self.start(send, &mut transfers);
            match self.events.recv_timeout(self.next_check_in(&wait)) {
                Ok(ProgressEvent::Arrived(MessageChunk { peer, start, is_sent }, bytes)) => {
                    if !is_sent {
                        recv[peer][start..start + bytes.len()].copy_from_slice(&bytes);
                    }
                    transfers[usize::from(!is_sent)][peer].arrived(bytes.len());
                    self.recycle(bytes);
                    wait.progress();
                }
                Ok(ProgressEvent::Check) | Err(RecvTimeoutError::Timeout) => self.check(&transfers, &mut wait)?,
                Err(RecvTimeoutError::Disconnected) => unreachable!("this rank owns a sender"),
            }
        }
        Ok(())
    }
}
