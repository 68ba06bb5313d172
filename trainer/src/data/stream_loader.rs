//! The data loader of a streaming run.

use std::collections::VecDeque;
use std::sync::Arc;

use candlewick_text::source::RowSource;

use super::DataError;
use super::batch::{Batch, DatasetRow, GlobalBatch, SampleNumbering, collate_rows};
use super::loader::Cursor;
use super::plan::DataPlan;
use super::prefetch::Prefetcher;
use super::stream::{ChunkReader, ReaderShard, StreamChunk, StreamedData};

/// Encoded samples of all ranks' parts of a chunk, by rank, from this rank's part.
pub type PartExchange<'a> = &'a dyn Fn(Result<Vec<u8>, DataError>) -> anyhow::Result<Vec<Vec<u8>>>;

/// Loads steps from the chunks of a stream. All ranks load the same steps.
pub(crate) struct StreamLoader {
    data: Arc<StreamedData>,
    parts: ChunkParts,
    /// The order of this epoch's chunks, and the number of those that are tokenized.
    order: Vec<u32>,
    n_read: usize,
    /// The tokenized chunks with rows that are not trained on yet, and the next row of the first.
    chunks: VecDeque<StreamChunk>,
    next_row: usize,
    /// The rows to skip in the first chunk of a resumed run.
    skip: usize,
    /// True if a step of this epoch was loaded.
    has_steps: bool,
}

/// This rank's parts of the chunks.
enum ChunkParts {
    /// Tokenized when they are needed.
    Direct(ChunkReader),
    /// Tokenized ahead on a thread.
    Prefetched(Prefetcher<Result<Vec<u8>, DataError>>),
}

impl ChunkParts {
    fn next(&mut self) -> Result<Vec<u8>, DataError> {
        match self {
            Self::Direct(reader) => reader.next_part(&|| false),
            Self::Prefetched(parts) => parts.next().unwrap_or_else(|| Ok(Vec::new())),
        }
    }
}

impl StreamLoader {
    /// Creates a loader that continues at `cursor`.
    pub(crate) fn new(data: Arc<StreamedData>, reader: ReaderShard, cursor: &Cursor) -> Result<Self, DataError> {
        let mut chunks = ChunkReader::new(data.clone(), reader, (cursor.epoch, cursor.chunk))?;
        let parts = match data.plan.dl_num_workers {
            0 => ChunkParts::Direct(chunks),
            n => {
                ChunkParts::Prefetched(Prefetcher::start(2 * n, move |is_dropped| Some(chunks.next_part(is_dropped)))?)
            }
        };
        let (order, n_read) = (data.chunk_order(cursor.epoch), cursor.chunk);
        let (skip, has_steps) = (cursor.row_in_chunk, cursor.step_in_epoch > 0);
        Ok(Self { data, parts, order, n_read, chunks: VecDeque::new(), next_row: 0, skip, has_steps })
    }

    /// Returns the data.
    pub(crate) fn data(&self) -> &StreamedData {
        &self.data
    }

    /// Returns the next step and moves `cursor` after it.
    pub(crate) fn load(&mut self, cursor: &mut Cursor, exchange: PartExchange<'_>) -> anyhow::Result<GlobalBatch> {
        let needed = self.data.plan.rows_per_step();
        let n_rows = loop {
            self.read_rows(needed, cursor.epoch, exchange)?;
            let n_rows = self.n_rows().min(needed);
            if n_rows == needed || (n_rows > 0 && !self.data.plan.drop_last) {
                break n_rows;
            }
            if !self.has_steps {
                return Err(DataError::TooFew { rows: n_rows, needed }.into());
            }
            self.end_epoch(cursor);
        };
        let step = GlobalBatch::new(cursor.epoch, self.take(n_rows));
        cursor.seen.count(&step);
        cursor.step += 1;
        cursor.step_in_epoch += 1;
        self.has_steps = true;
        let rest = self.n_rows();
        if self.n_read == self.order.len() && (rest == 0 || (rest < needed && self.data.plan.drop_last)) {
            self.end_epoch(cursor);
        }
        cursor.chunk = self.chunks.front().map_or(self.n_read, |chunk| chunk.index);
        cursor.row_in_chunk = self.next_row;
        Ok(step)
    }

    /// Counts the rows that are tokenized and not trained on yet.
    fn n_rows(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.rows.len()).sum::<usize>() - self.next_row
    }

    /// Tokenizes chunks until there are `needed` rows, or the epoch has no more. Collective: all ranks call it.
    fn read_rows(&mut self, needed: usize, epoch: usize, exchange: PartExchange<'_>) -> anyhow::Result<()> {
        while self.n_rows() < needed && self.n_read < self.order.len() {
            let parts = exchange(self.parts.next())?;
            let index = self.n_read;
            let chunk = self.data.chunk(epoch, [index, self.order[index] as usize], &parts)?;
            self.n_read += 1;
            let skip = std::mem::take(&mut self.skip);
            if chunk.rows.len() > skip {
                if skip > 0 {
                    self.next_row = skip;
                }
                self.chunks.push_back(chunk);
            }
        }
        Ok(())
    }

    /// Collates the next rows into micro-batches.
    fn take(&mut self, n_rows: usize) -> Vec<Batch> {
        let plan = &self.data.plan;
        let rows = self.chunks.iter().flat_map(|chunk| (0..chunk.rows.len()).map(move |row| (chunk, row)));
        let rows: Vec<_> = rows.skip(self.next_row).take(n_rows).collect();
        let collate = |rows: &[(&StreamChunk, usize)]| collate_chunk_rows(plan, rows);
        let batches = rows.chunks(plan.micro_batch_size).map(collate).collect();
        self.next_row += n_rows;
        while let Some(chunk) = self.chunks.front()
            && chunk.rows.len() <= self.next_row
        {
            self.next_row -= chunk.rows.len();
            self.chunks.pop_front();
        }
        batches
    }

    /// Starts the next epoch. Counts the rows that `drop_last` drops.
    fn end_epoch(&mut self, cursor: &mut Cursor) {
        let rows = self.chunks.iter().flat_map(|chunk| (0..chunk.rows.len()).map(move |row| (chunk, row)));
        for (chunk, row) in rows.skip(self.next_row) {
            for &sequence in chunk.rows.row(row) {
                cursor.seen.left_over.add(chunk.dataset.length(sequence as usize));
            }
        }
        self.chunks.clear();
        (self.next_row, self.n_read, self.has_steps) = (0, 0, false);
        cursor.epoch += 1;
        cursor.step_in_epoch = 0;
        self.order = self.data.chunk_order(cursor.epoch);
    }
}

fn collate_chunk_rows(plan: &DataPlan, rows: &[(&StreamChunk, usize)]) -> Batch {
    let numbering = SampleNumbering::SourceRows;
    collate_rows(
        plan,
        rows.iter().map(|(chunk, row)| DatasetRow { dataset: &chunk.dataset, rows: &chunk.rows, row: *row, numbering }),
    )
}

impl std::fmt::Debug for StreamLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StreamLoader({} rows)", self.data.len())
    }
}
