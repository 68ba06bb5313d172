//! A save that is written while training goes on: of a copy of the state, by a thread and a process group of its own.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use candlewick_comm::{AtWork, Collective};
use candlewick_runtime::process_group::exchange_words;

use crate::checkpoint::{
    AT_ONCE, CheckpointError, CheckpointPlan, Crew, Piece, RunState, Saved, StateError, Tag, TensorMeta, TrainState,
    Word, save,
};

/// A save on its way to disk.
pub(super) struct UnderWay {
    thread: JoinHandle<Result<(Saved, Duration), CheckpointError>>,
    tag: Tag,
    /// How long training waited for the copy.
    copying: Duration,
}

/// A save that is done.
pub(super) struct Done {
    pub(super) tag: Tag,
    pub(super) dir: PathBuf,
    /// Older checkpoints that `keep` deleted.
    pub(super) removed: Vec<PathBuf>,
    /// From its beginning until it was safe on disk.
    pub(super) save_time: Duration,
}

impl UnderWay {
    /// Copies what this rank writes of `state`, and begins to write it. All ranks call it.
    pub(super) fn begin(
        plan: &CheckpointPlan,
        run: RunState,
        state: &dyn TrainState,
        crew: BackgroundCrew,
    ) -> Result<Self> {
        let began = Instant::now();
        let (plan, tag) = (plan.clone(), run.tag());
        let snapshot =
            Snapshot::of(state, state.written()).map_err(|error| anyhow!("failed to copy the state: {error}"))?;
        let copying = began.elapsed();
        // Those that compute have no time, and the main thread, which may wait for this one, is one of them.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).thread_name(|i| format!("save-{i}")).build()?;
        let write = move || save(&plan, &run, &snapshot, &crew).map(|saved| (saved, began.elapsed()));
        let thread = std::thread::Builder::new().name("save".to_owned()).spawn(move || pool.install(write))?;
        Ok(Self { thread, tag, copying })
    }

    /// Tells whether [`UnderWay::finish`] returns at once.
    pub(super) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until it is safe on disk.
    pub(super) fn finish(self) -> Result<Done> {
        tracing::debug!("training waited {:?} for the copy of step {}", self.copying, self.tag.step);
        let (saved, save_time) = self.thread.join().map_err(|_| anyhow!("failed to save: the writer panicked"))??;
        Ok(Done { tag: self.tag, dir: saved.dir, removed: saved.removed, save_time })
    }
}

/// The ranks of a save in the background, in a group that nothing else uses.
pub(super) struct BackgroundCrew {
    pub(super) group: Arc<dyn Collective>,
    pub(super) at_work: AtWork,
}

impl Crew for BackgroundCrew {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn tell(&self, own: Word) -> Result<Vec<Word>, StateError> {
        Ok(exchange_words(&*self.group, own)?)
    }

    fn at_work(&self) -> Option<AtWork> {
        Some(self.at_work.clone())
    }
}

/// A copy of what a rank writes.
struct Snapshot {
    tensors: Vec<TensorMeta>,
    pieces: Vec<Piece>,
    values: HashMap<String, (usize, Vec<f32>)>,
}

impl Snapshot {
    fn of(state: &dyn TrainState, pieces: Vec<Piece>) -> Result<Self, StateError> {
        let mut values = HashMap::new();
        for Piece { tensor, range, .. } in &pieces {
            let mut copy = Vec::with_capacity(range.len());
            for start in range.clone().step_by(AT_ONCE) {
                let n_values = AT_ONCE.min(range.end - start);
                state.read(&tensor.name, start, n_values, &mut |read| copy.extend_from_slice(read))?;
            }
            values.insert(tensor.name.clone(), (range.start, copy));
        }
        Ok(Self { tensors: state.tensors(), pieces, values })
    }
}

impl TrainState for Snapshot {
    fn tensors(&self) -> Vec<TensorMeta> {
        self.tensors.clone()
    }

    fn pieces(&self) -> Vec<Piece> {
        self.pieces.clone()
    }

    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        let (first, values) = self.values.get(name).ok_or_else(|| format!("the copy has nothing of {name}"))?;
        let from = start.checked_sub(*first).ok_or_else(|| format!("the copy has {name} from {first} on"))?;
        take(values.get(from..from + n_values).ok_or_else(|| format!("the copy has less of {name}"))?);
        Ok(())
    }

    fn load(&mut self, name: &str, _start: usize, _values: Vec<f32>) -> Result<(), StateError> {
        Err(format!("{name}: a copy is only written").into())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct Ten;

    impl TrainState for Ten {
        fn tensors(&self) -> Vec<TensorMeta> {
            vec![TensorMeta { name: "w".to_owned(), shape: vec![10] }]
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
    fn a_copy_gives_what_was_copied_and_nothing_else() {
        let tensor = Ten.tensors().remove(0);
        let pieces = vec![Piece { tensor, columns: 0..10, range: 3..8 }];
        let mut copy = Snapshot::of(&Ten, pieces).unwrap();
        let mut read = Vec::new();
        copy.read("w", 4, 3, &mut |values| read.extend_from_slice(values)).unwrap();
        assert_eq!(read, [4.0, 5.0, 6.0]);
        for (name, start, n) in [("w", 2, 1), ("w", 6, 3), ("v", 3, 1)] {
            assert!(copy.read(name, start, n, &mut |_| unreachable!()).is_err(), "{name} {start} {n}");
        }
        assert!(copy.load("w", 3, vec![0.0]).is_err());
    }
}
