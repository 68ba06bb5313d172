//! The thread that makes all calls to MPI: starts what the others order, sees what has arrived, hears what other ranks tell.
//!
//! MPI moves its messages only while it is asked about them, and cannot be waited for and listened to at once. So the thread
//! asks in turns: without a pause while something happens, then with ever longer ones.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::datatype::Equivalence;
use mpi::environment::Universe;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives, Source};

use super::about::{ABOUT_BYTES, About};
use super::frame::Frame;
use super::letter::Letter;
use super::shared::{Done, News, Order, Shared};
use crate::panic::said;
use crate::{Cause, Failure};

/// How often nothing may happen before there are pauses.
const EAGER_TURNS: u32 = 200;

/// The first pause, and the longest while messages are under way.
const PAUSES: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// How long nobody listens to what other ranks tell, when this one has nothing to do.
const DOZE: Duration = Duration::from_millis(5);

/// How long after a failure this process stays, so that the others hear of it before it ends.
const FAREWELL_WITHIN: Duration = Duration::from_secs(2);

/// Of a frame.
const TAG: i32 = 0;

/// What the thread owns.
pub(super) struct Clerk {
    under_way: Vec<(Letter, Errand)>,
    shared: Arc<Shared>,
    /// For what groups exchange.
    tensors: SimpleCommunicator,
    frames: SimpleCommunicator,
    // Ends MPI, after its communicators.
    universe: Universe,
}

/// What is to be done when a letter has arrived.
enum Errand {
    /// A group waits for it.
    Report(Done),
    /// Nothing: a frame was sent.
    Forget,
    /// This rank has sent a frame.
    Hear(usize),
}

impl Clerk {
    /// Starts MPI, which must agree that this is rank `rank` of `size`, and meets the others.
    pub(super) fn start(rank: usize, size: usize, timeout: Duration) -> Result<Self, String> {
        let Some((universe, level)) = mpi::initialize_with_threading(Threading::Funneled) else {
            return Err("a process can start MPI only once".to_owned());
        };
        if level < Threading::Funneled {
            return Err(format!("this MPI is for programs of one thread ({level:?})"));
        }
        let world = universe.world();
        let found = (world.rank() as usize, world.size() as usize);
        if found != (rank, size) {
            return Err(format!(
                "MPI calls it rank {} of {}; start the ranks with the mpirun of the MPI that this program was built with, \
                 or with `srun --mpi=pmix`, one process for each of its ranks",
                found.0, found.1
            ));
        }
        let host = mpi::environment::processor_name().unwrap_or_else(|_| "an unnamed host".to_owned());
        let own = About { rank, pid: std::process::id(), host };
        let mut all = vec![0; size * ABOUT_BYTES];
        world.all_gather_into(&own.encode()[..], &mut all[..]);
        let others: Option<Vec<About>> = all.chunks(ABOUT_BYTES).map(About::decode).collect();
        let others = others.ok_or("another rank runs another version of this program")?;
        let shared = Arc::new(Shared::new(rank, others, timeout));
        let [tensors, frames] = [(); 2].map(|()| world.duplicate());
        Ok(Self { under_way: Vec::new(), shared, tensors, frames, universe })
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Works until this rank has left, and the others have or the world has ended.
    pub(super) fn run(mut self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_turns())) {
            let rank = self.shared.rank;
            let message = format!("go on: {} failed to talk to MPI: {}", self.shared.others[rank], said(&*panic));
            self.shared.adopt(Failure { rank, cause: Cause::Told, message });
        }
        let is_clean = self.shared.failure().is_none() && self.shared.all_have_left() && self.under_way.is_empty();
        if !is_clean {
            // MPI_Finalize waits for all, also for those who never come. Without it MPI's launcher ends who is left.
            std::mem::forget((self.tensors, self.frames, self.universe));
        }
    }

    fn take_turns(&mut self) {
        let mut n_idle = 0;
        let mut left = None;
        while !self.is_over(&mut left) {
            n_idle = if self.turn() { 0 } else { n_idle + 1 };
            self.rest(n_idle, left.is_some());
        }
    }

    /// Does what there is to do; returns whether there was anything.
    fn turn(&mut self) -> bool {
        let orders = std::mem::take(&mut self.shared.lock().orders);
        let is_busy = !orders.is_empty();
        orders.into_iter().for_each(|order| self.carry_out(order));
        is_busy | self.probe() | self.deliver()
    }

    fn carry_out(&mut self, order: Order) {
        let letter = match order {
            Order::Send { to, tag, bytes, done } => {
                (Letter::send(&self.tensors, to as i32, tag, bytes), Errand::Report(done))
            }
            Order::Receive { from, tag, room, done } => {
                (Letter::receive(&self.tensors, from as i32, tag, room), Errand::Report(done))
            }
            Order::Tell { to, frame } => {
                (Letter::send(&self.frames, to as i32, TAG, frame.encode().into()), Errand::Forget)
            }
        };
        self.under_way.push(letter);
    }

    /// Makes room for frames that are coming; returns whether there are any.
    fn probe(&mut self) -> bool {
        let mut is_any = false;
        while let Some(status) = self.frames.any_process().immediate_probe_with_tag(TAG) {
            let room = vec![0; status.count(u8::equivalent_datatype()) as usize];
            let from = status.source_rank();
            self.under_way.push((Letter::receive(&self.frames, from, TAG, room.into()), Errand::Hear(from as usize)));
            is_any = true;
        }
        is_any
    }

    /// Hands over what has arrived; returns whether anything has.
    fn deliver(&mut self) -> bool {
        let (mut at, mut is_any) = (0, false);
        while at < self.under_way.len() {
            let Some(bytes) = self.under_way[at].0.arrived() else {
                at += 1;
                continue;
            };
            is_any = true;
            match self.under_way.swap_remove(at).1 {
                // A group that has failed hears nothing more.
                Errand::Report(Done { ear, piece }) => drop(ear.send(News::Arrived(piece, bytes))),
                Errand::Forget => {}
                Errand::Hear(from) => self.hear(from, &bytes),
            }
        }
        is_any
    }

    fn hear(&self, from: usize, bytes: &[u8]) {
        match Frame::decode(bytes) {
            Some(Frame::Leave) => self.shared.left(from),
            Some(Frame::Open(tag, id)) => self.shared.opened(tag, id),
            Some(Frame::Beat) => self.shared.heard_beat(from),
            Some(Frame::Waits(ranks)) => self.shared.heard_wait(from, &ranks),
            Some(Frame::Ended(failure)) => drop(self.shared.adopt(failure)),
            Some(Frame::Accuse(failure)) => {
                let first = self.shared.end(failure);
                self.shared.order([Order::Tell { to: from, frame: Frame::Ended(first) }]);
            }
            None => {
                let message = format!("go on: {} sent a message that makes no sense", self.shared.others[from]);
                self.shared.end(Failure { rank: from, cause: Cause::Strayed, message });
            }
        }
    }

    /// Whether the thread may end. `left` is when this rank has left.
    fn is_over(&self, left: &mut Option<Instant>) -> bool {
        if !self.shared.lock().leaving {
            return false;
        }
        let since = left.get_or_insert_with(Instant::now).elapsed();
        let is_told = !self.under_way.iter().any(|(_, errand)| matches!(errand, Errand::Forget))
            && self.shared.lock().orders.is_empty();
        let patience = if self.shared.failure().is_some() { FAREWELL_WITHIN } else { self.shared.timeout };
        (is_told && self.shared.all_have_left()) || since >= patience
    }

    fn rest(&self, n_idle: u32, has_left: bool) {
        let [first, longest] = PAUSES;
        match n_idle {
            0 => {}
            _ if has_left => thread::sleep(longest),
            _ if self.under_way.is_empty() => self.shared.await_bell(DOZE),
            1..=EAGER_TURNS => thread::yield_now(),
            _ => self.shared.await_bell((first * (1 + (n_idle - EAGER_TURNS) / 8)).min(longest)),
        }
    }
}
