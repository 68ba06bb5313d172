//! The steps of a training run: from tokenized data or from a stream, with or without prefetching.

use std::sync::Arc;

use candlewick_text::source::RowSource;

use super::DataError;
use super::batch::GlobalBatch;
use super::dataset::Dataset;
use super::loader::{Cursor, TrainLoader, check_unchanged, made_with};
use super::mixture::{self, SourceCounts};
use super::plan::{DataPlan, Horizon};
use super::prefetch::Prefetcher;
use super::prepare::PreparedData;
use super::rows::tokens_of_steps;
use super::stream::{ReaderShard, StreamedData};
use super::stream_loader::{PartExchange, StreamLoader};
use crate::step_fraction::RunLength;

/// The steps of a run. Its cursor is the position after the last returned step, whatever is prefetched.
#[derive(Debug)]
pub struct TrainSteps {
    plan: DataPlan,
    cursor: Cursor,
    total_steps: usize,
    epoch_size: Option<EpochSize>,
    epoch_ends: Vec<usize>,
    samples: SampleLocations,
    source: StepSource,
}

/// The size of the epoch of the next step, at the start. Packing makes other epochs a little larger or smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EpochSize {
    /// The number of rows.
    pub rows: usize,
    /// The number of steps.
    pub steps: usize,
    /// The number of samples.
    pub samples: usize,
}

impl PreparedData {
    /// Counts the steps of the run from its start.
    pub fn run_length(&self, plan: &DataPlan) -> Result<RunLength, DataError> {
        if self.streamed.is_some() {
            return Ok(RunLength { total_steps: streamed_steps(plan), epoch_steps: 0 });
        }
        let loader = TrainLoader::new(self.train.clone(), plan.clone(), Cursor::default())?;
        Ok(RunLength { total_steps: loader.total_steps(), epoch_steps: loader.steps_in_epoch() })
    }
}

/// Returns the steps of a run that streams its data.
fn streamed_steps(plan: &DataPlan) -> usize {
    match plan.horizon {
        Horizon::Steps(steps) => steps,
        // The plan refuses a stream without `train_iters`.
        Horizon::Epochs(_) | Horizon::Tokens(_) => 0,
    }
}

/// The files and lines of samples, for messages.
#[derive(Debug, Clone)]
enum SampleLocations {
    Tokenized(Arc<Dataset>),
    Streamed(Arc<StreamedData>),
}

#[derive(Debug)]
enum StepSource {
    Direct(Box<TrainLoader>),
    Prefetched(Prefetcher<(GlobalBatch, Cursor)>),
    Streamed(Box<StreamLoader>),
}

impl TrainSteps {
    /// Creates the steps of a run that continues at `cursor`. `reader` is this rank among those that read a stream.
    pub fn new(
        prepared: &PreparedData,
        plan: &DataPlan,
        cursor: Cursor,
        reader: ReaderShard,
    ) -> Result<Self, DataError> {
        match &prepared.streamed {
            Some(data) => Self::streamed(data.clone(), plan, cursor, reader),
            None => Self::tokenized(prepared.train.clone(), plan, cursor),
        }
    }

    fn tokenized(dataset: Arc<Dataset>, plan: &DataPlan, cursor: Cursor) -> Result<Self, DataError> {
        let mut loader = TrainLoader::new(dataset.clone(), plan.clone(), cursor)?;
        let (cursor, total_steps) = (loader.cursor().clone(), loader.total_steps());
        let samples = loader.packing_stats().sequences;
        let epoch_size = Some(EpochSize { rows: loader.rows_in_epoch(), steps: loader.steps_in_epoch(), samples });
        let epoch_ends = loader.epoch_ends();
        let source = match plan.dl_num_workers {
            0 => StepSource::Direct(Box::new(loader)),
            n => StepSource::Prefetched(Prefetcher::start(2 * n, move |_| {
                let step = loader.next_step()?;
                Some((step, loader.cursor().clone()))
            })?),
        };
        let samples = SampleLocations::Tokenized(dataset);
        Ok(Self { plan: plan.clone(), cursor, total_steps, epoch_size, epoch_ends, samples, source })
    }

    fn streamed(
        data: Arc<StreamedData>,
        plan: &DataPlan,
        cursor: Cursor,
        reader: ReaderShard,
    ) -> Result<Self, DataError> {
        let made_with = made_with(&data.identity, plan);
        check_unchanged(&cursor.made_with, &made_with, plan)?;
        let cursor = Cursor { made_with, ..cursor };
        let total_steps = streamed_steps(plan);
        let source = StepSource::Streamed(Box::new(StreamLoader::new(data.clone(), reader, &cursor)?));
        let samples = SampleLocations::Streamed(data);
        Ok(Self { plan: plan.clone(), cursor, total_steps, epoch_size: None, epoch_ends: Vec::new(), samples, source })
    }

    /// Returns the next global batch; `None` at the horizon. `exchange` gathers the ranks' parts of a stream's chunk;
    /// all ranks call this.
    pub fn next_step<E: From<DataError>>(&mut self, exchange: PartExchange<'_, E>) -> Result<Option<GlobalBatch>, E> {
        if self.cursor.step >= self.total_steps {
            return Ok(None);
        }
        match &mut self.source {
            StepSource::Direct(loader) => {
                let step = loader.next_step();
                self.cursor = loader.cursor().clone();
                Ok(step)
            }
            StepSource::Prefetched(steps) => Ok(steps.next().map(|(step, cursor)| {
                self.cursor = cursor;
                step
            })),
            StepSource::Streamed(loader) => loader.next_step(&mut self.cursor, exchange).map(Some),
        }
    }

    /// Returns the position of the next step.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Counts the steps of the whole run, finished ones included.
    pub fn total_steps(&self) -> usize {
        self.total_steps
    }

    /// Returns the size of an epoch; `None` if rows are streamed.
    pub fn epoch_size(&self) -> Option<EpochSize> {
        self.epoch_size
    }

    /// Returns the steps at which epochs end: [`TrainLoader::epoch_ends`]. Empty if rows are streamed.
    pub fn epoch_ends(&self) -> &[usize] {
        &self.epoch_ends
    }

    /// Counts the rows of the source, if they are streamed.
    pub fn n_streamed_rows(&self) -> Option<usize> {
        match &self.samples {
            SampleLocations::Streamed(data) => Some(data.len()),
            SampleLocations::Tokenized(_) => None,
        }
    }

    /// Returns the number of tokens of each step of the run, without padding. Empty if rows are streamed: the plan refuses a
    /// schedule in tokens.
    pub fn tokens_of_steps(&self) -> Box<dyn Iterator<Item = u64> + '_> {
        match &self.samples {
            SampleLocations::Tokenized(dataset) => {
                Box::new(tokens_of_steps(dataset, &self.plan).take(self.total_steps))
            }
            SampleLocations::Streamed(_) => Box::new(std::iter::empty()),
        }
    }

    /// Returns the counts of each source, if there are several. Empty if rows are streamed: their number of tokens is unknown.
    pub fn counts_by_source(&self) -> Vec<SourceCounts> {
        match &self.samples {
            SampleLocations::Tokenized(dataset) => {
                mixture::compare(dataset, &self.cursor.seen_by_source, &self.plan.sources)
            }
            SampleLocations::Streamed(_) => Vec::new(),
        }
    }

    /// Returns the file and row of a sample of a batch.
    pub fn locate(&self, sample: usize) -> String {
        match &self.samples {
            SampleLocations::Tokenized(dataset) => dataset.locate(sample),
            SampleLocations::Streamed(data) => data.locate(sample),
        }
    }
}
