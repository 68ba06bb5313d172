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

impl Watch {
    pub(super) fn start(store: Client, seat: Seat, may_grow: bool, interval: Duration, events: Sender<Event>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let should_stop = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut pulses = Pulses::new(seat);
            while !should_stop.load(Ordering::Relaxed) {
                let news = match look(&store, seat, may_grow, &mut pulses) {
                    Ok(news) => news,
                    Err(error) => Some(Peer::Failed(format!("the node that hosts the store is gone ({error})"))),
                };
                if let Some(peer) = news {
                    // The launcher is not interested any more.
                    let _ = events.send(Event::Peer { round: seat.round, peer });
                    return;
                }
                thread::sleep(interval.clamp(SHORTEST, LONGEST));
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
    next: Instant,
    last: Vec<(i64, Instant)>,
}

/// How often a node says that it is alive, and how long it may be silent: torchrun's three times five seconds.
const BEAT: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(15);

impl Pulses {
    fn new(seat: Seat) -> Self {
        let now = Instant::now();
        Self { seat, next: now, last: vec![(0, now); seat.n_nodes] }
    }

    fn feel(&mut self, store: &Client) -> Result<Option<Peer>, Error> {
        let now = Instant::now();
        if now < self.next {
            return Ok(None);
        }
        self.next = now + BEAT;
        for group_rank in 0..self.seat.n_nodes {
            let is_own = group_rank == self.seat.group_rank;
            let beats = store.add(&self.seat.node_key("beats", group_rank), i64::from(is_own))?;
            if beats != self.last[group_rank].0 {
                self.last[group_rank] = (beats, now);
            }
            let is_silent = !is_own && now > self.last[group_rank].1 + SILENCE;
            if is_silent && !store.check(&[&self.seat.node_key("gone", group_rank)])? {
                return Ok(Some(Peer::Failed(format!("node {group_rank} was not heard of for {SILENCE:?}"))));
            }
        }
        Ok(None)
    }
}
