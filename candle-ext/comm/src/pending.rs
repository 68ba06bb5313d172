//! Result of an asynchronous operation.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use candle_core::Tensor;

use crate::call::span;
use crate::{CollectiveCall, Op, Result};

/// Handle of an asynchronous operation, like torch's `Work`.
///
/// Dropping it does not cancel the operation, because the other ranks wait for this rank's part. The group's next call returns
/// its failure, if any.
#[must_use = "call `wait` to get the result"]
#[derive(Debug)]
pub struct Pending<T = Tensor>(PendingState<T>);

enum PendingState<T> {
    Ready(T),
    Started(Receiver<Result<T>>, Arc<str>, Op),
    Unfinished(Box<dyn FnOnce() -> Result<T> + Send>),
}

impl<T> Pending<T> {
    /// Blocks until the operation has finished and returns its result.
    pub fn wait(self) -> Result<T> {
        match self.0 {
            PendingState::Ready(value) => Ok(value),
            PendingState::Started(receiver, group, op) => {
                let _span = span(&group, op, "wait");
                receiver.recv().expect("a group's thread answers every call")
            }
            PendingState::Unfinished(rest) => rest(),
        }
    }

    /// Creates a finished operation with this result.
    pub(crate) fn ready(value: T) -> Self {
        Self(PendingState::Ready(value))
    }

    /// Creates the handle of a call, and the sender of its result.
    pub(crate) fn started(call: &CollectiveCall) -> (SyncSender<Result<T>>, Self) {
        let (sender, receiver) = sync_channel(1);
        (sender, Self(PendingState::Started(receiver, Arc::clone(&call.group), call.op)))
    }

    /// Chains `rest`, which runs on the result in the thread that calls [`wait`](Self::wait).
    pub fn then<U>(self, rest: impl FnOnce(T) -> Result<U> + Send + 'static) -> Pending<U>
    where
        T: Send + 'static,
    {
        Pending(PendingState::Unfinished(Box::new(move || rest(self.wait()?))))
    }
}

impl<T> fmt::Debug for PendingState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready(_) => "Ready",
            Self::Started(..) => "Started",
            Self::Unfinished(_) => "Unfinished",
        })
    }
}
