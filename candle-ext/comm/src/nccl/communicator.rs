//! One of NCCL's communicators: started, given work, asked how it is, ended. None of it blocks the host.

use std::ffi::c_int;
use std::ptr::null_mut;

use super::api::{Config, Handle, IN_PROGRESS, Nccl, SUCCESS, Stream, UniqueId, nccl};
use super::memory::Address;
use crate::Reduce;

/// Part of an operation. Counts are elements of NCCL's type `dtype`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    AllReduce { from: Address, to: Address, n: usize, dtype: c_int, op: Reduce },
    AllGather { from: Address, to: Address, n: usize, dtype: c_int },
    ReduceScatter { from: Address, to: Address, n: usize, dtype: c_int },
    Broadcast { from: Address, to: Address, n: usize, dtype: c_int, root: usize },
    Send { from: Address, n: usize, dtype: c_int, peer: usize },
    Receive { to: Address, n: usize, dtype: c_int, peer: usize },
}

/// See the module. Aborted when it is dropped, unless it was ended.
pub(super) struct Communicator {
    nccl: &'static Nccl,
    handle: Handle,
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
        let (mut handle, mut config) = (null_mut(), Config::non_blocking());
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

    /// Puts `steps` onto `stream`, as one.
    ///
    /// # Safety
    ///
    /// The stream is one of the communicator's device, and the addresses are good for the elements until what is put onto
    /// it has been done.
    pub(super) unsafe fn put(&self, stream: Stream, steps: &[Step]) -> Result<(), String> {
        // SAFETY: it has no conditions.
        self.taken(unsafe { (self.nccl.group_start)() })?;
        // SAFETY: the caller's promise.
        let put = steps.iter().try_for_each(|step| self.taken(unsafe { self.put_one(stream, step) }));
        // SAFETY: a group was started above. It is ended in any case.
        let ended = self.taken(unsafe { (self.nccl.group_end)() });
        put.and(ended)
    }

    /// # Safety
    ///
    /// As for [`put`](Self::put).
    unsafe fn put_one(&self, stream: Stream, step: &Step) -> c_int {
        let Self { nccl, handle } = *self;
        // SAFETY: the handle is one of NCCL's; the caller answers for stream and addresses.
        unsafe {
            match *step {
                Step::AllReduce { from, to, n, dtype, op } => {
                    (nccl.all_reduce)(from.read(), to.write(), n, dtype, number_of(op), handle, stream)
                }
                Step::AllGather { from, to, n, dtype } => {
                    (nccl.all_gather)(from.read(), to.write(), n, dtype, handle, stream)
                }
                Step::ReduceScatter { from, to, n, dtype } => {
                    (nccl.reduce_scatter)(from.read(), to.write(), n, dtype, number_of(Reduce::Sum), handle, stream)
                }
                Step::Broadcast { from, to, n, dtype, root } => {
                    (nccl.broadcast)(from.read(), to.write(), n, dtype, root as c_int, handle, stream)
                }
                Step::Send { from, n, dtype, peer } => {
                    (nccl.send)(from.read(), n, dtype, peer as c_int, handle, stream)
                }
                Step::Receive { to, n, dtype, peer } => {
                    (nccl.receive)(to.write(), n, dtype, peer as c_int, handle, stream)
                }
            }
        }
    }

    /// Starts to end it, when all that was put onto streams has been done.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: the handle is one of NCCL's.
        self.taken(unsafe { (self.nccl.comm_finalize)(self.handle) })
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

    fn taken(&self, result: c_int) -> Result<(), String> {
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
