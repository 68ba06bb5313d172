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

/// A source of a run's steps: tokenized data, a stream, or rows that the run itself makes.
pub trait StepSource: std::fmt::Debug {
    /// Returns the next step, and moves `cursor` after it; `None` at the end. All ranks call it, and `exchange` gathers their
    /// parts.
    fn next_step(&mut self, cursor: &mut Cursor, exchange: PartExchange<'_>) -> anyhow::Result<Option<GlobalBatch>>;

    /// Returns the file and row of a sample of a batch.
    fn locate(&self, sample: usize) -> String;

    /// Returns the size of an epoch; `None` if it is not known.
    fn epoch_size(&self) -> Option<EpochSize> {
        None
    }

    /// Returns the steps at which epochs end; empty if they are not known.
    fn epoch_ends(&self) -> &[usize] {
        &[]
    }

    /// Counts the rows that are read while training, if any.
    fn n_streamed_rows(&self) -> Option<usize> {
        None
    }

    /// Returns the number of tokens of each step, without padding; empty if they are not known. The plan then refuses a schedule
    /// in tokens.
    fn tokens_of_steps(&self) -> Box<dyn Iterator<Item = u64> + '_> {
        Box::new(std::iter::empty())
    }

    /// Returns the counts of each source of data at `cursor`; empty if there is one, or if they are not known.
    fn counts_by_source(&self, _cursor: &Cursor) -> Vec<SourceCounts> {
        Vec::new()
    }
}

/// The steps of a run. Its cursor is the position after the last returned step, whatever is prefetched.
#[derive(Debug)]
pub struct TrainSteps {
    cursor: Cursor,
    total_steps: usize,
    source: Box<dyn StepSource>,
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

/// Steps of tokenized data.
#[derive(Debug)]
struct TokenizedSteps {
    dataset: Arc<Dataset>,
    plan: DataPlan,
    epoch_size: EpochSize,
    epoch_ends: Vec<usize>,
    loader: StepLoader,
}

/// Loading of tokenized steps.
#[derive(Debug)]
enum StepLoader {
    /// Loading on demand.
    Direct(Box<TrainLoader>),
    /// Loading ahead, on a thread.
    Prefetched(Prefetcher<(GlobalBatch, Cursor)>),
}

impl TokenizedSteps {
    fn new(dataset: Arc<Dataset>, plan: &DataPlan, mut loader: TrainLoader) -> Result<Self, DataError> {
        let samples = loader.packing_stats().sequences;
        let epoch_size = EpochSize { rows: loader.rows_in_epoch(), steps: loader.steps_in_epoch(), samples };
        let epoch_ends = loader.epoch_ends();
        let loader = match plan.dl_num_workers {
            0 => StepLoader::Direct(Box::new(loader)),
            n => StepLoader::Prefetched(Prefetcher::start(2 * n, move |_| {
                let step = loader.next_step()?;
                Some((step, loader.cursor().clone()))
            })?),
        };
        Ok(Self { dataset, plan: plan.clone(), epoch_size, epoch_ends, loader })
    }
}

impl StepSource for TokenizedSteps {
    fn next_step(&mut self, cursor: &mut Cursor, _: PartExchange<'_>) -> anyhow::Result<Option<GlobalBatch>> {
        let next = match &mut self.loader {
            StepLoader::Direct(loader) => loader.next_step().map(|step| (step, loader.cursor().clone())),
            StepLoader::Prefetched(steps) => steps.next(),
        };
        Ok(next.map(|(step, after)| {
            *cursor = after;
            step
        }))
    }

    fn locate(&self, sample: usize) -> String {
        self.dataset.locate(sample)
    }

    fn epoch_size(&self) -> Option<EpochSize> {
        Some(self.epoch_size)
    }

    fn epoch_ends(&self) -> &[usize] {
        &self.epoch_ends
    }

    fn tokens_of_steps(&self) -> Box<dyn Iterator<Item = u64> + '_> {
        Box::new(tokens_of_steps(&self.dataset, &self.plan))
    }

    fn counts_by_source(&self, cursor: &Cursor) -> Vec<SourceCounts> {
        mixture::compare(&self.dataset, &cursor.seen_by_source, &self.plan.sources)
    }
}

impl StepSource for StreamLoader {
    fn next_step(&mut self, cursor: &mut Cursor, exchange: PartExchange<'_>) -> anyhow::Result<Option<GlobalBatch>> {
        self.load(cursor, exchange).map(Some)
    }

    fn locate(&self, sample: usize) -> String {
        self.data().locate(sample)
    }

    fn n_streamed_rows(&self) -> Option<usize> {
        Some(self.data().len())
    }
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
            Some(data) => Self::streamed(data, plan, cursor, reader),
            None => Self::tokenized(&prepared.train, plan, cursor),
        }
    }

    fn tokenized(dataset: &Arc<Dataset>, plan: &DataPlan, cursor: Cursor) -> Result<Self, DataError> {
        let loader = TrainLoader::new(dataset.clone(), plan.clone(), cursor)?;
        let (cursor, total_steps) = (loader.cursor().clone(), loader.total_steps());
        Ok(Self::of(Box::new(TokenizedSteps::new(dataset.clone(), plan, loader)?), cursor, total_steps))
    }

    fn streamed(
        data: &Arc<StreamedData>,
        plan: &DataPlan,
        cursor: Cursor,
        reader: ReaderShard,
    ) -> Result<Self, DataError> {
        let made_with = made_with(&data.identity, plan);
        check_unchanged(&cursor.made_with, &made_with, plan)?;
        let cursor = Cursor { made_with, ..cursor };
        let source = StreamLoader::new(data.clone(), reader, &cursor)?;
        Ok(Self::of(Box::new(source), cursor, streamed_steps(plan)))
    }

    /// Creates the steps of a source that continues at `cursor`, up to `total_steps` from the start of the run.
    pub fn of(source: Box<dyn StepSource>, cursor: Cursor, total_steps: usize) -> Self {
        Self { cursor, total_steps, source }
    }

    /// Returns the next global batch; `None` at the horizon. `exchange` gathers the ranks' parts of a stream's chunk;
    /// all ranks call this.
    pub fn next_step(&mut self, exchange: PartExchange<'_>) -> anyhow::Result<Option<GlobalBatch>> {
        match self.cursor.step >= self.total_steps {
            true => Ok(None),
            false => self.source.next_step(&mut self.cursor, exchange),
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
        self.source.epoch_size()
    }

    /// Returns the steps at which epochs end: [`TrainLoader::epoch_ends`]. Empty if rows are streamed.
    pub fn epoch_ends(&self) -> &[usize] {
        self.source.epoch_ends()
    }

    /// Counts the rows of the source, if they are streamed.
    pub fn n_streamed_rows(&self) -> Option<usize> {
        self.source.n_streamed_rows()
    }

    /// Returns the number of tokens of each step of the run, without padding. Empty if rows are streamed: the plan refuses a
    /// schedule in tokens.
    pub fn tokens_of_steps(&self) -> Box<dyn Iterator<Item = u64> + '_> {
        Box::new(self.source.tokens_of_steps().take(self.total_steps))
    }

    /// Returns the counts of each source, if there are several. Empty if rows are streamed: their number of tokens is unknown.
    pub fn counts_by_source(&self) -> Vec<SourceCounts> {
        self.source.counts_by_source(&self.cursor)
    }

    /// Returns the file and row of a sample of a batch.
    pub fn locate(&self, sample: usize) -> String {
        self.source.locate(sample)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::batch::Batch;
    use super::*;

    /// Steps whose batch has the number of the step as its token.
    #[derive(Debug)]
    struct Counting;

    impl StepSource for Counting {
        fn next_step(&mut self, cursor: &mut Cursor, _: PartExchange<'_>) -> anyhow::Result<Option<GlobalBatch>> {
            cursor.step += 1;
            let batch = Batch { ids: vec![cursor.step as u32], ..Batch::filler() };
            Ok(Some(GlobalBatch::new(cursor.epoch, vec![batch])))
        }

        fn locate(&self, sample: usize) -> String {
            format!("step {sample}")
        }
    }

    #[test]
    fn any_source_ends_at_the_horizon_and_resumes_at_its_cursor() {
        let ids = |steps: &mut TrainSteps| {
            let next = steps.next_step(&|_| anyhow::bail!("no part is exchanged")).unwrap();
            next.map(|step| step.micro_batches[0].ids[0])
        };
        let mut steps = TrainSteps::of(Box::new(Counting), Cursor::default(), 3);
        assert_eq!((ids(&mut steps), ids(&mut steps)), (Some(1), Some(2)));
        let mut resumed = TrainSteps::of(Box::new(Counting), steps.cursor().clone(), 3);
        assert_eq!((ids(&mut resumed), ids(&mut resumed)), (Some(3), None));
        assert_eq!((resumed.locate(7).as_str(), resumed.epoch_size(), resumed.epoch_ends().len()), ("step 7", None, 0));
    }
}
