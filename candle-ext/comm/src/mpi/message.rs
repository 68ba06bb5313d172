//! A message that MPI is sending or receiving, with the buffer for its bytes.

use std::ptr::NonNull;

use mpi::request::{Request, StaticScope};
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};

/// A message on its way. If it is dropped before it has arrived its bytes are never freed: MPI may still use them.
pub(super) struct MpiMessage {
    /// `None` once it has arrived.
    request: Option<Request<'static, [u8], StaticScope>>,
    /// Taken out of a box, and put back into one when the request is done.
    bytes: NonNull<[u8]>,
}

impl MpiMessage {
    /// Starts to send.
    pub(super) fn send(over: &SimpleCommunicator, to: i32, tag: i32, bytes: Box<[u8]>) -> Self {
        let bytes = Box::leak(bytes);
        let start = NonNull::from(&mut *bytes);
        let request = over.process_at_rank(to).immediate_send_with_tag(StaticScope, &*bytes, tag);
        Self { request: Some(request), bytes: start }
    }

    /// Starts to receive, as many bytes as there is buffer for.
    pub(super) fn receive(over: &SimpleCommunicator, from: i32, tag: i32, buffer: Box<[u8]>) -> Self {
        let bytes = Box::leak(buffer);
        let start = NonNull::from(&mut *bytes);
        let request = over.process_at_rank(from).immediate_receive_into_with_tag(StaticScope, bytes, tag);
        Self { request: Some(request), bytes: start }
    }

    /// Returns the bytes if they have arrived; once.
    pub(super) fn arrived(&mut self) -> Option<Box<[u8]>> {
        match self.request.take()?.test() {
            // SAFETY: they came out of a box, which is made again only here, where the request was there and is now done:
            // MPI does not use them any more.
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
        // The request itself panics when it is dropped.
        if let Some(request) = self.request.take() {
            std::mem::forget(request);
        }
    }
}
