//! The sequences of a run: slices of rendered samples, read from their stores when asked for.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candlewick_text::sample_warning::SampleWarnings;
use candlewick_text::source::{Row, RowSource, SourceError};

use super::token_store::TokenStore;

/// Sequences by index. Holds 12 bytes a sequence; the tokens stay on disk.
pub struct Dataset {
    sources: Vec<TokenizedSource>,
    /// The samples chosen for this data set, as numbers over all sources.
    samples: Vec<u32>,
    slices: Vec<SampleSlice>,
    /// Where each row ends among the slices, if rows do not change from epoch to epoch.
    fixed_rows: Option<Vec<usize>>,
    pad_id: u32,
    identity: String,
}

/// The samples of one source.
#[derive(Clone)]
pub(crate) struct TokenizedSource {
    pub(crate) store: Arc<TokenStore>,
    /// Where the samples were rendered from, for messages.
    pub(crate) rows: Arc<dyn RowSource>,
    /// Tells stores with different content apart.
    pub(crate) key: String,
}

/// Some neighbouring tokens of one sample: all of them, unless it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SampleSlice {
    /// Index into the chosen samples.
    pub(crate) sample: u32,
    pub(crate) start: u32,
    pub(crate) len: u32,
}

impl SampleSlice {
    /// Cuts the slice into slices of `max_length` tokens and a rest.
    pub(crate) fn chunks(self, max_length: usize) -> impl Iterator<Item = Self> {
        let end = self.start + self.len;
        (self.start..end).step_by(max_length).map(move |start| Self {
            start,
            len: (end - start).min(max_length as u32),
            ..self
        })
    }
}

/// One sequence's tokens, still in the store.
#[derive(Clone)]
pub struct SampleRef<'a> {
    store: &'a TokenStore,
    span: Range<usize>,
}

impl SampleRef<'_> {
    /// DatasetCounts the tokens.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// The token ids.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.store.ids(self.span.clone())
    }

    /// For each token, whether the model must learn to predict it.
    pub fn is_target(&self) -> impl ExactSizeIterator<Item = bool> + '_ {
        self.span.clone().map(|token| self.store.is_target(token))
    }

    /// Returns true if any token is learned.
    pub fn has_targets(&self) -> bool {
        self.is_target().skip(1).any(|is_target| is_target)
    }

    /// DatasetCounts the tokens that are learned. The first has nothing before it to predict it from.
    pub fn n_targets(&self) -> usize {
        self.is_target().skip(1).filter(|is_target| *is_target).count()
    }
}

impl Dataset {
    /// DatasetCounts the sequences.
    pub fn len(&self) -> usize {
        self.slices.len()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.slices.is_empty()
    }

    /// The sequence at `index`.
    pub fn get(&self, index: usize) -> SampleRef<'_> {
        self.sequence(&self.slices[index])
    }

    /// DatasetCounts the tokens of the sequence at `index`.
    pub fn length(&self, index: usize) -> usize {
        self.slices[index].len as usize
    }

    /// Says which row of which file the sequence at `index` was made of: `train.jsonl:17`.
    pub fn locate(&self, index: usize) -> String {
        self.locate_sample(self.slices[index].sample as usize)
    }

    /// DatasetCounts the tokens of all sequences.
    pub fn n_tokens(&self) -> u64 {
        self.slices.iter().map(|slice| u64::from(slice.len)).sum()
    }

    /// The id that padding has.
    pub fn pad_id(&self) -> u32 {
        self.pad_id
    }

    /// Changes whenever the sequences do.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    pub(crate) fn fixed_rows(&self) -> Option<&[usize]> {
        self.fixed_rows.as_deref()
    }
}

impl Dataset {
    /// All samples of all sources, each a sequence.
    pub(crate) fn new(sources: Vec<TokenizedSource>, pad_id: u32) -> Self {
        let n_samples = sources.iter().map(|source| source.store.len()).sum();
        Self::choose(sources, super::order::identity(n_samples), pad_id)
    }

    /// Some samples of all sources, each a sequence.
    pub(crate) fn choose(sources: Vec<TokenizedSource>, samples: Vec<u32>, pad_id: u32) -> Self {
        let identity = sources.iter().map(|source| source.key.as_str()).collect::<Vec<_>>().join(" ");
        let mut dataset = Self { sources, samples, slices: Vec::new(), fixed_rows: None, pad_id, identity };
        dataset.slices = (0..dataset.samples.len()).map(|i| dataset.whole(i)).collect();
        dataset
    }

    /// The same samples cut in another way.
    pub(crate) fn with_slices(self, slices: Vec<SampleSlice>, fixed_rows: Option<Vec<usize>>) -> Self {
        Self { slices, fixed_rows, ..self }
    }

    /// Returns the oddities of a sample.
    pub(crate) fn sample_warnings(&self, sample: usize) -> SampleWarnings {
        let (source, local) = self.find(sample);
        source.store.sample_warnings(local)
    }

    /// The row that a sample was made of.
    pub(crate) fn row_of_sample(&self, sample: usize) -> Result<Row, SourceError> {
        let (source, local) = self.find(sample);
        source.rows.row(source.store.row(local))
    }

    /// The tokens of a slice.
    pub(crate) fn sequence(&self, slice: &SampleSlice) -> SampleRef<'_> {
        let (source, local) = self.find(slice.sample as usize);
        let start = source.store.span(local).start + slice.start as usize;
        SampleRef { store: &source.store, span: start..start + slice.len as usize }
    }

    pub(crate) fn n_samples(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn sample_length(&self, sample: usize) -> usize {
        let (source, local) = self.find(sample);
        source.store.span(local).len()
    }

    pub(crate) fn slices(&self) -> &[SampleSlice] {
        &self.slices
    }

    pub(crate) fn locate_sample(&self, sample: usize) -> String {
        let (source, local) = self.find(sample);
        source.rows.locate(source.store.row(local))
    }

    pub(crate) fn whole(&self, sample: usize) -> SampleSlice {
        let len = u32::try_from(self.sample_length(sample)).unwrap_or(u32::MAX);
        SampleSlice { sample: sample as u32, start: 0, len }
    }

    fn find(&self, sample: usize) -> (&TokenizedSource, usize) {
        let mut local = self.samples[sample] as usize;
        for source in &self.sources {
            match local.checked_sub(source.store.len()) {
                Some(rest) => local = rest,
                None => return (source, local),
            }
        }
        unreachable!("the chosen samples are those of the sources")
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({} sequences, {} tokens)", self.len(), self.n_tokens())
    }
}
