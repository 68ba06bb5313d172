//! Random orders that depend only on their key: equal on every machine and after a resume.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// The use of a random number. Each use has its own random stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RngPurpose {
    /// Sampling a source's rows.
    Sampling = 1,
    /// Selecting the held-out samples.
    Split = 2,
    /// Ordering samples.
    Samples = 3,
    /// Ordering rows.
    Rows = 4,
    /// Selecting the fused packs.
    Fuse = 5,
    /// Drawing the source of the next sample, or the samples of a source.
    SourceDraw = 6,
    /// Ordering the samples of a source.
    SourceOrder = 7,
    /// Ordering the chunks of a stream.
    Chunks = 8,
    /// Seeding the orders within a chunk of a stream.
    ChunkSeed = 9,
}

/// Returns the random generator of one use, in one pass of one epoch.
pub(crate) fn seeded_rng(seed: u64, purpose: RngPurpose, epoch: usize, pass: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    let words = [seed, purpose as u64, epoch as u64, pass as u64];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// Returns the numbers below `n` in random order (Fisher and Yates).
pub(crate) fn permutation(n: usize, mut rng: impl RngCore) -> Vec<u32> {
    let mut order = identity(n);
    shuffle(&mut order, &mut rng);
    order
}

/// Shuffles `items`.
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut impl RngCore) {
    for last in (1..items.len()).rev() {
        let chosen = below(rng, last as u64 + 1) as usize;
        items.swap(last, chosen);
    }
}

/// Returns the numbers below `n` in ascending order.
pub(crate) fn identity(n: usize) -> Vec<u32> {
    assert!(u32::try_from(n).is_ok(), "a data set has fewer than 2^32 samples");
    (0..n as u32).collect()
}

/// Returns `count` different numbers below `n`, in the order of sampling.
pub(crate) fn sample_without_replacement(n: usize, count: usize, mut rng: impl RngCore) -> Vec<u32> {
    let mut order = identity(n);
    for first in 0..count {
        let chosen = first + below(&mut rng, (n - first) as u64) as usize;
        order.swap(first, chosen);
    }
    order.truncate(count);
    order
}

/// Returns a uniform number from 0 to below 1.
pub(crate) fn uniform(rng: &mut impl RngCore) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns an unbiased number below `n` (Lemire 2019).
fn below(rng: &mut impl RngCore, n: u64) -> u64 {
    let threshold = n.wrapping_neg() % n;
    loop {
        let wide = u128::from(rng.next_u64()) * u128::from(n);
        if wide as u64 >= threshold {
            return (wide >> 64) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A resume of a run of an older build depends on this.
    #[test]
    fn the_order_of_a_seed_and_an_epoch_never_changes() {
        let order = |seed, epoch| permutation(8, seeded_rng(seed, RngPurpose::Samples, epoch, 0));
        assert_eq!([order(42, 0), order(42, 1)], [[0, 7, 6, 1, 3, 5, 2, 4], [2, 7, 1, 3, 6, 4, 0, 5]]);
    }

    #[test]
    fn a_permutation_has_every_number_once() {
        for n in [0, 1, 2, 7, 1000] {
            let mut order = permutation(n, seeded_rng(1, RngPurpose::Rows, 0, 0));
            order.sort_unstable();
            assert_eq!(order, identity(n));
        }
    }

    #[test]
    fn seed_purpose_epoch_and_pass_each_make_another_order() {
        let order = |seed, purpose, epoch, pass| permutation(64, seeded_rng(seed, purpose, epoch, pass));
        let base = order(1, RngPurpose::Samples, 0, 0);
        assert_ne!(base, order(2, RngPurpose::Samples, 0, 0));
        assert_ne!(base, order(1, RngPurpose::Rows, 0, 0));
        assert_ne!(base, order(1, RngPurpose::Samples, 1, 0));
        assert_ne!(base, order(1, RngPurpose::Samples, 0, 1));
    }

    #[test]
    fn sampling_without_replacement_is_uniform() {
        let mut times = [0; 5];
        for epoch in 0..5000 {
            let drawn = sample_without_replacement(5, 2, seeded_rng(7, RngPurpose::Sampling, epoch, 0));
            assert_eq!(drawn.len(), 2);
            assert_ne!(drawn[0], drawn[1]);
            drawn.iter().for_each(|&i| times[i as usize] += 1);
        }
        assert!(times.iter().all(|&n| (1850..2150).contains(&n)), "{times:?}");
    }
}
