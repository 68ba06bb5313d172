//! Allocator of the programs: mimalloc, configured for training, with an exit code for out of memory.

use std::alloc::{GlobalAlloc, Layout};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use libmimalloc_sys::{mi_option_large_os_pages, mi_option_set, mi_option_t};
use mimalloc::MiMalloc;

use crate::exit::ExitCode;

/// `mi_option_purge_delay` of mimalloc.h, which the bindings do not declare.
const PURGE_DELAY: mi_option_t = 15;

/// Configures mimalloc to keep freed memory for the next step and to use huge pages. Call it first in a program.
///
/// Measured write bandwidth on a virtual machine: 2 GB/s into fresh small pages, 5 GB/s into fresh huge pages, 12 GB/s into
/// reused memory.
pub fn keep_memory() {
    // SAFETY: setting an option has no preconditions.
    unsafe {
        mi_option_set(PURGE_DELAY, -1);
        mi_option_set(mi_option_large_os_pages, 1);
    }
}

/// Returns the fragmentation of mimalloc, in bytes, for a step that allocates and frees `bytes`. Measured.
///
/// Freed blocks serve no allocation of another size: one sixteenth of `bytes`. Small buffers and data loading add `bytes`
/// again, up to 40 MiB.
pub fn slack_bytes(bytes: u64) -> u64 {
    const MAX_LEFT_OVER: u64 = 40 << 20;
    bytes / 16 + bytes.min(MAX_LEFT_OVER)
}

/// True if allocations are counted.
static IS_COUNTING: AtomicBool = AtomicBool::new(false);
/// Bytes allocated minus bytes freed since [`count_allocated_bytes`].
static ALLOCATED: AtomicI64 = AtomicI64::new(0);

/// Starts to count the bytes in use, from 0. Blocks that are older and freed later make the count negative.
pub fn count_allocated_bytes() {
    ALLOCATED.store(0, Ordering::Relaxed);
    IS_COUNTING.store(true, Ordering::Relaxed);
}

/// Returns the bytes allocated minus the bytes freed since [`count_allocated_bytes`], by all threads of a program with
/// [`Allocator`].
pub fn allocated_bytes() -> i64 {
    ALLOCATED.load(Ordering::Relaxed)
}

fn count(n_bytes: i64) {
    if IS_COUNTING.load(Ordering::Relaxed) {
        ALLOCATED.fetch_add(n_bytes, Ordering::Relaxed);
    }
}

/// mimalloc. A failed allocation exits with [`ExitCode::OutOfMemory`] instead of aborting.
#[derive(Debug)]
pub struct Allocator;

// SAFETY: every call is forwarded to mimalloc unchanged, and a null pointer is never returned.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract of `alloc`.
        allocated(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        allocated(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { MiMalloc.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        count(n_bytes as i64 - layout.size() as i64);
        // SAFETY: the caller keeps the contract of `realloc`.
        allocated(unsafe { MiMalloc.realloc(block, layout, n_bytes) }, n_bytes)
    }
}

fn allocated(block: *mut u8, n_bytes: usize) -> *mut u8 {
    if block.is_null() { out_of_memory(n_bytes) } else { block }
}

/// Exits without another allocation, destructors or buffers.
#[cold]
pub(crate) fn out_of_memory(n_bytes: usize) -> ! {
    let mut text = [0; 200];
    let mut rest = &mut text[..];
    let code = ExitCode::OutOfMemory as i32;
    let _ = writeln!(
        rest,
        "error: failed to allocate {n_bytes} bytes: memory ran out (exit code {code}). Lower the batch size or the sequence \
         length, or see `trainer estimate`"
    );
    let n_left = rest.len();
    let n_written = text.len() - n_left;
    let _ = std::io::stderr().write_all(&text[..n_written]);
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}
