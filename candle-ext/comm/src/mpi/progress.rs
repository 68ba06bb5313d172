//! The thread that makes all calls to MPI: starts what the others request, sees what has arrived, hears what other ranks tell.
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

use super::frame::Frame;
use super::message::MpiMessage;
use super::rank::{Completion, MpiRank, MpiRequest, ProgressEvent};
use crate::panic::panic_message;
use crate::peer::PeerInfo;
use crate::{Cause, RankFailure};

/// How often nothing may happen before there are pauses.
const SPIN_POLLS: u32 = 200;

/// The first pause, and the longest while messages are under way.
const BACKOFF: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// How long nobody listens to what other ranks tell, when this one has nothing to do.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How long after a failure this process stays, so that the others hear of it before it ends.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// The buffer for a rank's description, with zeros after it.
const PEER_BYTES: usize = 512;

/// The tag of a frame.
const FRAME_TAG: i32 = 0;

/// What the thread owns.
pub(super) struct ProgressThread {
    in_flight: Vec<(MpiMessage, Job)>,
    shared: Arc<MpiRank>,
    /// For what groups exchange.
    tensors: SimpleCommunicator,
    frames: SimpleCommunicator,
    // Ends MPI, after its communicators.
    universe: Universe,
}

/// The action on an arrived message.
enum Job {
    /// A group waits for it.
    Report(Completion),
    /// Nothing: a frame was sent.
    Forget,
    /// This rank has sent a frame.
    ReadFrame(usize),
}

impl ProgressThread {
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
        let own = PeerInfo { host, ..PeerInfo::this_process(rank, size, String::new()) };
        let mut all = vec![0; size * PEER_BYTES];
        world.all_gather_into(&padded(own.encode())[..], &mut all[..]);
        let decode = |(rank, bytes): (usize, &[u8])| PeerInfo::decode(rank, without_padding(bytes));
        let peers: Option<Vec<PeerInfo>> = all.chunks(PEER_BYTES).enumerate().map(decode).collect();
        let peers = peers.ok_or("another rank runs another version of this program")?;
        let shared = Arc::new(MpiRank::new(rank, peers, timeout));
        let [tensors, frames] = [(); 2].map(|()| world.duplicate());
        Ok(Self { in_flight: Vec::new(), shared, tensors, frames, universe })
    }

    pub(super) fn shared(&self) -> &Arc<MpiRank> {
        &self.shared
    }

    /// Works until this rank has left, and the others have or the world has ended.
    pub(super) fn run(mut self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_loop())) {
            let rank = self.shared.rank;
            let message =
                format!("go on: {} failed to talk to MPI: {}", self.shared.peers[rank], panic_message(&*panic));
            self.shared.adopt(RankFailure { rank, cause: Cause::Reported, message });
        }
        let is_clean =
            self.shared.monitor.failure().is_none() && self.shared.all_have_left() && self.in_flight.is_empty();
        if !is_clean {
            // MPI_Finalize waits for all, also for those who never come. Without it MPI's launcher ends who is left.
            std::mem::forget((self.tensors, self.frames, self.universe));
        }
    }

    fn run_loop(&mut self) {
        let mut n_idle = 0;
        let mut left = None;
        while !self.is_over(&mut left) {
            n_idle = if self.poll() { 0 } else { n_idle + 1 };
            self.rest(n_idle, left.is_some());
        }
    }

    /// Does what there is to do; returns whether there was anything.
    fn poll(&mut self) -> bool {
        let requests = std::mem::take(&mut self.shared.lock().requests);
        let is_busy = !requests.is_empty();
        requests.into_iter().for_each(|request| self.start_request(request));
        is_busy | self.probe() | self.deliver()
    }

    fn start_request(&mut self, request: MpiRequest) {
        let message = match request {
            MpiRequest::Send { to, tag, bytes, done } => {
                (MpiMessage::send(&self.tensors, to as i32, tag, bytes), Job::Report(done))
            }
            MpiRequest::Receive { from, tag, buffer, done } => {
                (MpiMessage::receive(&self.tensors, from as i32, tag, buffer), Job::Report(done))
            }
            MpiRequest::SendFrame { to, frame } => {
                (MpiMessage::send(&self.frames, to as i32, FRAME_TAG, frame.encode().into()), Job::Forget)
            }
        };
        self.in_flight.push(message);
    }

    /// Makes buffer for frames that are receives; returns whether there are any.
    fn probe(&mut self) -> bool {
        let mut is_any = false;
        while let Some(status) = self.frames.any_process().immediate_probe_with_tag(FRAME_TAG) {
            let buffer = vec![0; status.count(u8::equivalent_datatype()) as usize];
            let from = status.source_rank();
            self.in_flight.push((
                MpiMessage::receive(&self.frames, from, FRAME_TAG, buffer.into()),
                Job::ReadFrame(from as usize),
            ));
            is_any = true;
        }
        is_any
    }

    /// Hands over what has arrived; returns whether anything has.
    fn deliver(&mut self) -> bool {
        let (mut at, mut is_any) = (0, false);
        while at < self.in_flight.len() {
            let Some(bytes) = self.in_flight[at].0.arrived() else {
                at += 1;
                continue;
            };
            is_any = true;
            match self.in_flight.swap_remove(at).1 {
                // A group that has failed hears nothing more.
                Job::Report(Completion { events, chunk }) => drop(events.send(ProgressEvent::Arrived(chunk, bytes))),
                Job::Forget => {}
                Job::ReadFrame(from) => self.read_frame(from, &bytes),
            }
        }
        is_any
    }

    fn read_frame(&self, from: usize, bytes: &[u8]) {
        match Frame::decode(bytes) {
            Some(Frame::Leave) => self.shared.left(from),
            Some(Frame::Open(tag, id)) => self.shared.opened(tag, id),
            Some(Frame::Beat) => self.shared.on_beat(from),
            Some(Frame::Waits(ranks)) => self.shared.on_wait(from, &ranks),
            Some(Frame::Ended(failure)) => self.shared.adopt(failure),
            Some(Frame::ReportFailure(failure)) => {
                let first = self.shared.end(failure);
                self.shared.request([MpiRequest::SendFrame { to: from, frame: Frame::Ended(first) }]);
            }
            None => {
                let message = format!("go on: {} sent a message that makes no sense", self.shared.peers[from]);
                self.shared.end(RankFailure { rank: from, cause: Cause::CallMismatch, message });
            }
        }
    }

    /// Whether the thread may end. `left` is when this rank has left.
    fn is_over(&self, left: &mut Option<Instant>) -> bool {
        if !self.shared.lock().leaving {
            return false;
        }
        let since = left.get_or_insert_with(Instant::now).elapsed();
        let is_told =
            !self.in_flight.iter().any(|(_, job)| matches!(job, Job::Forget)) && self.shared.lock().requests.is_empty();
        let patience = if self.shared.monitor.failure().is_some() { SHUTDOWN_GRACE } else { self.shared.timeout };
        (is_told && self.shared.all_have_left()) || since >= patience
    }

    fn rest(&self, n_idle: u32, has_left: bool) {
        let [first, longest] = BACKOFF;
        match n_idle {
            0 => {}
            _ if has_left => thread::sleep(longest),
            _ if self.in_flight.is_empty() => self.shared.await_request(IDLE_POLL_INTERVAL),
            1..=SPIN_POLLS => thread::yield_now(),
            _ => self.shared.await_request((first * (1 + (n_idle - SPIN_POLLS) / 8)).min(longest)),
        }
    }
}

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(PEER_BYTES, 0);
    bytes
}

fn without_padding(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}
