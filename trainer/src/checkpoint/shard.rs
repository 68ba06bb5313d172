//! One safetensors file of a save, written and read in pieces of bounded size while it is hashed.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use sha2::{Digest, Sha256};

use super::error::CheckpointError;
use super::manifest::FileEntry;
use super::state::{TensorMeta, TrainState};
use super::storage::{Storage, StoredFile};

/// Values that travel at once: 4 MiB.
const PIECE: usize = 1 << 20;
/// A longer header than this is no header of ours.
const MAX_HEADER: u64 = 100 << 20;

/// Passes bytes on to a file, counting and hashing them.
pub(crate) struct HashedFile {
    file: Box<dyn StoredFile>,
    hash: Sha256,
    size: u64,
}

impl HashedFile {
    pub(crate) fn create(storage: &dyn Storage, path: &Path) -> io::Result<Self> {
        Ok(Self { file: storage.create_file(path)?, hash: Sha256::new(), size: 0 })
    }

    /// Makes the file durable and describes it.
    pub(crate) fn finish(mut self, name: &str) -> io::Result<FileEntry> {
        self.file.sync()?;
        Ok(FileEntry { name: name.to_owned(), size: self.size, sha256: hex(&self.hash.finalize()) })
    }
}

impl Write for HashedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hash.update(&bytes[..n]);
        self.size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes `tensors`, in their order, as the file `dir/name`.
pub(crate) fn write_shard(
    storage: &dyn Storage,
    dir: &Path,
    name: &str,
    tensors: &[TensorMeta],
    state: &dyn TrainState,
) -> Result<FileEntry, CheckpointError> {
    let path = dir.join(name);
    let mut file = HashedFile::create(storage, &path).map_err(CheckpointError::io("create", &path))?;
    file.write_all(&header(tensors)).map_err(CheckpointError::io("write", &path))?;
    let mut bytes = Vec::new();
    let mut values = Vec::new();
    for tensor in tensors {
        let n_values = tensor.n_values();
        for start in (0..n_values).step_by(PIECE) {
            values.resize(PIECE.min(n_values - start), 0f32);
            state.read(&tensor.name, start, &mut values).map_err(|source| CheckpointError::State {
                action: "read",
                name: tensor.name.clone(),
                source,
            })?;
            bytes.resize(4 * values.len(), 0u8);
            let (quads, _) = bytes.as_chunks_mut::<4>();
            quads.iter_mut().zip(&values).for_each(|(quad, value)| *quad = value.to_le_bytes());
            file.write_all(&bytes).map_err(CheckpointError::io("write", &path))?;
        }
    }
    file.finish(name).map_err(CheckpointError::io("sync", &path))
}

/// Hands every tensor of the file to `state`. The file's hash was verified before.
pub(crate) fn read_shard(
    dir: &Path,
    name: &str,
    tensors: &[TensorMeta],
    state: &mut dyn TrainState,
) -> Result<(), CheckpointError> {
    let path = dir.join(name);
    let file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
    let mut file = BufReader::with_capacity(1 << 20, file);
    let (data_start, metadata) =
        read_header(&mut file).map_err(|reason| CheckpointError::damaged(dir, format!("{name}: {reason}")))?;
    let mut bytes = Vec::new();
    for tensor in tensors {
        let begin =
            begin_of(&metadata, tensor).map_err(|reason| CheckpointError::damaged(dir, format!("{name}: {reason}")))?;
        file.seek(SeekFrom::Start(data_start + begin)).map_err(CheckpointError::io("read", &path))?;
        let n_values = tensor.n_values();
        for start in (0..n_values).step_by(PIECE) {
            bytes.resize(4 * PIECE.min(n_values - start), 0u8);
            file.read_exact(&mut bytes).map_err(CheckpointError::io("read", &path))?;
            let (quads, _) = bytes.as_chunks::<4>();
            let values: Vec<f32> = quads.iter().map(|&quad| f32::from_le_bytes(quad)).collect();
            state.load(&tensor.name, start, &values).map_err(|source| CheckpointError::State {
                action: "load",
                name: tensor.name.clone(),
                source,
            })?;
        }
    }
    Ok(())
}

/// Hashes a whole file: its sha256 in hexadecimal digits.
pub(crate) fn sha256_of(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut bytes = vec![0u8; 1 << 20];
    loop {
        match file.read(&mut bytes)? {
            0 => return Ok(hex(&hash.finalize())),
            n => hash.update(&bytes[..n]),
        }
    }
}

fn header(tensors: &[TensorMeta]) -> Vec<u8> {
    let mut end = 0;
    let infos = tensors.iter().map(|tensor| {
        let begin = end;
        end += 4 * tensor.n_values();
        let info = TensorInfo { dtype: Dtype::F32, shape: tensor.shape.clone(), data_offsets: (begin, end) };
        (tensor.name.clone(), info)
    });
    let metadata = Metadata::new(None, infos.collect()).expect("the offsets are consecutive");
    let mut json = serde_json::to_vec(&metadata).expect("names and numbers are JSON");
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

/// Returns where the data begins, and the header.
fn read_header(file: &mut impl Read) -> Result<(u64, Metadata), String> {
    let mut length = [0u8; 8];
    file.read_exact(&mut length).map_err(|error| format!("no header: {error}"))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        return Err(format!("a header of {length} bytes"));
    }
    let mut json = vec![0u8; length as usize];
    file.read_exact(&mut json).map_err(|error| format!("a cut header: {error}"))?;
    let metadata = serde_json::from_slice(&json).map_err(|error| format!("its header: {error}"))?;
    Ok((8 + length, metadata))
}

fn begin_of(metadata: &Metadata, tensor: &TensorMeta) -> Result<u64, String> {
    let info = metadata.info(&tensor.name).ok_or_else(|| format!("no tensor {:?}", tensor.name))?;
    if info.dtype != Dtype::F32 || info.shape != tensor.shape {
        return Err(format!("{:?} is {:?} {:?}, not F32 {:?}", tensor.name, info.dtype, info.shape, tensor.shape));
    }
    Ok(info.data_offsets.0 as u64)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
