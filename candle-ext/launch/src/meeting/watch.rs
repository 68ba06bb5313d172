//! What a launcher asks the store while workers run: whether workers of another node failed, whether a node is silent,
//! whether a new one would like to join. It says itself that it is alive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::Seat;
use crate::event::{Event, Peer};

/// A thread that watches. It ends with this value.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// What is asked, and how often.
pub(super) struct Questions {
    /// Whether there is room for another node.
    pub(super) may_grow: bool,
    pub(super) interval: Duration,
    /// How long a node may be silent.
    pub(super) keep_alive: Duration,
}

impl Watch {
    pub(super) fn start(store: Client, seat: Seat, questions: Questions, events: Sender<Event>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let should_stop = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut pulses = Pulses::new(seat, questions.keep_alive);
            while !should_stop.load(Ordering::Relaxed) {
                let news = match look(&store, seat, questions.may_grow, &mut pulses) {
                    Ok(news) => news,
                    Err(error) => Some(Peer::Failed(format!("the node that hosts the store is gone ({error})"))),
                };
                if let Some(peer) = news {
                    // The launcher is not interested any more.
                    let _ = events.send(Event::Peer { round: seat.round, peer });
                    return;
                }
                thread::sleep(questions.interval.clamp(SHORTEST, LONGEST));
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

/// The end of a run does not wait long for the watch.
const LONGEST: Duration = Duration::from_millis(500);
const SHORTEST: Duration = Duration::from_millis(20);

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn look(store: &Client, seat: Seat, may_grow: bool, pulses: &mut Pulses) -> Result<Option<Peer>, Error> {
    if store.check(&[&seat.key("failed")])? {
        let text = String::from_utf8_lossy(&store.get(&seat.key("failed"))?).into_owned();
        return Ok(Some(Peer::Failed(text)));
    }
    if may_grow && store.add(&seat.key("waiting"), 0)? > 0 {
        return Ok(Some(Peer::Joins));
    }
    pulses.feel(store)
}

/// When each node was last heard of.
struct Pulses {
    seat: Seat,
    keep_alive: Duration,
    next: Instant,
    last: Vec<(i64, Instant)>,
}

impl Pulses {
    fn new(seat: Seat, keep_alive: Duration) -> Self {
        let now = Instant::now();
        Self { seat, keep_alive, next: now, last: vec![(0, now); seat.n_nodes] }
    }

    /// Says that this node is alive, and looks whether the others said so.
    fn feel(&mut self, store: &Client) -> Result<Option<Peer>, Error> {
        let now = Instant::now();
        if now < self.next {
            return Ok(None);
        }
        self.next = now + (self.keep_alive / 5).min(Duration::from_secs(1));
        for group_rank in 0..self.seat.n_nodes {
            let is_own = group_rank == self.seat.group_rank;
            let beats = store.add(&self.seat.node_key("beats", group_rank), i64::from(is_own))?;
            if beats != self.last[group_rank].0 {
                self.last[group_rank] = (beats, now);
            }
            let is_silent = !is_own && now > self.last[group_rank].1 + self.keep_alive;
            if is_silent && !store.check(&[&self.seat.node_key("gone", group_rank)])? {
                let text = format!("node {group_rank} was not heard of for {:?}", self.keep_alive);
                return Ok(Some(Peer::Failed(text)));
            }
        }
        Ok(None)
    }
}
