//! The monitor of the other nodes while workers run: it detects failed workers, stopped or lost nodes, and nodes that
//! wait to join. It also sends this node's heartbeats.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, Error};

use super::heartbeats::Heartbeats;
use super::node_rank::NodeRank;
use crate::event::{Event, PeerEvent};

/// A thread that monitors the other nodes. It ends when this value is dropped.
#[derive(Debug)]
pub struct PeerMonitor {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// The settings of a monitor.
pub(super) struct PeerMonitorSettings {
    /// Maximum number of nodes, if nodes may join by a new generation (c10d).
    pub(super) max_nodes: Option<usize>,
    pub(super) interval: Duration,
    /// Longest time without a heartbeat of a live node.
    pub(super) heartbeat_timeout: Duration,
}

impl PeerMonitor {
    pub(super) fn start(store: Client, node: NodeRank, settings: PeerMonitorSettings, events: Sender<Event>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let should_stop = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut heartbeats = PeerHeartbeats::new(node, settings.heartbeat_timeout);
            let mut has_reported = false;
            while !should_stop.load(Ordering::Relaxed) {
                let event = match poll_peers(&store, node, settings.max_nodes, &mut heartbeats) {
                    Ok(event) => event,
                    Err(error) => Some(PeerEvent::Lost(format!("lost the connection to the store host ({error})"))),
                };
                let is_lost = matches!(event, Some(PeerEvent::Lost(_)));
                // The agent needs one event only. The thread continues to send heartbeats.
                if let Some(peer) = event.filter(|_| !has_reported) {
                    has_reported = true;
                    // An error means that the agent has ended.
                    let _ = events.send(Event::Peer { generation: node.generation, peer });
                }
                if is_lost {
                    return;
                }
                thread::sleep(settings.interval.clamp(MIN_INTERVAL, MAX_INTERVAL));
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

/// Bounds of the interval. The end of a run waits for at most one interval.
const MAX_INTERVAL: Duration = Duration::from_millis(500);
const MIN_INTERVAL: Duration = Duration::from_millis(20);

impl Drop for PeerMonitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the key and the text of a published event, or `None` for an event that is not published.
pub(super) fn store_entry(peer: &PeerEvent) -> Option<(&'static str, &str)> {
    match peer {
        PeerEvent::Failed(text) => Some(("failed", text)),
        PeerEvent::Stopped(text) => Some(("stopped", text)),
        PeerEvent::Saved(text) => Some(("saved", text)),
        PeerEvent::Lost(_) | PeerEvent::Joins => None,
    }
}

/// Returns the text of an event that another node published; `None` if this node published it, or none did.
pub(super) fn read_peer_event(store: &Client, this_node: NodeRank, name: &str) -> Result<Option<String>, Error> {
    let key = this_node.key(name);
    if !store.check(&[&key])? {
        return Ok(None);
    }
    let text = String::from_utf8_lossy(&store.get(&key)?).into_owned();
    let (group_rank, text) = text.split_once(' ').unwrap_or(("", &text));
    Ok((group_rank != this_node.group_rank.to_string()).then(|| text.to_owned()))
}

fn poll_peers(
    store: &Client,
    node: NodeRank,
    max_nodes: Option<usize>,
    heartbeats: &mut PeerHeartbeats,
) -> Result<Option<PeerEvent>, Error> {
    let silence = heartbeats.poll(store)?;
    // Read this first: a node that failed publishes the failure before it begins a newer generation. Otherwise a poll between
    // the two would miss the failure, and this node would not count the restart.
    let is_joining = max_nodes.map_or(Ok(false), |max_nodes| needs_rerendezvous(store, node, max_nodes))?;
    for (name, peer) in [
        ("failed", PeerEvent::Failed as fn(String) -> PeerEvent),
        ("stopped", PeerEvent::Stopped),
        ("saved", PeerEvent::Saved),
    ] {
        if let Some(text) = read_peer_event(store, node, name)? {
            return Ok(Some(peer(text)));
        }
    }
    Ok(if is_joining { Some(PeerEvent::Joins) } else { silence })
}

/// Returns whether a node waits to join, or a newer generation exists. After the first success no node is admitted.
fn needs_rerendezvous(store: &Client, node: NodeRank, max_nodes: usize) -> Result<bool, Error> {
    let is_open = node.n_nodes < max_nodes && store.add(&node.key("done"), 0)? == 0;
    let is_wanted = is_open && store.add(&node.key("waiting"), 0)? > 0;
    Ok(is_wanted || store.add("generation", 0)? > node.generation as i64)
}

/// The heartbeats of this node and of the other nodes.
pub(super) struct PeerHeartbeats {
    node: NodeRank,
    heartbeat_timeout: Duration,
    next: Instant,
    heartbeats: Heartbeats,
}

impl PeerHeartbeats {
    pub(super) fn new(node: NodeRank, heartbeat_timeout: Duration) -> Self {
        let heartbeats = Heartbeats::new(node.generation, "beats", heartbeat_timeout);
        Self { node, heartbeat_timeout, next: Instant::now(), heartbeats }
    }

    /// Sends this node's heartbeat. Returns the failure of a node whose heartbeat timeout has passed.
    fn poll(&mut self, store: &Client) -> Result<Option<PeerEvent>, Error> {
        let now = Instant::now();
        if now < self.next {
            return Ok(None);
        }
        self.next = now + (self.heartbeat_timeout / 5).min(Duration::from_secs(1));
        self.heartbeats.beat(store, self.node.group_rank)?;
        for group_rank in self.peers() {
            if !self.heartbeats.may_be_alive(store, group_rank)? && !self.is_gone(store, group_rank)? {
                let text = format!("node {group_rank} sent no heartbeat for {:?}", self.heartbeat_timeout);
                return Ok(Some(PeerEvent::Failed(text)));
            }
        }
        Ok(None)
    }

    /// Returns whether another node is alive and has not left.
    pub(super) fn are_peers_alive(&mut self, store: &Client) -> bool {
        self.peers().into_iter().any(|group_rank| {
            let is_away = self.is_gone(store, group_rank).unwrap_or(true);
            !is_away && self.heartbeats.may_be_alive(store, group_rank).unwrap_or(false)
        })
    }

    fn peers(&self) -> Vec<usize> {
        (0..self.node.n_nodes).filter(|group_rank| *group_rank != self.node.group_rank).collect()
    }

    fn is_gone(&self, store: &Client, group_rank: usize) -> Result<bool, Error> {
        store.check(&[&self.node.node_key("gone", group_rank)])
    }
}
