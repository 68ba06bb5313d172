//! Tensors of a multimodal checkpoint that are not computed, such as a vision tower. Exports get them byte for byte.

use std::io::{BufWriter, Write};
use std::path::Path;

use super::reader::DiskTensor;
use super::{Checkpoint, DurableFile, HeaderEntry, encode_header, identity};
use crate::family::multimodal::NameLayout;
use crate::{Config, ModelError};

/// The carried tensors of a multimodal model, and the layout of its names.
#[derive(Debug)]
pub struct CarriedTensors {
    source: Checkpoint,
    layout: &'static NameLayout,
}

impl CarriedTensors {
    /// Opens the carried tensors in a model folder; `None` for a text model.
    ///
    /// # Errors
    /// If the weights have no known layout of names.
    pub fn open(folder: &Path, config: &Config) -> Result<Option<Self>, ModelError> {
        if !config.family().is_multimodal() {
            return Ok(None);
        }
        let source = Checkpoint::of_model(folder, config)?;
        match source.layout() {
            Some(layout) => Ok(Some(Self { source, layout })),
            None => {
                let problem = format!("its tensors have no names of {}", config.family().architecture());
                Err(ModelError::mismatch(folder, problem))
            }
        }
    }

    /// Returns a hash of the carried tensors, as of [`Checkpoint::identity`].
    pub fn identity(&self) -> String {
        identity::identity(self.source.carried())
    }

    /// Returns the number of bytes.
    pub fn n_bytes(&self) -> u64 {
        self.source.carried().map(|tensor| tensor.bytes.len() as u64).sum()
    }

    /// Returns the layout of the names.
    pub(super) fn layout(&self) -> &'static NameLayout {
        self.layout
    }

    /// Splits the tensors into shards of at most `limit` bytes. A larger tensor gets a shard of its own.
    pub(super) fn shards(&self, limit: u64) -> Vec<CarriedShard<'_>> {
        let mut shards: Vec<CarriedShard<'_>> = Vec::new();
        for tensor in self.source.carried() {
            match shards.last_mut() {
                Some(shard) if shard.n_bytes() + tensor.bytes.len() as u64 <= limit => shard.tensors.push(tensor),
                _ => shards.push(CarriedShard { tensors: vec![tensor] }),
            }
        }
        shards
    }

    /// Verifies that an exported folder has the carried tensors, with equal bytes.
    ///
    /// # Errors
    /// If one is missing or differs.
    pub(crate) fn verify(&self, exported: &Path, config: &Config) -> Result<(), ModelError> {
        let written = Checkpoint::of_model(exported, config)?;
        let (wanted, found) = (self.source.carried(), written.carried());
        let differs = |(a, b): &(DiskTensor<'_>, DiskTensor<'_>)| {
            (a.name, a.dtype, a.shape) != (b.name, b.dtype, b.shape) || a.bytes != b.bytes
        };
        let n_found = written.carried().count();
        match wanted.zip(found).find(differs) {
            Some((wanted, _)) => {
                let problem = format!(
                    "tensor `{}` was written with other bytes than those in {}; check the disk, and run the command again",
                    wanted.name,
                    self.source.folder().display()
                );
                Err(ModelError::mismatch(exported, problem))
            }
            None if n_found != self.source.carried().count() => {
                Err(ModelError::mismatch(exported, "carried tensors are missing; run the command again"))
            }
            None => Ok(()),
        }
    }
}

/// Carried tensors of one file.
pub(super) struct CarriedShard<'a> {
    tensors: Vec<DiskTensor<'a>>,
}

impl CarriedShard<'_> {
    /// Returns the number of bytes.
    pub(super) fn n_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum()
    }

    /// Returns the names of the tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name)
    }

    /// Writes a safetensors file, and flushes it to disk.
    pub(super) fn write(&self, path: &Path) -> Result<(), ModelError> {
        let io = |e| ModelError::io("write", path)(e);
        let entry = |tensor: &DiskTensor<'_>| HeaderEntry {
            name: tensor.name.to_owned(),
            dtype: tensor.dtype,
            shape: tensor.shape.to_vec(),
        };
        let mut out = BufWriter::with_capacity(1 << 20, DurableFile::create_new(path).map_err(io)?);
        let header = encode_header(&[("format", "pt".to_owned())], self.tensors.iter().map(entry));
        out.write_all(&header).map_err(io)?;
        self.tensors.iter().try_for_each(|tensor| out.write_all(tensor.bytes)).map_err(io)?;
        out.into_inner().map_err(|e| io(e.into_error()))?.sync().map_err(io)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/mistral3")
    }

    #[test]
    fn a_changed_or_missing_carried_tensor_is_found() {
        let config = Config::read(&fixture()).unwrap();
        let carried = CarriedTensors::open(&fixture(), &config).unwrap().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        let original = fs::read(fixture().join("model.safetensors")).unwrap();
        fs::write(&file, &original).unwrap();
        carried.verify(folder.path(), &config).unwrap();
        let (wanted, found) = (carried.source.carried(), carried.source.carried().count());
        let last = wanted.last().unwrap().bytes;
        let start = original.windows(last.len()).position(|bytes| bytes == last).unwrap();
        let mut changed = original.clone();
        changed[start] ^= 1;
        fs::write(&file, changed).unwrap();
        let error = carried.verify(folder.path(), &config).unwrap_err().to_string();
        assert!(error.contains("vision_tower.") && error.contains("other bytes"), "{error}");
        let mut shards = carried.shards(u64::MAX);
        assert_eq!(shards[0].tensors.len(), found);
        shards[0].tensors.pop();
        // Without the text there is no layout, so the last norm stays.
        let norm = "language_model.model.norm.weight";
        let text = Checkpoint::open(&fixture()).unwrap();
        shards[0].tensors.extend(text.contents().filter(|tensor| tensor.name == norm));
        fs::remove_file(&file).unwrap();
        shards[0].write(&file).unwrap();
        let error = carried.verify(folder.path(), &config).unwrap_err().to_string();
        assert!(error.contains("missing"), "{error}");
    }
}
