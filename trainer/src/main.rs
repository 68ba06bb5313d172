//! The `trainer` program. Everything is in the library; here are the allocator and the door.

use trainer::exit::ExitCode;

#[global_allocator]
static ALLOCATOR: candlewick_runtime::allocator::Allocator = candlewick_runtime::allocator::Allocator;

fn main() -> ExitCode {
    candlewick_runtime::allocator::keep_memory();
    candlewick_runtime::cores::share_cores();
    candlewick_text::source::report_shortened_files();
    candlewick_ops::join_compute_threads();
    trainer::cli::main()
}
