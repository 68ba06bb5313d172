//! Tokenized samples on disk, memory-mapped: token ids, a loss mask of one bit a token, and an index. A store is
//! written once, in order, and never changed.
//!
//! `ids`: u32, little-endian. `targets`: bit `i % 8` of byte `i / 8` belongs to token `i`.
//! `index`: two u64 a sample. The first is the end of its tokens. The second has the index of its row in the source in
//! the lower half and its warnings in the upper half.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt;
use std::path::Path;

use candlewick_model::checkpoint::little_endian;
use candlewick_text::files::open_regular_file;
use candlewick_text::render::Sample;
use candlewick_text::sample_warning::SampleWarnings;
use memmap2::Mmap;

use super::DataError;

const IDS: &str = "ids";
const TARGETS: &str = "targets";
const INDEX: &str = "index";
const INDEX_ENTRY: usize = 16;
/// The bits of a row index.
const ROW_BITS: u32 = 32;
const ROW: usize = (1 << ROW_BITS) - 1;

/// The tokenized samples of one source.
#[derive(Debug)]
pub(crate) struct TokenStore {
    ids: StoreBytes,
    targets: StoreBytes,
    index: StoreBytes,
    n_samples: usize,
    /// A file with a shared lock: the store is in use.
    _lock: Option<File>,
}

/// The bytes of a store's part.
#[derive(Debug)]
enum StoreBytes {
    Mapped(Mmap),
    InMemory(Vec<u8>),
}

impl Deref for StoreBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::InMemory(bytes) => bytes,
        }
    }
}

impl TokenStore {
    /// Creates a store in memory from encoded samples of several ranks, in this order.
    pub(crate) fn decode(parts: &[Vec<u8>]) -> Result<Self, DataError> {
        let corrupt = |source| DataError::Cache { path: "the rows of another rank".into(), source };
        let mut writer = TokenStoreWriter::over([Vec::new(), Vec::new(), Vec::new()]);
        for part in parts {
            let mut rest = part.as_slice();
            while !rest.is_empty() {
                let (row, sample) = decode_sample(&mut rest).map_err(corrupt)?;
                writer.push(row, &sample).map_err(corrupt)?;
            }
        }
        let n_samples = writer.index.len() / INDEX_ENTRY;
        let [ids, targets, index] = writer.into_parts().map_err(corrupt)?.map(StoreBytes::InMemory);
        Ok(Self { ids, targets, index, n_samples, _lock: None })
    }

    /// Maps the store of a folder. Fails with `InvalidData` if it is corrupt.
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        let index = map(&folder.join(INDEX))?;
        let store = Self {
            ids: map(&folder.join(IDS))?,
            targets: map(&folder.join(TARGETS))?,
            n_samples: index.len() / INDEX_ENTRY,
            index,
            _lock: None,
        };
        store.check()?;
        Ok(store)
    }

    /// Holds a file's lock until the store is dropped.
    pub(crate) fn with_lock(self, lock: Option<File>) -> Self {
        Self { _lock: lock, ..self }
    }

    pub(crate) fn len(&self) -> usize {
        self.n_samples
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.ids.len() / 4
    }

    /// Returns the range of a sample's tokens among all tokens.
    pub(crate) fn span(&self, sample: usize) -> Range<usize> {
        let start = if sample == 0 { 0 } else { self.entry(sample - 1, 0) };
        start..self.entry(sample, 0)
    }

    /// Returns the index of a sample's row in the source.
    pub(crate) fn row(&self, sample: usize) -> usize {
        self.entry(sample, 1) & ROW
    }

    /// Returns the warnings of a sample.
    pub(crate) fn sample_warnings(&self, sample: usize) -> SampleWarnings {
        SampleWarnings::from_bits((self.entry(sample, 1) >> ROW_BITS) as u32)
    }

    pub(crate) fn ids(&self, span: Range<usize>) -> impl ExactSizeIterator<Item = u32> + '_ {
        let bytes = self.ids[span.start * 4..span.end * 4].chunks_exact(4);
        bytes.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    pub(crate) fn is_target(&self, token: usize) -> bool {
        self.targets[token / 8] >> (token % 8) & 1 == 1
    }

    /// Returns the BLAKE3 hash of all bytes.
    pub(crate) fn checksum(&self) -> String {
        let mut hash = blake3::Hasher::new();
        for map in [&self.ids, &self.targets, &self.index] {
            hash.update(&(map.len() as u64).to_le_bytes()).update(map);
        }
        hash.finalize().to_string()
    }

    fn entry(&self, sample: usize, column: usize) -> usize {
        let start = sample * INDEX_ENTRY + column * 8;
        let bytes = self.index[start..start + 8].try_into().expect("the slice has eight bytes");
        u64::from_le_bytes(bytes) as usize
    }

    fn check(&self) -> io::Result<()> {
        let corrupt = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if !self.index.len().is_multiple_of(INDEX_ENTRY) || !self.ids.len().is_multiple_of(4) {
            return corrupt("a file is truncated");
        }
        let mut end = 0;
        for sample in 0..self.n_samples {
            let next = self.entry(sample, 0);
            if next < end {
                return corrupt("the index is not ascending");
            }
            end = next;
        }
        if end != self.n_tokens() || self.targets.len() != end.div_ceil(8) {
            return corrupt("the files have different numbers of tokens");
        }
        Ok(())
    }
}

/// Writes a store, a sample at a time: its ids, targets and index.
pub(crate) struct TokenStoreWriter<W = BufWriter<File>> {
    ids: W,
    targets: W,
    index: W,
    n_tokens: u64,
    bits: u8,
}

impl TokenStoreWriter {
    pub(crate) fn create(folder: &Path) -> io::Result<Self> {
        let create = |name| File::create(folder.join(name)).map(BufWriter::new);
        Ok(Self::over([create(IDS)?, create(TARGETS)?, create(INDEX)?]))
    }

    /// Continues a store that was finished too early, after its last sample.
    pub(crate) fn resume(folder: &Path) -> io::Result<Self> {
        let n_tokens = TokenStore::open(folder)?.n_tokens() as u64;
        let targets = OpenOptions::new().read(true).write(true).open(folder.join(TARGETS))?;
        let mut bits = [0];
        if !n_tokens.is_multiple_of(8) {
            targets.read_exact_at(&mut bits, n_tokens / 8)?;
        }
        targets.set_len(n_tokens / 8)?;
        let append = |name| OpenOptions::new().append(true).open(folder.join(name)).map(BufWriter::new);
        Ok(Self { ids: append(IDS)?, targets: append(TARGETS)?, index: append(INDEX)?, n_tokens, bits: bits[0] })
    }

    /// Writes the last partial byte and flushes the files.
    pub(crate) fn finish(self) -> io::Result<()> {
        self.into_parts()?.into_iter().try_for_each(|file| file.into_inner().map(drop).map_err(Into::into))
    }
}

impl<W: Write> TokenStoreWriter<W> {
    fn over([ids, targets, index]: [W; 3]) -> Self {
        Self { ids, targets, index, n_tokens: 0, bits: 0 }
    }

    pub(crate) fn push(&mut self, row: u32, sample: &Sample) -> io::Result<()> {
        let Sample { ids, is_target, sample_warnings } = sample;
        assert_eq!(ids.len(), is_target.len(), "the loss mask has an entry for each token");
        self.ids.write_all(&little_endian(ids))?;
        is_target.iter().try_for_each(|&is_target| self.push_bit(is_target))?;
        self.index.write_all(&self.n_tokens.to_le_bytes())?;
        let row = u64::from(row) | u64::from(sample_warnings.bits()) << ROW_BITS;
        self.index.write_all(&row.to_le_bytes())
    }

    /// Writes the last partial byte.
    fn into_parts(mut self) -> io::Result<[W; 3]> {
        if !self.n_tokens.is_multiple_of(8) {
            self.targets.write_all(&[self.bits])?;
        }
        Ok([self.ids, self.targets, self.index])
    }

    fn push_bit(&mut self, bit: bool) -> io::Result<()> {
        self.bits |= u8::from(bit) << (self.n_tokens % 8);
        self.n_tokens += 1;
        if self.n_tokens.is_multiple_of(8) {
            self.targets.write_all(&[self.bits])?;
            self.bits = 0;
        }
        Ok(())
    }
}

/// Appends a sample to `bytes`: row, warnings and number of tokens (u32 each), the ids, and a byte for each token's target.
pub(crate) fn encode_sample(row: u32, sample: &Sample, bytes: &mut Vec<u8>) {
    let Sample { ids, is_target, sample_warnings } = sample;
    for number in [row, sample_warnings.bits(), ids.len() as u32] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend_from_slice(&little_endian(ids));
    bytes.extend(is_target.iter().map(|is_target| u8::from(*is_target)));
}

/// Takes a sample that [`encode_sample`] wrote from the front of `bytes`.
fn decode_sample(bytes: &mut &[u8]) -> io::Result<(u32, Sample)> {
    let mut take = |n_bytes: usize| {
        let truncated = || io::Error::new(io::ErrorKind::InvalidData, "the samples are truncated");
        let (head, rest) = bytes.split_at_checked(n_bytes).ok_or_else(truncated)?;
        *bytes = rest;
        Ok::<_, io::Error>(head)
    };
    let numbers = |bytes: &[u8]| -> Vec<u32> {
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let head = numbers(take(12)?);
    let n_tokens = head[2] as usize;
    let ids = numbers(take(4 * n_tokens)?);
    let is_target = take(n_tokens)?.iter().map(|flag| *flag == 1).collect();
    Ok((head[0], Sample { ids, is_target, sample_warnings: SampleWarnings::from_bits(head[1]) }))
}

fn map(path: &Path) -> io::Result<StoreBytes> {
    let file = open_regular_file(path)?;
    // SAFETY: a store is renamed into place when it is complete and nothing writes to it afterwards.
    unsafe { Mmap::map(&file) }.map(StoreBytes::Mapped)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use candlewick_text::sample_warning::SampleWarning;

    use super::*;

    fn written(samples: &[(usize, Vec<u32>, Vec<bool>)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenStoreWriter::create(folder.path()).unwrap();
        for (row, ids, is_target) in samples {
            writer.push(*row as u32, &sample(ids, is_target)).unwrap();
        }
        writer.finish().unwrap();
        folder
    }

    #[test]
    fn written_samples_are_read_back() {
        for n_samples in [0, 1, 5, 23] {
            let samples: Vec<_> = (0..n_samples)
                .map(|i| {
                    let ids: Vec<u32> = (0..i as u32 * 3 % 11).map(|t| t * 70_001 + i as u32).collect();
                    let is_target = ids.iter().map(|id| id % 3 == 0).collect();
                    (i * 2, ids, is_target)
                })
                .collect();
            let folder = written(&samples);
            let store = TokenStore::open(folder.path()).unwrap();
            assert_eq!(store.len(), n_samples);
            for (i, (row, ids, is_target)) in samples.iter().enumerate() {
                let span = store.span(i);
                assert_eq!(store.row(i), *row);
                assert_eq!(&store.ids(span.clone()).collect::<Vec<_>>(), ids);
                assert_eq!(&span.map(|t| store.is_target(t)).collect::<Vec<_>>(), is_target);
            }
        }
    }

    #[test]
    fn a_resumed_store_equals_one_that_was_written_at_once() {
        let samples: Vec<_> = (0..9).map(|i| (i, vec![i as u32; i * 5 % 7], vec![i % 2 == 0; i * 5 % 7])).collect();
        let whole = TokenStore::open(written(&samples).path()).unwrap().checksum();
        for n_first in 0..=samples.len() {
            let folder = written(&samples[..n_first]);
            let mut writer = TokenStoreWriter::resume(folder.path()).unwrap();
            for (row, ids, is_target) in &samples[n_first..] {
                writer.push(*row as u32, &sample(ids, is_target)).unwrap();
            }
            writer.finish().unwrap();
            assert_eq!(TokenStore::open(folder.path()).unwrap().checksum(), whole, "{n_first}");
        }
    }

    fn sample(ids: &[u32], is_target: &[bool]) -> Sample {
        Sample { ids: ids.to_vec(), is_target: is_target.to_vec(), ..Sample::default() }
    }

    #[test]
    fn encoded_samples_of_several_ranks_form_one_store() {
        let mut odd = sample(&[7, 8, 9], &[false, true, true]);
        odd.sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
        let samples = [(3, odd), (1, sample(&[], &[])), (9, sample(&[70_000; 9], &[true; 9]))];
        let mut parts = vec![Vec::new(), Vec::new(), Vec::new()];
        for ((row, sample), part) in samples.iter().zip([0, 0, 2]) {
            encode_sample(*row, sample, &mut parts[part]);
        }
        let store = TokenStore::decode(&parts).unwrap();
        store.check().unwrap();
        for (i, (row, sample)) in samples.iter().enumerate() {
            let span = store.span(i);
            assert_eq!((store.row(i), store.sample_warnings(i)), (*row as usize, sample.sample_warnings));
            assert_eq!(store.ids(span.clone()).collect::<Vec<_>>(), sample.ids);
            assert_eq!(span.map(|t| store.is_target(t)).collect::<Vec<_>>(), sample.is_target);
        }
        parts[2].pop();
        assert!(TokenStore::decode(&parts).is_err());
    }

    #[test]
    fn warnings_are_stored_with_the_row() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = TokenStoreWriter::create(folder.path()).unwrap();
        let mut odd = sample(&[1, 2], &[false, true]);
        odd.sample_warnings.insert(SampleWarning::TokenSpansPromptBoundary);
        writer.push(u32::MAX, &odd).unwrap();
        writer.push(7, &sample(&[3], &[true])).unwrap();
        writer.finish().unwrap();
        let store = TokenStore::open(folder.path()).unwrap();
        assert_eq!((store.row(0), store.row(1)), (u32::MAX as usize, 7));
        assert_eq!(
            (store.sample_warnings(0), store.sample_warnings(1)),
            (odd.sample_warnings, SampleWarnings::default())
        );
    }

    #[test]
    fn a_truncated_file_is_an_error() {
        let samples = [(0, vec![1; 9], vec![true; 9]), (1, vec![2; 4], vec![false; 4])];
        for name in [IDS, TARGETS, INDEX] {
            let folder = written(&samples);
            let path = folder.path().join(name);
            let file = File::options().write(true).open(&path).unwrap();
            file.set_len(path.metadata().unwrap().len() - 1).unwrap();
            let error = TokenStore::open(folder.path()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{name}");
        }
    }

    #[test]
    fn a_descending_index_is_an_error() {
        let folder = written(&[(0, vec![1; 3], vec![true; 3]), (1, vec![1; 3], vec![true; 3])]);
        let mut index = std::fs::read(folder.path().join(INDEX)).unwrap();
        index[0] = 200;
        std::fs::write(folder.path().join(INDEX), index).unwrap();
        assert!(TokenStore::open(folder.path()).is_err());
    }
}
