//! The list of what a save holds. It is written last, so its presence says that the rest is there;
//! it is read as if a stranger had written it.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

use super::plan::Tag;

/// The manifest's file name.
pub(crate) const MANIFEST: &str = "manifest.json";
/// The file name of the loop's state.
pub(crate) const STATE: &str = "state.json";
const FORMAT: &str = "candlewick-sharded";
/// In the first version files were hashed by SHA-256.
const VERSION: u32 = 2;

/// Lists the files and tensors of a save.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: String,
    version: u32,
    /// Optimizer steps done.
    pub step: usize,
    /// Epochs done.
    pub epoch: usize,
    /// When the run began, in milliseconds since 1970: tells the saves of one run from those of another.
    pub began: u64,
    /// Every file but the manifest.
    pub files: Vec<FileEntry>,
    /// Every tensor, or every piece of one.
    pub tensors: Vec<TensorEntry>,
}

/// Describes a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its name in the save's folder.
    pub name: String,
    /// Its length in bytes.
    pub size: u64,
    /// Its BLAKE3 hash, in lower-case hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
    /// Its SHA-256 hash instead: in saves of the first version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// Describes a tensor, or the piece of it that one file holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The tensor's name in the whole model.
    pub name: String,
    /// The whole tensor's shape; the piece's own shape is in its file's header.
    pub shape: Vec<usize>,
    /// Where the piece begins in the whole tensor.
    pub offset: Vec<usize>,
    /// The file that holds it.
    pub file: String,
}

impl Manifest {
    /// Collects the lists of a save.
    pub(crate) fn new(tag: Tag, began: u64, files: Vec<FileEntry>, tensors: Vec<TensorEntry>) -> Self {
        let Tag { step, epoch } = tag;
        Self { format: FORMAT.to_owned(), version: VERSION, step, epoch, began, files, tensors }
    }

    /// Reads a manifest and checks that it makes sense in itself. The error says what does not.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| format!("{MANIFEST} is not readable: {error}"))?;
        manifest.check().map_err(|reason| format!("{MANIFEST}: {reason}"))?;
        Ok(manifest)
    }

    /// Returns the name under which this was saved.
    pub fn tag(&self) -> Tag {
        Tag { step: self.step, epoch: self.epoch }
    }

    /// Sums the sizes of the files.
    pub fn n_bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.size))
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT || !(1..=VERSION).contains(&self.version) {
            return Err(format!(
                "it has the format {} {}; this program reads {FORMAT} up to {VERSION}",
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
        let mut names = std::collections::BTreeSet::new();
        for tensor in &self.tensors {
            let n_bytes = check_tensor(tensor)?;
            let sum = tensor_bytes
                .get_mut(tensor.file.as_str())
                .ok_or_else(|| format!("the tensor {:?} is in {:?}, which is not listed", tensor.name, tensor.file))?;
            *sum = sum.saturating_add(n_bytes);
            if !names.insert(&tensor.name) {
                return Err(format!("the tensor {:?} is listed twice", tensor.name));
            }
        }
        match self.files.iter().find(|file| tensor_bytes[file.name.as_str()] > file.size) {
            Some(file) => Err(format!("the tensors of {:?} are larger than the file", file.name)),
            None => Ok(()),
        }
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
        return Err(format!("the hash of {:?} is not one: {hash:?}", file.name));
    }
    Ok(())
}

/// Returns the bytes of the tensor.
fn check_tensor(tensor: &TensorEntry) -> Result<u64, String> {
    if tensor.offset.len() != tensor.shape.len() || tensor.offset.iter().any(|&o| o != 0) {
        return Err(format!(
            "the tensor {:?} is saved in pieces (offset {:?}); this program reads whole tensors",
            tensor.name, tensor.offset
        ));
    }
    tensor
        .shape
        .iter()
        .try_fold(4u64, |bytes, &extent| bytes.checked_mul(extent as u64))
        .ok_or_else(|| format!("the tensor {:?} has an absurd shape {:?}", tensor.name, tensor.shape))
}
