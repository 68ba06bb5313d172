//! Memory that does not depend on the model's training: the program, the tokenizer and the allocator's slack.

use candlewick_ops::{DeviceKind, GPU_CONTEXT_BYTES, GPU_HOST_BYTES, cpu_gemm_buffer_bytes, gpu_pool_slack_bytes};
use candlewick_runtime::allocator::slack_bytes;
use candlewick_runtime::process_memory::program_bytes;
use candlewick_text::tokenizer::Tokenizer;

use super::{Setup, costs};
use crate::plan::dtype;

/// Returns the bytes in the memory of the device that computes.
pub(super) fn bytes_on_device(setup: &Setup) -> u64 {
    match setup.compute_device {
        DeviceKind::Cpu => program_bytes() + tokenizer(setup) + matmul_buffers(setup),
        DeviceKind::Gpu => GPU_CONTEXT_BYTES,
    }
}

/// Returns the program's bytes of host RAM if a GPU computes.
pub(super) fn bytes_on_gpu_host(setup: &Setup) -> u64 {
    program_bytes() + GPU_HOST_BYTES + tokenizer(setup)
}

/// Returns the allocator's slack for `temporary` bytes that a step allocates and frees.
pub(super) fn slack(compute_device: DeviceKind, temporary: u64) -> u64 {
    match compute_device {
        DeviceKind::Cpu => slack_bytes(temporary),
        DeviceKind::Gpu => gpu_pool_slack_bytes(temporary),
    }
}

fn tokenizer(setup: &Setup) -> u64 {
    setup.model.config().vocab_size() as u64 * Tokenizer::BYTES_PER_TOKEN
}

/// Returns the bytes of the CPU's matmul packing buffers, and of the copies that experts multiply. They are reused.
fn matmul_buffers(setup: &Setup) -> u64 {
    let (layer, head) = (costs::layer(setup, 0), costs::head(setup));
    let copies = (0..setup.model.n_blocks()).map(|layer_idx| costs::layer(setup, layer_idx).kept_by_threads()).max();
    let matmuls: Vec<_> = layer.mlp_matmuls().into_iter().chain(head.matmuls()).collect();
    cpu_gemm_buffer_bytes(&matmuls, dtype(setup.compute)) + copies.unwrap_or(0)
}
