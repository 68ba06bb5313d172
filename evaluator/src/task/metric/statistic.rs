//! Interface of aggregations over bootstrap resamples.

/// Metric values prepared for repeated aggregation over bootstrap resamples.
pub(crate) trait Statistic: Sync {
    /// Returns the aggregate of the values at `indices`, with repetition.
    fn over(&self, picked: &mut dyn Iterator<Item = usize>) -> f64;
}
