//! What a launcher asks the store while workers run: whether workers of another node failed, whether a node was stopped or
//! is silent, whether a new one would like to join. It says itself that it is alive.

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
    /// How many nodes there is room for, if there may be another round with others.
    pub(super) n_most: Option<usize>,
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
            let mut has_told = false;
            while !should_stop.load(Ordering::Relaxed) {
                let news = match look(&store, seat, questions.n_most, &mut pulses) {
                    Ok(news) => news,
                    Err(error) => Some(Peer::Lost(format!("the node that hosts the store is gone ({error})"))),
                };
                let is_lost = matches!(news, Some(Peer::Lost(_)));
                // One thing is enough for the launcher; the others still want to know that this node lives.
                if let Some(peer) = news.filter(|_| !has_told) {
                    has_told = true;
                    // The launcher is not interested any more.
                    let _ = events.send(Event::Peer { round: seat.round, peer });
                }
                if is_lost {
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

/// Returns under which key the others are told, and what.
pub(super) fn told(peer: &Peer) -> Option<(&'static str, &str)> {
    match peer {
        Peer::Failed(text) => Some(("failed", text)),
        Peer::Stopped(text) => Some(("stopped", text)),
        Peer::Saved(text) => Some(("saved", text)),
        Peer::Lost(_) | Peer::Joins => None,
    }
}

/// Returns what another node has told. This one's own words are no news.
pub(super) fn heard(store: &Client, seat: Seat, name: &str) -> Result<Option<String>, Error> {
    let key = seat.key(name);
    if !store.check(&[&key])? {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&store.get(&key)?).into_owned();
    let (group_rank, text) = text.split_once(' ').unwrap_or(("", &text));
    Ok((group_rank != seat.group_rank.to_string()).then(|| text.to_owned()))
}

fn look(store: &Client, seat: Seat, n_most: Option<usize>, pulses: &mut Pulses) -> Result<Option<Peer>, Error> {
    let silence = pulses.feel(store)?;
    for (name, peer) in
        [("failed", Peer::Failed as fn(String) -> Peer), ("stopped", Peer::Stopped), ("saved", Peer::Saved)]
    {
        if let Some(text) = heard(store, seat, name)? {
            return Ok(Some(peer(text)));
        }
    }
    match n_most {
        Some(n_most) if has_moved_on(store, seat, n_most)? => Ok(Some(Peer::Joins)),
        _ => Ok(silence),
    }
}

/// A node waits to be let in, or others have met it already. Those that are done would not be there.
fn has_moved_on(store: &Client, seat: Seat, n_most: usize) -> Result<bool, Error> {
    let is_open = seat.n_nodes < n_most && store.add(&seat.key("done"), 0)? == 0;
    let is_wanted = is_open && store.add(&seat.key("waiting"), 0)? > 0;
    Ok(is_wanted || store.add("round", 0)? > seat.round as i64)
}

/// When each node was last heard of.
pub(super) struct Pulses {
    seat: Seat,
    keep_alive: Duration,
    next: Instant,
    last: Vec<(i64, Instant)>,
}

impl Pulses {
    pub(super) fn new(seat: Seat, keep_alive: Duration) -> Self {
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
        store.add(&self.seat.node_key("beats", self.seat.group_rank), 1)?;
        for group_rank in self.others() {
            if self.is_silent(store, group_rank)? && !self.is_gone(store, group_rank)? {
                let text = format!("node {group_rank} was not heard of for {:?}", self.keep_alive);
                return Ok(Some(Peer::Failed(text)));
            }
        }
        Ok(None)
    }

    /// Says whether a node is alive and has not gone for good.
    pub(super) fn are_others_here(&mut self, store: &Client) -> bool {
        self.others().into_iter().any(|group_rank| {
            let is_away = self.is_gone(store, group_rank).unwrap_or(true);
            !is_away && !self.is_silent(store, group_rank).unwrap_or(true)
        })
    }

    fn others(&self) -> Vec<usize> {
        (0..self.seat.n_nodes).filter(|group_rank| *group_rank != self.seat.group_rank).collect()
    }

    fn is_gone(&self, store: &Client, group_rank: usize) -> Result<bool, Error> {
        store.check(&[&self.seat.node_key("gone", group_rank)])
    }

    fn is_silent(&mut self, store: &Client, group_rank: usize) -> Result<bool, Error> {
        let beats = store.add(&self.seat.node_key("beats", group_rank), 0)?;
        let now = Instant::now();
        let last = &mut self.last[group_rank];
        if beats != last.0 {
            *last = (beats, now);
        }
        Ok(now > last.1 + self.keep_alive)
    }
}
