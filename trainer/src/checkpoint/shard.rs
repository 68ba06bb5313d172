//! A safetensors file of a checkpoint, written and read in blocks of bounded size.

use std::io::{BufReader, Read};
use std::path::Path;

use candlewick_model::checkpoint::{HeaderEntry, encode_header, little_endian, read_header};
use candlewick_text::files::open_regular_file;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::error::CheckpointError;
use super::hash::HashedFile;
use super::manifest::FileEntry;
use super::state::{Overlap, TensorChunk, TrainState};
use super::storage::Storage;

/// The number of values that are copied at once: 4 MiB.
pub(crate) const VALUES_PER_BLOCK: usize = 1 << 20;

/// Writes `chunks`, in order, to the file `dir/name`.
pub(crate) fn write_shard(
    storage: &dyn Storage,
    dir: &Path,
    name: &str,
    chunks: &[TensorChunk],
    state: &dyn TrainState,
) -> Result<FileEntry, CheckpointError> {
    let path = dir.join(name);
    let mut file = HashedFile::create(storage, &path).map_err(CheckpointError::io("create", &path))?;
    file.write(&header(chunks)).map_err(CheckpointError::io("write", &path))?;
    for TensorChunk { tensor, range, .. } in chunks {
        for start in range.clone().step_by(VALUES_PER_BLOCK) {
            let mut written = Ok(());
            let mut write = |values: &[f32]| written = file.write(&little_endian(values));
            let read = state.read(&tensor.name, start, VALUES_PER_BLOCK.min(range.end - start), &mut write);
            read.map_err(|source| CheckpointError::State { action: "read", name: tensor.name.clone(), source })?;
            written.map_err(CheckpointError::io("write", &path))?;
        }
    }
    file.finish(name).map_err(CheckpointError::io("sync", &path))
}

/// The parts of a file to read: one chunk in the file, and its overlaps with a chunk of this rank.
pub(crate) struct ChunkRead {
    pub(crate) chunk: TensorChunk,
    /// The name in the file, if that is an old one.
    pub(crate) old_name: Option<String>,
    /// Starts in the file's chunk and in this rank's chunk.
    pub(crate) overlaps: Vec<Overlap>,
}

/// Loads the requested parts of a file into `state`. The file's hash is verified before.
pub(crate) fn read_shard(
    dir: &Path,
    name: &str,
    wanted: &[ChunkRead],
    state: &mut dyn TrainState,
) -> Result<(), CheckpointError> {
    let path = dir.join(name);
    let file = open_regular_file(&path).map_err(CheckpointError::io("open", &path))?;
    let mut file = BufReader::with_capacity(1 << 20, file);
    let (data_start, metadata) =
        read_header(&mut file).map_err(|reason| CheckpointError::damaged(dir, format!("{name}: {reason}")))?;
    let mut position = data_start;
    for ChunkRead { chunk, old_name, overlaps } in wanted {
        let begin = data_offset(&metadata, old_name.as_ref().unwrap_or(&chunk.tensor.name), chunk)
            .map_err(|reason| CheckpointError::damaged(dir, format!("{name}: {reason}")))?;
        let tensor = &chunk.tensor;
        for Overlap { starts: [from, to], len } in overlaps {
            let first = data_start + begin + 4 * (from - chunk.range.start) as u64;
            // Nearby offsets are already in the buffer.
            file.seek_relative(first as i64 - position as i64).map_err(CheckpointError::io("read", &path))?;
            position = first + 4 * *len as u64;
            for start in (0..*len).step_by(VALUES_PER_BLOCK) {
                let mut values = vec![0f32; VALUES_PER_BLOCK.min(len - start)];
                file.read_exact(bytemuck::cast_slice_mut(&mut values)).map_err(CheckpointError::io("read", &path))?;
                values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
                state.load(&tensor.name, to + start, values).map_err(|source| CheckpointError::State {
                    action: "load",
                    name: tensor.name.clone(),
                    source,
                })?;
            }
        }
    }
    Ok(())
}

fn header(chunks: &[TensorChunk]) -> Vec<u8> {
    let entry =
        |chunk: &TensorChunk| HeaderEntry { name: chunk.tensor.name.clone(), dtype: Dtype::F32, shape: chunk.shape() };
    encode_header(&[], chunks.iter().map(entry))
}

fn data_offset(metadata: &Metadata, name: &str, chunk: &TensorChunk) -> Result<u64, String> {
    let shape = chunk.shape();
    let info = metadata.info(name).ok_or_else(|| format!("no tensor {name:?}"))?;
    if info.dtype != Dtype::F32 || info.shape != shape {
        return Err(format!("{name:?} is {:?} {:?}, not F32 {shape:?}", info.dtype, info.shape));
    }
    Ok(info.data_offsets.0 as u64)
}
