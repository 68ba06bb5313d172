//! A summary of the prepared data: lengths, targets, and the fill of the first epoch's rows.

use std::fmt;

use candlewick_text::quantity::{counted, grouped};
use serde::Serialize;

use super::batch::padded_length;
use super::dataset::Dataset;
use super::mixture::{SourceCounts, count_epoch};
use super::plan::{DataPlan, Packing};
use super::rows::{EpochRows, PackingStats, epoch_rows};

/// The most bins of a histogram.
const BINS: usize = 12;
/// The columns of the longest bar.
const BAR: usize = 40;

/// The lengths, targets and rows of training data.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataReport {
    /// The lengths of all sequences.
    pub lengths: LengthHistogram,
    /// The fraction of the sequences' tokens that are targets.
    pub target_share: f64,
    /// The rows of the first epoch, compared with `max_length`.
    pub packing: PackingStats,
    /// The fraction of `max_length` that holds tokens, if samples are packed.
    pub packing_fill: Option<f64>,
    /// The pad tokens of the first epoch.
    pub padding: u64,
    /// The first epoch by source.
    pub sources: Vec<SourceCounts>,
    /// The sequences of the first epoch in their order.
    #[serde(skip)]
    pub order: Vec<usize>,
}

/// A histogram of lengths in tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LengthHistogram {
    /// The number of sequences.
    pub sequences: usize,
    /// The shortest.
    pub min: usize,
    /// The median.
    pub median: usize,
    /// The mean.
    pub mean: f64,
    /// The length that 95 % do not exceed.
    pub p95: usize,
    /// The longest.
    pub max: usize,
    /// The bins, shortest first.
    pub bins: Vec<LengthBin>,
}

/// A bin of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LengthBin {
    /// The shortest length of the bin.
    pub from: usize,
    /// The longest length of the bin.
    pub to: usize,
    /// The number of sequences.
    pub sequences: usize,
}

impl DataReport {
    /// Summarizes training data and the first epoch that `plan` makes of them.
    pub fn new(dataset: &Dataset, plan: &DataPlan) -> Self {
        let rows = epoch_rows(dataset, plan, 0);
        let n_targets: u64 = (0..dataset.len()).map(|index| dataset.get(index).n_targets() as u64).sum();
        let packing = PackingStats::of(&rows, dataset, plan.max_length);
        let order = (0..rows.len()).flat_map(|row| rows.row(row)).map(|&sequence| sequence as usize);
        Self {
            lengths: LengthHistogram::of((0..dataset.len()).map(|index| dataset.length(index)).collect()),
            target_share: n_targets as f64 / dataset.n_tokens().max(1) as f64,
            packing,
            packing_fill: (plan.packing != Packing::Off).then(|| packing.fraction_filled()),
            padding: padding(dataset, plan, &rows),
            sources: count_epoch(dataset, rows.sequences(), &plan.sources),
            order: order.collect(),
        }
    }
}

fn padding(dataset: &Dataset, plan: &DataPlan, rows: &EpochRows) -> u64 {
    let of_row = |row: usize| {
        let n_tokens = rows.row(row).iter().map(|&sequence| dataset.length(sequence as usize)).sum();
        (padded_length(n_tokens, plan) - n_tokens) as u64
    };
    (0..rows.len()).map(of_row).sum()
}

impl LengthHistogram {
    fn of(mut lengths: Vec<usize>) -> Self {
        lengths.sort_unstable();
        let n = lengths.len();
        let at = |fraction: f64| lengths.get(((n as f64 * fraction).ceil() as usize).saturating_sub(1)).copied();
        let max = lengths.last().copied().unwrap_or(0);
        let mut width = 1;
        while max.div_ceil(width) > BINS {
            width *= 2;
        }
        let bin = |idx: usize| {
            let (from, to) = (idx * width + 1, (idx + 1) * width);
            let below = |limit: usize| lengths.partition_point(|&length| length < limit);
            // Empty sequences count as the shortest.
            let first = if idx == 0 { 0 } else { below(from) };
            LengthBin { from, to, sequences: below(to + 1) - first }
        };
        Self {
            sequences: n,
            min: lengths.first().copied().unwrap_or(0),
            median: at(0.5).unwrap_or(0),
            mean: lengths.iter().sum::<usize>() as f64 / n.max(1) as f64,
            p95: at(0.95).unwrap_or(0),
            max,
            bins: (0..max.div_ceil(width)).map(bin).collect(),
        }
    }
}

impl fmt::Display for LengthHistogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sequences, min, median, mean, p95, max, bins } = self;
        write!(f, "lengths of {}: ", counted(*sequences, "sequence"))?;
        writeln!(f, "min {min}, median {median}, mean {mean:.1}, 95 % up to {p95}, max {max} tokens")?;
        let most = bins.iter().map(|bin| bin.sequences).max().unwrap_or(0).max(1);
        for LengthBin { from, to, sequences } in bins.iter().skip_while(|bin| bin.sequences == 0) {
            // A bin with few sequences has a bar, too.
            let bar = "█".repeat((sequences * BAR).div_ceil(most));
            let line = format!("{:>15} {:>9} {bar}", format!("{from}-{to}"), grouped(*sequences as u64));
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lengths, target_share, packing, packing_fill, padding, .. } = self;
        write!(f, "{lengths}")?;
        writeln!(f, "targets: {:.1} % of the tokens", 100.0 * target_share)?;
        if let Some(fill) = packing_fill {
            let (rows, verb) = (counted(packing.rows, "row"), if packing.rows == 1 { "is" } else { "are" });
            writeln!(f, "packing: {rows} {verb} {:.1} % full", 100.0 * fill)?;
        }
        if *padding > 0 {
            let share = 100.0 * *padding as f64 / (packing.tokens + padding) as f64;
            writeln!(f, "padding: {} tokens, {share:.1} % of the rows", grouped(*padding))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_has_equal_bins_up_to_the_longest() {
        let lengths = [3, 40, 17, 1, 16, 33, 40, 64];
        insta::assert_snapshot!(LengthHistogram::of(lengths.to_vec()), @r"
        lengths of 8 sequences: min 1, median 17, mean 26.8, 95 % up to 64, max 64 tokens
                    1-8         2 ███████████████████████████
                   9-16         1 ██████████████
                  17-24         1 ██████████████
                  25-32         0
                  33-40         3 ████████████████████████████████████████
                  41-48         0
                  49-56         0
                  57-64         1 ██████████████
        ");
        assert_eq!(LengthHistogram::of(Vec::new()).bins, []);
    }

    #[test]
    fn every_length_is_in_one_bin() {
        for max in [1, 2, 12, 13, 100, 4096, 5000] {
            let histogram = LengthHistogram::of((0..=max).collect());
            assert_eq!(histogram.bins.iter().map(|bin| bin.sequences).sum::<usize>(), max + 1);
            assert!(histogram.bins.len() <= BINS, "{max}");
        }
    }
}
