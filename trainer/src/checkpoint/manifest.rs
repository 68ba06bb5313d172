//! The manifest: the list of a checkpoint's files and tensors.
//!
//! It is written last, so a folder with a manifest is complete. Reading treats it as untrusted input.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::plan::Tag;
use super::state::{TensorChunk, TensorMeta, current_name};

/// The file name of the manifest.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The file name of the loop's state.
pub(crate) const STATE: &str = "state.json";
const FORMAT: &str = "candlewick-sharded";
/// Version 1 hashed files with SHA-256. In version 2, every chunk had all columns. In version 3, rows were those of the
/// last dim. In version 4, optimizer states had the name of their slot alone.
const VERSION: u32 = 5;
/// The first version whose optimizer states have a part of their own in their names.
const WITH_OPTIMIZER_PART: u32 = 5;

/// The files and tensors of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// Optimizer steps done.
    pub step: usize,
    /// Epochs done.
    pub epoch: usize,
    /// The start of the run, in milliseconds since 1970. It identifies the run that wrote the checkpoint.
    #[serde(rename = "began")]
    pub run_start: u64,
    /// Every file except the manifest.
    pub files: Vec<FileEntry>,
    /// Every tensor, or every chunk of one.
    pub tensors: Vec<TensorEntry>,
}

/// A file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// The file name in the checkpoint folder.
    pub name: String,
    /// The length in bytes.
    pub size: u64,
    /// The BLAKE3 hash, in lower-case hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// The SHA-256 hash, in checkpoints of version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// A tensor, or the chunk of a tensor that one file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The tensor's global name.
    pub name: String,
    /// The name in the file, if that is an old one.
    #[serde(skip)]
    pub old_name: Option<String>,
    /// The shape of the full tensor.
    pub shape: Vec<usize>,
    /// The offset of a chunk in the full tensor: always zeros. Only version 1 wrote it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    offset: Vec<usize>,
    /// The elements of a row, to which `columns` refers; those of the last dim if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_len: Option<usize>,
    /// The columns of the full tensor that the file holds elements of; all of them if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Range<usize>>,
    /// The range of elements of these columns that the file holds, in row-major order; all of them if absent. The file
    /// stores such a chunk as a vector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Range<usize>>,
    /// The file that holds it.
    pub file: String,
}

impl Manifest {
    /// Creates the manifest of a checkpoint.
    pub(crate) fn new(tag: Tag, run_start: u64, files: Vec<FileEntry>, tensors: Vec<TensorEntry>) -> Self {
        let Tag { step, epoch } = tag;
        Self { format: FORMAT.to_owned(), version: VERSION, step, epoch, run_start, files, tensors }
    }

    /// Parses a manifest and checks that it is consistent. The error names the inconsistency.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("{MANIFEST} is not readable: {error}"))?;
        manifest.check().map_err(|reason| format!("{MANIFEST}: {reason}"))?;
        Ok(manifest.with_current_names())
    }

    /// Renames the tensors of an old version.
    fn with_current_names(mut self) -> Self {
        if self.version < WITH_OPTIMIZER_PART {
            for tensor in &mut self.tensors {
                let name = current_name(&tensor.name);
                tensor.old_name = Some(std::mem::replace(&mut tensor.name, name));
            }
        }
        self
    }

    /// Returns the tag of the checkpoint.
    pub fn tag(&self) -> Tag {
        Tag { step: self.step, epoch: self.epoch }
    }

    /// Returns the sum of the file sizes.
    pub fn n_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT || !(1..=VERSION).contains(&self.version) {
            return Err(format!(
                "the format is {} version {}; this program reads {FORMAT} up to version {VERSION}",
                self.format, self.version
            ));
        }
        let mut tensor_bytes: BTreeMap<&str, u64> = BTreeMap::new();
        for file in &self.files {
            check_file(file)?;
            if tensor_bytes.insert(&file.name, 0).is_some() {
                return Err(format!("the file {:?} is listed twice", file.name));
            }
        }
        if !tensor_bytes.contains_key(STATE) {
            return Err(format!("{STATE} is not listed"));
        }
        let mut places: BTreeMap<&str, Vec<TensorChunk>> = BTreeMap::new();
        for tensor in &self.tensors {
            let n_bytes = check_tensor(tensor)?;
            let sum = tensor_bytes
                .get_mut(tensor.file.as_str())
                .ok_or_else(|| format!("the tensor {:?} is in {:?}, which is not listed", tensor.name, tensor.file))?;
            *sum = sum.saturating_add(n_bytes);
            places.entry(&tensor.name).or_default().push(tensor.chunk());
        }
        for (name, mut chunks) in places {
            if let Some(other) = chunks.iter().find(|chunk| chunk.tensor.shape != chunks[0].tensor.shape) {
                let (shape, other) = (&chunks[0].tensor.shape, &other.tensor.shape);
                return Err(format!("the tensor {name:?} is listed with the shapes {shape:?} and {other:?}"));
            }
            chunks.sort_by_key(|chunk| (chunk.columns.start, chunk.range.start));
            if chunks.windows(2).any(|pair| !pair[0].overlaps(&pair[1]).is_empty()) {
                return Err(format!("the tensor {name:?} is listed twice"));
            }
        }
        match self.files.iter().find(|file| tensor_bytes[file.name.as_str()] > file.size) {
            Some(file) => Err(format!("the tensors of {:?} are larger than the file", file.name)),
            None => Ok(()),
        }
    }
}

impl TensorEntry {
    /// Describes the chunk of a tensor that `file` holds.
    pub(crate) fn new(chunk: TensorChunk, file: &str) -> Self {
        let has_all_columns = chunk.has_all_columns();
        let row_len = (!has_all_columns && chunk.row_len != chunk.tensor.n_columns()).then_some(chunk.row_len);
        let columns = (!has_all_columns).then_some(chunk.columns);
        let range = (chunk.range.len() != chunk.tensor.n_values()).then_some(chunk.range);
        let TensorMeta { name, shape } = chunk.tensor;
        Self { name, old_name: None, shape, offset: Vec::new(), row_len, columns, range, file: file.to_owned() }
    }

    /// Returns the chunk.
    pub fn chunk(&self) -> TensorChunk {
        let full = TensorChunk::full(TensorMeta { name: self.name.clone(), shape: self.shape.clone() });
        let row_len = self.row_len.unwrap_or(full.row_len);
        let columns = self.columns.clone().unwrap_or(0..row_len);
        let n_rows = full.range.end / row_len.max(1);
        let all = 0..n_rows * columns.len();
        TensorChunk { tensor: full.tensor, range: self.range.clone().unwrap_or(all), row_len, columns }
    }
}

fn check_file(file: &FileEntry) -> Result<(), String> {
    let mut parts = Path::new(&file.name).components();
    let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    if !is_plain || file.name.contains(['/', '\\', '\0']) || file.name == MANIFEST {
        return Err(format!("{:?} is not a file name", file.name));
    }
    let ((Some(hash), None) | (None, Some(hash))) = (&file.blake3, &file.sha256) else {
        return Err(format!("{:?} has two hashes or none", file.name));
    };
    if hash.len() != 64 || !hash.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(format!("the hash of {:?} is malformed: {hash:?}", file.name));
    }
    Ok(())
}

/// Returns the bytes of the tensor or chunk.
fn check_tensor(tensor: &TensorEntry) -> Result<u64, String> {
    let TensorEntry { name, shape, offset, row_len, columns, range, .. } = tensor;
    if offset.iter().any(|&o| o != 0) {
        return Err(format!("the tensor {name:?} has the offset {offset:?}; this program reads ranges of elements"));
    }
    let n_bytes = shape.iter().try_fold(4u64, |bytes, &extent| bytes.checked_mul(extent as u64));
    let n_bytes = n_bytes.ok_or_else(|| format!("the tensor {name:?} has an impossible shape {shape:?}"))?;
    let width = row_len.or(shape.last().copied()).unwrap_or(1);
    if row_len.is_some_and(|n| n == 0 || !(n_bytes / 4).is_multiple_of(n as u64)) {
        return Err(format!("the tensor {name:?} of shape {shape:?} has no rows of {width} elements"));
    }
    let n_values = match columns {
        None => n_bytes / 4,
        Some(columns) if columns.is_empty() || columns.end > width => {
            return Err(format!("the tensor {name:?} of shape {shape:?} has no columns {columns:?}"));
        }
        Some(columns) => n_bytes / 4 / width as u64 * columns.len() as u64,
    };
    match range {
        None => Ok(4 * n_values),
        Some(range) if range.is_empty() || range.end as u64 > n_values => {
            Err(format!("the tensor {name:?} of shape {shape:?} has no elements {range:?}"))
        }
        Some(range) => Ok(4 * range.len() as u64),
    }
}
