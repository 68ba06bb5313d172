//! EpochRows of sequences become the flat arrays that a model computes on.

use super::dataset::Dataset;
use super::plan::{DataPlan, Padding};
use super::rows::EpochRows;

/// The target of a token that has nothing to predict.
pub const IGNORE_INDEX: i64 = -100;

/// One micro-batch: its sequences behind one another, without a batch dim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// The token ids.
    pub ids: Vec<u32>,
    /// For each token the one to predict after it, or [`IGNORE_INDEX`].
    pub targets: Vec<i64>,
    /// Where each token stands in its sequence.
    pub positions: Vec<u32>,
    /// Where sequences begin, and the end of the last: attention does not cross these.
    pub cu_seqlens: Vec<usize>,
    /// DatasetCounts the targets that are not ignored.
    pub n_targets: usize,
    /// DatasetCounts the tokens, padding left out.
    pub n_tokens: usize,
    /// The sequences' numbers in the [`Dataset`], for messages. Those of a fused row all count, so
    /// there may be more of them than spans in `cu_seqlens`.
    pub samples: Vec<usize>,
}

/// The micro-batches between two updates of the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GlobalBatch {
    /// The pass over the data it belongs to.
    pub epoch: usize,
    /// What all ranks compute: the first ones each rank's first, in the order of the ranks, and so on.
    pub micro_batches: Vec<Batch>,
    /// The targets of the whole step: what every sum of losses is divided by.
    pub n_targets: usize,
}

impl Batch {
    /// One token that teaches nothing: what a rank computes when the others have a micro-batch and it has none.
    pub fn filler() -> Self {
        Self {
            ids: vec![0],
            targets: vec![IGNORE_INDEX],
            positions: vec![0],
            cu_seqlens: vec![0, 1],
            ..Self::default()
        }
    }

    /// DatasetCounts the pad tokens.
    pub fn n_padding(&self) -> usize {
        self.ids.len() - self.n_tokens
    }

    /// The longest sequence, padding included.
    pub fn longest(&self) -> usize {
        self.cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
    }
}

impl GlobalBatch {
    pub(crate) fn new(epoch: usize, micro_batches: Vec<Batch>) -> Self {
        let n_targets = micro_batches.iter().map(|batch| batch.n_targets).sum();
        Self { epoch, micro_batches, n_targets }
    }

    /// How many micro-batches each rank computes, one after another.
    pub fn n_micros(&self, n_ranks: usize) -> usize {
        self.micro_batches.len().div_ceil(n_ranks)
    }

    /// The numbers of a rank's micro-batches among all. The last may be past their end: there is none left for this rank.
    pub fn of_rank(&self, (rank, n_ranks): (usize, usize)) -> impl Iterator<Item = usize> + use<> {
        (0..self.n_micros(n_ranks)).map(move |round| round * n_ranks + rank)
    }

    /// DatasetCounts the tokens, padding left out.
    pub fn n_tokens(&self) -> usize {
        self.micro_batches.iter().map(|batch| batch.n_tokens).sum()
    }
}

/// Puts some rows into one micro-batch.
pub(crate) fn collate(dataset: &Dataset, plan: &DataPlan, rows: &EpochRows, chosen: std::ops::Range<usize>) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    for row in chosen {
        let row_start = batch.ids.len();
        for &sequence in rows.row(row) {
            batch.push(dataset, sequence as usize);
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
    fn push(&mut self, dataset: &Dataset, sequence: usize) {
        let sample = dataset.get(sequence);
        self.ids.extend(sample.ids());
        let pairs = sample.ids().zip(sample.is_target()).skip(1);
        let targets = pairs.map(|(id, is_target)| if is_target { i64::from(id) } else { IGNORE_INDEX });
        self.targets.extend(targets);
        self.targets.extend((!sample.is_empty()).then_some(IGNORE_INDEX));
        self.n_targets += sample.n_targets();
        self.n_tokens += sample.len();
        self.samples.push(sequence);
    }

    /// Closes the sequence that began where the last one ended.
    fn end_sequence(&mut self) {
        let start = self.cu_seqlens.last().copied().unwrap_or(0);
        self.positions.extend(0..(self.ids.len() - start) as u32);
        self.cu_seqlens.push(self.ids.len());
    }

    /// Lengthens the last sequence: what comes after its tokens cannot change them.
    fn pad(&mut self, n_tokens: usize, pad_id: u32) {
        if n_tokens == 0 {
            return;
        }
        let length = self.ids.len() + n_tokens;
        let position = self.positions.last().map_or(0, |last| last + 1);
        self.ids.resize(length, pad_id);
        self.targets.resize(length, IGNORE_INDEX);
        self.positions.extend(position..position + n_tokens as u32);
        if let Some(end) = self.cu_seqlens.last_mut() {
            *end = length;
        }
    }
}

fn padded_length(n_tokens: usize, plan: &DataPlan) -> usize {
    let wanted = match plan.padding {
        Padding::Nothing => n_tokens,
        Padding::Multiple(multiple) => n_tokens.next_multiple_of(multiple).min(plan.max_length),
        Padding::MaxLength => plan.max_length,
    };
    wanted.max(n_tokens)
}
