//! The rows of one epoch: the sequences of each row, in order. They are a pure function of the plan, the data set and
//! the epoch, so a resume needs no stored order.

use std::fmt;
use std::ops::Range;

use candlewick_text::quantity::{counted, grouped};
use serde::{Deserialize, Serialize};

use super::dataset::Dataset;
use super::mixture::mixed_units;
use super::order::{RngPurpose, identity, permutation, seeded_rng, uniform};
use super::pack;
use super::plan::{DataPlan, Mixture, Packing, RowOrder};

/// Rows, each a list of sequences.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct EpochRows {
    sequences: Vec<u32>,
    ends: Vec<usize>,
    /// A flag for each row: true if its sequences form one sequence. Empty if none do.
    fused: Vec<bool>,
}

/// The packing efficiency of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PackingStats {
    /// The number of rows.
    pub rows: usize,
    /// The number of sequences.
    pub sequences: usize,
    /// The number of tokens.
    pub tokens: u64,
    /// The number of tokens that fit into the rows.
    pub capacity: u64,
}

impl EpochRows {
    fn of(sequences: Vec<u32>, ends: Vec<usize>) -> Self {
        Self { sequences, ends, fused: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the sequences of all rows.
    pub(crate) fn sequences(&self) -> &[u32] {
        &self.sequences
    }

    /// Returns the sequences of one row.
    pub(crate) fn row(&self, row: usize) -> &[u32] {
        &self.sequences[self.span(row)]
    }

    pub(crate) fn is_fused(&self, row: usize) -> bool {
        self.fused.get(row).copied().unwrap_or(false)
    }

    fn span(&self, row: usize) -> Range<usize> {
        let start = if row == 0 { 0 } else { self.ends[row - 1] };
        start..self.ends[row]
    }

    fn push(&mut self, row: impl IntoIterator<Item = u32>) {
        self.sequences.extend(row);
        self.ends.push(self.sequences.len());
    }
}

/// Returns the rows of a training epoch.
pub(crate) fn epoch_rows(dataset: &Dataset, plan: &DataPlan, epoch: usize) -> EpochRows {
    let mut rows = EpochRows::default();
    for pass in 0.. {
        append_pass(&mut rows, dataset, plan, epoch, pass);
        if n_steps(rows.len(), plan) >= plan.min_iterations || rows.len() == 0 {
            break;
        }
    }
    fuse(&mut rows, plan, epoch);
    rows
}

/// Returns the rows of an evaluation, in the order of the data.
pub(crate) fn eval_rows(dataset: &Dataset, plan: &DataPlan) -> EpochRows {
    let plan = DataPlan { order: RowOrder::Sequential, mixture: Mixture::Concatenate, ..plan.clone() };
    let mut rows = EpochRows::default();
    append_pass(&mut rows, dataset, &plan, 0, 0);
    rows
}

/// Returns the number of steps of `n_rows` rows.
pub(crate) fn n_steps(n_rows: usize, plan: &DataPlan) -> usize {
    if plan.drop_last { n_rows / plan.rows_per_step() } else { n_rows.div_ceil(plan.rows_per_step()) }
}

/// Yields the number of tokens of each step, without padding and without end.
pub(crate) fn tokens_of_steps<'a>(dataset: &'a Dataset, plan: &'a DataPlan) -> impl Iterator<Item = u64> + 'a {
    (0..).flat_map(move |epoch| {
        let rows = epoch_rows(dataset, plan, if plan.overfit_first_batch { 0 } else { epoch });
        (0..n_steps(rows.len(), plan)).map(move |step| {
            let first = if plan.overfit_first_batch { 0 } else { step * plan.rows_per_step() };
            let sequences = (first..(first + plan.rows_per_step()).min(rows.len())).flat_map(|row| rows.row(row));
            sequences.map(|&i| dataset.length(i as usize) as u64).sum()
        })
    })
}

fn append_pass(rows: &mut EpochRows, dataset: &Dataset, plan: &DataPlan, epoch: usize, pass: usize) {
    let order = |purpose, n| match plan.order {
        RowOrder::Sequential => identity(n),
        RowOrder::Shuffle | RowOrder::LongestFirst => permutation(n, seeded_rng(plan.seed, purpose, epoch, pass)),
    };
    let length = |i: u32| dataset.length(i as usize);
    let mixed = mixed_units(dataset, plan, epoch, pass);
    let mut mixed_rows = None;
    let packed = match (plan.packing, dataset.fixed_rows()) {
        (_, Some(ends)) => {
            mixed_rows = mixed;
            EpochRows::of(identity(dataset.len()), ends.to_vec())
        }
        (Packing::Fit(strategy), None) => {
            let order = mixed.unwrap_or_else(|| order(RngPurpose::Samples, dataset.len()));
            let mut packed = EpochRows::default();
            let packer = pack::FitPacker { strategy, max_length: plan.max_length, window: pack::WINDOW };
            packer.pack(&order, length).for_each(|row| packed.push(row));
            packed
        }
        (_, None) => {
            mixed_rows = mixed;
            EpochRows::of(identity(dataset.len()), (1..=dataset.len()).collect())
        }
    };
    let mut row_order = mixed_rows.unwrap_or_else(|| order(RngPurpose::Rows, packed.len()));
    if plan.order == RowOrder::LongestFirst && (epoch, pass) == (0, 0) {
        let n_tokens = |row: u32| packed.row(row as usize).iter().map(|&i| length(i)).sum();
        longest_first(&mut row_order, plan.rows_per_step(), n_tokens);
    }
    row_order.iter().for_each(|&row| rows.push(packed.row(row as usize).iter().copied()));
}

/// Moves the `n` longest rows to the front. The other rows keep their order.
fn longest_first(rows: &mut Vec<u32>, n: usize, n_tokens: impl Fn(u32) -> usize) {
    let mut longest: Vec<usize> = (0..rows.len()).collect();
    longest.sort_by_key(|&i| std::cmp::Reverse(n_tokens(rows[i])));
    longest.truncate(n);
    let first: Vec<u32> = longest.iter().map(|&i| rows[i]).collect();
    longest.sort_unstable();
    let others = rows.iter().enumerate().filter(|(i, _)| longest.binary_search(i).is_err());
    *rows = first.iter().copied().chain(others.map(|(_, &row)| row)).collect();
}

fn fuse(rows: &mut EpochRows, plan: &DataPlan, epoch: usize) {
    if plan.packing == Packing::Off || plan.fuse_positions_prob == 0.0 {
        return;
    }
    let mut rng = seeded_rng(plan.seed, RngPurpose::Fuse, epoch, 0);
    rows.fused = (0..rows.len()).map(|_| uniform(&mut rng) < plan.fuse_positions_prob).collect();
}

impl PackingStats {
    pub(crate) fn of(rows: &EpochRows, dataset: &Dataset, max_length: usize) -> Self {
        Self {
            rows: rows.len(),
            sequences: rows.sequences.len(),
            tokens: rows.sequences.iter().map(|&i| dataset.length(i as usize) as u64).sum(),
            capacity: rows.len() as u64 * max_length as u64,
        }
    }

    /// Returns the fraction of the capacity that holds tokens.
    pub fn fraction_filled(&self) -> f64 {
        self.tokens as f64 / self.capacity.max(1) as f64
    }
}

impl fmt::Display for PackingStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, sequences, tokens, capacity } = self;
        let percent = 100.0 * self.fraction_filled();
        let (sequences, rows) = (counted(*sequences, "sequence"), counted(*rows, "row"));
        write!(f, "{sequences} in {rows}, {} of {} tokens ({percent:.1} % full)", grouped(*tokens), grouped(*capacity))
    }
}
