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
use super::communicator::{Communicator, NcclOp, unique_id};
use super::description::decode;
use super::launch_order::{LaunchOrder, Ticket};
use super::memory::read_words;
use crate::transport::{FailureChannel, TransportError};
use crate::watchdog::Watchdog;
use crate::{Call, Cause, RankFailure, Recv, Result, store};

/// How often is polled at what is under way.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The sleep between two looks at a launch, which takes some tens of microseconds, or at a barrier.
const SHORT_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// The time between two comparisons of a tensor that does not arrive with its description, which may have.
const COMPARE_INTERVAL: Duration = Duration::from_secs(1);

/// How long what was stopped may take to end on the device.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) type Job = Box<dyn FnOnce(&mut NcclWorker) + Send>;

/// The state that all groups of a rank share.
#[derive(Clone)]
pub(super) struct NcclRank {
    pub(super) watchdog: Arc<Watchdog>,
    pub(super) device: CudaDevice,
    pub(super) order: Arc<LaunchOrder>,
}

/// What the thread owns.
pub(super) struct NcclWorker {
    /// Names the group in the store; unique in the world.
    pub(super) id: String,
    pub(super) group: Arc<str>,
    /// The world ranks of the group's ranks.
    pub(super) members: Vec<usize>,
    pub(super) me: usize,
    pub(super) rank: NcclRank,
    stream: Arc<CudaStream>,
    /// The stream by which the host reads what has arrived, whatever the group's has to do.
    reads: Arc<CudaStream>,
    /// `None` once it was stopped.
    communicator: Option<Communicator>,
    in_flight: VecDeque<InFlightCall>,
}

/// A call that is on the stream.
struct InFlightCall {
    call: Call,
    /// What it needs is there.
    ready: CudaEvent,
    done: Arc<CudaEvent>,
    /// Since when only the others are waited for.
    since: Option<Instant>,
    /// What it reads and writes.
    tensors: Vec<Tensor>,
    expected: Option<ExpectedTensor>,
    /// The wait for the others before the next comparison.
    compare_after: Duration,
}

/// An operation to enqueued onto the stream.
pub(super) struct Launch {
    /// The event after which all that it needs is there.
    pub(super) ready: CudaEvent,
    pub(super) ops: Vec<NcclOp>,
    /// All that the ops read and write.
    pub(super) tensors: Vec<Tensor>,
    pub(super) expected: Option<ExpectedTensor>,
}

/// A tensor to receive, and where its sender's description of it arrives.
pub(super) struct ExpectedTensor {
    pub(super) recv: Recv,
    pub(super) description: Tensor,
}

/// The part of a sender's description that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Complete,
    MaybePartial,
}

impl NcclWorker {
    /// Connects the ranks `members`, which all call this with the same `id`, never used before.
    pub(super) fn open(rank: &NcclRank, id: &str, group: Arc<str>, members: &[usize]) -> Result<Self, TransportError> {
        let own = rank.watchdog.rank();
        let me = members.iter().position(|rank| *rank == own).expect("who opens a group is in it");
        let context = Arc::clone(rank.device.cuda_stream().context());
        let (stream, reads) = (context.new_stream().map_err(cuda)?, context.new_stream().map_err(cuda)?);
        stream.context().bind_to_thread().map_err(cuda)?;
        let unique_id = exchange_unique_id(&rank.watchdog, id, members)?;
        let communicator = Communicator::start(me, members.len(), unique_id).map_err(TransportError::Local)?;
        let (id, members, in_flight) = (id.to_owned(), members.to_vec(), VecDeque::new());
        let (rank, communicator) = (rank.clone(), Some(communicator));
        let worker = Self { id, group, members, me, rank, stream, reads, communicator, in_flight };
        worker.await_communicator(|| {
            Some(TransportError::Local("NCCL has not connected the ranks within the time-out".to_owned()))
        })?;
        Ok(worker)
    }

    /// Carries out jobs until there can be no more and all that was enqueued onto the stream is done.
    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        // Linux otherwise ends a sleep up to 50 us late.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        loop {
            let job = match self.in_flight.is_empty() {
                true => jobs.recv().map_err(RecvTimeoutError::from),
                false => jobs.recv_timeout(POLL_INTERVAL),
            };
            match job {
                Ok(job) => job(&mut self),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if self.in_flight.is_empty() => break,
                Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL_INTERVAL),
            }
            self.poll();
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
        while !ticket.await_turn(POLL_INTERVAL) {
            self.check()?;
        }
        Ok(())
    }

    /// Puts an operation onto the stream; returns what tells that it is done. Its tensors are kept until then.
    pub(super) fn enqueue(
        &mut self,
        call: &Call,
        ticket: Ticket,
        launch: Launch,
    ) -> Result<Arc<CudaEvent>, TransportError> {
        let Launch { ready, ops, tensors, expected } = launch;
        self.await_turn(&ticket)?;
        self.stream.wait(&ready).map_err(cuda)?;
        let stream = self.stream.cu_stream().cast();
        let communicator =
            self.communicator.as_ref().ok_or_else(|| TransportError::Local("NCCL was stopped".to_owned()))?;
        // SAFETY: the stream is of the communicator's device; the ops' addresses are those of `tensors`, which are kept in
        // `in_flight` until `done`.
        let enqueued = unsafe { communicator.enqueue(stream, &ops) }.map_err(TransportError::Local);
        let enqueued = enqueued.and_then(|()| self.await_communicator(|| self.diagnose_timeout(call)));
        drop(ticket);
        let done = Arc::new(self.stream.record_event(None).map_err(cuda)?);
        let (call, done_here) = (call.clone(), Arc::clone(&done));
        let (since, compare_after) = (None, COMPARE_INTERVAL);
        self.in_flight.push_back(InFlightCall {
            call,
            ready,
            done: done_here,
            since,
            tensors,
            expected,
            compare_after,
        });
        enqueued.map(|()| done)
    }

    /// Waits until what was enqueued onto the stream is done.
    pub(super) fn await_done(&mut self, call: &Call, done: &CudaEvent) -> Result<(), TransportError> {
        let began = Instant::now();
        while !done.try_is_complete().map_err(cuda)? {
            self.check()?;
            if began.elapsed() > self.rank.watchdog.timeout()
                && let Some(error) = self.diagnose_timeout(call)
                // To find out who is late takes a while, in which it may have come.
                && !done.try_is_complete().map_err(cuda)?
            {
                return Err(error);
            }
            thread::sleep(SHORT_POLL_INTERVAL);
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

    fn await_communicator(&self, on_timeout: impl Fn() -> Option<TransportError>) -> Result<(), TransportError> {
        let began = Instant::now();
        while !self.check()? {
            if began.elapsed() > self.rank.watchdog.timeout()
                && let Some(error) = on_timeout()
            {
                return Err(error);
            }
            thread::sleep(SHORT_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Lets go of what is done, and ends the world for what went wrong or does not get done.
    fn poll(&mut self) {
        while let Some(mut first) = self.in_flight.pop_front() {
            let polled = self.poll_call(&mut first);
            if let Ok(true) = polled {
                continue;
            }
            let call = first.call.clone();
            self.in_flight.push_front(first);
            if let Err(error) = polled {
                self.fail(&call, error);
            }
            return;
        }
    }

    /// Returns whether the oldest call under way is done.
    fn poll_call(&self, first: &mut InFlightCall) -> Result<bool, TransportError> {
        if first.done.try_is_complete().map_err(cuda)? {
            first.expected.as_ref().map_or(Ok(()), |expected| self.compare(expected, Arrival::Complete))?;
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
            first.compare_after += COMPARE_INTERVAL;
            self.compare(expected, Arrival::MaybePartial)?;
        }
        if waited > self.rank.watchdog.timeout()
            && let Some(error) = self.diagnose_timeout(&first.call)
            // To find out who is late takes a while, in which it may have come.
            && !first.done.is_complete()
        {
            return Err(error);
        }
        Ok(false)
    }

    /// Fails if a sender describes another tensor than this rank expects.
    fn compare(&self, expected: &ExpectedTensor, arrival: Arrival) -> Result<(), TransportError> {
        let ExpectedTensor { recv, description } = expected;
        let sent = decode(&read_words(&self.reads, description)?);
        let sent = sent.as_ref().map(|(dtype, shape)| (*dtype, shape.as_slice()));
        let is_missing = sent.is_none() && arrival == Arrival::MaybePartial;
        if is_missing || sent.is_some_and(|(dtype, shape)| recv.matches(Some(dtype), shape)) {
            return Ok(());
        }
        let ends = [recv.from, self.me].map(|rank| self.rank.watchdog.who(self.members[rank]));
        Err(TransportError::Mismatch(recv.from, recv.mismatch(sent, ends)))
    }

    /// Ends the world with what went wrong in `call`, and stops what runs on the device; returns why the world ended.
    fn fail(&mut self, call: &Call, error: TransportError) -> RankFailure {
        let failure = error.fail_call(&*self.rank.watchdog, &self.members, call);
        self.abort();
        failure
    }

    /// Stops what runs on the device. What does not stop may still write to its tensors, which are then never freed.
    fn abort(&mut self) {
        drop(self.communicator.take());
        let began = Instant::now();
        // NCCL may have enqueued its work behind the events of the calls, but behind this one there is none.
        let end = self.stream.record_event(None);
        let is_running = || matches!(end.as_ref().map(CudaEvent::try_is_complete), Ok(Ok(false)));
        while is_running() && began.elapsed() < ABORT_TIMEOUT {
            thread::sleep(POLL_INTERVAL);
        }
        let in_flight = self.in_flight.drain(..);
        if is_running() {
            in_flight.flat_map(|in_flight| in_flight.tensors).for_each(std::mem::forget);
        }
    }

    fn diagnose_timeout(&self, call: &Call) -> Option<TransportError> {
        self.rank.watchdog.diagnose_timeout(&self.id, &self.members, call)
    }

    /// Closes the group. A failure to do so ends the world.
    fn close(mut self) {
        let (watchdog, communicator) = (Arc::clone(&self.rank.watchdog), self.communicator.take());
        let Some(communicator) = communicator.filter(|_| watchdog.failure().is_none()) else { return };
        let Err(what) = self.end(communicator) else { return };
        let (rank, group, members) = (watchdog.rank(), &self.group, &self.members);
        let message = format!("close group {group} of ranks {members:?}: {}: {what}", watchdog.who(rank));
        watchdog.fail(RankFailure { rank, cause: Cause::Reported, message });
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
            thread::sleep(POLL_INTERVAL);
        }
        communicator.destroy()
    }
}

/// Gives the ranks of a new group what they know each other by: the first hands it out.
fn exchange_unique_id(watchdog: &Watchdog, id: &str, members: &[usize]) -> Result<UniqueId, TransportError> {
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
