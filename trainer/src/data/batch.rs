//! Collation: rows of sequences to the flat arrays of a micro-batch.

use std::ops::Range;

use candlewick_parallel::LossNormalizer;

use super::dataset::Dataset;
use super::plan::{DataPlan, Padding};
use super::rows::EpochRows;

/// The target of a token without a loss, as in PyTorch.
pub const IGNORE_INDEX: i64 = -100;

/// One micro-batch: its sequences concatenated, without a batch dim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// The token ids.
    pub ids: Vec<u32>,
    /// The next token of each token, or [`IGNORE_INDEX`].
    pub targets: Vec<i64>,
    /// The position of each token in its sequence.
    pub positions: Vec<u32>,
    /// The cumulative sequence lengths: the start of each sequence and the end of the last. Attention stays within a
    /// sequence.
    pub cu_seqlens: Vec<usize>,
    /// The pad tokens: the end of each padded row.
    pub padding: Vec<Range<usize>>,
    /// The number of targets that are not ignored.
    pub n_targets: usize,
    /// The number of tokens without padding.
    pub n_tokens: usize,
    /// The indices of the sequences in the [`Dataset`], for messages; of their rows if the data are streamed. A fused row is
    /// one span of `cu_seqlens` and lists all its sequences here.
    pub samples: Vec<usize>,
}

/// The micro-batches of all ranks between two optimizer steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalBatch {
    /// The epoch.
    pub epoch: usize,
    /// The micro-batches of all ranks: the first of each rank in rank order, then the second of each rank, and so on.
    pub micro_batches: Vec<Batch>,
    /// The number of targets in the global batch.
    pub n_targets: usize,
}

impl Batch {
    /// Returns one token without a target. A rank computes it when the other ranks have a micro-batch and it has none.
    pub fn filler() -> Self {
        Self {
            ids: vec![0],
            targets: vec![IGNORE_INDEX],
            positions: vec![0],
            cu_seqlens: vec![0, 1],
            ..Self::default()
        }
    }

    /// Counts the pad tokens.
    pub fn n_padding(&self) -> usize {
        self.ids.len() - self.n_tokens
    }

    /// Counts the positions whose sequence has a target `depth` positions later: the targets of an MTP layer.
    pub fn n_targets_ahead(&self, depth: usize) -> usize {
        let sequences = self.cu_seqlens.windows(2).map(|ends| &self.targets[ends[0]..ends[1]]);
        sequences.flat_map(|targets| targets.iter().skip(depth)).filter(|target| **target != IGNORE_INDEX).count()
    }

    /// Returns the length of the longest sequence, padding included.
    pub fn longest(&self) -> usize {
        self.cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
    }
}

impl GlobalBatch {
    pub(crate) fn new(epoch: usize, micro_batches: Vec<Batch>) -> Self {
        let n_targets = micro_batches.iter().map(|batch| batch.n_targets).sum();
        Self { epoch, micro_batches, n_targets }
    }

    /// Counts the units of a loss's normalizer.
    pub fn count(&self, normalizer: LossNormalizer) -> usize {
        self.micro_batches.iter().map(|batch| normalizer.count(&batch.targets, &batch.cu_seqlens)).sum()
    }

    /// Returns the number of micro-batches that each rank computes.
    pub fn n_micros(&self, n_ranks: usize) -> usize {
        self.micro_batches.len().div_ceil(n_ranks)
    }

    /// Returns the indices of a rank's micro-batches. The last index may be past the end: then this rank has no
    /// micro-batch left.
    pub fn of_rank(&self, (rank, n_ranks): (usize, usize)) -> impl Iterator<Item = usize> + use<> {
        (0..self.n_micros(n_ranks)).map(move |round| round * n_ranks + rank)
    }

    /// Returns the most tokens, padding included, that any rank has in its first micro-batch, in its second, and so on. A
    /// rank without a micro-batch computes [`Batch::filler`].
    pub fn most_tokens(&self, n_ranks: usize) -> Vec<usize> {
        let most = |round: &[Batch]| round.iter().map(|batch| batch.ids.len()).fold(1, usize::max);
        self.micro_batches.chunks(n_ranks).map(most).collect()
    }

    /// Counts the tokens without padding.
    pub fn n_tokens(&self) -> usize {
        self.micro_batches.iter().map(|batch| batch.n_tokens).sum()
    }
}

/// A row of a data set to collate.
pub(crate) struct DatasetRow<'a> {
    pub(crate) dataset: &'a Dataset,
    pub(crate) rows: &'a EpochRows,
    pub(crate) row: usize,
    pub(crate) numbering: SampleNumbering,
}

/// The numbers of [`Batch::samples`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SampleNumbering {
    /// Indices of sequences in the data set.
    Sequences,
    /// Indices of rows in the source of the data set.
    SourceRows,
}

/// Collates some rows of a data set into one micro-batch.
pub(crate) fn collate(dataset: &Dataset, plan: &DataPlan, rows: &EpochRows, chosen: std::ops::Range<usize>) -> Batch {
    let numbering = SampleNumbering::Sequences;
    collate_rows(plan, chosen.map(|row| DatasetRow { dataset, rows, row, numbering }))
}

/// Collates rows into one micro-batch.
pub(crate) fn collate_rows<'a>(plan: &DataPlan, chosen: impl Iterator<Item = DatasetRow<'a>>) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    for DatasetRow { dataset, rows, row, numbering } in chosen {
        let row_start = batch.ids.len();
        for &sequence in rows.row(row) {
            batch.push(dataset, sequence as usize, numbering);
            if !rows.is_fused(row) {
                batch.end_sequence();
            }
        }
        if rows.is_fused(row) {
            batch.end_sequence();
        }
        let n_tokens = batch.ids.len() - row_start;
        batch.pad(padded_length(n_tokens, plan) - n_tokens, dataset.pad_id());
    }
    batch
}

impl Batch {
    fn push(&mut self, dataset: &Dataset, sequence: usize, numbering: SampleNumbering) {
        let sample = dataset.get(sequence);
        self.ids.extend(sample.ids());
        let pairs = sample.ids().zip(sample.target_mask()).skip(1);
        let targets = pairs.map(|(id, is_target)| if is_target { i64::from(id) } else { IGNORE_INDEX });
        self.targets.extend(targets);
        self.targets.extend((!sample.is_empty()).then_some(IGNORE_INDEX));
        self.n_targets += sample.n_targets();
        self.n_tokens += sample.len();
        self.samples.push(match numbering {
            SampleNumbering::Sequences => sequence,
            SampleNumbering::SourceRows => dataset.source_row(sequence),
        });
    }

    /// Closes the current sequence: appends its positions and its end.
    fn end_sequence(&mut self) {
        let start = self.cu_seqlens.last().copied().unwrap_or(0);
        self.positions.extend(0..(self.ids.len() - start) as u32);
        self.cu_seqlens.push(self.ids.len());
    }

    /// Appends pad tokens to the last sequence. Causal attention keeps them from changing earlier tokens.
    fn pad(&mut self, n_tokens: usize, pad_id: u32) {
        if n_tokens == 0 {
            return;
        }
        let length = self.ids.len() + n_tokens;
        self.padding.push(self.ids.len()..length);
        let position = self.positions.last().map_or(0, |last| last + 1);
        self.ids.resize(length, pad_id);
        self.targets.resize(length, IGNORE_INDEX);
        self.positions.extend(position..position + n_tokens as u32);
        if let Some(end) = self.cu_seqlens.last_mut() {
            *end = length;
        }
    }
}

pub(crate) fn padded_length(n_tokens: usize, plan: &DataPlan) -> usize {
    let wanted = match plan.padding {
        Padding::Nothing => n_tokens,
        Padding::Multiple(multiple) => n_tokens.next_multiple_of(multiple).min(plan.max_length),
        Padding::MaxLength => plan.max_length,
    };
    wanted.max(n_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_of_micro_batches_has_the_most_tokens_of_any_rank() {
        let of = |n_tokens: usize| Batch { ids: vec![0; n_tokens], ..Batch::default() };
        let step = GlobalBatch::new(0, [3, 5, 4, 0, 2].map(of).to_vec());
        assert_eq!(step.most_tokens(2), [5, 4, 2]);
        assert_eq!(step.most_tokens(1), [3, 5, 4, 1, 2]);
        assert_eq!(step.most_tokens(8), [5]);
    }

    #[test]
    fn targets_ahead_stay_in_their_sequence() {
        let targets = vec![1, 2, IGNORE_INDEX, 3, IGNORE_INDEX, 4, 5, 6, 7, IGNORE_INDEX];
        let batch = Batch { targets, cu_seqlens: vec![0, 3, 3, 5, 10], ..Batch::default() };
        assert_eq!([0, 1, 2, 3, 4, 9].map(|depth| batch.n_targets_ahead(depth)), [7, 4, 2, 1, 0, 0]);
    }
}
