//! One metric of two runs over the same documents: both values, their difference, and where that lies.

use rayon::prelude::*;
use serde::Serialize;

use super::Z;
use crate::task::{Aggregation, MetricValue, PythonRandom};

/// Resamples of the documents, and those of metrics that compare whole corpora of texts.
const RESAMPLES: usize = 1000;
const RESAMPLES_OF_TEXTS: usize = 100;

/// Method of a confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IntervalBy {
    /// A mean: by the normal distribution of the paired differences.
    Normal,
    /// Anything else: by resampling the documents, the same for both runs, from 2.5 % to 97.5 % of the differences.
    Bootstrap,
}

/// A metric of two runs.
pub(super) struct PairedDifference {
    pub(super) a: f64,
    pub(super) b: f64,
    /// b - a.
    pub(super) difference: f64,
    pub(super) interval: [f64; 2],
    pub(super) interval_by: IntervalBy,
}

/// Aggregates the values of the same documents in both runs. The error says what a value lacks.
pub(super) fn paired(
    aggregation: Aggregation,
    a: &[MetricValue],
    b: &[MetricValue],
) -> Result<PairedDifference, String> {
    if aggregation == Aggregation::Mean { of_means(a, b) } else { by_bootstrap(aggregation, a, b) }
}

fn of_means(a: &[MetricValue], b: &[MetricValue]) -> Result<PairedDifference, String> {
    let number = |score: &MetricValue| score.number().ok_or_else(|| format!("{score:?} is not a number"));
    let pair = |(a, b)| Ok((number(a)?, number(b)?));
    let values: Vec<(f64, f64)> = a.iter().zip(b).map(pair).collect::<Result<_, String>>()?;
    let n = values.len() as f64;
    let mean = |pick: fn(&(f64, f64)) -> f64| values.iter().map(pick).sum::<f64>() / n;
    let difference = mean(|v| v.1 - v.0);
    let squares: f64 = values.iter().map(|(a, b)| (b - a - difference).powi(2)).sum();
    let stderr = if values.len() < 2 { f64::NAN } else { (squares / (n - 1.0) / n).sqrt() };
    Ok(PairedDifference {
        a: mean(|v| v.0),
        b: mean(|v| v.1),
        difference,
        interval: [difference - Z * stderr, difference + Z * stderr],
        interval_by: IntervalBy::Normal,
    })
}

fn by_bootstrap(aggregation: Aggregation, a: &[MetricValue], b: &[MetricValue]) -> Result<PairedDifference, String> {
    let n = a.len();
    let (of_a, of_b) = (aggregation.statistic(a)?, aggregation.statistic(b)?);
    let value = [&of_a, &of_b].map(|statistic| statistic.over(&mut (0..n)));
    let n_resamples = match aggregation {
        Aggregation::Bleu | Aggregation::Chrf | Aggregation::ChrfWords => RESAMPLES_OF_TEXTS,
        _ => RESAMPLES,
    };
    // A generator for each resample, so that any number of threads gives the same.
    let resample = |seed: usize| {
        let mut random = PythonRandom::new(seed as u64);
        let picked: Vec<usize> = (0..n).map(|_| random.choice(n)).collect();
        of_b.over(&mut picked.iter().copied()) - of_a.over(&mut picked.iter().copied())
    };
    let mut drawn: Vec<f64> = (0..n_resamples).into_par_iter().map(resample).collect();
    drawn.sort_by(f64::total_cmp);
    let quantile = |share: f64| drawn[((n_resamples - 1) as f64 * share).round() as usize];
    let interval = if n < 2 { [f64::NAN; 2] } else { [quantile(0.025), quantile(0.975)] };
    let [a, b] = value;
    Ok(PairedDifference { a, b, difference: b - a, interval, interval_by: IntervalBy::Bootstrap })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn weighted(values: &[(f64, i64)]) -> Vec<MetricValue> {
        values
            .iter()
            .map(|(sum, n)| MetricValue::List(vec![MetricValue::Number(*sum), MetricValue::Count(*n)]))
            .collect()
    }

    #[test]
    fn a_ratio_of_sums_is_that_of_all_documents() {
        let a = weighted(&[(-10.0, 5), (-30.0, 10), (-2.0, 1), (-9.0, 4)]);
        let b = weighted(&[(-5.0, 5), (-30.0, 10), (-2.0, 1), (-3.0, 4)]);
        let found = paired(Aggregation::WeightedPerplexity, &a, &b).unwrap();
        let want = ((51.0_f64 / 20.0).exp(), (40.0_f64 / 20.0).exp());
        assert!((found.a - want.0).abs() < 1e-12 && (found.b - want.1).abs() < 1e-12);
        assert_eq!((found.difference, found.interval_by), (found.b - found.a, IntervalBy::Bootstrap));
        // No document is worse in the second run.
        let [low, high] = found.interval;
        assert!(low < found.difference && found.difference < high && high <= 0.0, "{low} {high}");
    }

    #[test]
    fn runs_that_are_the_same_differ_by_nothing() {
        let a = weighted(&[(-10.0, 5), (-30.0, 10), (-2.0, 1)]);
        assert_eq!(paired(Aggregation::BitsPerByte, &a, &a).unwrap().interval, [0.0, 0.0]);
        assert!(paired(Aggregation::F1, &a, &[MetricValue::None]).is_err());
    }

    /// What the interval of a mean is by the normal distribution, resampling finds, too.
    #[test]
    fn a_bootstrap_is_as_wide_as_the_normal_distribution_says() {
        let values = |shift: usize| -> Vec<MetricValue> {
            (0..400).map(|i| MetricValue::Number(((i * 7919 + shift * 104_729) % 1000) as f64 / 1000.0)).collect()
        };
        let (a, b) = (values(0), values(3));
        let want = paired(Aggregation::Mean, &a, &b).unwrap();
        let found = by_bootstrap(Aggregation::Mean, &a, &b).unwrap();
        assert_eq!(want.interval_by, IntervalBy::Normal);
        let width = want.interval[1] - want.interval[0];
        for (found, want) in found.interval.iter().zip(want.interval) {
            assert!((found - want).abs() < 0.1 * width, "{found} {want}");
        }
    }
}
