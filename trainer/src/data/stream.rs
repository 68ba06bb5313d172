//! Streaming: rows that are read and tokenized while training, in chunks of `buffer_size` rows.
//!
//! A chunk is a range of consecutive rows. Its packing and its orders depend on the seed, the epoch and its index, so a
//! resumed run tokenizes only the chunk in which it stopped. Each rank tokenizes a part of every chunk.

use std::ops::Range;
use std::sync::Arc;

use candlewick_runtime::progress::WorkProgress;
use candlewick_text::format::RowFormat;
use candlewick_text::render::RenderOptions;
use candlewick_text::source::{Row, RowSource, SourceError};
use candlewick_text::template::ChatTemplate;
use candlewick_text::tokenizer::Tokenizer;
use rand_chacha::rand_core::RngCore;

use super::DataError;
use super::cache::FillStatus;
use super::dataset::{Dataset, TokenizedSource};
use super::order::{RngPurpose, identity, permutation, seeded_rng};
use super::plan::{DataPlan, RowOrder};
use super::render::{ChosenRows, Renderer, threads};
use super::rows::{EpochRows, epoch_rows};
use super::token_store::{TokenStore, encode_sample};
use super::truncation::apply_truncation;
use super::warnings::SampleWarningReport;

/// The training data of a run that streams them.
pub struct StreamedData {
    pub(crate) plan: DataPlan,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) sources: Vec<StreamedSource>,
    /// The digests of the sources' settings. Their rows are not hashed.
    pub(crate) identity: String,
}

/// One source of a stream.
pub(crate) struct StreamedSource {
    pub(crate) rows: Arc<dyn RowSource>,
    pub(crate) format: RowFormat,
    /// The sampled rows; `None` if all are used.
    pub(crate) chosen: Option<Vec<u32>>,
    pub(crate) options: RenderOptions,
}

/// The ranks that share the tokenization of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReaderShard {
    /// This rank.
    pub rank: usize,
    /// The number of ranks.
    pub n_ranks: usize,
}

/// A chunk after tokenization: its sequences, and its rows in the order of training.
pub(crate) struct StreamChunk {
    pub(crate) index: usize,
    pub(crate) dataset: Dataset,
    pub(crate) rows: EpochRows,
}

impl StreamedSource {
    fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.rows.len(), Vec::len)
    }

    /// Returns the row of a position.
    fn row_at(&self, position: usize) -> usize {
        self.chosen.as_ref().map_or(position, |chosen| chosen[position] as usize)
    }
}

impl StreamedData {
    /// Counts the chunks of an epoch.
    pub(crate) fn n_chunks(&self) -> usize {
        self.len().div_ceil(self.buffer_size())
    }

    /// Returns the order of an epoch's chunks.
    pub(crate) fn chunk_order(&self, epoch: usize) -> Vec<u32> {
        match self.plan.order {
            RowOrder::Sequential => identity(self.n_chunks()),
            RowOrder::Shuffle | RowOrder::LongestFirst => {
                permutation(self.n_chunks(), seeded_rng(self.plan.seed, RngPurpose::Chunks, epoch, 0))
            }
        }
    }

    fn buffer_size(&self) -> usize {
        self.plan.streaming.map_or(1, |streaming| streaming.buffer_size)
    }

    fn chunk_rows(&self, chunk: usize) -> Range<usize> {
        let start = chunk * self.buffer_size();
        start..(start + self.buffer_size()).min(self.len())
    }

    /// Reads and tokenizes one rank's part of a chunk, and encodes its samples.
    pub(crate) fn tokenize_part(
        &self,
        chunk: usize,
        reader: ReaderShard,
        is_stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<u8>, DataError> {
        let rows = self.chunk_rows(chunk);
        let bound = |rank: usize| rows.start + rows.len() * rank / reader.n_ranks;
        self.tokenize(bound(reader.rank)..bound(reader.rank + 1), is_stopped)
    }

    /// Reads, tokenizes and encodes the rows at consecutive positions of the stream. Fails once `is_stopped`.
    pub(crate) fn tokenize(
        &self,
        positions: Range<usize>,
        is_stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<u8>, DataError> {
        let renderer = Renderer::new(&self.plan, &self.tokenizer, self.template.clone());
        let (mut bytes, mut start) = (Vec::new(), 0);
        for source in &self.sources {
            let end = start + source.len();
            let own = positions.start.clamp(start, end)..positions.end.clamp(start, end);
            let rows: Vec<u32> = own.clone().map(|position| source.row_at(position - start) as u32).collect();
            let mut position = own.start as u32;
            let chosen =
                ChosenRows { source: &*source.rows, format: &source.format, rows: &rows, options: source.options };
            let status = renderer.render(&chosen, &WorkProgress::hidden(), is_stopped, |_, sample| {
                encode_sample(position, sample, &mut bytes);
                position += 1;
                Ok(())
            })?;
            if status == FillStatus::Stopped {
                return Err(DataError::Stopped { kept: "a stream keeps no tokens".to_owned() });
            }
            start = end;
        }
        Ok(bytes)
    }

    /// Joins the parts of a chunk from all ranks, truncates and packs its samples.
    pub(crate) fn chunk(
        self: &Arc<Self>,
        epoch: usize,
        [index, chunk]: [usize; 2],
        parts: &[Vec<u8>],
    ) -> Result<StreamChunk, DataError> {
        let plan = self.chunk_plan(epoch, chunk);
        let dataset = self.dataset(parts)?;
        let template = &self.template_name();
        SampleWarningReport { dataset: &dataset, which: "training", plan: &plan, template }.refuse_unrendered()?;
        let dataset = apply_truncation(dataset, &plan, plan.drop_last)?;
        let rows = epoch_rows(&dataset, &plan, 0);
        Ok(StreamChunk { index, dataset, rows })
    }

    /// Returns the plan of a chunk: its orders have a seed of their own.
    fn chunk_plan(&self, epoch: usize, chunk: usize) -> DataPlan {
        let seed = seeded_rng(self.plan.seed, RngPurpose::ChunkSeed, epoch, chunk).next_u64();
        DataPlan { seed, ..self.plan.clone() }
    }

    /// Tokenizes the first chunk of the first epoch. Returns its sequences, and the plan whose first epoch has its rows in the
    /// order of training.
    pub fn first_chunk(self: &Arc<Self>) -> Result<(Dataset, DataPlan), DataError> {
        let chunk = self.chunk_order(0)[0] as usize;
        let part = threads(&self.plan)?.install(|| self.tokenize(self.chunk_rows(chunk), &|| false))?;
        Ok((self.chunk(0, [0, chunk], &[part])?.dataset, self.chunk_plan(0, chunk)))
    }

    /// Creates a data set of encoded samples, each a sequence.
    pub(crate) fn dataset(self: &Arc<Self>, parts: &[Vec<u8>]) -> Result<Dataset, DataError> {
        let store = Arc::new(TokenStore::decode(parts)?);
        let source = TokenizedSource { store, rows: self.clone(), key: self.identity.clone() };
        Ok(Dataset::new(vec![source], self.tokenizer.pad().map_or(0, |pad| pad.id)))
    }

    /// Returns the chat template's name for messages.
    pub(crate) fn template_name(&self) -> String {
        self.template.as_ref().map_or_else(String::new, |template| format!("chat template {}", template.name()))
    }

    fn find(&self, position: usize) -> (&StreamedSource, usize) {
        let mut local = position;
        for source in &self.sources {
            match local.checked_sub(source.len()) {
                Some(rest) => local = rest,
                None => return (source, source.row_at(local)),
            }
        }
        unreachable!("positions are in bounds")
    }
}

/// The chosen rows of all sources, one after another.
impl RowSource for StreamedData {
    fn len(&self) -> usize {
        self.sources.iter().map(StreamedSource::len).sum()
    }

    fn row(&self, row_idx: usize) -> Result<Row, SourceError> {
        let (source, row) = self.find(row_idx);
        source.rows.row(row)
    }

    fn locate(&self, row_idx: usize) -> String {
        let (source, row) = self.find(row_idx);
        source.rows.locate(row)
    }
}

impl std::fmt::Debug for StreamedData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamedData({} rows)", self.len())
    }
}

/// Tokenizes a rank's part of the chunks of all epochs, in the order of training.
pub(crate) struct ChunkReader {
    data: Arc<StreamedData>,
    reader: ReaderShard,
    pool: rayon::ThreadPool,
    epoch: usize,
    order: Vec<u32>,
    next: usize,
}

impl ChunkReader {
    /// Starts at the `first`-th chunk of an epoch.
    pub(crate) fn new(
        data: Arc<StreamedData>,
        reader: ReaderShard,
        (epoch, first): (usize, usize),
    ) -> Result<Self, DataError> {
        let (pool, order) = (threads(&data.plan)?, data.chunk_order(epoch));
        Ok(Self { data, reader, pool, epoch, order, next: first })
    }

    /// Tokenizes this rank's part of the next chunk. Fails once `is_stopped`.
    pub(crate) fn next_part(&mut self, is_stopped: &(dyn Fn() -> bool + Sync)) -> Result<Vec<u8>, DataError> {
        if self.next >= self.order.len() {
            self.epoch += 1;
            self.next = 0;
            self.order = self.data.chunk_order(self.epoch);
        }
        let chunk = self.order[self.next] as usize;
        self.next += 1;
        self.pool.install(|| self.data.tokenize_part(chunk, self.reader, is_stopped))
    }
}
