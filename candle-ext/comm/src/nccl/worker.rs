//! Thread of a process group: enqueues calls on the group's stream in order, and watches them until they complete.

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
use crate::{Cause, CollectiveCall, RankFailure, Recv, Result, store};

/// Interval between polls of the calls in flight.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Interval between polls of a launch, which takes some tens of microseconds, or of a barrier.
const SHORT_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Interval between checks of a stalled receive's description, which may have arrived.
const COMPARE_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of aborted operations on the device.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) type Job = Box<dyn FnOnce(&mut NcclWorker) + Send>;

/// State that all groups of a rank share.
#[derive(Clone)]
pub(super) struct NcclRank {
    pub(super) watchdog: Arc<Watchdog>,
    pub(super) device: CudaDevice,
    pub(super) order: Arc<LaunchOrder>,
}

/// State of the thread.
pub(super) struct NcclWorker {
    /// Id of the group in the store; unique in the world.
    pub(super) id: String,
    pub(super) group: Arc<str>,
    /// World ranks of the group's ranks.
    pub(super) members: Vec<usize>,
    pub(super) me: usize,
    pub(super) rank: NcclRank,
    stream: Arc<CudaStream>,
    /// Stream on which the host reads descriptions, independent of the group's stream.
    reads: Arc<CudaStream>,
    /// `None` after an abort.
    communicator: Option<Communicator>,
    in_flight: VecDeque<InFlightCall>,
}

/// Call that is enqueued on the stream.
struct InFlightCall {
    call: CollectiveCall,
    /// Event after which the inputs are ready.
    ready: CudaEvent,
    done: Arc<CudaEvent>,
    /// Time since which the call waits for other ranks only.
    since: Option<Instant>,
    /// Tensors that the call reads and writes.
    tensors: Vec<Tensor>,
    expected: Option<ExpectedTensor>,
    /// Time of waiting after which the description is checked next.
    compare_after: Duration,
}

/// Operations to enqueue on the stream.
pub(super) struct Launch {
    /// Event after which the inputs are ready.
    pub(super) ready: CudaEvent,
    pub(super) ops: Vec<NcclOp>,
    /// Tensors that the operations read and write.
    pub(super) tensors: Vec<Tensor>,
    pub(super) expected: Option<ExpectedTensor>,
}

/// Tensor to receive, with the buffer of its sender's description.
pub(super) struct ExpectedTensor {
    pub(super) recv: Recv,
    pub(super) description: Tensor,
}

/// State of a received description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Complete,
    MaybePartial,
}

impl NcclWorker {
    /// Connects the ranks `members`. All of them call this with the same unused `id`.
    pub(super) fn open(rank: &NcclRank, id: &str, group: Arc<str>, members: &[usize]) -> Result<Self, TransportError> {
        let own = rank.watchdog.rank();
        let me = members.iter().position(|rank| *rank == own).expect("a rank opens only groups that contain it");
        let context = Arc::clone(rank.device.cuda_stream().context());
        let (stream, reads) = (context.new_stream().map_err(cuda)?, context.new_stream().map_err(cuda)?);
        stream.context().bind_to_thread().map_err(cuda)?;
        let unique_id = exchange_unique_id(&rank.watchdog, id, members)?;
        let communicator = Communicator::start(me, members.len(), unique_id).map_err(TransportError::Local)?;
        let (id, members, in_flight) = (id.to_owned(), members.to_vec(), VecDeque::new());
        let (rank, communicator) = (rank.clone(), Some(communicator));
        let worker = Self { id, group, members, me, rank, stream, reads, communicator, in_flight };
        worker.await_communicator(|| {
            Some(TransportError::Local("ncclCommInitRank has not finished within the timeout".to_owned()))
        })?;
        Ok(worker)
    }

    /// Runs jobs until the group is dropped and all enqueued calls have completed.
    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        // By default Linux ends a sleep up to 50 us late.
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

    /// Runs one call. Fails if the world has failed, and aborts the world if the call fails.
    pub(super) fn run_call<T>(
        &mut self,
        call: &CollectiveCall,
        body: impl FnOnce(&mut Self) -> Result<T, TransportError>,
    ) -> Result<T> {
        if let Some(failure) = self.rank.watchdog.failure() {
            return Err(failure.into());
        }
        self.rank.watchdog.begin(&self.id, call);
        let done = self.stream.context().bind_to_thread().map_err(cuda).and_then(|()| body(self));
        done.map_err(|error| self.fail(call, error).into())
    }

    /// Waits until all calls with earlier tickets have launched, in any group.
    pub(super) fn await_turn(&self, ticket: &Ticket) -> Result<(), TransportError> {
        while !ticket.await_turn(POLL_INTERVAL) {
            self.check()?;
        }
        Ok(())
    }

    /// Enqueues a call on the stream and returns the event of its completion. Keeps its tensors until then.
    pub(super) fn enqueue(
        &mut self,
        call: &CollectiveCall,
        ticket: Ticket,
        launch: Launch,
    ) -> Result<Arc<CudaEvent>, TransportError> {
        let Launch { ready, ops, tensors, expected } = launch;
        self.await_turn(&ticket)?;
        self.stream.wait(&ready).map_err(cuda)?;
        let stream = self.stream.cu_stream().cast();
        let communicator =
            self.communicator.as_ref().ok_or_else(|| TransportError::Local("NCCL was aborted".to_owned()))?;
        // SAFETY: the stream belongs to the communicator's device. The addresses are those of `tensors`, which stay in
        // `in_flight` until `done` completes.
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

    /// Waits for the event `done`.
    pub(super) fn await_done(&mut self, call: &CollectiveCall, done: &CudaEvent) -> Result<(), TransportError> {
        let began = Instant::now();
        while !done.try_is_complete().map_err(cuda)? {
            self.check()?;
            if began.elapsed() > self.rank.watchdog.timeout()
                && let Some(error) = self.diagnose_timeout(call)
                // The diagnosis takes a while, in which the call may have completed.
                && !done.try_is_complete().map_err(cuda)?
            {
                return Err(error);
            }
            thread::sleep(SHORT_POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns true if NCCL is ready. Fails if the world or NCCL has failed.
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

    /// Releases completed calls, and aborts the world if one has failed or timed out.
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

    /// Returns true if the oldest call in flight has completed.
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
            // The diagnosis takes a while, in which the call may have completed.
            && !first.done.is_complete()
        {
            return Err(error);
        }
        Ok(false)
    }

    /// Fails if a sender's description differs from the expected tensor.
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

    /// Aborts the world because of the error of `call`, and the running operations. Returns the world's first failure.
    fn fail(&mut self, call: &CollectiveCall, error: TransportError) -> RankFailure {
        let failure = error.fail_call(&*self.rank.watchdog, &self.members, call);
        self.abort();
        failure
    }

    /// Aborts the running operations. Leaks the tensors of an operation that does not end, because it may still write to them.
    fn abort(&mut self) {
        drop(self.communicator.take());
        let began = Instant::now();
        // NCCL may have enqueued work after the events of the calls. This event follows all of it.
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

    fn diagnose_timeout(&self, call: &CollectiveCall) -> Option<TransportError> {
        self.rank.watchdog.diagnose_timeout(&self.id, &self.members, call)
    }

    /// Closes the group. A failure aborts the world.
    fn close(mut self) {
        let (watchdog, communicator) = (Arc::clone(&self.rank.watchdog), self.communicator.take());
        let Some(communicator) = communicator.filter(|_| watchdog.failure().is_none()) else { return };
        let Err(what) = self.end(communicator) else { return };
        let (rank, group, members) = (watchdog.rank(), &self.group, &self.members);
        let message = format!("close group {group} of ranks {members:?}: {}: {what}", watchdog.who(rank));
        watchdog.fail(RankFailure { rank, cause: Cause::Reported, message });
    }

    /// Finalizes and destroys the communicator, after it has sent what other ranks still receive.
    fn end(&self, communicator: Communicator) -> Result<(), String> {
        self.stream.context().bind_to_thread().map_err(|error| format!("CUDA: {error}"))?;
        communicator.finalize()?;
        let (began, timeout) = (Instant::now(), self.rank.watchdog.timeout());
        while !communicator.is_ready()? {
            if self.rank.watchdog.failure().is_some() {
                return Ok(());
            }
            if began.elapsed() > timeout {
                return Err(format!("ncclCommFinalize has not finished within {timeout:?}"));
            }
            thread::sleep(POLL_INTERVAL);
        }
        communicator.destroy()
    }
}

/// Distributes the unique id of a new group through the store. The group's first rank creates it.
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
            let what = format!("{} has not published ncclUniqueId within {timeout:?}", watchdog.who(members[0]));
            return Err(TransportError::CallStalled(0, what));
        }
        Err(error) => return Err(lost(error)),
    }
    let bytes = store.get(&key).map_err(lost)?;
    let bytes = bytes.try_into().map_err(|_| TransportError::Local("read ncclUniqueId: wrong length".to_owned()))?;
    Ok(UniqueId(bytes))
}

pub(super) fn cuda(error: DriverError) -> TransportError {
    TransportError::Local(format!("CUDA: {error}"))
}
