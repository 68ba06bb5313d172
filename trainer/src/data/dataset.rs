//! The sequences of a run: slices of tokenized samples, read from memory-mapped stores on access.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candlewick_text::sample_warning::SampleWarnings;
use candlewick_text::source::{Row, RowSource, SourceError};

use super::token_count::TokenCount;
use super::token_store::TokenStore;

/// Sequences by index. It uses 12 bytes of memory a sequence; the tokens stay on disk.
pub struct Dataset {
    sources: Vec<TokenizedSource>,
    /// The samples of this data set, as indices over all sources.
    samples: Vec<u32>,
    slices: Vec<SampleSlice>,
    /// The end of each row among the slices, if every epoch has the same rows.
    fixed_rows: Option<Vec<usize>>,
    pad_id: u32,
    identity: String,
}

/// The tokenized samples of one source.
#[derive(Clone)]
pub(crate) struct TokenizedSource {
    pub(crate) store: Arc<TokenStore>,
    /// The rows of the samples, for messages.
    pub(crate) rows: Arc<dyn RowSource>,
    /// The digest of the cache key: it identifies the content.
    pub(crate) key: String,
}

/// A run of consecutive tokens of one sample: the whole sample, unless it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampleSlice {
    /// Index into the samples of the data set.
    pub(crate) sample: u32,
    pub(crate) start: u32,
    pub(crate) len: u32,
}

impl SampleSlice {
    /// Cuts the slice into slices of `max_length` tokens and a shorter last one.
    pub(crate) fn chunks(self, max_length: usize) -> impl Iterator<Item = Self> {
        let end = self.start + self.len;
        (self.start..end).step_by(max_length).map(move |start| Self {
            start,
            len: (end - start).min(max_length as u32),
            ..self
        })
    }
}

/// A view of one sequence's tokens in the store.
#[derive(Clone)]
pub struct SampleRef<'a> {
    store: &'a TokenStore,
    span: Range<usize>,
}

impl SampleRef<'_> {
    /// Counts the tokens.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Returns true if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// Returns the token ids.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.store.ids(self.span.clone())
    }

    /// Returns a flag for each token: true if it is a target.
    pub fn target_mask(&self) -> impl ExactSizeIterator<Item = bool> + '_ {
        self.span.clone().map(|token| self.store.is_target(token))
    }

    /// Returns true if any token is a target.
    pub fn has_targets(&self) -> bool {
        self.target_mask().skip(1).any(|is_target| is_target)
    }

    /// Counts the targets. The first token is never one: no token precedes it.
    pub fn n_targets(&self) -> usize {
        self.target_mask().skip(1).filter(|is_target| *is_target).count()
    }
}

impl Dataset {
    /// Counts the sequences.
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// Returns true if there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// Returns the sequence at `index`.
    pub fn get(&self, index: usize) -> SampleRef<'_> {
        self.sequence(&self.slices[index])
    }

    /// Counts the tokens of the sequence at `index`.
    pub fn length(&self, index: usize) -> usize {
        self.slices[index].len as usize
    }

    /// Returns the file and row of the sequence at `index`: `train.jsonl:17`.
    pub fn locate(&self, index: usize) -> String {
        self.locate_sample(self.slices[index].sample as usize)
    }

    /// Counts the tokens of all sequences.
    pub fn n_tokens(&self) -> u64 {
        self.slices.iter().map(|slice| u64::from(slice.len)).sum()
    }

    /// Returns the id of the pad token.
    pub fn pad_id(&self) -> u32 {
        self.pad_id
    }

    /// Returns the index of the source of the sequence at `index`.
    pub(crate) fn source_of(&self, index: usize) -> usize {
        self.find(self.slices[index].sample as usize).0
    }

    /// Returns the range of each source's units: its rows if every epoch has the same rows, else its sequences. The
    /// units are in the order of the sources.
    pub(crate) fn units_by_source(&self) -> Vec<Range<u32>> {
        let rows: Option<Vec<usize>> =
            self.fixed_rows.as_ref().map(|ends| std::iter::once(0).chain(ends.iter().copied()).collect());
        let n_units = rows.as_ref().map_or(self.len(), |starts| starts.len() - 1);
        let source_of = |unit: usize| self.source_of(rows.as_ref().map_or(unit, |starts| starts[unit]));
        let mut ranges: Vec<Range<u32>> = Vec::with_capacity(self.sources.len());
        let mut start = 0;
        for source in 0..self.sources.len() {
            let end = start + partition_point(n_units - start, |unit| source_of(start + unit) <= source);
            ranges.push(start as u32..end as u32);
            start = end;
        }
        ranges
    }

    /// Counts the sequences of each source and their tokens.
    pub(crate) fn counts_by_source(&self) -> Vec<TokenCount> {
        let mut counts = vec![TokenCount::default(); self.sources.len()];
        for index in 0..self.len() {
            counts[self.source_of(index)].add(self.length(index));
        }
        counts
    }

    /// Returns the cache keys of all sources, which identify the data, but not the selection of samples.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    pub(crate) fn fixed_rows(&self) -> Option<&[usize]> {
        self.fixed_rows.as_deref()
    }
}

impl Dataset {
    /// Creates a data set of all samples of all sources, each a sequence.
    pub(crate) fn new(sources: Vec<TokenizedSource>, pad_id: u32) -> Self {
        let n_samples = sources.iter().map(|source| source.store.len()).sum();
        Self::choose(sources, super::order::identity(n_samples), pad_id)
    }

    /// Creates a data set of some samples of all sources, each a sequence.
    pub(crate) fn choose(sources: Vec<TokenizedSource>, samples: Vec<u32>, pad_id: u32) -> Self {
        let identity = sources.iter().map(|source| source.key.as_str()).collect::<Vec<_>>().join(" ");
        let mut dataset = Self { sources, samples, slices: Vec::new(), fixed_rows: None, pad_id, identity };
        dataset.slices = (0..dataset.samples.len()).map(|i| dataset.whole(i)).collect();
        dataset
    }

    /// Replaces the sequences by these slices.
    pub(crate) fn with_slices(self, slices: Vec<SampleSlice>, fixed_rows: Option<Vec<usize>>) -> Self {
        Self { slices, fixed_rows, ..self }
    }

    /// Returns the warnings of a sample.
    pub(crate) fn sample_warnings(&self, sample: usize) -> SampleWarnings {
        let (source, local) = self.find_source(sample);
        source.store.sample_warnings(local)
    }

    /// Returns the row of a sample.
    pub(crate) fn row_of_sample(&self, sample: usize) -> Result<Row, SourceError> {
        let (source, local) = self.find_source(sample);
        source.rows.row(source.store.row(local))
    }

    /// Returns the index of a sequence's row in its source.
    pub(crate) fn source_row(&self, index: usize) -> usize {
        let (source, local) = self.find_source(self.slices[index].sample as usize);
        source.store.row(local)
    }

    /// Returns a view of the tokens of a slice.
    pub(crate) fn sequence(&self, slice: &SampleSlice) -> SampleRef<'_> {
        let (source, local) = self.find_source(slice.sample as usize);
        let start = source.store.span(local).start + slice.start as usize;
        SampleRef { store: &source.store, span: start..start + slice.len as usize }
    }

    pub(crate) fn n_samples(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn sample_length(&self, sample: usize) -> usize {
        let (source, local) = self.find_source(sample);
        source.store.span(local).len()
    }

    pub(crate) fn slices(&self) -> &[SampleSlice] {
        &self.slices
    }

    pub(crate) fn locate_sample(&self, sample: usize) -> String {
        let (source, local) = self.find_source(sample);
        source.rows.locate(source.store.row(local))
    }

    pub(crate) fn whole(&self, sample: usize) -> SampleSlice {
        let len = u32::try_from(self.sample_length(sample)).unwrap_or(u32::MAX);
        SampleSlice { sample: sample as u32, start: 0, len }
    }

    /// Returns the index of a sample's source, and of the sample in it.
    fn find(&self, sample: usize) -> (usize, usize) {
        let mut local = self.samples[sample] as usize;
        for (source, tokenized) in self.sources.iter().enumerate() {
            match local.checked_sub(tokenized.store.len()) {
                Some(rest) => local = rest,
                None => return (source, local),
            }
        }
        unreachable!("sample indices are in bounds")
    }

    fn find_source(&self, sample: usize) -> (&TokenizedSource, usize) {
        let (source, local) = self.find(sample);
        (&self.sources[source], local)
    }

    /// Returns the samples of each source, in the order of the sources.
    pub(crate) fn samples_by_source(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let ranges = (0..self.sources.len()).map(|source| {
            let n = partition_point(self.n_samples() - start, |sample| self.find(start + sample).0 <= source);
            start += n;
            start - n..start
        });
        ranges.collect()
    }
}

/// Returns the number of indices below `n` before the first one of which `is_before` is false.
fn partition_point(n: usize, is_before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, n);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_before(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({} sequences, {} tokens)", self.len(), self.n_tokens())
    }
}
