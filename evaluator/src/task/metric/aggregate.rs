//! Aggregations of per-document metric values.

use super::bleu::BleuCounts;
use super::chrf::ChrfCounts;
use super::score::MetricValue;
use super::statistic::Statistic;

/// Aggregation of per-document metric values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aggregation {
    /// Arithmetic mean.
    Mean,
    /// Upper median.
    Median,
    /// Mean that skips NaN.
    NanMean,
    /// Perplexity: exp(-mean).
    Perplexity,
    /// Weighted perplexity: exp(-sum / sum of weights).
    WeightedPerplexity,
    /// Bits per byte: the negative sum over the sum of weights, divided by ln 2.
    BitsPerByte,
    /// F1 score of class 1.
    F1,
    /// Matthews' correlation coefficient.
    Matthews,
    /// Brier score.
    Brier,
    /// Corpus BLEU.
    Bleu,
    /// Corpus chrF.
    Chrf,
    /// Corpus chrF++.
    ChrfWords,
    /// Mean over the elements of all list values.
    FlatMean,
    /// lm-eval's `bypass`: always 999.
    Bypass,
}

const NAMES: [(&str, Aggregation); 13] = [
    ("mean", Aggregation::Mean),
    ("median", Aggregation::Median),
    ("nanmean", Aggregation::NanMean),
    ("perplexity", Aggregation::Perplexity),
    ("weighted_perplexity", Aggregation::WeightedPerplexity),
    ("bits_per_byte", Aggregation::BitsPerByte),
    ("f1", Aggregation::F1),
    ("matthews_corrcoef", Aggregation::Matthews),
    ("brier_score", Aggregation::Brier),
    ("bleu", Aggregation::Bleu),
    ("chrf", Aggregation::Chrf),
    ("chrf++", Aggregation::ChrfWords),
    ("bypass", Aggregation::Bypass),
];

impl Aggregation {
    /// Returns the names of all aggregations, as task files spell them.
    pub(super) fn names() -> [&'static str; NAMES.len()] {
        NAMES.map(|(name, _)| name)
    }

    /// Returns the aggregation that task files call `name`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|(_, aggregation)| *aggregation)
    }

    /// Returns the aggregate of `scores`.
    pub(crate) fn aggregate(self, scores: &[MetricValue]) -> Result<f64, String> {
        Ok(self.statistic(scores)?.compute(&mut (0..scores.len())))
    }

    /// Prepares the values for repeated aggregation. The error names a value of the wrong type.
    pub(crate) fn statistic(self, scores: &[MetricValue]) -> Result<Box<dyn Statistic>, String> {
        Ok(match self {
            Self::Mean => Box::new(Numbers(numbers(scores)?, |sum, n| sum / n)),
            Self::Perplexity => Box::new(Numbers(numbers(scores)?, |sum, n| (-(sum / n)).exp())),
            Self::NanMean => Box::new(NanMean(numbers(scores)?)),
            Self::Median => Box::new(Median(numbers(scores)?)),
            Self::WeightedPerplexity => Box::new(Weighted(pairs(scores)?, |sum, n| (-(sum / n)).exp())),
            Self::BitsPerByte => Box::new(Weighted(pairs(scores)?, |sum, n| -(sum / n) / 2f64.ln())),
            Self::F1 => Box::new(F1(classes(scores)?)),
            Self::Matthews => Box::new(Matthews::new(&classes(scores)?)),
            Self::Brier => Box::new(Numbers(brier(scores)?, |sum, n| sum / n)),
            Self::Bleu => Box::new(BleuCounts::new(&texts(scores)?)),
            Self::Chrf => Box::new(ChrfCounts::new(&texts(scores)?, 0)),
            Self::ChrfWords => Box::new(ChrfCounts::new(&texts(scores)?, 2)),
            Self::FlatMean => Box::new(FlatMean(parts(scores)?)),
            Self::Bypass => Box::new(Bypass),
        })
    }
}

struct Numbers(Vec<f64>, fn(f64, f64) -> f64);
struct NanMean(Vec<f64>);
struct Median(Vec<f64>);
struct Weighted(Vec<(f64, f64)>, fn(f64, f64) -> f64);
struct F1(Vec<(i64, i64)>);
struct FlatMean(Vec<(f64, f64)>);
struct Bypass;

impl Statistic for Numbers {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let (sum, n) = indices.fold((0.0, 0.0), |(sum, n), i| (sum + self.0[i], n + 1.0));
        (self.1)(sum, n)
    }
}

impl Statistic for NanMean {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let values = indices.map(|i| self.0[i]).filter(|value| !value.is_nan());
        let (sum, n) = values.fold((0.0, 0.0), |(sum, n), value| (sum + value, n + 1.0));
        sum / n
    }
}

impl Statistic for Median {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let mut values: Vec<f64> = indices.map(|i| self.0[i]).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

impl Statistic for Weighted {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let (sum, weight) = indices.fold((0.0, 0.0), |(sum, weight), i| (sum + self.0[i].0, weight + self.0[i].1));
        (self.1)(sum, weight)
    }
}

impl Statistic for F1 {
    /// Computes F1 of class 1: 2 tp / (2 tp + fp + fn), or 0 if the class is absent.
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let (mut right, mut either) = (0.0, 0.0);
        for (gold, guess) in indices.map(|i| self.0[i]) {
            right += if gold == 1 && guess == 1 { 2.0 } else { 0.0 };
            either += f64::from(u8::from(gold == 1)) + f64::from(u8::from(guess == 1));
        }
        if either == 0.0 { 0.0 } else { right / either }
    }
}

impl Statistic for FlatMean {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let (sum, n) = indices.fold((0.0, 0.0), |(sum, n), i| (sum + self.0[i].0, n + self.0[i].1));
        sum / n
    }
}

impl Statistic for Bypass {
    fn compute(&self, _: &mut dyn Iterator<Item = usize>) -> f64 {
        999.0
    }
}

/// Matthews correlation of gold and predicted class indices.
struct Matthews {
    values: Vec<(usize, usize)>,
    n_classes: usize,
}

impl Matthews {
    fn new(classes: &[(i64, i64)]) -> Self {
        let mut names: Vec<i64> = classes.iter().flat_map(|(gold, guess)| [*gold, *guess]).collect();
        names.sort_unstable();
        names.dedup();
        let number = |name: i64| names.binary_search(&name).unwrap_or(0);
        let values = classes.iter().map(|(gold, guess)| (number(*gold), number(*guess))).collect();
        Self { values, n_classes: names.len() }
    }
}

impl Statistic for Matthews {
    fn compute(&self, indices: &mut dyn Iterator<Item = usize>) -> f64 {
        let (mut golds, mut guesses) = (vec![0.0; self.n_classes], vec![0.0; self.n_classes]);
        let (mut right, mut n) = (0.0, 0.0);
        for (gold, guess) in indices.map(|i| self.values[i]) {
            golds[gold] += 1.0;
            guesses[guess] += 1.0;
            right += f64::from(u8::from(gold == guess));
            n += 1.0;
        }
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let both = right * n - dot(&golds, &guesses);
        let spread = (n * n - dot(&guesses, &guesses)) * (n * n - dot(&golds, &golds));
        if spread == 0.0 { 0.0 } else { both / spread.sqrt() }
    }
}

fn numbers(scores: &[MetricValue]) -> Result<Vec<f64>, String> {
    let number = |score: &MetricValue| score.number().ok_or_else(|| format!("{score:?} is not a number"));
    scores.iter().map(number).collect()
}

fn pairs(scores: &[MetricValue]) -> Result<Vec<(f64, f64)>, String> {
    let pair = |score: &MetricValue| {
        let (sum, weight) = score.as_pair()?;
        Some((sum.number()?, weight.number()?))
    };
    scores
        .iter()
        .map(|score| pair(score).ok_or_else(|| format!("{score:?} is not a pair of a number and a weight")))
        .collect()
}

fn classes(scores: &[MetricValue]) -> Result<Vec<(i64, i64)>, String> {
    let pair = |score: &MetricValue| {
        let (gold, guess) = score.as_pair()?;
        Some((gold.number()? as i64, guess.number()? as i64))
    };
    scores
        .iter()
        .map(|score| pair(score).ok_or_else(|| format!("{score:?} is not a pair of target class and predicted class")))
        .collect()
}

fn texts(scores: &[MetricValue]) -> Result<Vec<(&str, &str)>, String> {
    let pair = |score| {
        let (reference, text) = MetricValue::as_pair(score)?;
        Some((reference.as_text()?, text.as_text()?))
    };
    scores
        .iter()
        .map(|score| pair(score).ok_or_else(|| format!("{score:?} is not a pair of target and generated text")))
        .collect()
}

/// Returns sum and length of each list value.
fn parts(scores: &[MetricValue]) -> Result<Vec<(f64, f64)>, String> {
    let list = |score: &MetricValue| match score {
        MetricValue::List(items) => numbers(items).map(|parts| (parts.iter().sum(), parts.len() as f64)),
        other => Err(format!("{other:?} is not a list")),
    };
    scores.iter().map(list).collect()
}

/// Returns the squared error of each document's class probabilities, summed over the classes.
fn brier(scores: &[MetricValue]) -> Result<Vec<f64>, String> {
    let off = |score: &MetricValue| {
        let (gold, probabilities) = score.as_pair()?;
        let (gold, MetricValue::List(probabilities)) = (gold.number()?, probabilities) else { return None };
        let probabilities = numbers(probabilities).ok()?;
        let is_class = gold >= 0.0 && (gold as usize) < probabilities.len();
        let target = |i: usize| f64::from(u8::from(i == gold as usize));
        is_class.then(|| probabilities.iter().enumerate().map(|(i, p)| (p - target(i)).powi(2)).sum())
    };
    scores
        .iter()
        .map(|score| off(score).ok_or_else(|| format!("{score:?} is not a pair of a class and its probabilities")))
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(aggregation: Aggregation, values: &[f64]) -> f64 {
        aggregation.aggregate(&values.iter().map(|value| MetricValue::Number(*value)).collect::<Vec<_>>()).unwrap()
    }

    fn classes(pairs: &[(i64, i64)]) -> Vec<MetricValue> {
        pairs
            .iter()
            .map(|(gold, guess)| MetricValue::pair(MetricValue::Count(*gold), MetricValue::Count(*guess)))
            .collect()
    }

    #[test]
    fn the_median_is_the_upper_of_the_middle() {
        assert_eq!(of(Aggregation::Median, &[4.0, 1.0, 3.0, 2.0]), 3.0);
        assert_eq!(of(Aggregation::NanMean, &[1.0, f64::NAN, 2.0]), 1.5);
    }

    #[test]
    fn classes_that_are_never_guessed_correlate_with_nothing() {
        assert_eq!(Aggregation::Matthews.aggregate(&classes(&[(1, 0), (0, 0)])).unwrap(), 0.0);
        assert_eq!(Aggregation::Matthews.aggregate(&classes(&[(1, 1), (0, 0)])).unwrap(), 1.0);
        assert_eq!(Aggregation::F1.aggregate(&classes(&[(0, 0)])).unwrap(), 0.0);
        assert_eq!(Aggregation::F1.aggregate(&classes(&[(1, 1), (0, 1)])).unwrap(), 2.0 / 3.0);
    }

    #[test]
    fn values_of_the_wrong_type_are_an_error() {
        assert!(Aggregation::Mean.aggregate(&[MetricValue::Text("a".into())]).unwrap_err().contains("not a number"));
        assert!(Aggregation::Brier.aggregate(&classes(&[(1, 1)])).unwrap_err().contains("probabilities"));
    }
}
