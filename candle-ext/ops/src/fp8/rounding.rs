//! Rounding of FP8 codes: to nearest, or stochastic with a counter-based generator.

/// Rounding to FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Rounding {
    /// To the nearest code, ties to even.
    Nearest,
    /// Up or down with a probability by the distance, so that the mean is exact. Equal keys give equal codes.
    Stochastic {
        /// Seed of the random numbers.
        key: u64,
    },
}
