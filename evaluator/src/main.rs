//! The `evaluator` program: selects the allocator, sets up the threads and runs the command line.

use candlewick_runtime::allocator::{Allocator, keep_memory};
use candlewick_runtime::cores::{load_kernels_at_start, share_cores};
use candlewick_runtime::exit::ExitCode;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    keep_memory();
    share_cores();
    load_kernels_at_start();
    candlewick_text::source::report_shortened_files();
    candlewick_ops::join_rayon_pool();
    evaluator::cli::main()
}
