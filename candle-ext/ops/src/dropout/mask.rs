//! The mask of a dropout: a counter-based generator, so that any block can be drawn by any thread.

/// The elements that are dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The probability that an element becomes zero, in [0, 1).
    pub p: f64,
    /// Chooses the mask: the same key, the same mask.
    pub key: u64,
}

impl Dropout {
    /// Returns the mask after the first `n_elements`: a tensor in parts drops the elements that the whole drops.
    pub fn after(self, n_elements: usize) -> Self {
        Self { key: key_after(self.key, n_elements as u64), ..self }
    }

    /// Returns the factor on kept elements.
    pub(super) fn scale(self) -> f32 {
        (1.0 / (1.0 - self.p)) as f32
    }

    /// Returns the threshold: an element is kept if 32 random bits are no less.
    pub(super) fn threshold(self) -> u64 {
        (self.p * 2f64.powi(32)) as u64
    }
}

/// Derives a key for a part: from a seed a key for a step, from that a key for a micro-batch, and so on.
pub fn derive_key(key: u64, part: u64) -> u64 {
    random(key, part)
}

const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// The key of the stream that begins at `position` of the stream of `key`.
pub(super) fn key_after(key: u64, position: u64) -> u64 {
    key.wrapping_add(position.wrapping_mul(STRIDE))
}

/// SplitMix64's output at `position` of the stream that begins at `key` (Steele, Lea, Flood 2014).
pub(super) fn random(key: u64, position: u64) -> u64 {
    let mut z = key_after(key, position + 1);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
