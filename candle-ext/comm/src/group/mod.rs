//! Process group over any transport: checks the arguments and queues the call for the group's thread.

mod exchange;
mod header;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};

use crate::call::CallTrace;
use crate::fnv1a::fnv1a;
use crate::sync::lock;
use crate::thread_pool::ThreadPool;
use crate::transport::{Transport, TransportError};
use crate::{Collective, CollectiveCall, Op, Pending, Recv, Reduce, Result, Solo, arguments};
use exchange::Scratch;
use worker::{ByteCounter, GroupWorker};

/// Implementation of [`Collective`] over a transport.
///
/// After it is dropped, its thread finishes the started calls, because the other ranks need this rank's part.
pub(crate) struct TransportGroup {
    name: Arc<str>,
    rank: usize,
    size: usize,
    trace: CallTrace,
    queue: Mutex<Queue>,
    threads: Arc<ThreadPool>,
}

type Job = Box<dyn FnOnce(&mut GroupWorker) + Send>;

/// Queue of the group's thread. One lock assigns sequence numbers and orders the calls.
struct Queue {
    jobs: Sender<Job>,
    n_calls: u64,
    n_sends: u64,
}

impl TransportGroup {
    /// Connects all ranks of the world.
    pub(crate) fn world(
        transport: &Arc<dyn Transport>,
        size: usize,
        trace: &CallTrace,
        threads: &Arc<ThreadPool>,
    ) -> Result<Self> {
        let (rank, members) = (transport.rank(), (0..size).collect::<Vec<_>>());
        let connections =
            transport.open("world", &members).map_err(|error| error.fail_connect(&**transport, &members))?;
        let worker = GroupWorker {
            id: "world".to_owned(),
            group: "world".into(),
            me: rank,
            connections: ByteCounter::new(connections),
            transport: Arc::clone(transport),
            n_sent: vec![0; size],
            n_received: vec![0; size],
            scratch: Scratch::default(),
            members,
        };
        Self::new(worker, trace.clone(), Arc::clone(threads))
    }

    fn new(mut worker: GroupWorker, trace: CallTrace, threads: Arc<ThreadPool>) -> Result<Self> {
        let (name, rank, size) = (Arc::clone(&worker.group), worker.me, worker.members.len());
        let (sender, jobs) = channel::<Job>();
        let run = move || jobs.into_iter().for_each(|job| job(&mut worker));
        threads.spawn(format!("comm-{name}"), run).map_err(candle_core::Error::wrap)?;
        let queue = Mutex::new(Queue { jobs: sender, n_calls: 0, n_sends: 0 });
        Ok(Self { name, rank, size, trace, queue, threads })
    }

    fn start<T: Send + 'static>(
        &self,
        op: Op,
        x: Option<&Tensor>,
        body: impl FnOnce(&mut GroupWorker, &CollectiveCall) -> Result<T, TransportError> + Send + 'static,
    ) -> Result<Pending<T>> {
        let mut queue = lock(&self.queue);
        let count = if matches!(op, Op::SendRecv { .. }) { &mut queue.n_sends } else { &mut queue.n_calls };
        *count += 1;
        let call = CollectiveCall::new(&self.name, *count, op, x);
        self.trace.record(&call);
        let (sender, pending) = Pending::started(&call);
        let job: Job = Box::new(move |worker| {
            // A dropped Pending has no receiver. The world keeps the failure, if any.
            let _ = sender.send(worker.run(&call, |worker| body(worker, &call)));
        });
        queue.jobs.send(job).expect("the thread runs until the group is dropped");
        Ok(pending)
    }

    /// Starts an operation on one tensor.
    fn start_on(
        &self,
        op: Op,
        x: &Tensor,
        body: impl FnOnce(&mut GroupWorker, &CollectiveCall, &Tensor) -> Result<Tensor, TransportError> + Send + 'static,
    ) -> Result<Pending> {
        arguments::tensor(op.name(), x)?;
        // Release the autograd graph that led to x.
        let x = x.detach();
        self.start(op, Some(&x.clone()), move |worker, call| body(worker, call, &x))
    }
}

impl Collective for TransportGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn check_device(&self, device: &Device) -> Result<()> {
        arguments::device("check_device", device)
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
        self.start_on(Op::AllReduce(op), x, move |worker, call, x| worker.all_reduce(call, x, op))
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        arguments::rows("all_gather", x)?;
        self.start_on(Op::AllGather, x, GroupWorker::all_gather)
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        arguments::shard_rows(x, self.size)?;
        self.start_on(Op::ReduceScatter, x, GroupWorker::reduce_scatter)
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        arguments::counts(x, send, recv, self.size)?;
        let (send, recv) = (send.to_vec(), recv.to_vec());
        self.start_on(Op::AllToAll, x, move |worker, call, x| worker.all_to_all(call, x, &send, &recv))
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        arguments::peer("broadcast", root, self.size)?;
        self.start_on(Op::Broadcast { root }, x, move |worker, call, x| worker.broadcast(call, x, root))
    }

    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        arguments::pair(x, to, recv.as_ref(), self.rank, self.size)?;
        if let Some(x) = x {
            arguments::tensor("send_recv", x)?;
        }
        let (outgoing, from) = (x.map(Tensor::detach).zip(to), recv.as_ref().map(|recv| recv.from));
        self.start(Op::SendRecv { to, from }, x, move |worker, call| {
            worker.send_recv(call, outgoing.as_ref().map(|(x, to)| (x, *to)), recv.as_ref())
        })
    }

    fn barrier(&self) -> Result<()> {
        self.start(Op::Barrier, None, |worker, call| worker.check_call(call, 0))?.wait()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        let index = arguments::list_of(lists, self.rank, self.size)?;
        let list = lists[index].clone();
        let (digest, name, rank) = (digest(lists), Arc::from(name), self.rank);
        let made = self.start(Op::Split, None, move |worker, call| {
            worker.check_call(call, digest)?;
            connect_subgroup(worker, format!("{}/{}.{index}", worker.id, call.number), name, &list, rank)
        })?;
        match made.wait()? {
            Some(worker) => Ok(Arc::new(Self::new(worker, self.trace.clone(), Arc::clone(&self.threads))?)),
            None => Ok(Arc::new(Solo)),
        }
    }
}

/// Connects the ranks in `list`. Returns `None` for a list of one rank, which needs no connections.
fn connect_subgroup(
    of: &GroupWorker,
    id: String,
    name: Arc<str>,
    list: &[usize],
    rank: usize,
) -> Result<Option<GroupWorker>, TransportError> {
    if list.len() == 1 {
        return Ok(None);
    }
    let members: Vec<usize> = list.iter().map(|rank| of.members[*rank]).collect();
    let connections = of.transport.open(&id, &members).map_err(|error| error.map_ranks(|rank| list[rank]))?;
    let me = list.iter().position(|other| *other == rank).expect("the list contains this rank");
    let n = members.len();
    let transport = Arc::clone(&of.transport);
    let (n_sent, n_received, scratch) = (vec![0; n], vec![0; n], Scratch::default());
    Ok(Some(GroupWorker {
        id,
        group: name,
        members,
        me,
        connections: ByteCounter::new(connections),
        transport,
        n_sent,
        n_received,
        scratch,
    }))
}

/// Returns a digest of the lists of a split, equal in every build.
pub(crate) fn digest(lists: &[Vec<usize>]) -> u64 {
    let numbers = lists.iter().flat_map(|list| [list.len()].into_iter().chain(list.iter().copied()));
    fnv1a(numbers.map(|number| number as u64))
}
