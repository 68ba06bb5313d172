//! The `evaluator` program. Everything is in the library; here are the allocator and the door.

use evaluator::exit::ExitCode;

/// Fresh large allocations page-fault at 2 GB/s; this allocator keeps what it was given.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    candlewick_ops::join_compute_threads();
    evaluator::cli::main()
}
