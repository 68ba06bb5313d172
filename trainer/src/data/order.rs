//! Random orders that depend on nothing but their key: the same on every machine and after a resume.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// What a random number is for. Two purposes never share a stream of numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RngPurpose {
    /// Choosing a source's rows.
    Sampling = 1,
    /// Choosing the held-out samples.
    Split = 2,
    /// Ordering samples.
    Samples = 3,
    /// Ordering rows.
    Rows = 4,
    /// Choosing the packs that are fused.
    Fuse = 5,
}

/// The generator of one purpose, in one pass of one epoch.
pub(crate) fn seeded_rng(seed: u64, purpose: RngPurpose, epoch: usize, pass: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    let words = [seed, purpose as u64, epoch as u64, pass as u64];
    for (bytes, word) in key.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    ChaCha8Rng::from_seed(key)
}

/// The numbers below `n` in random order (Fisher and Yates).
pub(crate) fn permutation(n: usize, mut rng: impl RngCore) -> Vec<u32> {
    let mut order = identity(n);
    shuffle(&mut order, &mut rng);
    order
}

/// Puts `items` in random order.
pub(crate) fn shuffle<T>(items: &mut [T], rng: &mut impl RngCore) {
    for last in (1..items.len()).rev() {
        let chosen = below(rng, last as u64 + 1) as usize;
        items.swap(last, chosen);
    }
}

/// The numbers below `n` in their own order.
pub(crate) fn identity(n: usize) -> Vec<u32> {
    assert!(u32::try_from(n).is_ok(), "a data set is refused before it has 2^32 samples");
    (0..n as u32).collect()
}

/// `count` different numbers below `n`, in the order drawn.
pub(crate) fn sample_without_replacement(n: usize, count: usize, mut rng: impl RngCore) -> Vec<u32> {
    let mut order = identity(n);
    for first in 0..count {
        let chosen = first + below(&mut rng, (n - first) as u64) as usize;
        order.swap(first, chosen);
    }
    order.truncate(count);
    order
}

/// A number between 0 and 1, never 1.
pub(crate) fn uniform(rng: &mut impl RngCore) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}

/// A number below `n` without bias (Lemire 2019).
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

    /// Resuming a run made by an older build depends on this.
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
    fn a_draw_has_no_number_twice_and_every_number_is_as_likely() {
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
