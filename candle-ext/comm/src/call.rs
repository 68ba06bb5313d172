//! One call to a process group, as it is recorded, named in messages and compared between ranks.

use std::fmt;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Tensor};
use tracing::field;
use tracing::span::EnteredSpan;

use crate::sync::lock;

/// Reduction of the ranks' tensors. f16 and bf16 are accumulated in f32 and rounded once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Sum in rank order; integers wrap.
    Sum,
    /// Maximum; NaN propagates.
    Max,
    /// Minimum; NaN propagates.
    Min,
}

/// Operation of a process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// [`all_reduce`](crate::Collective::all_reduce)
    AllReduce(Reduce),
    /// [`all_gather`](crate::Collective::all_gather)
    AllGather,
    /// [`reduce_scatter`](crate::Collective::reduce_scatter)
    ReduceScatter,
    /// [`all_to_all`](crate::Collective::all_to_all)
    AllToAll,
    /// [`broadcast`](crate::Collective::broadcast)
    Broadcast {
        /// Rank whose tensor all ranks receive.
        root: usize,
    },
    /// [`send_recv`](crate::Collective::send_recv)
    SendRecv {
        /// Destination rank.
        to: Option<usize>,
        /// Source rank.
        from: Option<usize>,
    },
    /// [`barrier`](crate::Collective::barrier)
    Barrier,
    /// [`split`](crate::Collective::split)
    Split,
}

impl Op {
    /// Returns the method's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast { .. } => "broadcast",
            Self::SendRecv { .. } => "send_recv",
            Self::Barrier => "barrier",
            Self::Split => "split",
        }
    }
}

/// Opens a profiler span for an operation; it ends when the guard is dropped.
///
/// `pass` is the part of the operation. The field `bytes` holds the number of bytes sent. Without a subscriber of the target
/// `profile` the span costs nothing.
pub(crate) fn span(group: &str, op: Op, pass: &str) -> EnteredSpan {
    let name = || format!("{group} {}", op.name());
    tracing::trace_span!(target: "profile", "span", name = name(), pass, bytes = field::Empty).entered()
}

/// One rank's call to one of its process groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveCall {
    /// Name of the group.
    pub group: Arc<str>,
    /// Sequence number of the call in its group, from 1. [`Op::SendRecv`] has a counter of its own.
    pub number: u64,
    /// Operation.
    pub op: Op,
    /// Dtype of this rank's tensor.
    pub dtype: Option<DType>,
    /// Shape of this rank's tensor.
    pub shape: Vec<usize>,
}

impl CollectiveCall {
    pub(crate) fn new(group: &Arc<str>, number: u64, op: Op, x: Option<&Tensor>) -> Self {
        let shape = x.map_or_else(Vec::new, |x| x.dims().to_vec());
        Self { group: Arc::clone(group), number, op, dtype: x.map(Tensor::dtype), shape }
    }
}

/// Formats a call: `all_reduce 12 (sum, f32 [3, 4])`.
impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.op.name(), self.number)?;
        let detail = match self.op {
            Op::AllReduce(op) => Some(format!("{op:?}").to_lowercase()),
            Op::Broadcast { root } => Some(format!("from rank {root}")),
            Op::SendRecv { to, from } => ends(to, from),
            _ => None,
        };
        let tensor = self.dtype.map(|dtype| tensor(dtype, &self.shape));
        let inside: Vec<String> = detail.into_iter().chain(tensor).collect();
        if inside.is_empty() { Ok(()) } else { write!(f, " ({})", inside.join(", ")) }
    }
}

/// Formats a dtype and a shape: `f32 [3, 4]`.
pub(crate) fn tensor(dtype: DType, shape: &[usize]) -> String {
    format!("{} {shape:?}", dtype.as_str())
}

fn ends(to: Option<usize>, from: Option<usize>) -> Option<String> {
    let to = to.map(|rank| format!("to rank {rank}"));
    let from = from.map(|rank| format!("from rank {rank}"));
    let ends: Vec<String> = to.into_iter().chain(from).collect();
    (!ends.is_empty()).then(|| ends.join(", "))
}

/// Trace of one rank's calls to all its groups, in call order.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallTrace(Option<Arc<Mutex<Vec<CollectiveCall>>>>);

impl CallTrace {
    /// Creates a trace that records calls if `record` is true.
    pub(crate) fn new(record: bool) -> Self {
        Self(record.then(Arc::default))
    }

    pub(crate) fn record(&self, call: &CollectiveCall) {
        if let Some(calls) = &self.0 {
            lock(calls).push(call.clone());
        }
    }

    pub(crate) fn calls(&self) -> Vec<CollectiveCall> {
        self.0.as_ref().map_or_else(Vec::new, |calls| lock(calls).clone())
    }
}
