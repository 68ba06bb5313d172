//! The result of an operation that is still under way.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use candle_core::Tensor;

use crate::call::span;
use crate::{Call, Op, Result};

/// An operation that was started. Dropping it lets the operation go on: the other ranks wait for this one's part, and a
/// failure of it is met by the group's next call.
#[must_use = "the result is had by waiting"]
#[derive(Debug)]
pub struct Pending<T = Tensor>(PendingState<T>);

enum PendingState<T> {
    Ready(T),
    Started(Receiver<Result<T>>, Arc<str>, Op),
    Unfinished(Box<dyn FnOnce() -> Result<T> + Send>),
}

impl<T> Pending<T> {
    /// Waits until the operation is finished and returns its result.
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

    /// Makes one whose result is known.
    pub(crate) fn ready(value: T) -> Self {
        Self(PendingState::Ready(value))
    }

    /// Makes one of a call and the end to which its result is sent.
    pub(crate) fn started(call: &Call) -> (SyncSender<Result<T>>, Self) {
        let (sender, receiver) = sync_channel(1);
        (sender, Self(PendingState::Started(receiver, Arc::clone(&call.group), call.op)))
    }

    /// Does `rest` with the result, on the thread that waits for it; not at all if nobody does.
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
