//! Progress thread, which makes all calls to MPI: starts requests, completes messages and reads control messages.
//!
//! MPI makes progress only during its calls, and one call cannot wait for messages and for local requests. So the thread
//! polls: it spins while there is progress and then backs off.

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

/// Number of idle polls before the thread sleeps.
const SPIN_POLLS: u32 = 200;

/// First sleep, and the longest one while messages are in flight.
const BACKOFF: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(1)];

/// Interval between polls for control messages while nothing is in flight.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Time that the thread stays after a failure, so that the other ranks receive its report.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// Size of a rank's description, padded with zeros.
const PEER_BYTES: usize = 512;

/// Tag of control messages.
const FRAME_TAG: i32 = 0;

/// State of the progress thread.
pub(super) struct ProgressThread {
    in_flight: Vec<(MpiMessage, Job)>,
    shared: Arc<MpiRank>,
    /// Communicator of tensor data.
    tensors: SimpleCommunicator,
    frames: SimpleCommunicator,
    // Finalizes MPI. Dropped after the communicators.
    universe: Universe,
}

/// Action on a completed message.
enum Job {
    /// Report the completion to a group.
    Report(Completion),
    /// None: a control message was sent.
    Forget,
    /// Read the control message of this rank.
    ReadFrame(usize),
}

impl ProgressThread {
    /// Initializes MPI and exchanges the descriptions of all ranks. Fails if MPI reports another rank or size.
    pub(super) fn start(rank: usize, size: usize, timeout: Duration) -> Result<Self, String> {
        let Some((universe, level)) = mpi::initialize_with_threading(Threading::Funneled) else {
            return Err("a process can initialize MPI only once".to_owned());
        };
        if level < Threading::Funneled {
            return Err(format!("this MPI provides {level:?}; MPI_THREAD_FUNNELED is required"));
        }
        let world = universe.world();
        let found = (world.rank() as usize, world.size() as usize);
        if found != (rank, size) {
            return Err(format!(
                "MPI reports rank {} of {}; start the ranks with the mpirun of the MPI that this program was built with, \
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
        let peers = peers.ok_or("another rank runs another version of this program; start all ranks from one build")?;
        let shared = Arc::new(MpiRank::new(rank, peers, timeout));
        let [tensors, frames] = [(); 2].map(|()| world.duplicate());
        Ok(Self { in_flight: Vec::new(), shared, tensors, frames, universe })
    }

    pub(super) fn shared(&self) -> &Arc<MpiRank> {
        &self.shared
    }

    /// Runs until this rank has left, and the other ranks have left or the world has failed.
    pub(super) fn run(mut self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_loop())) {
            let rank = self.shared.rank;
            let message =
                format!("continue: {} failed to call MPI: {}", self.shared.peers[rank], panic_message(&*panic));
            self.shared.adopt(RankFailure { rank, cause: Cause::Reported, message });
        }
        let is_clean =
            self.shared.monitor.failure().is_none() && self.shared.all_have_left() && self.in_flight.is_empty();
        if !is_clean {
            // MPI_Finalize waits for all ranks, also for exited ones. Without it mpirun kills the remaining ranks.
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

    /// Makes progress once. Returns true if there was any.
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

    /// Starts to receive pending control messages. Returns true if there were any.
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

    /// Handles completed messages. Returns true if there were any.
    fn deliver(&mut self) -> bool {
        let (mut at, mut is_any) = (0, false);
        while at < self.in_flight.len() {
            let Some(bytes) = self.in_flight[at].0.arrived() else {
                at += 1;
                continue;
            };
            is_any = true;
            match self.in_flight.swap_remove(at).1 {
                // A failed group has no receiver.
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
                let message = format!("continue: {} sent a malformed control message", self.shared.peers[from]);
                self.shared.end(RankFailure { rank: from, cause: Cause::CallMismatch, message });
            }
        }
    }

    /// Returns true if the thread may end. `left` is the time at which this rank has left.
    fn is_over(&self, left: &mut Option<Instant>) -> bool {
        if !self.shared.lock().leaving {
            return false;
        }
        let since = left.get_or_insert_with(Instant::now).elapsed();
        let is_sent =
            !self.in_flight.iter().any(|(_, job)| matches!(job, Job::Forget)) && self.shared.lock().requests.is_empty();
        let patience = if self.shared.monitor.failure().is_some() { SHUTDOWN_GRACE } else { self.shared.timeout };
        (is_sent && self.shared.all_have_left()) || since >= patience
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
