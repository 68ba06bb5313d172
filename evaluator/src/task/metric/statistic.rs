//! The interface of aggregations over resamples.

/// Values in the form in which they are aggregated fast, over and over.
pub(crate) trait Statistic: Sync {
    /// The aggregate of the values at these places, a place as often as it comes.
    fn over(&self, picked: &mut dyn Iterator<Item = usize>) -> f64;
}
