//! Ranks that are threads of one process: for tests, and for runs on one machine that need no processes.
//!
//! Messages are copied through mailboxes. A send is finished when it was received, as strictly as any engine may be, so
//! that a program which deadlocks elsewhere does so here.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::fabric::{Fabric, Links, Trouble};
use crate::{Call, Failure, Options, Result, World};

/// Runs `rank` on `size` threads, each with its own end of one world, and returns what they return, in rank order. If
/// one fails or panics, all that wait for it fail too, and the first failure is returned.
pub fn run<T: Send, E: Display>(
    size: usize,
    options: Options,
    rank: impl Fn(&World) -> Result<T, E> + Sync,
) -> Result<Vec<T>> {
    let hall = Arc::new(Hall { timeout: options.timeout, ..Hall::default() });
    let results: Vec<Result<T>> = thread::scope(|scope| {
        let rank = &rank;
        let spawn = |world: Result<World>| scope.spawn(move || attend(&world?, rank));
        let threads: Vec<_> = worlds(&hall, size, &options).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("panics are caught in the thread")).collect()
    });
    match hall.failure() {
        Some(first) => Err(first.into()),
        None => results.into_iter().collect(),
    }
}

fn worlds(hall: &Arc<Hall>, size: usize, options: &Options) -> impl Iterator<Item = Result<World>> {
    (0..size).map(move |rank| {
        let fabric = Arc::new(Door { rank, hall: Arc::clone(hall) });
        if size == 1 { Ok(World::solo()) } else { World::open(fabric, size, options) }
    })
}

fn attend<T, E: Display>(world: &World, rank: &impl Fn(&World) -> Result<T, E>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(|| rank(world))) {
        Ok(done) => done.map_err(|error| world.fail(error).into()),
        Err(panic) => Err(world.fail(format!("finish: it panicked: {}", said(&*panic))).into()),
    }
}

fn said(panic: &dyn Any) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}

/// Where all ranks of a world meet.
#[derive(Default)]
struct Hall {
    timeout: Duration,
    failure: Mutex<Option<Failure>>,
    rooms: Mutex<HashMap<String, Arc<Room>>>,
}

/// Where the ranks of one group meet.
struct Room {
    mail: Mutex<Mail>,
    changed: Condvar,
}

struct Mail {
    /// What each rank has sent to each rank and that was not taken yet: `boxes[to][from]`.
    boxes: Vec<Vec<VecDeque<Vec<u8>>>>,
    gone: Vec<bool>,
}

impl Hall {
    fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    fn fail(&self, failure: Failure) -> Failure {
        let first = lock(&self.failure).get_or_insert(failure).clone();
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

impl Fabric for Door {
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

    fn open(&self, id: &str, members: &[usize]) -> Result<Box<dyn Links>, Trouble> {
        let me = members.iter().position(|rank| *rank == self.rank).expect("who opens a group is in it");
        let room = self.hall.room(id, members.len());
        Ok(Box::new(Seat { me, room, hall: Arc::clone(&self.hall) }))
    }

    fn doing(&self, _id: &str, _call: Option<&Call>) {}
}

/// One rank's place in a room.
struct Seat {
    me: usize,
    room: Arc<Room>,
    hall: Arc<Hall>,
}

impl Links for Seat {
    fn exchange(&mut self, send: &[&[u8]], recv: &mut [&mut [u8]]) -> Result<(), Trouble> {
        let mut mail = lock(&self.room.mail);
        for (to, bytes) in send.iter().enumerate().filter(|(_, bytes)| !bytes.is_empty()) {
            mail.boxes[to][self.me].push_back(bytes.to_vec());
        }
        self.room.changed.notify_all();
        let mut missing: Vec<usize> = (0..recv.len()).filter(|from| !recv[*from].is_empty()).collect();
        let mut last_moved = Instant::now();
        loop {
            let n_missing = missing.len();
            missing.retain(|from| !self.take(&mut mail, *from, recv[*from]));
            if missing.len() < n_missing {
                self.room.changed.notify_all();
                last_moved = Instant::now();
            }
            let untaken: Vec<usize> = (0..send.len()).filter(|to| !mail.boxes[*to][self.me].is_empty()).collect();
            if missing.is_empty() && untaken.is_empty() {
                return Ok(());
            }
            let waits_for = if missing.is_empty() { untaken } else { missing.clone() };
            if let Some(failure) = self.hall.failure() {
                return Err(Trouble::Failed(failure));
            }
            if let Some(gone) = waits_for.iter().find(|rank| mail.gone[**rank]) {
                return Err(Trouble::Left(*gone));
            }
            let left = self.hall.timeout.saturating_sub(last_moved.elapsed());
            if left.is_zero() {
                return Err(Trouble::Late(waits_for, self.hall.timeout));
            }
            mail = self.room.changed.wait_timeout(mail, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Seat {
    fn take(&self, mail: &mut Mail, from: usize, into: &mut [u8]) -> bool {
        let Some(bytes) = mail.boxes[self.me][from].pop_front() else { return false };
        into.copy_from_slice(&bytes);
        true
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        lock(&self.room.mail).gone[self.me] = true;
        self.room.changed.notify_all();
    }
}

// What these locks guard is whole between any two statements, so a panic elsewhere does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
