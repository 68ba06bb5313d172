//! One rank's part in one group: cuts what is exchanged into pieces, and waits for them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::shared::{Done, Event, Piece, Request, Shared};
use crate::liveness::Wait;
use crate::transport::{Connections, TransportError};

/// The size of a piece. Each that arrives is a sign of life, so it is not too large.
const PIECE_BYTES: usize = 1 << 18;

/// How many pieces are on the way to each rank at once, and from each.
const WINDOW: usize = 4;

/// How long something may still come from a rank that has said it leaves: another message may overtake it.
const LATE_MESSAGES_WITHIN: Duration = Duration::from_secs(1);

/// See [`Connections`].
pub(super) struct MpiConnections {
    shared: Arc<Shared>,
    /// The world ranks of the group's ranks.
    members: Vec<usize>,
    tag: i32,
    sender: Sender<Event>,
    events: Receiver<Event>,
    /// Rooms of pieces that have arrived, for the next.
    rooms: Vec<Box<[u8]>>,
}

/// How far the bytes between this rank and another are, one way.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    len: usize,
    started: usize,
    arrived: usize,
    n_under_way: usize,
}

impl Progress {
    fn of(len: usize) -> Self {
        Self { len, ..Self::default() }
    }

    fn is_done(&self) -> bool {
        self.arrived == self.len
    }

    /// Returns where the next piece is that may start.
    fn next(&mut self) -> Option<std::ops::Range<usize>> {
        if self.started == self.len || self.n_under_way == WINDOW {
            return None;
        }
        let start = self.started;
        self.started = (start + PIECE_BYTES).min(self.len);
        self.n_under_way += 1;
        Some(start..self.started)
    }

    fn arrived(&mut self, n_bytes: usize) {
        self.arrived += n_bytes;
        self.n_under_way -= 1;
    }
}

impl MpiConnections {
    pub(super) fn new(shared: Arc<Shared>, members: Vec<usize>, tag: i32) -> Self {
        let (sender, events) = channel();
        shared.listen(&sender);
        Self { shared, members, tag, sender, events, rooms: Vec::new() }
    }

    /// Orders what may start now.
    fn start(&mut self, send: &[&[u8]], [going, coming]: &mut [Vec<Progress>; 2]) {
        let mut requests = Vec::new();
        for peer in 0..self.members.len() {
            while let Some(at) = coming[peer].next() {
                let done = self.done(peer, at.start, false);
                let room = self.room(at.len());
                requests.push(Request::Receive { from: self.members[peer], tag: self.tag, room, done });
            }
            while let Some(at) = going[peer].next() {
                let done = self.done(peer, at.start, true);
                let mut bytes = self.room(at.len());
                bytes.copy_from_slice(&send[peer][at]);
                requests.push(Request::Send { to: self.members[peer], tag: self.tag, bytes, done });
            }
        }
        if !requests.is_empty() {
            self.shared.request(requests);
        }
    }

    fn done(&self, peer: usize, start: usize, is_sent: bool) -> Done {
        Done { events: self.sender.clone(), piece: Piece { peer, start, is_sent } }
    }

    fn room(&mut self, len: usize) -> Box<[u8]> {
        let fits = self.rooms.iter().position(|room| room.len() == len);
        fits.map_or_else(|| vec![0; len].into(), |at| self.rooms.swap_remove(at))
    }

    fn keep(&mut self, room: Box<[u8]>) {
        if self.rooms.len() < 2 * WINDOW * self.members.len() {
            self.rooms.push(room);
        }
    }

    /// Says why nothing moves, if there is a reason not to wait any longer.
    fn check(&self, [going, coming]: &[Vec<Progress>; 2], wait: &mut Wait) -> Result<(), TransportError> {
        if let Some(failure) = self.shared.monitor.failure() {
            return Err(TransportError::Failed(failure));
        }
        // Those from whom something is missing; those who do not take what they are sent, if nothing is.
        let unfinished = |ways: &[Progress]| (0..ways.len()).filter(|peer| !ways[*peer].is_done()).collect::<Vec<_>>();
        let waits_for = Some(unfinished(coming)).filter(|peers| !peers.is_empty()).unwrap_or_else(|| unfinished(going));
        let gone = waits_for.iter().find(|peer| self.shared.has_left(self.members[**peer]));
        if let Some(peer) = gone.filter(|_| wait.elapsed() >= LATE_MESSAGES_WITHIN) {
            return Err(TransportError::PeerLeft(*peer));
        }
        let waits_for: Vec<usize> = waits_for.into_iter().map(|peer| self.members[peer]).collect();
        if wait.is_to_be_shown() {
            self.shared.show_wait(&waits_for);
        }
        let silent = self.shared.suspects(&waits_for, wait);
        silent.map_or(Ok(()), |silent| Err(TransportError::PeersTimedOut(silent, self.shared.timeout)))
    }

    fn patience(&self, wait: &Wait) -> Duration {
        let any_has_left = self.members.iter().any(|rank| self.shared.has_left(*rank));
        let late_messages = any_has_left.then(|| LATE_MESSAGES_WITHIN.saturating_sub(wait.elapsed()));
        let late_messages = late_messages.filter(|left| !left.is_zero());
        late_messages.map_or(wait.patience(), |left| left.min(wait.patience()))
    }
}

impl Connections for MpiConnections {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        let mut ways = [
            send.iter().map(|bytes| Progress::of(bytes.len())).collect::<Vec<_>>(),
            recv.iter().map(|bytes| Progress::of(bytes.len())).collect(),
        ];
        let mut wait = Wait::begin(self.shared.timeout);
        while !ways.iter().flatten().all(Progress::is_done) {
            self.start(send, &mut ways);
            match self.events.recv_timeout(self.patience(&wait)) {
                Ok(Event::Arrived(Piece { peer, start, is_sent }, bytes)) => {
                    if !is_sent {
                        recv[peer][start..start + bytes.len()].copy_from_slice(&bytes);
                    }
                    ways[usize::from(!is_sent)][peer].arrived(bytes.len());
                    self.keep(bytes);
                    wait.progress();
                }
                Ok(Event::Check) | Err(RecvTimeoutError::Timeout) => self.check(&ways, &mut wait)?,
                Err(RecvTimeoutError::Disconnected) => unreachable!("this rank keeps an end of its own"),
            }
        }
        Ok(())
    }
}
