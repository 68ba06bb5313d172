//! Asynchronous checkpoints: a thread with its own process group writes a copy of the state while training continues.

use std::collections::HashMap;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use candlewick_runtime::process_group::ProcessGroup;

use crate::checkpoint::{
    CheckpointPlan, RunState, StateError, Tag, TensorChunk, TensorMeta, TrainState, VALUES_PER_BLOCK,
    WrittenCheckpoint, save,
};

/// A checkpoint that is being written in the background.
pub(super) struct AsyncSave {
    thread: JoinHandle<Result<(WrittenCheckpoint, Duration)>>,
    tag: Tag,
    /// The time for which training waited for the copy.
    copy_time: Duration,
}

/// A finished asynchronous checkpoint.
pub(super) struct FinishedAsyncSave {
    pub(super) tag: Tag,
    pub(super) dir: PathBuf,
    /// Older checkpoints that retention deleted.
    pub(super) removed: Vec<PathBuf>,
    /// The time from the start until the checkpoint was on disk.
    pub(super) save_time: Duration,
}

impl AsyncSave {
    /// Copies the state that this rank writes, and starts to write it. All ranks call this.
    pub(super) fn begin(
        plan: &CheckpointPlan,
        run: RunState,
        state: &dyn TrainState,
        process: ProcessGroup,
    ) -> Result<Self> {
        let started = Instant::now();
        let (plan, tag) = (plan.clone(), run.tag());
        let snapshot = Snapshot::of(state).map_err(|error| anyhow!("failed to copy the state: {error}"))?;
        let copy_time = started.elapsed();
        // A separate pool, because the global pool is busy computing, and its main thread may wait for this thread.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).thread_name(|i| format!("save-{i}")).build()?;
        let write = move || save(&plan, &run, &snapshot, &process).map(|saved| (saved, started.elapsed()));
        let thread = std::thread::Builder::new().name("save".to_owned()).spawn(move || pool.install(write))?;
        Ok(Self { thread, tag, copy_time })
    }

    /// Returns true if [`AsyncSave::finish`] returns at once.
    pub(super) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the checkpoint is on disk.
    pub(super) fn finish(self) -> Result<FinishedAsyncSave> {
        tracing::debug!("training waited {:?} to copy the state of step {}", self.copy_time, self.tag.step);
        let (saved, save_time) = self.thread.join().map_err(|_| anyhow!("failed to save: the writer panicked"))??;
        Ok(FinishedAsyncSave { tag: self.tag, dir: saved.dir, removed: saved.removed, save_time })
    }
}

/// A copy of the chunks that a rank writes.
struct Snapshot {
    tensors: Vec<TensorMeta>,
    chunks: Vec<TensorChunk>,
    values: HashMap<String, (usize, Vec<f32>)>,
}

impl Snapshot {
    fn of(state: &dyn TrainState) -> Result<Self, StateError> {
        let chunks = state.chunks_to_write();
        let mut values = HashMap::new();
        for TensorChunk { tensor, range, .. } in &chunks {
            let mut copy = Vec::with_capacity(range.len());
            for start in range.clone().step_by(VALUES_PER_BLOCK) {
                let n_values = VALUES_PER_BLOCK.min(range.end - start);
                state.read(&tensor.name, start, n_values, &mut |read| copy.extend_from_slice(read))?;
            }
            values.insert(tensor.name.clone(), (range.start, copy));
        }
        Ok(Self { tensors: state.tensors(), chunks, values })
    }
}

impl TrainState for Snapshot {
    fn tensors(&self) -> Vec<TensorMeta> {
        self.tensors.clone()
    }

    fn chunks(&self) -> Vec<TensorChunk> {
        self.chunks.clone()
    }

    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        let (first, values) = self.values.get(name).ok_or_else(|| format!("the copy has no tensor {name}"))?;
        let from =
            start.checked_sub(*first).ok_or_else(|| format!("the copy has {name} only from element {first} on"))?;
        take(values.get(from..from + n_values).ok_or_else(|| format!("the copy has fewer elements of {name}"))?);
        Ok(())
    }

    fn load(&mut self, name: &str, _start: usize, _values: Vec<f32>) -> Result<(), StateError> {
        Err(format!("{name}: a copy cannot be loaded into").into())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct TenValues;

    impl TrainState for TenValues {
        fn tensors(&self) -> Vec<TensorMeta> {
            vec![TensorMeta { name: "w".to_owned(), shape: vec![10] }]
        }

        fn chunks_to_write(&self) -> Vec<TensorChunk> {
            let tensor = self.tensors().remove(0);
            vec![TensorChunk { tensor, row_len: 10, columns: 0..10, range: 3..8 }]
        }

        fn read(&self, _: &str, start: usize, n: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
            let values: Vec<f32> = (start..start + n).map(|at| at as f32).collect();
            take(&values);
            Ok(())
        }

        fn load(&mut self, _: &str, _: usize, _: Vec<f32>) -> Result<(), StateError> {
            unreachable!("nothing is loaded")
        }
    }

    #[test]
    fn a_copy_reads_only_the_copied_elements() {
        let mut copy = Snapshot::of(&TenValues).unwrap();
        let mut read = Vec::new();
        copy.read("w", 4, 3, &mut |values| read.extend_from_slice(values)).unwrap();
        assert_eq!(read, [4.0, 5.0, 6.0]);
        for (name, start, n) in [("w", 2, 1), ("w", 6, 3), ("v", 3, 1)] {
            assert!(copy.read(name, start, n, &mut |_| unreachable!()).is_err(), "{name} {start} {n}");
        }
        assert!(copy.load("w", 3, vec![0.0]).is_err());
    }
}
