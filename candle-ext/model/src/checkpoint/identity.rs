//! Identity of weights: a hash that changes with training, dtype or model.

use std::ops::Range;

use super::Checkpoint;
use super::reader::DiskTensor;

/// Hashed bytes of each tensor. Training changes nearly all values of a tensor, so a sample suffices.
const SAMPLE: usize = 16 << 10;

impl Checkpoint {
    /// Returns a hash of every tensor's name, dtype, shape and sampled bytes. Sharding into files does not change it.
    pub fn identity(&self) -> String {
        identity(self.contents())
    }
}

/// Returns a hash of every tensor's name, dtype, shape and sampled bytes.
pub(super) fn identity<'t>(tensors: impl Iterator<Item = DiskTensor<'t>>) -> String {
    let mut hash = blake3::Hasher::new();
    for DiskTensor { name, dtype, shape, bytes } in tensors {
        hash.update(format!("{name} {dtype:?} {shape:?} {}\n", bytes.len()).as_bytes());
        hash.update(&bytes[middle(bytes.len())]);
    }
    hash.finalize().to_hex()[..32].to_owned()
}

fn middle(n_bytes: usize) -> Range<usize> {
    let n_sampled = n_bytes.min(SAMPLE);
    let start = (n_bytes - n_sampled) / 2;
    start..start + n_sampled
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_a_tensor_is_sampled() {
        assert_eq!(middle(0), 0..0);
        assert_eq!(middle(10), 0..10);
        assert_eq!(middle(SAMPLE + 8), 4..SAMPLE + 4);
    }
}
