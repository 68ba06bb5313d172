//! Mailboxes between the threads of one process.
//!
//! A send is finished when it was received, as strictly as in any backend, so that a program which deadlocks elsewhere
//! does so here.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::failure::FailureMonitor;
use crate::liveness::{Wait, WaitGraph};
use crate::sync::{ignore_poison, lock};
use crate::transport::{Connections, FailureChannel, Transport, TransportError};
use crate::{Call, RankFailure};

/// Returns each rank's way to the others.
pub(crate) fn transports(world: &Arc<SharedWorld>, size: usize) -> impl Iterator<Item = Arc<dyn Transport>> {
    (0..size).map(move |rank| Arc::new(ThreadTransport { rank, world: Arc::clone(world) }) as Arc<dyn Transport>)
}

/// The transport of a world of one rank.
pub(crate) fn solo_transport() -> Arc<dyn Transport> {
    Arc::new(ThreadTransport { rank: 0, world: Arc::default() })
}

/// The state of a world that its ranks share.
#[derive(Default)]
pub(crate) struct SharedWorld {
    timeout: Duration,
    monitor: FailureMonitor<WaitGraph>,
    groups: Mutex<HashMap<String, Arc<GroupBuffers>>>,
}

/// The messages between the ranks of one group.
struct GroupBuffers {
    mailboxes: Mutex<Mailboxes>,
    changed: Condvar,
}

type Message = Arc<[u8]>;

struct Mailboxes {
    /// The messages from each rank to each rank that were not taken yet: `messages[to][from]`.
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
            // A thread that looked for a failure before this one is waiting once the lock is free.
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

/// One rank's way to the others.
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
        // All ranks share the monitor, so the first to lock it is the first.
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
        let me = members.iter().position(|rank| *rank == self.rank).expect("who opens a group is in it");
        let group = self.world.group(id, members.len());
        let members = members.to_vec();
        Ok(Box::new(ThreadConnections { id: id.to_owned(), me, members, group, world: Arc::clone(&self.world) }))
    }

    fn set_current_call(&self, _id: &str, _call: Option<&Call>) {}
}

/// One rank's end of a group.
struct ThreadConnections {
    id: String,
    me: usize,
    /// The world ranks of the group's ranks.
    members: Vec<usize>,
    group: Arc<GroupBuffers>,
    world: Arc<SharedWorld>,
}

impl Connections for ThreadConnections {
    // What is copied is copied outside the lock that all ranks share.
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), TransportError> {
        let wanted: Vec<usize> = (0..recv.len()).filter(|from| !recv[*from].is_empty()).collect();
        for (from, message) in self.pass(messages(send), wanted)? {
            recv[from].copy_from_slice(&message);
        }
        Ok(())
    }
}

/// Copies what is to be sent to each rank, once where several are sent the same.
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
    /// Sends messages to ranks; returns those from the ranks `missing` once all are there, and what was sent is taken.
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

    /// Shows from time to time which ranks this one waits for; returns those that it has waited for in vain.
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
