//! Transport over mailboxes between threads of one process.
//!
//! A send is synchronous: it finishes when the message is received. A program that deadlocks on another backend therefore also
//! deadlocks here.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::failure::FailureMonitor;
use crate::liveness::{Wait, WaitGraph};
use crate::sync::{ignore_poison, lock};
use crate::transport::{Connections, FailureChannel, Transport, TransportError};
use crate::{CollectiveCall, RankFailure};

/// Returns the transport of each rank.
pub(crate) fn transports(world: &Arc<SharedWorld>, size: usize) -> impl Iterator<Item = Arc<dyn Transport>> {
    (0..size).map(move |rank| Arc::new(ThreadTransport { rank, world: Arc::clone(world) }) as Arc<dyn Transport>)
}

/// Returns the transport of a world of one rank.
pub(crate) fn solo_transport() -> Arc<dyn Transport> {
    Arc::new(ThreadTransport { rank: 0, world: Arc::default() })
}

/// State of a world, shared by its ranks.
#[derive(Default)]
pub(crate) struct SharedWorld {
    timeout: Duration,
    monitor: FailureMonitor<WaitGraph>,
    groups: Mutex<HashMap<String, Arc<GroupBuffers>>>,
}

/// Messages between the ranks of one group.
struct GroupBuffers {
    mailboxes: Mutex<Mailboxes>,
    changed: Condvar,
}

type Message = Arc<[u8]>;

struct Mailboxes {
    /// Queued messages: `messages[to][from]`.
    messages: Vec<Vec<VecDeque<Message>>>,
    gone: Vec<bool>,
}

impl SharedWorld {
    pub(crate) fn new(timeout: Duration) -> Arc<Self> {
        Arc::new(Self { timeout, ..Self::default() })
    }

    pub(crate) fn failure(&self) -> Option<RankFailure> {
        self.monitor.failure()
    }

    fn wake_all(&self) {
        for group in lock(&self.groups).values() {
            // Acquire the lock once: a thread that has checked for a failure holds it until it waits.
            drop(lock(&group.mailboxes));
            group.changed.notify_all();
        }
    }

    fn group(&self, id: &str, size: usize) -> Arc<GroupBuffers> {
        let fresh = || {
            let mailboxes = Mailboxes { messages: vec![vec![VecDeque::new(); size]; size], gone: vec![false; size] };
            Arc::new(GroupBuffers { mailboxes: Mutex::new(mailboxes), changed: Condvar::new() })
        };
        Arc::clone(lock(&self.groups).entry(id.to_owned()).or_insert_with(fresh))
    }
}

/// Transport of one rank.
struct ThreadTransport {
    rank: usize,
    world: Arc<SharedWorld>,
}

impl FailureChannel for ThreadTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn who(&self, rank: usize) -> String {
        format!("rank {rank}")
    }

    fn fail(&self, failure: RankFailure) -> RankFailure {
        // All ranks share the monitor: the first to lock it has the first failure.
        self.world.monitor.fail(failure, |_| None, |_| self.world.wake_all())
    }

    fn failure(&self) -> Option<RankFailure> {
        self.world.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<RankFailure> {
        self.world.monitor.await_failure(within)
    }

    fn beat(&self) {
        self.world.monitor.lock().record_busy(self.rank);
    }
}

impl Transport for ThreadTransport {
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Connections>, TransportError> {
        let me = members.iter().position(|rank| *rank == self.rank).expect("a rank opens only groups that contain it");
        let group = self.world.group(id, members.len());
        let members = members.to_vec();
        Ok(Box::new(ThreadConnections { id: id.to_owned(), me, members, group, world: Arc::clone(&self.world) }))
    }

    fn set_current_call(&self, _id: &str, _call: Option<&CollectiveCall>) {}
}

/// Connections of one rank in a group.
struct ThreadConnections {
    id: String,
    me: usize,
    /// World ranks of the group's ranks.
    members: Vec<usize>,
    group: Arc<GroupBuffers>,
    world: Arc<SharedWorld>,
}

impl Connections for ThreadConnections {
    // Copies outside the lock that all ranks share.
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        let wanted: Vec<usize> = (0..recv.len()).filter(|from| !recv[*from].is_empty()).collect();
        for (from, message) in self.pass(messages(send), wanted)? {
            recv[from].copy_from_slice(&message);
        }
        Ok(())
    }
}

/// Copies the bytes to send to each rank. Equal slices are copied once.
fn messages(send: &[&[u8]]) -> Vec<(usize, Message)> {
    let mut messages: Vec<(usize, Message)> = Vec::new();
    for (to, bytes) in send.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
        let same = messages.iter().find(|(other, _)| std::ptr::eq(send[*other], *bytes));
        let message = same.map_or_else(|| Arc::from(*bytes), |(_, message)| Arc::clone(message));
        messages.push((to, message));
    }
    messages
}

impl ThreadConnections {
    /// Sends messages and receives one from each rank of `missing`. Returns after all are received at both ends.
    fn pass(
        &self,
        sent: Vec<(usize, Message)>,
        mut missing: Vec<usize>,
    ) -> Result<Vec<(usize, Message)>, TransportError> {
        let receivers: Vec<usize> = sent.iter().map(|(to, _)| *to).collect();
        let mut mailboxes = lock(&self.group.mailboxes);
        for (to, message) in sent {
            mailboxes.messages[to][self.me].push_back(message);
        }
        self.group.changed.notify_all();
        let mut taken = Vec::with_capacity(missing.len());
        let mut wait = Wait::begin(self.world.timeout);
        loop {
            let n_taken = taken.len();
            missing.retain(|from| match mailboxes.messages[self.me][*from].pop_front() {
                Some(message) => {
                    taken.push((*from, message));
                    false
                }
                None => true,
            });
            if taken.len() > n_taken {
                self.group.changed.notify_all();
                wait.progress();
            }
            let untaken = || receivers.iter().copied().filter(|to| !mailboxes.messages[*to][self.me].is_empty());
            let waits_for: Vec<usize> = if missing.is_empty() { untaken().collect() } else { missing.clone() };
            if waits_for.is_empty() {
                return Ok(taken);
            }
            if let Some(failure) = self.world.failure() {
                return Err(TransportError::Failed(failure));
            }
            if let Some(gone) = waits_for.iter().find(|rank| mailboxes.gone[**rank]) {
                return Err(TransportError::PeerLeft(*gone));
            }
            if let Some(silent) = self.suspects(&waits_for, &mut wait) {
                return Err(TransportError::PeersTimedOut(silent, self.world.timeout));
            }
            mailboxes = ignore_poison(self.group.changed.wait_timeout(mailboxes, wait.next_check_in())).0;
        }
    }

    /// Sends a heartbeat if it is due, and returns the suspects after the timeout.
    fn suspects(&self, waits_for: &[usize], wait: &mut Wait) -> Option<Vec<usize>> {
        let is_heartbeat_due = wait.is_heartbeat_due();
        if !is_heartbeat_due && !wait.is_timed_out() {
            return None;
        }
        let own = self.members[self.me];
        let waits_for: Vec<usize> = waits_for.iter().map(|rank| self.members[*rank]).collect();
        let mut wait_graph = self.world.monitor.lock();
        if is_heartbeat_due {
            wait_graph.record_wait(own, &waits_for);
        }
        wait_graph.suspects(own, &waits_for, wait)
    }
}

impl Drop for ThreadConnections {
    fn drop(&mut self) {
        let empty = {
            let mut mailboxes = lock(&self.group.mailboxes);
            mailboxes.gone[self.me] = true;
            mailboxes.gone.iter().all(|gone| *gone)
        };
        self.group.changed.notify_all();
        if empty {
            lock(&self.world.groups).remove(&self.id);
        }
    }
}
