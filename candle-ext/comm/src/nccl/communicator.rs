//! One of NCCL's communicators: started, given work, asked how it is, ended. None of it blocks the host.

use std::ffi::c_int;
use std::ptr::null_mut;

use super::api::{CommHandle, IN_PROGRESS, Nccl, NcclConfig, SUCCESS, StreamHandle, UniqueId, nccl};
use super::memory::DeviceAddress;
use crate::Reduce;

/// Part of an operation. Counts are elements of NCCL's type `dtype`.
#[derive(Clone, Copy, Debug)]
pub(super) enum NcclOp {
    AllReduce { from: DeviceAddress, to: DeviceAddress, n: usize, dtype: c_int, op: Reduce },
    AllGather { from: DeviceAddress, to: DeviceAddress, n: usize, dtype: c_int },
    ReduceScatter { from: DeviceAddress, to: DeviceAddress, n: usize, dtype: c_int },
    Broadcast { from: DeviceAddress, to: DeviceAddress, n: usize, dtype: c_int, root: usize },
    Send { from: DeviceAddress, n: usize, dtype: c_int, peer: usize },
    Receive { to: DeviceAddress, n: usize, dtype: c_int, peer: usize },
}

/// See the module. Aborted when it is dropped, unless it was ended.
pub(super) struct Communicator {
    nccl: &'static Nccl,
    handle: CommHandle,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time: this one has one owner.
unsafe impl Send for Communicator {}

/// Returns what the ranks of a new communicator know each other by: one of them asks for it.
pub(super) fn unique_id() -> Result<UniqueId, String> {
    let nccl = nccl()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: it writes an id.
    match unsafe { (nccl.get_unique_id)(&raw mut id) } {
        SUCCESS => Ok(id),
        error => Err(nccl.explain(error, null_mut())),
    }
}

impl Communicator {
    /// Starts to connect rank `rank` of `size` on the current device; see [`is_ready`](Self::is_ready).
    pub(super) fn start(rank: usize, size: usize, id: UniqueId) -> Result<Self, String> {
        let nccl = nccl()?;
        let (mut handle, mut config) = (null_mut(), NcclConfig::non_blocking());
        // SAFETY: handle and config are there while it is called.
        let result =
            unsafe { (nccl.comm_init_rank_config)(&raw mut handle, size as c_int, id, rank as c_int, &raw mut config) };
        match result {
            SUCCESS | IN_PROGRESS => Ok(Self { nccl, handle }),
            error => Err(nccl.explain(error, handle)),
        }
    }

    /// Whether what was asked of it last has been done: it may be asked for more only then.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        let mut state = SUCCESS;
        // SAFETY: the handle is one of NCCL's, and a number is written.
        let asked = unsafe { (self.nccl.comm_get_async_error)(self.handle, &raw mut state) };
        match (asked, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, error) | (error, _) => Err(self.nccl.explain(error, self.handle)),
        }
    }

    /// Puts `ops` onto `stream`, as one.
    ///
    /// # Safety
    ///
    /// The stream is one of the communicator's device, and the addresses are good for the elements until what is enqueued onto
    /// it has been done.
    pub(super) unsafe fn enqueue(&self, stream: StreamHandle, ops: &[NcclOp]) -> Result<(), String> {
        // SAFETY: it has no conditions.
        self.check(unsafe { (self.nccl.group_start)() })?;
        // SAFETY: the caller's promise.
        let enqueued = ops.iter().try_for_each(|op| self.check(unsafe { self.enqueue_one(stream, op) }));
        // SAFETY: a group was started above. It is ended in any case.
        let ended = self.check(unsafe { (self.nccl.group_end)() });
        enqueued.and(ended)
    }

    /// # Safety
    ///
    /// As for [`enqueued`](Self::enqueued).
    unsafe fn enqueue_one(&self, stream: StreamHandle, op: &NcclOp) -> c_int {
        let Self { nccl, handle } = *self;
        // SAFETY: the handle is one of NCCL's; the caller answers for stream and addresses.
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

    /// Starts to end it, when all that was enqueued onto streams has been done.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: the handle is one of NCCL's.
        self.check(unsafe { (self.nccl.comm_finalize)(self.handle) })
    }

    /// Frees it after [`finalize`](Self::finalize).
    pub(super) fn destroy(self) -> Result<(), String> {
        let Self { nccl, handle } = self;
        std::mem::forget(self);
        // SAFETY: the handle is one of NCCL's and not used again.
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
        // SAFETY: the handle is one of NCCL's and not used again. What runs on the device is stopped.
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
