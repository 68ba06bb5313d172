//! Downsampling of a series for a plot. Minimum and maximum of each bucket are kept, so no spike is lost.

use serde::Serialize;

use super::rows::MetricPoint;

/// Consecutive points of a series. A bucket of one point has its step and value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PointBucket {
    /// Middle of the steps.
    pub step: u64,
    /// Least finite value.
    pub low: f64,
    /// Mean of the finite values.
    pub mean: f64,
    /// Largest finite value.
    pub high: f64,
}

/// Divides a series into at most `most` buckets of equally many points. Returns the buckets that have a finite value, and
/// the steps of the values that are not finite.
pub fn downsample(points: &[MetricPoint], most: usize) -> (Vec<PointBucket>, Vec<u64>) {
    let size = points.len().div_ceil(most.max(1)).max(1);
    let not_finite = points.iter().filter(|point| !point.value.is_finite()).map(|point| point.step).collect();
    (points.chunks(size).filter_map(bucket).collect(), not_finite)
}

fn bucket(points: &[MetricPoint]) -> Option<PointBucket> {
    let values = || points.iter().map(|point| point.value).filter(|value| value.is_finite());
    let n = values().count();
    let middle = (points.first()?.step + points.last()?.step) / 2;
    (n > 0).then(|| PointBucket {
        step: middle,
        low: values().fold(f64::INFINITY, f64::min),
        mean: values().sum::<f64>() / n as f64,
        high: values().fold(f64::NEG_INFINITY, f64::max),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(values: &[f64]) -> Vec<MetricPoint> {
        (1..).zip(values).map(|(step, value)| MetricPoint { step, value: *value }).collect()
    }

    #[test]
    fn a_short_series_keeps_its_points() {
        let (buckets, _) = downsample(&points(&[3.0, 1.0, 2.0]), 3);
        let one = |step, value| PointBucket { step, low: value, mean: value, high: value };
        assert_eq!(buckets, [one(1, 3.0), one(2, 1.0), one(3, 2.0)]);
        assert_eq!(downsample(&[], 3), (Vec::new(), Vec::new()));
    }

    #[test]
    fn a_long_series_keeps_its_extremes() {
        let mut values = vec![1.0; 100_000];
        values[70_000] = 50.0;
        values[30_001] = -5.0;
        let (buckets, _) = downsample(&points(&values), 1000);
        assert_eq!(buckets.len(), 1000);
        let extreme = |of: fn(f64, f64) -> f64, end: fn(&PointBucket) -> f64| buckets.iter().map(end).fold(1.0, of);
        assert_eq!((extreme(f64::max, |b| b.high), extreme(f64::min, |b| b.low)), (50.0, -5.0));
    }

    #[test]
    fn values_that_are_not_finite_are_listed_by_step() {
        let (buckets, not_finite) = downsample(&points(&[1.0, f64::NAN, f64::INFINITY, f64::NAN, 3.0]), 3);
        let found: Vec<(u64, f64)> = buckets.iter().map(|bucket| (bucket.step, bucket.mean)).collect();
        assert_eq!((found, not_finite), (vec![(1, 1.0), (5, 3.0)], vec![2, 3, 4]));
    }
}
