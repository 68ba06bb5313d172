//! Chunking of tokens, which bounds the memory of logits.

use candle_core::Device;

use crate::accelerator::gpu_memory;
use crate::cost::{DeviceKind, F32_BYTES};

/// Most elements of logits at once on the CPU: 256 MiB.
const CPU_LOGITS: usize = 1 << 26;
/// Most elements of logits at once on a GPU: 4 GiB.
const GPU_LOGITS: usize = 1 << 30;
/// Rows of a matmul's tile on a GPU.
const TILE: usize = 128;

/// Bytes of f32 logits that the loss holds at once on a CPU.
pub const LOGITS_BYTES_ON_CPU: u64 = 64 << 20;

/// Returns the bytes of logits that the loss holds at once on a GPU with `memory_bytes`: 3 %, at most 4 GiB.
///
/// If the memory is unknown, the result is 1 GiB. Each chunk updates the whole gradient of the LM head, so few chunks
/// are fast.
pub fn logits_bytes_on_gpu(memory_bytes: Option<u64>) -> u64 {
    memory_bytes.map_or(1 << 30, |bytes| (bytes / 100 * 3).min(4 << 30))
}

/// Returns the bytes of logits that the loss holds at once on `device`.
pub fn logits_bytes(device: &Device) -> u64 {
    match device {
        Device::Cuda(_) => logits_bytes_on_gpu(gpu_memory(device)),
        _ => LOGITS_BYTES_ON_CPU,
    }
}

/// Returns the most rows of f32 logits in `logits_bytes`, at least one. This is the `chunk` of
/// [`CrossEntropy`](super::CrossEntropy).
pub fn max_logit_rows(logits_bytes: u64, n_vocab: u64) -> u64 {
    (logits_bytes / (n_vocab * F32_BYTES).max(1)).max(1)
}

/// Returns the rows per chunk for `n_targets` tokens: at most `max_rows` rows of `n_vocab` logits.
pub(super) fn rows_per_chunk(device: DeviceKind, n_targets: usize, n_vocab: usize, max_rows: usize) -> usize {
    match device {
        DeviceKind::Cpu => (CPU_LOGITS / n_vocab.max(1)).clamp(1, max_rows),
        DeviceKind::Gpu => even_chunk(n_targets, (GPU_LOGITS / n_vocab.max(1)).clamp(1, max_rows)),
    }
}

/// Returns the size of nearly equal chunks, the fewest of at most `max_rows`; a multiple of the tile if that fits.
fn even_chunk(n: usize, max_rows: usize) -> usize {
    let n_chunks = n.div_ceil(max_rows).max(1);
    n.div_ceil(n_chunks).next_multiple_of(TILE).clamp(1, max_rows)
}

#[cfg(test)]
mod tests {
    use super::{even_chunk, logits_bytes_on_gpu};

    #[test]
    fn a_gpu_holds_three_percent_of_its_memory_in_logits_and_at_most_four_gib() {
        assert_eq!(
            [None, Some(100), Some(80_000_000_000), Some(u64::MAX)].map(logits_bytes_on_gpu),
            [1 << 30, 3, 2_400_000_000, 4 << 30]
        );
    }

    #[test]
    fn chunks_are_few_and_even() {
        assert_eq!(
            [(4096, 1766), (4096, 4096), (4096, 1024), (5, 3), (0, 7), (1, 1)].map(|(n, most)| even_chunk(n, most)),
            [1408, 4096, 1024, 3, 1, 1]
        );
        for (n, most) in (1..3000).flat_map(|n| [1, 7, 100, 128, 700, 5000].map(|most| (n, most))) {
            let chunk = even_chunk(n, most);
            assert!(chunk <= most && n.div_ceil(chunk) == n.div_ceil(most), "{n} {most}: {chunk}");
        }
    }
}
