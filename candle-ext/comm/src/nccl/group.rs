//! Process group over NCCL: prepares tensors on the device and queues the call for the group's thread.
//!
//! CUDA events order two streams. The group's stream waits for the inputs, and the compute stream waits for the group's stream
//! in [`Pending::wait`].

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use candle_core::cuda_backend::cudarc::driver::CudaEvent;
use candle_core::{CudaDevice, DType, Device, Tensor};

use super::api::number_of;
use super::communicator::NcclOp;
use super::description::{self, Descriptions};
use super::launch_order::{LaunchOrder, Ticket};
use super::memory::{address, empty};
use super::worker::{ExpectedTensor, Job, Launch, NcclWorker};
use crate::arguments;
use crate::call::CallTrace;
use crate::group::digest;
use crate::staged::to_host;
use crate::sync::lock;
use crate::thread_pool::ThreadPool;
use crate::transport::{FailureChannel, TransportError};
use crate::watchdog::Watchdog;
use crate::{Collective, CollectiveCall, Error, Op, Pending, Recv, Reduce, Result, Solo};

/// Implementation of [`Collective`] over an NCCL communicator.
pub(super) struct NcclGroup {
    name: Arc<str>,
    rank: usize,
    size: usize,
    device: CudaDevice,
    watchdog: Arc<Watchdog>,
    trace: CallTrace,
    queue: Mutex<Queue>,
    descriptions: Mutex<Descriptions>,
    /// Launch order, shared by the groups of the device.
    order: Arc<LaunchOrder>,
    threads: Arc<ThreadPool>,
}

/// Queue of the group's thread. One lock assigns sequence numbers and orders the calls.
struct Queue {
    jobs: Sender<Job>,
    n_calls: u64,
    n_sends: u64,
}

/// Result that is on the device after the event `done`.
struct PendingOutput {
    tensors: Vec<Tensor>,
    done: Arc<CudaEvent>,
}

/// NCCL operations of one call, with their inputs and outputs.
struct NcclCall {
    ops: Vec<NcclOp>,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

impl NcclGroup {
    pub(super) fn new(worker: NcclWorker, device: &Device, trace: CallTrace, threads: Arc<ThreadPool>) -> Result<Self> {
        let Device::Cuda(device) = device else { unreachable!("the world was joined with a GPU") };
        let (name, rank, size) = (Arc::clone(&worker.group), worker.me, worker.members.len());
        let (watchdog, order) = (Arc::clone(&worker.rank.watchdog), Arc::clone(&worker.rank.order));
        let (jobs, received) = channel();
        threads.spawn(format!("comm-{name}"), move || worker.run(&received)).map_err(candle_core::Error::wrap)?;
        let queue = Mutex::new(Queue { jobs, n_calls: 0, n_sends: 0 });
        let (device, descriptions) = (device.clone(), Mutex::default());
        Ok(Self { name, rank, size, device, watchdog, trace, queue, descriptions, order, threads })
    }

    fn start<T: Send + 'static>(
        &self,
        op: Op,
        x: Option<&Tensor>,
        body: impl FnOnce(&mut NcclWorker, &CollectiveCall, Ticket) -> Result<T, TransportError> + Send + 'static,
    ) -> Result<Pending<T>> {
        // The lock keeps the tickets in the order of the group's calls.
        let mut queue = lock(&self.queue);
        let count = if matches!(op, Op::SendRecv { .. }) { &mut queue.n_sends } else { &mut queue.n_calls };
        *count += 1;
        let call = CollectiveCall::new(&self.name, *count, op, x);
        self.trace.record(&call);
        let ticket = self.order.ticket();
        let (sender, pending) = Pending::started(&call);
        let job: Job = Box::new(move |worker| {
            // A dropped Pending has no receiver. The world keeps the failure, if any.
            let _ = sender.send(worker.run_call(&call, |worker| body(worker, &call, ticket)));
        });
        queue.jobs.send(job).expect("the thread runs until the group is dropped");
        Ok(pending)
    }

    /// Starts a call. `finish` computes its result from the outputs in [`Pending::wait`].
    fn start_call(
        &self,
        op: Op,
        x: &Tensor,
        plan: NcclCall,
        finish: impl FnOnce(Vec<Tensor>) -> candle_core::Result<Tensor> + Send + 'static,
    ) -> Result<Pending> {
        let ready = self.ready()?;
        let NcclCall { ops, inputs, outputs } = plan;
        let output = self.start(op, Some(x), move |worker, call, ticket| {
            let tensors = inputs.into_iter().chain(outputs.iter().cloned()).collect();
            let done = worker.enqueue(call, ticket, Launch { ready, ops, tensors, expected: None })?;
            Ok(PendingOutput { tensors: outputs, done })
        })?;
        let (device, watchdog, to) = (self.device.clone(), Arc::clone(&self.watchdog), x.device().clone());
        Ok(output.then(move |output| finish_output(&device, &watchdog, output, &to, finish)))
    }

    /// Records an event after all work that is queued on the compute stream.
    fn ready(&self) -> Result<CudaEvent> {
        Ok(self.device.cuda_stream().record_event(None).map_err(candle_core::Error::wrap)?)
    }

    /// Copies `x` to the device and makes it contiguous.
    fn to_device(&self, op: &'static str, x: &Tensor) -> Result<Tensor> {
        self.check_same_gpu(op, x.device())?;
        arguments::dtype_and_rank(op, x.dtype(), x.dims())?;
        if x.elem_count() == 0 {
            return self.empty(x.dtype(), x.dims());
        }
        Ok(x.detach().to_device(&Device::Cuda(self.device.clone()))?.contiguous()?)
    }

    fn check_same_gpu(&self, op: &'static str, device: &Device) -> Result<()> {
        match device {
            Device::Cpu => Ok(()),
            Device::Cuda(other) if other.id() == self.device.id() => Ok(()),
            other => {
                let why = format!(
                    "the tensor is on {:?}, and this group sends tensors of one GPU and of the CPU",
                    other.location()
                );
                Err(Error::Call { op, why })
            }
        }
    }

    fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        Ok(empty(&self.device, dtype, shape)?)
    }

    /// Returns the ops that send `x` with its description, and the tensors that they read.
    fn sends(&self, x: Tensor, to: usize) -> Result<(Vec<NcclOp>, Vec<Tensor>)> {
        let description = lock(&self.descriptions).of(&x)?;
        let mut ops = vec![send(&description, to)?];
        ops.extend((x.elem_count() > 0).then(|| send(&x, to)).transpose()?);
        Ok((ops, vec![description, x]))
    }

    /// Adds the ops that receive a tensor and its description. Returns the tensor's buffer.
    fn receives(
        &self,
        recv: Recv,
        ops: &mut Vec<NcclOp>,
        tensors: &mut Vec<Tensor>,
    ) -> Result<(Tensor, ExpectedTensor)> {
        let description = description::empty(&Device::Cuda(self.device.clone()))?;
        let y = self.empty(recv.dtype, &recv.shape)?;
        ops.push(receive(&description, recv.from)?);
        ops.extend((y.elem_count() > 0).then(|| receive(&y, recv.from)).transpose()?);
        tensors.extend([description.clone(), y.clone()]);
        Ok((y, ExpectedTensor { recv, description }))
    }

    /// Starts a maximum or minimum that propagates NaN, which NCCL's comparisons ignore.
    fn start_compare(&self, x: &Tensor, own: Tensor, op: Reduce) -> Result<Pending> {
        let is_nan = if own.elem_count() > 0 { own.ne(&own)? } else { self.empty(DType::U8, own.dims())? };
        let outputs = vec![self.empty(own.dtype(), own.dims())?, self.empty(DType::U8, own.dims())?];
        let inputs = vec![own, is_nan];
        let pairs = inputs.iter().zip(&outputs).zip([op, Reduce::Max]);
        let ops = pairs.map(|((from, to), op)| reduce(from, to, op)).collect::<Result<_>>()?;
        self.start_call(Op::AllReduce(op), x, NcclCall { ops, inputs, outputs }, |outputs| {
            let [y, is_nan] = &outputs[..] else { unreachable!("the call has two outputs") };
            is_nan.where_cond(&y.affine(0.0, f64::NAN)?, y)
        })
    }
}

impl NcclGroup {
    /// Starts an all-reduce of `own`, which is `x` on the device, in the dtype to send. The result has the dtype of `x`.
    fn start_reduce(&self, x: &Tensor, own: Tensor, op: Reduce) -> Result<Pending> {
        let (dtype, out) = (x.dtype(), self.empty(own.dtype(), own.dims())?);
        let plan = NcclCall { ops: vec![reduce(&own, &out, op)?], inputs: vec![own], outputs: vec![out] };
        self.start_call(Op::AllReduce(op), x, plan, move |outputs| outputs[0].to_dtype(dtype))
    }

    /// Starts a reduce-scatter of `own`, as [`Self::start_reduce`].
    fn start_scattered_sum(&self, x: &Tensor, own: Tensor) -> Result<Pending> {
        let n_rows = arguments::shard_rows(x, self.size)?;
        let (dtype, out) = (x.dtype(), self.empty(own.dtype(), &[&[n_rows], &own.dims()[1..]].concat())?);
        let (from, to, n) = (address(&own)?, address(&out)?, out.elem_count());
        let ops = vec![NcclOp::ReduceScatter { from, to, n, dtype: number(&own) }];
        let plan = NcclCall { ops, inputs: vec![own], outputs: vec![out] };
        self.start_call(Op::ReduceScatter, x, plan, move |outputs| outputs[0].to_dtype(dtype))
    }
}

impl Collective for NcclGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn check_device(&self, device: &Device) -> Result<()> {
        self.check_same_gpu("check_device", device)
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
        let own = self.to_device("all_reduce", x)?;
        if op != Reduce::Sum && own.dtype().is_float() {
            return self.start_compare(x, own, op);
        }
        let wide = widened(&own, op)?;
        self.start_reduce(x, wide, op)
    }

    fn start_all_reduce_in_dtype(&self, x: &Tensor) -> Result<Pending> {
        self.start_reduce(x, self.to_device("all_reduce", x)?, Reduce::Sum)
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        let n_rows = arguments::rows("all_gather", x)?;
        let own = self.to_device("all_gather", x)?;
        let out = self.empty(own.dtype(), &[&[n_rows * self.size], &own.dims()[1..]].concat())?;
        let (from, to, n, dtype) = (address(&own)?, address(&out)?, own.elem_count(), number(&own));
        let ops = vec![NcclOp::AllGather { from, to, n, dtype }];
        self.start_call(Op::AllGather, x, NcclCall { ops, inputs: vec![own], outputs: vec![out] }, first)
    }

    fn all_gather_in_place(&self, whole: &Tensor) -> Result<bool> {
        let is_here = matches!(whole.device(), Device::Cuda(device) if device.id() == self.device.id());
        let n_rows = arguments::rows("all_gather", whole)?;
        if !is_here || !whole.is_contiguous() || !n_rows.is_multiple_of(self.size) || whole.elem_count() == 0 {
            return Ok(false);
        }
        arguments::dtype_and_rank("all_gather", whole.dtype(), whole.dims())?;
        let n_own = n_rows / self.size;
        let (whole, own) = (whole.detach(), whole.detach().narrow(0, self.rank * n_own, n_own)?);
        let (from, to, n, dtype) = (address(&own)?, address(&whole)?, own.elem_count(), number(&own));
        let ops = vec![NcclOp::AllGather { from, to, n, dtype }];
        let plan = NcclCall { ops, inputs: vec![own.clone()], outputs: vec![whole] };
        self.start_call(Op::AllGather, &own, plan, first)?.wait()?;
        Ok(true)
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        let wide = widened(&self.to_device("reduce_scatter", x)?, Reduce::Sum)?;
        self.start_scattered_sum(x, wide)
    }

    fn start_reduce_scatter_in_dtype(&self, x: &Tensor) -> Result<Pending> {
        self.start_scattered_sum(x, self.to_device("reduce_scatter", x)?)
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        arguments::counts(x, send, recv, self.size)?;
        let own = self.to_device("all_to_all", x)?;
        let out = self.empty(own.dtype(), &[&[recv.iter().sum()], &own.dims()[1..]].concat())?;
        let row = own.dims()[1..].iter().product::<usize>();
        let (row_bytes, dtype) = (row * own.dtype().size_in_bytes(), number(&own));
        let (mut from, mut to, mut ops) = (address(&own)?, address(&out)?, Vec::new());
        for peer in 0..self.size {
            let [n_sent, n_received] = [send[peer], recv[peer]];
            ops.push(NcclOp::Send { from, n: n_sent * row, dtype, peer });
            ops.push(NcclOp::Receive { to, n: n_received * row, dtype, peer });
            (from, to) = (from.after(n_sent * row_bytes), to.after(n_received * row_bytes));
        }
        ops.retain(|op| !matches!(op, NcclOp::Send { n: 0, .. } | NcclOp::Receive { n: 0, .. }));
        self.start_call(Op::AllToAll, x, NcclCall { ops, inputs: vec![own], outputs: vec![out] }, first)
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        arguments::peer("broadcast", root, self.size)?;
        let own = self.to_device("broadcast", x)?;
        let out = self.empty(own.dtype(), own.dims())?;
        let (from, to, n, dtype) = (address(&own)?, address(&out)?, own.elem_count(), number(&own));
        let ops = vec![NcclOp::Broadcast { from, to, n, dtype, root }];
        self.start_call(Op::Broadcast { root }, x, NcclCall { ops, inputs: vec![own], outputs: vec![out] }, first)
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        arguments::pair(x, to, recv.as_ref(), self.rank, self.size)?;
        let op = Op::SendRecv { to, from: recv.as_ref().map(|recv| recv.from) };
        let own = x.map(|x| self.to_device("send_recv", x)).transpose()?;
        let (mut ops, mut tensors) = own.zip(to).map_or(Ok(Default::default()), |(x, to)| self.sends(x, to))?;
        let (y, expected) = recv.map(|recv| self.receives(recv, &mut ops, &mut tensors)).transpose()?.unzip();
        // The exchange does not wait for work that is queued after this call.
        let ready = self.ready()?;
        let received = self.start(op, x, move |worker, call, ticket| {
            let done = worker.enqueue(call, ticket, Launch { ready, ops, tensors, expected })?;
            Ok(y.map(|y| PendingOutput { tensors: vec![y], done }))
        })?;
        let (device, watchdog) = (self.device.clone(), Arc::clone(&self.watchdog));
        let to = x.map_or_else(|| Device::Cuda(self.device.clone()), |x| x.device().clone());
        Ok(received
            .then(move |output| output.map(|output| finish_output(&device, &watchdog, output, &to, first)).transpose()))
    }

    fn barrier(&self) -> Result<()> {
        let one = Tensor::zeros(1, DType::U8, &Device::Cuda(self.device.clone()))?;
        let out = self.empty(DType::U8, &[1])?;
        let (ops, ready) = (vec![reduce(&one, &out, Reduce::Sum)?], self.ready()?);
        let done = self.start(Op::Barrier, None, move |worker, call, ticket| {
            let tensors = vec![one, out];
            let done = worker.enqueue(call, ticket, Launch { ready, ops, tensors, expected: None })?;
            worker.await_done(call, &done)
        });
        done?.wait()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        let index = arguments::list_of(lists, self.rank, self.size)?;
        let (list, digest, name) = (lists[index].clone(), digest(lists), Arc::from(name));
        let made = self.start(Op::Split, None, move |worker, call, ticket| {
            let id = format!("{}/{}", worker.id, call.number);
            check_lists(worker, call, &id, digest)?;
            // Connecting follows the launch order too: NCCL waits for the other ranks, and may wait for the device.
            worker.await_turn(&ticket)?;
            connect_subgroup(worker, &format!("{id}.{index}"), name, &list)
        })?;
        match made.wait()? {
            Some(worker) => {
                let device = Device::Cuda(self.device.clone());
                Ok(Arc::new(Self::new(worker, &device, self.trace.clone(), Arc::clone(&self.threads))?))
            }
            None => Ok(Arc::new(Solo)),
        }
    }
}

/// Connects the ranks in `list`. Returns `None` for a list of one rank, which needs no communicator.
fn connect_subgroup(
    of: &NcclWorker,
    id: &str,
    name: Arc<str>,
    list: &[usize],
) -> Result<Option<NcclWorker>, TransportError> {
    if list.len() == 1 {
        return Ok(None);
    }
    let members: Vec<usize> = list.iter().map(|rank| of.members[*rank]).collect();
    let opened = NcclWorker::open(&of.rank, id, Arc::clone(&name), &members);
    let connecting = |what| format!("connect group {name} of ranks {members:?}: {what}");
    opened.map(Some).map_err(|error| match error.map_ranks(|rank| list[rank]) {
        TransportError::Local(what) => TransportError::Local(connecting(what)),
        TransportError::CallStalled(rank, what) => TransportError::CallStalled(rank, connecting(what)),
        other => other,
    })
}

/// Fails if this rank's lists differ from those of another rank.
fn check_lists(worker: &NcclWorker, call: &CollectiveCall, id: &str, digest: u64) -> Result<(), TransportError> {
    let own = digest.to_le_bytes();
    let store = worker.rank.watchdog.store()?;
    let first = store.compare_set(&format!("split/{id}"), &[], &own);
    match first.map_err(|error| TransportError::Local(error.to_string()))? == own {
        true => Ok(()),
        false => {
            let who = worker.rank.watchdog.who(worker.members[worker.me]);
            Err(TransportError::Mismatch(
                worker.me,
                format!("{who} calls {call} with different lists than another rank"),
            ))
        }
    }
}

/// Makes the compute stream wait for the outputs, and computes the result on the device `to`.
fn finish_output(
    device: &CudaDevice,
    watchdog: &Watchdog,
    output: PendingOutput,
    to: &Device,
    finish: impl FnOnce(Vec<Tensor>) -> candle_core::Result<Tensor>,
) -> Result<Tensor> {
    let PendingOutput { tensors, done } = output;
    device.cuda_stream().wait(&done).map_err(candle_core::Error::wrap)?;
    let is_empty = tensors[0].elem_count() == 0;
    let y = if is_empty { tensors[0].clone() } else { finish(tensors)? };
    let y = match to {
        _ if is_empty && to.is_cpu() => Tensor::zeros(y.dims(), y.dtype(), to)?,
        Device::Cpu => to_host(&y)?,
        _ => y.to_device(to)?,
    };
    // An aborted operation has written no result.
    watchdog.failure().map_or(Ok(y), |failure| Err(failure.into()))
}

fn first(mut tensors: Vec<Tensor>) -> candle_core::Result<Tensor> {
    Ok(tensors.swap_remove(0))
}

/// Converts bf16 and f16 to f32 for a sum.
fn widened(x: &Tensor, op: Reduce) -> Result<Tensor> {
    let is_narrow = matches!(x.dtype(), DType::BF16 | DType::F16) && op == Reduce::Sum && x.elem_count() > 0;
    if is_narrow { Ok(x.to_dtype(DType::F32)?) } else { Ok(x.clone()) }
}

fn reduce(from: &Tensor, to: &Tensor, op: Reduce) -> Result<NcclOp> {
    let (n, dtype) = (from.elem_count(), number(from));
    Ok(NcclOp::AllReduce { from: address(from)?, to: address(to)?, n, dtype, op })
}

fn send(x: &Tensor, peer: usize) -> Result<NcclOp> {
    Ok(NcclOp::Send { from: address(x)?, n: x.elem_count(), dtype: number(x), peer })
}

fn receive(y: &Tensor, peer: usize) -> Result<NcclOp> {
    Ok(NcclOp::Receive { to: address(y)?, n: y.elem_count(), dtype: number(y), peer })
}

fn number(x: &Tensor) -> i32 {
    number_of(x.dtype()).expect("unsupported dtypes were rejected")
}
