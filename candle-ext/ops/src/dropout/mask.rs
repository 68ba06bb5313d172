//! Dropout mask from a counter-based generator, so that any thread can generate any block.

/// Dropout probability and the key of the mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// Probability that an element becomes zero, in [0, 1). It is rounded to a multiple of 2^-16.
    pub p: f64,
    /// Seed of the mask: equal keys give equal masks.
    pub key: u64,
}

impl Dropout {
    /// Returns the factor on elements that are not dropped: 1 / (1 - p), of the rounded p.
    pub(super) fn scale(self) -> f32 {
        (VALUES / (VALUES - f64::from(self.threshold()))) as f32
    }

    /// Returns the threshold: an element is kept if its 16 random bits are at least this.
    pub(super) fn threshold(self) -> u16 {
        (self.p * VALUES).round() as u16
    }
}

/// Number of values of 16 bits.
const VALUES: f64 = 65_536.0;

/// Elements that share a hash of 64 bits. Each has 16 of them, from the lowest on.
pub(super) const ELEMENTS_PER_HASH: usize = 4;

/// Derives a key from another: a step's key from a seed, a micro-batch's key from the step's, and so on.
pub fn derive_key(key: u64, part: u64) -> u64 {
    random(key, part)
}

const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the key of the stream that begins at `position` of the stream of `key`.
#[inline(always)]
pub(crate) fn key_after(key: u64, position: u64) -> u64 {
    key.wrapping_add(position.wrapping_mul(STRIDE))
}

/// Returns SplitMix64's output at `position` of the stream that begins at `key` (Steele, Lea, Flood 2014).
#[inline(always)]
pub(crate) fn random(key: u64, position: u64) -> u64 {
    let mut z = key_after(key, position.wrapping_add(1));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
