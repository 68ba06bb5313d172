//! The sequences of a run: pieces of rendered samples, read from their stores when asked for.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candlewick_text::sample_warning::SampleWarnings;
use candlewick_text::source::{Row, RowSource, SourceError};

use super::store::Store;

/// Sequences by index. Holds 12 bytes a sequence; the tokens stay on disk.
pub struct Dataset {
    parts: Vec<Part>,
    /// The samples chosen for this data set, as numbers over all parts.
    samples: Vec<u32>,
    pieces: Vec<Piece>,
    /// Where each row ends among the pieces, if rows do not change from epoch to epoch.
    fixed_rows: Option<Vec<usize>>,
    pad_id: u32,
    identity: String,
}

/// The samples of one source.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) store: Arc<Store>,
    /// Where the samples were rendered from, for messages.
    pub(crate) source: Arc<dyn RowSource>,
    /// Tells stores with different content apart.
    pub(crate) key: String,
}

/// Some neighbouring tokens of one sample: all of them, unless it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Index into the chosen samples.
    pub(crate) sample: u32,
    pub(crate) start: u32,
    pub(crate) len: u32,
}

impl Piece {
    /// Cuts the piece into slices of `max_length` tokens and a rest.
    pub(crate) fn slices(self, max_length: usize) -> impl Iterator<Item = Self> {
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
    store: &'a Store,
    span: Range<usize>,
}

impl SampleRef<'_> {
    /// Counts the tokens.
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

    /// Counts the tokens that are learned. The first has nothing before it to predict it from.
    pub fn n_targets(&self) -> usize {
        self.is_target().skip(1).filter(|is_target| *is_target).count()
    }
}

impl Dataset {
    /// Counts the sequences.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The sequence at `index`.
    pub fn get(&self, index: usize) -> SampleRef<'_> {
        self.sequence(&self.pieces[index])
    }

    /// Counts the tokens of the sequence at `index`.
    pub fn length(&self, index: usize) -> usize {
        self.pieces[index].len as usize
    }

    /// Says which row of which file the sequence at `index` was made of: `train.jsonl:17`.
    pub fn locate(&self, index: usize) -> String {
        self.place_of_sample(self.pieces[index].sample as usize)
    }

    /// Counts the tokens of all sequences.
    pub fn n_tokens(&self) -> u64 {
        self.pieces.iter().map(|piece| u64::from(piece.len)).sum()
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
    /// All samples of all parts, each a sequence.
    pub(crate) fn new(parts: Vec<Part>, pad_id: u32) -> Self {
        let n_samples = parts.iter().map(|part| part.store.len()).sum();
        Self::choose(parts, super::order::identity(n_samples), pad_id)
    }

    /// Some samples of all parts, each a sequence.
    pub(crate) fn choose(parts: Vec<Part>, samples: Vec<u32>, pad_id: u32) -> Self {
        let identity = parts.iter().map(|part| part.key.as_str()).collect::<Vec<_>>().join(" ");
        let mut dataset = Self { parts, samples, pieces: Vec::new(), fixed_rows: None, pad_id, identity };
        dataset.pieces = (0..dataset.samples.len()).map(|i| dataset.whole(i)).collect();
        dataset
    }

    /// The same samples cut in another way.
    pub(crate) fn with_pieces(self, pieces: Vec<Piece>, fixed_rows: Option<Vec<usize>>) -> Self {
        Self { pieces, fixed_rows, ..self }
    }

    /// Returns the oddities of a sample.
    pub(crate) fn sample_warnings(&self, sample: usize) -> SampleWarnings {
        let (part, local) = self.find(sample);
        part.store.sample_warnings(local)
    }

    /// The row that a sample was made of.
    pub(crate) fn row_of_sample(&self, sample: usize) -> Result<Row, SourceError> {
        let (part, local) = self.find(sample);
        part.source.row(part.store.row(local))
    }

    /// The tokens of a piece.
    pub(crate) fn sequence(&self, piece: &Piece) -> SampleRef<'_> {
        let (part, local) = self.find(piece.sample as usize);
        let start = part.store.span(local).start + piece.start as usize;
        SampleRef { store: &part.store, span: start..start + piece.len as usize }
    }

    pub(crate) fn n_samples(&self) -> usize {
        self.samples.len()
    }

    pub(crate) fn sample_length(&self, sample: usize) -> usize {
        let (part, local) = self.find(sample);
        part.store.span(local).len()
    }

    pub(crate) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    pub(crate) fn place_of_sample(&self, sample: usize) -> String {
        let (part, local) = self.find(sample);
        part.source.locate(part.store.row(local))
    }

    pub(crate) fn whole(&self, sample: usize) -> Piece {
        let len = u32::try_from(self.sample_length(sample)).unwrap_or(u32::MAX);
        Piece { sample: sample as u32, start: 0, len }
    }

    fn find(&self, sample: usize) -> (&Part, usize) {
        let mut local = self.samples[sample] as usize;
        for part in &self.parts {
            match local.checked_sub(part.store.len()) {
                Some(rest) => local = rest,
                None => return (part, local),
            }
        }
        unreachable!("the chosen samples are those of the parts")
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dataset({} sequences, {} tokens)", self.len(), self.n_tokens())
    }
}
