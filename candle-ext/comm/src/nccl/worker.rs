//! A group's own thread: puts calls onto the group's stream one after another, and watches them to their end.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DriverError};
use candle_core::{CudaDevice, Tensor};

use super::api::UniqueId;
use super::communicator::{Communicator, Step, unique_id};
use super::description::decode;
use super::launch_order::{LaunchOrder, Ticket};
use super::memory::read_words;
use crate::transport::{FailureChannel, TransportError};
use crate::watchdog::Watchdog;
use crate::{Call, Cause, Failure, Recv, Result, store};

/// How often is looked at what is under way.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The sleep between two looks at a launch, which takes some tens of microseconds, or at a barrier.
const SHORTLY: Duration = Duration::from_micros(20);

/// The time between two comparisons of a tensor that does not arrive with its description, which may have.
const COMPARE_EVERY: Duration = Duration::from_secs(1);

/// How long what was stopped may take to end on the device.
const STOP_WITHIN: Duration = Duration::from_secs(5);

pub(super) type Job = Box<dyn FnOnce(&mut Worker) + Send>;

/// The state that all groups of a rank share.
#[derive(Clone)]
pub(super) struct Rank {
    pub(super) watchdog: Arc<Watchdog>,
    pub(super) device: CudaDevice,
    pub(super) order: Arc<LaunchOrder>,
}

/// What the thread owns.
pub(super) struct Worker {
    /// Names the group in the store; unique in the world.
    pub(super) id: String,
    pub(super) group: Arc<str>,
    /// The world ranks of the group's ranks.
    pub(super) members: Vec<usize>,
    pub(super) me: usize,
    pub(super) rank: Rank,
    stream: Arc<CudaStream>,
    /// The stream by which the host reads what has arrived, whatever the group's has to do.
    reads: Arc<CudaStream>,
    /// `None` once it was stopped.
    communicator: Option<Communicator>,
    under_way: VecDeque<UnderWay>,
}

/// A call that is on the stream.
struct UnderWay {
    call: Call,
    /// What it needs is there.
    ready: CudaEvent,
    done: Arc<CudaEvent>,
    /// Since when only the others are waited for.
    since: Option<Instant>,
    /// What it reads and writes.
    tensors: Vec<Tensor>,
    expected: Option<Expected>,
    /// The wait for the others before the next comparison.
    compare_after: Duration,
}

/// An operation to put onto the stream.
pub(super) struct Launch {
    /// The event after which all that it needs is there.
    pub(super) ready: CudaEvent,
    pub(super) steps: Vec<Step>,
    /// All that the steps read and write.
    pub(super) tensors: Vec<Tensor>,
    pub(super) expected: Option<Expected>,
}

/// A tensor to receive, and where its sender's description of it arrives.
pub(super) struct Expected {
    pub(super) recv: Recv,
    pub(super) description: Tensor,
}

/// The part of a sender's description that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Described {
    InFull,
    Perhaps,
}

impl Worker {
    /// Connects the ranks `members`, which all call this with the same `id`, never used before.
    pub(super) fn open(rank: &Rank, id: &str, group: Arc<str>, members: &[usize]) -> Result<Self, TransportError> {
        let own = rank.watchdog.rank();
        let me = members.iter().position(|rank| *rank == own).expect("who opens a group is in it");
        let context = Arc::clone(rank.device.cuda_stream().context());
        let (stream, reads) = (context.new_stream().map_err(cuda)?, context.new_stream().map_err(cuda)?);
        stream.context().bind_to_thread().map_err(cuda)?;
        let unique_id = meet(&rank.watchdog, id, members)?;
        let communicator = Communicator::start(me, members.len(), unique_id).map_err(TransportError::Local)?;
        let (id, members, under_way) = (id.to_owned(), members.to_vec(), VecDeque::new());
        let (rank, communicator) = (rank.clone(), Some(communicator));
        let worker = Self { id, group, members, me, rank, stream, reads, communicator, under_way };
        worker.await_communicator(|| {
            Some(TransportError::Local("NCCL has not connected the ranks within the time-out".to_owned()))
        })?;
        Ok(worker)
    }

    /// Carries out jobs until there can be no more and all that was put onto the stream is done.
    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        // Linux otherwise ends a sleep up to 50 us late.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        loop {
            let job = match self.under_way.is_empty() {
                true => jobs.recv().map_err(RecvTimeoutError::from),
                false => jobs.recv_timeout(LOOK_EVERY),
            };
            match job {
                Ok(job) => job(&mut self),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if self.under_way.is_empty() => break,
                Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK_EVERY),
            }
            self.look();
        }
        self.close();
    }

    /// Carries out one call, or says why that is not possible any more.
    pub(super) fn carry_out<T>(
        &mut self,
        call: &Call,
        body: impl FnOnce(&mut Self) -> Result<T, TransportError>,
    ) -> Result<T> {
        if let Some(failure) = self.rank.watchdog.failure() {
            return Err(failure.into());
        }
        self.rank.watchdog.begin(&self.id, call);
        let done = self.stream.context().bind_to_thread().map_err(cuda).and_then(|()| body(self));
        done.map_err(|error| self.fail(call, error).into())
    }

    /// Waits until all calls before the ticket's have launched, in whatever group.
    pub(super) fn await_turn(&self, ticket: &Ticket) -> Result<(), TransportError> {
        while !ticket.await_turn(LOOK_EVERY) {
            self.check()?;
        }
        Ok(())
    }

    /// Puts an operation onto the stream; returns what tells that it is done. Its tensors are kept until then.
    pub(super) fn put(
        &mut self,
        call: &Call,
        ticket: Ticket,
        launch: Launch,
    ) -> Result<Arc<CudaEvent>, TransportError> {
        let Launch { ready, steps, tensors, expected } = launch;
        self.await_turn(&ticket)?;
        self.stream.wait(&ready).map_err(cuda)?;
        let stream = self.stream.cu_stream().cast();
        let communicator =
            self.communicator.as_ref().ok_or_else(|| TransportError::Local("NCCL was stopped".to_owned()))?;
        // SAFETY: the stream is of the communicator's device; the steps' addresses are those of `tensors`, which are kept in
        // `under_way` until `done`.
        let put = unsafe { communicator.put(stream, &steps) }.map_err(TransportError::Local);
        let put = put.and_then(|()| self.await_communicator(|| self.late(call)));
        drop(ticket);
        let done = Arc::new(self.stream.record_event(None).map_err(cuda)?);
        let (call, done_here) = (call.clone(), Arc::clone(&done));
        let (since, compare_after) = (None, COMPARE_EVERY);
        self.under_way.push_back(UnderWay { call, ready, done: done_here, since, tensors, expected, compare_after });
        put.map(|()| done)
    }

    /// Waits until what was put onto the stream is done.
    pub(super) fn await_done(&mut self, call: &Call, done: &CudaEvent) -> Result<(), TransportError> {
        let began = Instant::now();
        while !done.try_is_complete().map_err(cuda)? {
            self.check()?;
            if began.elapsed() > self.rank.watchdog.timeout()
                && let Some(error) = self.late(call)
                // To find out who is late takes a while, in which it may have come.
                && !done.try_is_complete().map_err(cuda)?
            {
                return Err(error);
            }
            thread::sleep(SHORTLY);
        }
        Ok(())
    }

    /// Fails if the world has ended, or NCCL has given up.
    fn check(&self) -> Result<bool, TransportError> {
        match (self.rank.watchdog.failure(), &self.communicator) {
            (Some(failure), _) => Err(TransportError::Failed(failure)),
            (None, Some(communicator)) => communicator.is_ready().map_err(TransportError::Local),
            (None, None) => Ok(true),
        }
    }

    fn await_communicator(&self, late: impl Fn() -> Option<TransportError>) -> Result<(), TransportError> {
        let began = Instant::now();
        while !self.check()? {
            if began.elapsed() > self.rank.watchdog.timeout()
                && let Some(error) = late()
            {
                return Err(error);
            }
            thread::sleep(SHORTLY);
        }
        Ok(())
    }

    /// Lets go of what is done, and ends the world for what went wrong or does not get done.
    fn look(&mut self) {
        while let Some(mut first) = self.under_way.pop_front() {
            let looked = self.look_at(&mut first);
            if let Ok(true) = looked {
                continue;
            }
            let call = first.call.clone();
            self.under_way.push_front(first);
            if let Err(error) = looked {
                self.fail(&call, error);
            }
            return;
        }
    }

    /// Returns whether the oldest call under way is done.
    fn look_at(&self, first: &mut UnderWay) -> Result<bool, TransportError> {
        if first.done.try_is_complete().map_err(cuda)? {
            first.expected.as_ref().map_or(Ok(()), |expected| self.compare(expected, Described::InFull))?;
            return Ok(true);
        }
        self.check()?;
        if first.since.is_none() && first.ready.is_complete() {
            first.since = Some(Instant::now());
        }
        let waited = first.since.map_or(Duration::ZERO, |since| since.elapsed());
        if waited > first.compare_after
            && let Some(expected) = &first.expected
        {
            first.compare_after += COMPARE_EVERY;
            self.compare(expected, Described::Perhaps)?;
        }
        if waited > self.rank.watchdog.timeout()
            && let Some(error) = self.late(&first.call)
            // To find out who is late takes a while, in which it may have come.
            && !first.done.is_complete()
        {
            return Err(error);
        }
        Ok(false)
    }

    /// Fails if a sender describes another tensor than this rank expects.
    fn compare(&self, expected: &Expected, described: Described) -> Result<(), TransportError> {
        let Expected { recv, description } = expected;
        let sent = decode(&read_words(&self.reads, description)?);
        let sent = sent.as_ref().map(|(dtype, shape)| (*dtype, shape.as_slice()));
        let is_missing = sent.is_none() && described == Described::Perhaps;
        if is_missing || sent.is_some_and(|(dtype, shape)| recv.fits(Some(dtype), shape)) {
            return Ok(());
        }
        let ends = [recv.from, self.me].map(|rank| self.rank.watchdog.who(self.members[rank]));
        Err(TransportError::Mismatch(recv.from, recv.unlike(sent, ends)))
    }

    /// Ends the world with what went wrong in `call`, and stops what runs on the device; returns why the world ended.
    fn fail(&mut self, call: &Call, error: TransportError) -> Failure {
        let failure = error.unfinished(&*self.rank.watchdog, &self.members, call);
        self.stop();
        failure
    }

    /// Stops what runs on the device. What does not stop may still write to its tensors, which are then never freed.
    fn stop(&mut self) {
        drop(self.communicator.take());
        let began = Instant::now();
        // NCCL may have put its work behind the events of the calls, but behind this one there is none.
        let end = self.stream.record_event(None);
        let is_running = || matches!(end.as_ref().map(CudaEvent::try_is_complete), Ok(Ok(false)));
        while is_running() && began.elapsed() < STOP_WITHIN {
            thread::sleep(LOOK_EVERY);
        }
        let under_way = self.under_way.drain(..);
        if is_running() {
            under_way.flat_map(|under_way| under_way.tensors).for_each(std::mem::forget);
        }
    }

    fn late(&self, call: &Call) -> Option<TransportError> {
        self.rank.watchdog.late(&self.id, &self.members, call)
    }

    /// Closes the group. A failure to do so ends the world.
    fn close(mut self) {
        let (watchdog, communicator) = (Arc::clone(&self.rank.watchdog), self.communicator.take());
        let Some(communicator) = communicator.filter(|_| watchdog.failure().is_none()) else { return };
        let Err(what) = self.end(communicator) else { return };
        let (rank, group, members) = (watchdog.rank(), &self.group, &self.members);
        let message = format!("close group {group} of ranks {members:?}: {}: {what}", watchdog.who(rank));
        watchdog.fail(Failure { rank, cause: Cause::Told, message });
    }

    /// Ends the communicator; what other ranks still read from this one is sent before.
    fn end(&self, communicator: Communicator) -> Result<(), String> {
        self.stream.context().bind_to_thread().map_err(|error| format!("CUDA: {error}"))?;
        communicator.finalize()?;
        let (began, timeout) = (Instant::now(), self.rank.watchdog.timeout());
        while !communicator.is_ready()? {
            if self.rank.watchdog.failure().is_some() {
                return Ok(());
            }
            if began.elapsed() > timeout {
                return Err(format!("NCCL has not sent within {timeout:?} what other ranks wait for"));
            }
            thread::sleep(LOOK_EVERY);
        }
        communicator.destroy()
    }
}

/// Gives the ranks of a new group what they know each other by: the first hands it out.
fn meet(watchdog: &Watchdog, id: &str, members: &[usize]) -> Result<UniqueId, TransportError> {
    let (store, key) = (watchdog.store()?, format!("id/{id}"));
    let lost = |error: store::Error| TransportError::Local(error.to_string());
    if members[0] == watchdog.rank() {
        let unique_id = unique_id().map_err(TransportError::Local)?;
        store.set(&key, &unique_id.0).map_err(lost)?;
        return Ok(unique_id);
    }
    match store.wait_for(&[&key], watchdog.timeout()) {
        Ok(()) => {}
        Err(store::Error::Timeout { timeout, .. }) => {
            let what = format!("{} has not made NCCL's id within {timeout:?}", watchdog.who(members[0]));
            return Err(TransportError::CallStalled(0, what));
        }
        Err(error) => return Err(lost(error)),
    }
    let bytes = store.get(&key).map_err(lost)?;
    let bytes =
        bytes.try_into().map_err(|_| TransportError::Local("read NCCL's id: it has another length".to_owned()))?;
    Ok(UniqueId(bytes))
}

pub(super) fn cuda(error: DriverError) -> TransportError {
    TransportError::Local(format!("CUDA: {error}"))
}
