//! Message in flight in MPI, with its buffer.

use std::ptr::NonNull;

use mpi::request::{Request, StaticScope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};

/// Message in flight. If it is dropped before it has completed, its buffer is leaked, because MPI may still use it.
pub(super) struct MpiMessage {
    /// `None` after completion.
    request: Option<Request<'static, [u8], StaticScope>>,
    /// Leaked box, restored after completion.
    bytes: NonNull<[u8]>,
}

impl MpiMessage {
    /// Starts a send.
    pub(super) fn send(over: &SimpleCommunicator, to: i32, tag: i32, bytes: Box<[u8]>) -> Self {
        let bytes = Box::leak(bytes);
        let start = NonNull::from(&mut *bytes);
        let request = over.process_at_rank(to).immediate_send_with_tag(StaticScope, &*bytes, tag);
        Self { request: Some(request), bytes: start }
    }

    /// Starts to receive as many bytes as `buffer` has.
    pub(super) fn receive(over: &SimpleCommunicator, from: i32, tag: i32, buffer: Box<[u8]>) -> Self {
        let bytes = Box::leak(buffer);
        let start = NonNull::from(&mut *bytes);
        let request = over.process_at_rank(from).immediate_receive_into_with_tag(StaticScope, bytes, tag);
        Self { request: Some(request), bytes: start }
    }

    /// Returns the bytes once, after completion.
    pub(super) fn arrived(&mut self) -> Option<Box<[u8]>> {
        match self.request.take()?.test() {
            // SAFETY: the bytes were leaked from a box. The request existed and is now complete, so MPI no longer uses them,
            // and the box is restored once.
            Ok(_) => Some(unsafe { Box::from_raw(self.bytes.as_ptr()) }),
            Err(request) => {
                self.request = Some(request);
                None
            }
        }
    }
}

impl Drop for MpiMessage {
    fn drop(&mut self) {
        // A request panics when it is dropped.
        if let Some(request) = self.request.take() {
            std::mem::forget(request);
        }
    }
}
