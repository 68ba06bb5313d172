//! Standard errors: of means, by bootstrap with lm-eval's random stream, and of groups.

use rayon::prelude::*;

use super::aggregate::Aggregation;
use super::score::MetricValue;
use crate::task::python_random::PythonRandom;

/// Bootstrap resamples drawn from one random generator.
const CHUNK: usize = 1000;
/// Maximum bootstrap resamples of a corpus metric (BLEU, chrF).
const MOST_FOR_TEXTS: usize = 100;

/// Returns the standard error of `aggregation` over `scores`; `None` where lm-eval prints "N/A".
pub(crate) fn stderr(
    aggregation: Aggregation,
    scores: &[MetricValue],
    n_resamples: usize,
) -> Result<Option<f64>, String> {
    use Aggregation as A;
    if n_resamples == 0 || scores.len() < 2 {
        return Ok(None);
    }
    let n_resamples = match aggregation {
        A::Mean => return Ok(Some(of_mean(scores)?)),
        A::Bleu | A::Chrf | A::ChrfWords => n_resamples.min(MOST_FOR_TEXTS),
        A::Median | A::Matthews | A::F1 | A::Perplexity | A::NanMean => n_resamples,
        A::WeightedPerplexity | A::BitsPerByte | A::Brier | A::FlatMean | A::Bypass => return Ok(None),
    };
    bootstrap(aggregation, scores, n_resamples).map(Some)
}

fn of_mean(scores: &[MetricValue]) -> Result<f64, String> {
    let numbers: Option<Vec<f64>> = scores.iter().map(MetricValue::number).collect();
    let numbers = numbers.ok_or("a value is not a number")?;
    Ok(deviation(&numbers) / (numbers.len() as f64).sqrt())
}

/// Returns the sample standard deviation.
fn deviation(numbers: &[f64]) -> f64 {
    let n = numbers.len() as f64;
    let mean = numbers.iter().sum::<f64>() / n;
    (numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt()
}

/// Returns the standard deviation over bootstrap resamples. Chunk i is seeded with i, so the result is independent of the thread count.
fn bootstrap(aggregation: Aggregation, scores: &[MetricValue], n_resamples: usize) -> Result<f64, String> {
    let statistic = aggregation.statistic(scores)?;
    let (chunk, n) = (n_resamples.min(CHUNK), scores.len());
    let resample = |random: &mut PythonRandom| statistic.over(&mut (0..n).map(|_| random.choice(n)));
    let draw = |seed: usize| {
        let mut random = PythonRandom::new(seed as u64);
        (0..chunk).map(|_| resample(&mut random)).collect::<Vec<f64>>()
    };
    let drawn: Vec<Vec<f64>> = (0..n_resamples / chunk).into_par_iter().map(draw).collect();
    Ok(deviation(&drawn.concat()))
}

/// Returns the pooled standard error of a mean weighted by task sizes.
pub(crate) fn pooled(stderrs: &[f64], sizes: &[usize]) -> f64 {
    let term = |(stderr, size): (&f64, &usize)| (*size as f64 - 1.0) * stderr.powi(2) * *size as f64;
    let (sum, n): (f64, usize) = (stderrs.iter().zip(sizes).map(term).sum(), sizes.iter().sum());
    (sum / (n as f64 - sizes.len() as f64) / n as f64).sqrt()
}

/// Returns the standard error of an unweighted mean over tasks.
pub(crate) fn unweighted(stderrs: &[f64]) -> f64 {
    stderrs.iter().map(|stderr| stderr.powi(2)).sum::<f64>().sqrt() / stderrs.len() as f64
}
