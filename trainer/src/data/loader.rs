//! The data loaders of training and evaluation. A training loader resumes at any step.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::DataError;
use super::batch::{Batch, GlobalBatch, collate};
use super::dataset::Dataset;
use super::mixture::{self, SourceCounts};
use super::plan::{DataPlan, Horizon, Mixture, Packing, PackingStrategy, SourcePlan};
use super::rows::{EpochRows, PackingStats, epoch_rows, eval_rows, n_steps, tokens_of_steps};
use super::token_count::TokenCount;
use super::token_stats::TrainedCounts;
use crate::step_fraction::rounded_up;

const MIXTURE: &str = "the mixture of sources";
const PACKING: &str = "packing";

/// The position of a run in its data: the complete state of a loader.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Cursor {
    /// The epoch.
    pub epoch: usize,
    /// The finished steps of this epoch.
    pub step_in_epoch: usize,
    /// All finished steps.
    pub step: usize,
    /// The chunk of a stream that has the next row, as an index into the order of its epoch.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub chunk: usize,
    /// The number of rows of this chunk that are done.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub row_in_chunk: usize,
    /// The token counts of the finished steps.
    pub seen: TrainedCounts,
    /// The sequences and tokens of the finished steps by source, if there are several.
    #[serde(default)]
    pub seen_by_source: Vec<TokenCount>,
    /// The settings that the order of the steps depends on. Empty at the start of a run.
    pub made_with: BTreeMap<String, String>,
}

/// The data loader of training.
#[derive(Debug)]
pub struct TrainLoader {
    dataset: Arc<Dataset>,
    plan: DataPlan,
    cursor: Cursor,
    rows: EpochRows,
    total_steps: usize,
    /// The steps of each whole epoch of the run, if they differ and are known; else empty.
    epoch_steps: Vec<usize>,
}

/// The length of a run.
struct Length {
    total_steps: usize,
    epoch_steps: Vec<usize>,
}

impl TrainLoader {
    /// Creates a loader that continues at `cursor`. The default cursor is the start of a run.
    pub fn new(dataset: Arc<Dataset>, plan: DataPlan, cursor: Cursor) -> Result<Self, DataError> {
        let made_with = made_with(dataset.identity(), &plan);
        check_unchanged(&cursor.made_with, &made_with, &plan)?;
        let rows = epoch_rows(&dataset, &plan, epoch_read(&plan, &cursor));
        let Length { total_steps, epoch_steps } = length(&dataset, &plan, &rows)?;
        let cursor = Cursor { made_with, ..cursor };
        Ok(Self { dataset, plan, cursor, rows, total_steps, epoch_steps })
    }

    /// Returns the next global batch; `None` at the horizon.
    pub fn next_step(&mut self) -> Option<GlobalBatch> {
        if self.cursor.step >= self.total_steps {
            return None;
        }
        let index = if self.plan.overfit_first_batch { 0 } else { self.cursor.step_in_epoch };
        let step = GlobalBatch::new(self.cursor.epoch, self.micro_batches(index));
        self.cursor.seen.count(&step);
        self.count_sources(&step);
        self.advance();
        Some(step)
    }

    /// Returns the position of the next step.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Counts the steps of the whole run, finished ones included.
    pub fn total_steps(&self) -> usize {
        self.total_steps
    }

    /// Returns the number of tokens of each step of the run, without padding.
    pub fn tokens_of_steps(&self) -> impl Iterator<Item = u64> + '_ {
        tokens_of_steps(&self.dataset, &self.plan).take(self.total_steps)
    }

    /// Counts the rows of the next step's epoch.
    pub fn rows_in_epoch(&self) -> usize {
        self.rows.len()
    }

    /// Counts the steps of the next step's epoch.
    pub fn steps_in_epoch(&self) -> usize {
        n_steps(self.rows.len(), &self.plan)
    }

    /// Returns the steps at which epochs end. With packing they are exact if the recipe sets `epochs`.
    pub fn epoch_ends(&self) -> Vec<usize> {
        let equal = self.steps_in_epoch();
        if self.epoch_steps.is_empty() {
            return (1..=self.total_steps / equal).map(|epoch| epoch * equal).collect();
        }
        let ends = self.epoch_steps.iter().scan(0, |end, steps| {
            *end += steps;
            Some(*end)
        });
        ends.collect()
    }

    /// Returns the packing efficiency of this epoch.
    pub fn packing_stats(&self) -> PackingStats {
        PackingStats::of(&self.rows, &self.dataset, self.plan.max_length)
    }

    /// Returns the data set.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// Returns the counts of each source, if there are several.
    pub fn counts_by_source(&self) -> Vec<SourceCounts> {
        mixture::compare(&self.dataset, &self.cursor.seen_by_source, &self.plan.sources)
    }

    fn count_sources(&mut self, step: &GlobalBatch) {
        if self.plan.sources.len() < 2 {
            return;
        }
        self.cursor.seen_by_source.resize(self.plan.sources.len(), TokenCount::default());
        for &sequence in step.micro_batches.iter().flat_map(|batch| &batch.samples) {
            let source = self.dataset.source_of(sequence);
            self.cursor.seen_by_source[source].add(self.dataset.length(sequence));
        }
    }

    fn micro_batches(&self, step_in_epoch: usize) -> Vec<Batch> {
        let plan = &self.plan;
        let start = step_in_epoch * plan.rows_per_step();
        let end = (start + plan.rows_per_step()).min(self.rows.len());
        (start..end)
            .step_by(plan.micro_batch_size)
            .map(|first| first..(first + plan.micro_batch_size).min(end))
            .map(|chosen| collate(&self.dataset, plan, &self.rows, chosen))
            .collect()
    }

    fn advance(&mut self) {
        self.cursor.step += 1;
        self.cursor.step_in_epoch += 1;
        if self.cursor.step_in_epoch < self.steps_in_epoch() {
            return;
        }
        if !self.plan.overfit_first_batch {
            self.count_left_over();
        }
        self.cursor.epoch += 1;
        self.cursor.step_in_epoch = 0;
        if self.cursor.step < self.total_steps && !self.plan.overfit_first_batch {
            self.rows = epoch_rows(&self.dataset, &self.plan, self.cursor.epoch);
        }
    }

    /// Counts the rows that `drop_last` drops.
    fn count_left_over(&mut self) {
        for row in self.steps_in_epoch() * self.plan.rows_per_step()..self.rows.len() {
            for &sequence in self.rows.row(row) {
                self.cursor.seen.left_over.add(self.dataset.length(sequence as usize));
            }
        }
    }
}

/// The data loader of an evaluation: every sequence once, in the order of the data. The last batch may be short.
#[derive(Debug)]
pub struct EvalLoader {
    dataset: Arc<Dataset>,
    plan: DataPlan,
    rows: EpochRows,
    next_row: usize,
}

impl EvalLoader {
    /// Creates a loader at the first sequence.
    pub fn new(dataset: Arc<Dataset>, plan: &DataPlan) -> Self {
        let rows = eval_rows(&dataset, plan);
        Self { dataset, plan: plan.clone(), rows, next_row: 0 }
    }

    /// Counts the batches.
    pub fn n_batches(&self) -> usize {
        self.rows.len().div_ceil(self.plan.micro_batch_size)
    }
}

impl Iterator for EvalLoader {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let start = self.next_row;
        self.next_row = (start + self.plan.micro_batch_size).min(self.rows.len());
        (start < self.next_row).then(|| collate(&self.dataset, &self.plan, &self.rows, start..self.next_row))
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

fn epoch_read(plan: &DataPlan, cursor: &Cursor) -> usize {
    if plan.overfit_first_batch { 0 } else { cursor.epoch }
}

fn length(dataset: &Dataset, plan: &DataPlan, rows: &EpochRows) -> Result<Length, DataError> {
    let in_epoch = n_steps(rows.len(), plan);
    if in_epoch == 0 {
        return Err(DataError::TooFew { rows: rows.len(), needed: plan.rows_per_step() });
    }
    let total_steps = match plan.horizon {
        Horizon::Steps(steps) => steps,
        Horizon::Tokens(tokens) => steps_until(dataset, plan, tokens as u64)?,
        Horizon::Epochs(epochs) if plan.epochs_vary() => {
            let steps_in = |epoch| n_steps(epoch_rows(dataset, plan, epoch).len(), plan);
            // The steps of the epochs that begin, then those of the fraction of the last.
            let mut epoch_steps: Vec<usize> = (0..epochs.ceil() as usize).map(steps_in).collect();
            let mut total_steps = epoch_steps.iter().sum();
            if let Some(&last) = epoch_steps.last().filter(|_| epochs.fract() > 0.0) {
                let in_last = steps_of_fraction(epochs, last);
                total_steps = total_steps - last + in_last;
                epoch_steps.pop_if(|_| in_last < last);
            }
            return Ok(Length { total_steps, epoch_steps });
        }
        Horizon::Epochs(epochs) => epochs.floor() as usize * in_epoch + steps_of_fraction(epochs, in_epoch),
    };
    Ok(Length { total_steps, epoch_steps: Vec::new() })
}

/// Returns the steps of the fraction of the last epoch, rounded up.
fn steps_of_fraction(epochs: f64, in_epoch: usize) -> usize {
    rounded_up(epochs.fract() * in_epoch as f64)
}

/// Returns the number of steps until they have `tokens` tokens.
fn steps_until(dataset: &Dataset, plan: &DataPlan, tokens: u64) -> Result<usize, DataError> {
    let mut sum = 0;
    for (of_step, n) in tokens_of_steps(dataset, plan).zip(1..) {
        sum += of_step;
        if sum >= tokens {
            return Ok(n);
        }
        if sum == 0 && n > dataset.len() {
            break;
        }
    }
    let problem = "the data have no tokens; check the sources".to_owned();
    Err(DataError::Plan { name: "train_tokens".to_owned(), problem })
}

/// The name of the number of rows of a step on all ranks, in checkpoints.
const ROWS_OF_STEP: &str = "rows a step";

/// Returns the settings that the order of the steps depends on. The number of micro-batches of a step may change.
pub(crate) fn made_with(data_identity: &str, plan: &DataPlan) -> BTreeMap<String, String> {
    let facts: [(&str, String); 13] = [
        (MIXTURE, plan.mixture.to_string()),
        ("the data", data_identity.to_owned()),
        ("train_eval_split", plan.eval_fraction.to_string()),
        ("max_length", plan.max_length.to_string()),
        (PACKING, packing_fact(plan.packing).to_owned()),
        ("fuse_positions_prob", plan.fuse_positions_prob.to_string()),
        ("overlong", format!("{:?}", plan.truncation)),
        ("drop_last", plan.drop_last.to_string()),
        ("order", format!("{:?}", plan.order)),
        (ROWS_OF_STEP, plan.rows_per_step().to_string()),
        ("min_iterations", plan.min_iterations.to_string()),
        ("overfit_first_batch", plan.overfit_first_batch.to_string()),
        ("seed", plan.seed.to_string()),
    ];
    let buffer_size = plan.streaming.map(|streaming| ("buffer_size", streaming.buffer_size.to_string()));
    let repeats = plan.repeat_to_pack_max_length.then(|| ("repeat_to_pack_max_length", "true".to_owned()));
    facts.into_iter().chain(buffer_size).chain(repeats).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Names the packing in a checkpoint. Versions before `data.packing_strategy` packed as `bfd`.
fn packing_fact(packing: Packing) -> &'static str {
    match packing {
        Packing::Off => "Off",
        Packing::Fit(PackingStrategy::Bfd) => "Fit",
        Packing::Fit(PackingStrategy::BestFit) => "BestFit",
        Packing::Exact => "Exact",
    }
}

/// Returns the recipe's keys for a packing that [`packing_fact`] named.
fn packing_keys(fact: &str) -> &str {
    match fact {
        "Off" => "pack_samples: false",
        "Fit" => "packing_strategy: bfd",
        "BestFit" => "packing_strategy: best_fit",
        "Exact" => "always_max_length: true",
        other => other,
    }
}

pub(crate) fn check_unchanged(
    then: &BTreeMap<String, String>,
    now: &BTreeMap<String, String>,
    plan: &DataPlan,
) -> Result<(), DataError> {
    let changed: Vec<String> = now
        .iter()
        .filter_map(|(name, value)| match then.get(name) {
            Some(old) if old != value && name == "the data" => Some(changed_sources(old, value, &plan.sources)),
            Some(old) if old != value && name == ROWS_OF_STEP => Some(changed_rows(old, plan)),
            Some(old) if old != value && name == PACKING => {
                Some(format!("data.{} before, data.{} now", packing_keys(old), packing_keys(value)))
            }
            Some(old) if old != value => Some(format!("{name} was {}, now {}", in_words(old), in_words(value))),
            // Checkpoints of earlier versions have no mixture.
            None if name == MIXTURE && !then.is_empty() && value != Mixture::DEFAULT => {
                Some(format!("{name} was {}, now {value}", Mixture::DEFAULT))
            }
            _ => None,
        })
        .collect();
    if changed.is_empty() { Ok(()) } else { Err(DataError::Changed { changed: changed.join("; ") }) }
}

/// Describes a changed number of rows of a step, with settings that restore it.
fn changed_rows(old: &str, plan: &DataPlan) -> String {
    let DataPlan { micro_batch_size, gradient_accumulation_steps: accumulation, data_ranks, .. } = *plan;
    let changed = format!(
        "{ROWS_OF_STEP} was {old}, now {} (micro_batch_size {micro_batch_size} x gradient_accumulation_steps {accumulation} x \
         data ranks {data_ranks})",
        plan.rows_per_step()
    );
    let Some(rows) = old.parse::<usize>().ok().filter(|rows| *rows > 0) else { return changed };
    let settings = |of_rank: usize| {
        let micro_batch = (1..=micro_batch_size).rev().find(|size| of_rank.is_multiple_of(*size)).unwrap_or(1);
        let steps = format!("gradient_accumulation_steps: {}", of_rank / micro_batch);
        if micro_batch == micro_batch_size { steps } else { format!("micro_batch_size: {micro_batch} and {steps}") }
    };
    if rows.is_multiple_of(data_ranks) {
        return format!("{changed}; set {}", settings(rows / data_ranks));
    }
    let most = (1..data_ranks).rev().find(|n| rows.is_multiple_of(*n)).unwrap_or(1);
    format!("{changed}; {rows} cannot be divided by {data_ranks}: use {most} data ranks with {}", settings(rows / most))
}

/// Returns a stored setting with the recipe's word for it. Cursors have the names of the program's types.
fn in_words(value: &str) -> String {
    match value {
        _ if !value.chars().all(char::is_alphabetic) => value.to_owned(),
        _ => {
            let letter = |(idx, c): (usize, char)| {
                let boundary = (idx > 0 && c.is_uppercase()).then_some('_');
                boundary.into_iter().chain(c.to_lowercase()).collect::<String>()
            };
            value.chars().enumerate().map(letter).collect()
        }
    }
}

/// Names the sources whose rows changed. `then` and `now` have a key for each source.
fn changed_sources(then: &str, now: &str, sources: &[SourcePlan]) -> String {
    let (then, now): (Vec<&str>, Vec<&str>) = (then.split(' ').collect(), now.split(' ').collect());
    if then.len() != now.len() {
        return format!("the data changed: {} sources before, {} now", then.len(), now.len());
    }
    let pairs = then.iter().zip(&now).zip(sources);
    let names = pairs.filter(|((then, now), _)| then != now).map(|(_, source)| source.name_or_path.as_str());
    format!("the data changed: {}", names.collect::<Vec<_>>().join(", "))
}
