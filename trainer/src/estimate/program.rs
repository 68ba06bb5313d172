//! What a run needs whatever it trains. The constants were measured: the only numbers here that are not read off the code.

use super::{Place, Setup, head};

/// The program itself, its libraries, threads and buffers.
const PROGRAM: u64 = 48 << 20;
/// A token of a byte-pair tokenizer: its text, its merges and their tables.
const TOKENIZER_BYTES: u64 = 400;
/// A GPU's context, our kernels and the workspace of cuBLASLt.
const GPU_CONTEXT: u64 = 640 << 20;
/// What CUDA's libraries take of the host's RAM.
const GPU_HOST: u64 = 1536 << 20;

/// The bytes in the memory of what computes.
pub(super) fn on_device(setup: &Setup) -> u64 {
    match setup.place {
        Place::Cpu => PROGRAM + tokenizer(setup) + head::packed(setup),
        Place::Gpu => GPU_CONTEXT,
    }
}

/// The bytes in the RAM of a machine whose GPU computes.
pub(super) fn on_gpu_host(setup: &Setup) -> u64 {
    PROGRAM + GPU_HOST + tokenizer(setup)
}

fn tokenizer(setup: &Setup) -> u64 {
    setup.model.config().vocab_size() as u64 * TOKENIZER_BYTES
}

/// Of what a step allocates and frees again, the allocator keeps pieces that nothing of another size fits into: on the CPU
/// a sixteenth, and besides as much as small buffers and the reading of the data have left, up to a bound.
pub(super) fn slack(place: Place, passing: u64) -> u64 {
    const LEFT: u64 = 40 << 20;
    match place {
        Place::Cpu => passing / 16 + passing.min(LEFT),
        Place::Gpu => passing / 16,
    }
}
