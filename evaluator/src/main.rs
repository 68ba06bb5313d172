//! The `evaluator` program. Everything is in the library; here are the allocator and the door.

use evaluator::exit::ExitCode;

#[global_allocator]
static ALLOCATOR: evaluator::allocator::Allocator = evaluator::allocator::Allocator;

fn main() -> ExitCode {
    evaluator::allocator::keep_memory();
    evaluator::cores::share_cores();
    evaluator::cores::load_kernels_at_start();
    candlewick_text::source::report_shortened_files();
    candlewick_ops::join_compute_threads();
    evaluator::cli::main()
}
