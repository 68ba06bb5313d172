//! Stack of a program's main thread, reserved at its start.

use std::hint::black_box;

use crate::allocator::out_of_memory;

/// Bytes to reserve: the size of the other threads' stacks.
const STACK_BYTES: usize = 2 << 20;

/// Grows the stack of the main thread to the size that other threads have. Call it first in a program.
///
/// The stack of a main thread grows as it is used. Growth beyond the limit of the address space (`ulimit -v`) is a
/// segmentation fault, without a message. Memory that is refused here ends the program with
/// [`ExitCode::OutOfMemory`](crate::exit::ExitCode::OutOfMemory).
pub fn reserve_stack() {
    // A stack that may be small is left as it is.
    if stack_limit().is_none_or(|n_bytes| n_bytes >= 2 * STACK_BYTES as u64) {
        if !has_address_space(2 * STACK_BYTES) {
            out_of_memory(STACK_BYTES);
        }
        touch_stack();
    }
}

/// Writes to every page of the stack to be reserved.
#[inline(never)]
fn touch_stack() {
    // A shared reference to the array would be one to a constant outside of the stack.
    black_box(&mut [0_u8; STACK_BYTES]);
}

/// Returns the limit of the main thread's stack, or `None` without one.
fn stack_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Stack).current
}

/// Returns true if the process may map `n_bytes` more.
fn has_address_space(n_bytes: usize) -> bool {
    memmap2::MmapMut::map_anon(n_bytes).is_ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_reserved_stack_leaves_the_program_running() {
        std::thread::Builder::new().stack_size(4 * STACK_BYTES).spawn(reserve_stack).unwrap().join().unwrap();
        assert!(has_address_space(STACK_BYTES) && !has_address_space(usize::MAX / 2));
    }
}
