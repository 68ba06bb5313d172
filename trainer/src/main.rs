//! The `trainer` program: sets up the process and runs the command line of the library.

use candlewick_runtime::allocator::{Allocator, keep_memory};
use candlewick_runtime::cores::{divide_cores, load_kernels_eagerly};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::process_memory::program_bytes;
use candlewick_runtime::stack::reserve_stack;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    keep_memory();
    reserve_stack();
    // Measure the program's size before other files are mapped.
    program_bytes();
    divide_cores();
    load_kernels_eagerly();
    candlewick_text::source::report_shortened_files();
    candlewick_ops::join_rayon_pool();
    trainer::cli::main()
}
