//! Ranks that are threads of one process: for tests, and for runs on one machine that need no processes.
//!
//! Messages are copied through mailboxes. A send is finished when it was received, as strictly as any engine may be, so
//! that a program which deadlocks elsewhere does so here.

use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::fabric::{Alarm, Fabric, Links, Trouble};
use crate::panic::said;
use crate::signs::{Signs, Wait};
use crate::{Call, Failure, Options, Result, World};

/// Runs `rank` on `size` threads, each with its own end of one world, and returns what they return, in rank order. If
/// one fails or panics, all that wait for it fail too, and the first failure is returned.
pub fn run<T: Send, E: Display>(
    size: usize,
    options: Options,
    rank: impl Fn(&World) -> Result<T, E> + Sync,
) -> Result<Vec<T>> {
    let hall = Hall::new(&options);
    let results: Vec<Result<T>> = thread::scope(|scope| {
        let rank = &rank;
        let spawn = |world: Result<World>| scope.spawn(move || attend(world?, rank));
        let threads: Vec<_> = worlds(&hall, size, &options).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught in the thread")).collect()
    });
    match hall.failure() {
        Some(first) => Err(first.into()),
        None => results.into_iter().collect(),
    }
}

fn worlds(hall: &Arc<Hall>, size: usize, options: &Options) -> impl Iterator<Item = Result<World>> {
    let open = move |door| if size == 1 { Ok(World::alone(door)) } else { World::open(door, size, options) };
    doors(hall, size).map(open)
}

/// Returns each rank's way to the others.
pub(crate) fn doors(hall: &Arc<Hall>, size: usize) -> impl Iterator<Item = Arc<dyn Fabric>> {
    (0..size).map(move |rank| Arc::new(Door { rank, hall: Arc::clone(hall) }) as Arc<dyn Fabric>)
}

/// The fabric of a world of one rank.
pub(crate) fn alone() -> Arc<dyn Fabric> {
    Arc::new(Door { rank: 0, hall: Arc::default() })
}

fn attend<T, E: Display>(world: World, rank: &impl Fn(&World) -> Result<T, E>) -> Result<T> {
    world.run(|world| match catch_unwind(AssertUnwindSafe(|| rank(world))) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("finish: it panicked: {}", said(&*panic))),
    })
}

/// Where all ranks of a world meet.
#[derive(Default)]
pub(crate) struct Hall {
    timeout: Duration,
    failure: Mutex<Option<Failure>>,
    failed: Condvar,
    signs: Mutex<Signs>,
    rooms: Mutex<HashMap<String, Arc<Room>>>,
}

/// Where the ranks of one group meet.
struct Room {
    mail: Mutex<Mail>,
    changed: Condvar,
}

type Message = Arc<[u8]>;

struct Mail {
    /// What each rank has sent to each rank and that was not taken yet: `boxes[to][from]`.
    boxes: Vec<Vec<VecDeque<Message>>>,
    gone: Vec<bool>,
}

impl Hall {
    pub(crate) fn new(options: &Options) -> Arc<Self> {
        Arc::new(Self { timeout: options.timeout, ..Self::default() })
    }

    fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    fn fail(&self, failure: Failure) -> Failure {
        let first = lock(&self.failure).get_or_insert(failure).clone();
        self.failed.notify_all();
        for room in lock(&self.rooms).values() {
            // Whoever has looked for a failure before this one is waiting once the lock is had.
            drop(lock(&room.mail));
            room.changed.notify_all();
        }
        first
    }

    fn room(&self, id: &str, size: usize) -> Arc<Room> {
        let fresh = || {
            let mail = Mail { boxes: vec![vec![VecDeque::new(); size]; size], gone: vec![false; size] };
            Arc::new(Room { mail: Mutex::new(mail), changed: Condvar::new() })
        };
        Arc::clone(lock(&self.rooms).entry(id.to_owned()).or_insert_with(fresh))
    }
}

/// One rank's way into the hall.
struct Door {
    rank: usize,
    hall: Arc<Hall>,
}

impl Alarm for Door {
    fn rank(&self) -> usize {
        self.rank
    }

    fn who(&self, rank: usize) -> String {
        format!("rank {rank}")
    }

    fn fail(&self, failure: Failure) -> Failure {
        self.hall.fail(failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.hall.failure()
    }

    fn await_failure(&self, within: Duration) -> Option<Failure> {
        let waited = self.hall.failed.wait_timeout_while(lock(&self.hall.failure), within, |failure| failure.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    fn beat(&self) {
        lock(&self.hall.signs).at_work(self.rank);
    }
}

impl Fabric for Door {
    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Links>, Trouble> {
        let me = members.iter().position(|rank| *rank == self.rank).expect("who opens a group is in it");
        let room = self.hall.room(id, members.len());
        let members = members.to_vec();
        Ok(Box::new(Seat { id: id.to_owned(), me, members, room, hall: Arc::clone(&self.hall) }))
    }

    fn doing(&self, _id: &str, _call: Option<&Call>) {}
}

/// One rank's place in a room.
struct Seat {
    id: String,
    me: usize,
    /// The world ranks of the group's ranks.
    members: Vec<usize>,
    room: Arc<Room>,
    hall: Arc<Hall>,
}

impl Links for Seat {
    // What is copied is copied outside the lock that all ranks share.
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), Trouble> {
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

impl Seat {
    /// Sends messages to ranks; returns those from the ranks `missing` once all are there, and what was sent is taken.
    fn pass(&self, sent: Vec<(usize, Message)>, mut missing: Vec<usize>) -> Result<Vec<(usize, Message)>, Trouble> {
        let receivers: Vec<usize> = sent.iter().map(|(to, _)| *to).collect();
        let mut mail = lock(&self.room.mail);
        for (to, message) in sent {
            mail.boxes[to][self.me].push_back(message);
        }
        self.room.changed.notify_all();
        let mut taken = Vec::with_capacity(missing.len());
        let mut wait = Wait::begin(self.hall.timeout);
        loop {
            let n_taken = taken.len();
            missing.retain(|from| match mail.boxes[self.me][*from].pop_front() {
                Some(message) => {
                    taken.push((*from, message));
                    false
                }
                None => true,
            });
            if taken.len() > n_taken {
                self.room.changed.notify_all();
                wait.moved();
            }
            let untaken = || receivers.iter().copied().filter(|to| !mail.boxes[*to][self.me].is_empty());
            let waits_for: Vec<usize> = if missing.is_empty() { untaken().collect() } else { missing.clone() };
            if waits_for.is_empty() {
                return Ok(taken);
            }
            if let Some(failure) = self.hall.failure() {
                return Err(Trouble::Failed(failure));
            }
            if let Some(gone) = waits_for.iter().find(|rank| mail.gone[**rank]) {
                return Err(Trouble::Left(*gone));
            }
            if let Some(silent) = self.blamed(&waits_for, &mut wait) {
                return Err(Trouble::Silent(silent, self.hall.timeout));
            }
            mail = self.room.changed.wait_timeout(mail, wait.patience()).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Seat {
    /// Shows from time to time for whom this rank waits; returns whom it has waited for in vain, if it has.
    fn blamed(&self, waits_for: &[usize], wait: &mut Wait) -> Option<Vec<usize>> {
        let is_to_be_shown = wait.is_to_be_shown();
        if !is_to_be_shown && !wait.is_over() {
            return None;
        }
        let waits_for: Vec<usize> = waits_for.iter().map(|rank| self.members[*rank]).collect();
        let mut signs = lock(&self.hall.signs);
        if is_to_be_shown {
            signs.waits(self.members[self.me], &waits_for);
        }
        signs.blamed(self.members[self.me], &waits_for, wait)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let empty = {
            let mut mail = lock(&self.room.mail);
            mail.gone[self.me] = true;
            mail.gone.iter().all(|gone| *gone)
        };
        self.room.changed.notify_all();
        if empty {
            lock(&self.hall.rooms).remove(&self.id);
        }
    }
}

// What these locks guard is whole between any two statements, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
