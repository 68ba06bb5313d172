//! Fault injection into collectives: one operation of one group returns a result from this rank's input alone.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use candlewick_comm::{Collective, CollectiveCall, Pending, Recv, Reduce, Result, Solo};

/// Group over which losses and counts are summed. It has no faults: a fault must show in gradients or weights.
const LOSS_GROUP: &str = "pp-dp_replicate-dp_shard-cp-sp";

/// A collective: a group and an operation, by name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupOp {
    pub(crate) group: String,
    pub(crate) op: &'static str,
}

impl GroupOp {
    /// Returns the collectives of these calls that faults can be injected into.
    pub(crate) fn used_in(calls: &[CollectiveCall]) -> BTreeSet<Self> {
        const OPS: [&str; 5] = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv"];
        let ops = calls.iter().map(|call| Self { group: call.group.to_string(), op: call.op.name() });
        ops.filter(|it| OPS.contains(&it.op) && it.group != LOSS_GROUP).collect()
    }
}

impl fmt::Display for GroupOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.group, self.op)
    }
}

/// A group with a fault in one collective of it or of the groups split from it.
pub(crate) struct FaultyGroup {
    pub(crate) group: Arc<dyn Collective>,
    pub(crate) name: String,
    pub(crate) fault: Option<GroupOp>,
}

impl FaultyGroup {
    fn is_faulty(&self, op: &str) -> bool {
        self.fault.as_ref().is_some_and(|fault| fault.op == op && fault.group == self.name)
    }

    /// Returns a result without communication.
    fn local_result(x: &Tensor) -> Result<Pending> {
        Solo.start_all_reduce(x, Reduce::Sum)
    }
}

impl Collective for FaultyGroup {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn check_device(&self, device: &Device) -> Result<()> {
        self.group.check_device(device)
    }

    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending> {
        if self.is_faulty("all_reduce") { Self::local_result(x) } else { self.group.start_all_reduce(x, op) }
    }

    fn start_all_gather(&self, x: &Tensor) -> Result<Pending> {
        match self.is_faulty("all_gather") {
            true => Self::local_result(&Tensor::cat(&vec![x; self.size()], 0)?),
            false => self.group.start_all_gather(x),
        }
    }

    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending> {
        if !self.is_faulty("reduce_scatter") {
            return self.group.start_reduce_scatter(x);
        }
        let share = x.dim(0)? / self.size();
        Self::local_result(&x.narrow(0, self.rank() * share, share)?)
    }

    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending> {
        if self.is_faulty("all_to_all") { Self::local_result(x) } else { self.group.start_all_to_all(x, send, recv) }
    }

    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending> {
        self.group.start_broadcast(x, root)
    }

    /// Sends zeros if faulty.
    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>> {
        match x.filter(|_| self.is_faulty("send_recv")) {
            Some(x) => self.group.start_send_recv(Some(&x.zeros_like()?), to, recv),
            None => self.group.start_send_recv(x, to, recv),
        }
    }

    fn barrier(&self) -> Result<()> {
        self.group.barrier()
    }

    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>> {
        let group = self.group.split(name, lists)?;
        Ok(Arc::new(Self { group, name: name.to_owned(), fault: self.fault.clone() }))
    }
}
