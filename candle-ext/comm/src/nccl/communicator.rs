//! Nonblocking NCCL communicator.

use std::ffi::c_int;
use std::ptr::null_mut;

use super::api::{CommHandle, IN_PROGRESS, Nccl, NcclConfig, SUCCESS, StreamHandle, UniqueId, nccl};
use super::memory::DevicePointer;
use crate::Reduce;

/// NCCL operation. `n` counts elements of the `ncclDataType_t` `dtype`.
#[derive(Clone, Copy, Debug)]
pub(super) enum NcclOp {
    AllReduce { from: DevicePointer, to: DevicePointer, n: usize, dtype: c_int, op: Reduce },
    AllGather { from: DevicePointer, to: DevicePointer, n: usize, dtype: c_int },
    ReduceScatter { from: DevicePointer, to: DevicePointer, n: usize, dtype: c_int },
    Broadcast { from: DevicePointer, to: DevicePointer, n: usize, dtype: c_int, root: usize },
    Send { from: DevicePointer, n: usize, dtype: c_int, peer: usize },
    Receive { to: DevicePointer, n: usize, dtype: c_int, peer: usize },
}

/// NCCL communicator. Dropping it aborts it, unless it was destroyed.
pub(super) struct Communicator {
    nccl: &'static Nccl,
    handle: CommHandle,
}

// SAFETY: an NCCL communicator may be used from any thread, one at a time, and this one has a single owner.
unsafe impl Send for Communicator {}

/// Returns the unique id of a new communicator. One of its ranks calls this.
pub(super) fn unique_id() -> Result<UniqueId, String> {
    let nccl = nccl()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: the function writes one id.
    match unsafe { (nccl.get_unique_id)(&raw mut id) } {
        SUCCESS => Ok(id),
        error => Err(nccl.explain(error, null_mut())),
    }
}

impl Communicator {
    /// Starts to initialize rank `rank` of `size` on the current device. Poll [`is_ready`](Self::is_ready).
    pub(super) fn start(rank: usize, size: usize, id: UniqueId) -> Result<Self, String> {
        let nccl = nccl()?;
        let (mut handle, mut config) = (null_mut(), NcclConfig::non_blocking());
        // SAFETY: handle and config outlive the call.
        let result =
            unsafe { (nccl.comm_init_rank_config)(&raw mut handle, size as c_int, id, rank as c_int, &raw mut config) };
        match result {
            SUCCESS | IN_PROGRESS => Ok(Self { nccl, handle }),
            error => Err(nccl.explain(error, handle)),
        }
    }

    /// Returns true if the last call has completed. The next call is allowed only then.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        let mut state = SUCCESS;
        // SAFETY: the handle is valid, and the function writes one int.
        let result = unsafe { (self.nccl.comm_get_async_error)(self.handle, &raw mut state) };
        match (result, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, error) | (error, _) => Err(self.nccl.explain(error, self.handle)),
        }
    }

    /// Enqueues `ops` on `stream` as one NCCL group.
    ///
    /// # Safety
    ///
    /// The stream belongs to the communicator's device. The addresses are valid for the elements until the operations have
    /// completed on the stream.
    pub(super) unsafe fn enqueue(&self, stream: StreamHandle, ops: &[NcclOp]) -> Result<(), String> {
        // SAFETY: ncclGroupStart has no preconditions.
        self.check(unsafe { (self.nccl.group_start)() })?;
        // SAFETY: the caller keeps the contract of `enqueue`.
        let enqueued = ops.iter().try_for_each(|op| self.check(unsafe { self.enqueue_one(stream, op) }));
        // SAFETY: a group was started above, and is ended also after an error.
        let ended = self.check(unsafe { (self.nccl.group_end)() });
        enqueued.and(ended)
    }

    /// # Safety
    ///
    /// See [`enqueue`](Self::enqueue).
    unsafe fn enqueue_one(&self, stream: StreamHandle, op: &NcclOp) -> c_int {
        let Self { nccl, handle } = *self;
        // SAFETY: the handle is valid; the caller keeps the contract of `enqueue`.
        unsafe {
            match *op {
                NcclOp::AllReduce { from, to, n, dtype, op } => {
                    (nccl.all_reduce)(from.read(), to.write(), n, dtype, number_of(op), handle, stream)
                }
                NcclOp::AllGather { from, to, n, dtype } => {
                    (nccl.all_gather)(from.read(), to.write(), n, dtype, handle, stream)
                }
                NcclOp::ReduceScatter { from, to, n, dtype } => {
                    (nccl.reduce_scatter)(from.read(), to.write(), n, dtype, number_of(Reduce::Sum), handle, stream)
                }
                NcclOp::Broadcast { from, to, n, dtype, root } => {
                    (nccl.broadcast)(from.read(), to.write(), n, dtype, root as c_int, handle, stream)
                }
                NcclOp::Send { from, n, dtype, peer } => {
                    (nccl.send)(from.read(), n, dtype, peer as c_int, handle, stream)
                }
                NcclOp::Receive { to, n, dtype, peer } => {
                    (nccl.receive)(to.write(), n, dtype, peer as c_int, handle, stream)
                }
            }
        }
    }

    /// Starts to finalize the communicator after all enqueued operations have completed.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: the handle is valid.
        self.check(unsafe { (self.nccl.comm_finalize)(self.handle) })
    }

    /// Destroys the communicator after [`finalize`](Self::finalize).
    pub(super) fn destroy(self) -> Result<(), String> {
        let Self { nccl, handle } = self;
        std::mem::forget(self);
        // SAFETY: the handle is valid and not used again.
        match unsafe { (nccl.comm_destroy)(handle) } {
            SUCCESS | IN_PROGRESS => Ok(()),
            error => Err(nccl.explain(error, null_mut())),
        }
    }

    fn check(&self, result: c_int) -> Result<(), String> {
        match result {
            SUCCESS | IN_PROGRESS => Ok(()),
            error => Err(self.nccl.explain(error, self.handle)),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the handle is valid and not used again. Running operations are aborted.
        unsafe { (self.nccl.comm_abort)(self.handle) };
    }
}

fn number_of(op: Reduce) -> c_int {
    match op {
        Reduce::Sum => 0,
        Reduce::Max => 2,
        Reduce::Min => 3,
    }
}
