//! Checkpoints of several ranks, with parameter groups that differ in shards, replicas and writers.

use std::collections::BTreeSet;
use std::ops::Range;

use candlewick_comm::{Options, threads};
use candlewick_runtime::process_group::ProcessGroup;

use super::*;

/// The number of shards of dense tensors and of experts; the remaining ranks are replicas.
#[derive(Clone, Copy)]
struct Shards {
    dense: usize,
    expert: usize,
}

/// One rank's shards of a dense tensor, of an expert's columns, and of some rows of every expert.
struct Sharded {
    chunks: Vec<TensorChunk>,
    to_write: Vec<TensorChunk>,
    values: BTreeMap<String, (usize, Vec<f32>)>,
}

const DENSE: &str = "master/dense";
const EXPERT: &str = "master/expert";
const GATE_UP: &str = "master/gate_up";

fn metas() -> Vec<TensorMeta> {
    let shapes = [(DENSE, vec![5, 8]), (EXPERT, vec![6, 8]), (GATE_UP, vec![12, 4])];
    shapes.map(|(name, shape)| TensorMeta { name: name.to_owned(), shape }).into()
}

/// Returns the value of an element of a full tensor.
fn value(chunk: &TensorChunk, at: usize) -> f32 {
    let (width, n) = (chunk.row_len, chunk.columns.len());
    let place = at / n * width + chunk.columns.start + at % n;
    (place + if chunk.tensor.name == DENSE { 0 } else { 1000 }) as f32
}

fn shard_of(n: usize, shard: usize, n_shards: usize) -> Range<usize> {
    n * shard / n_shards..n * (shard + 1) / n_shards
}

impl Sharded {
    /// Splits experts by columns over pairs of ranks, then shards them.
    fn new(rank: usize, n_ranks: usize, shards: Shards) -> Self {
        let [dense, expert, gate_up] = metas().try_into().unwrap();
        let n_splits = 2.min(n_ranks);
        let range = shard_of(40, rank % shards.dense, shards.dense);
        let dense = TensorChunk { row_len: 8, columns: 0..8, range, tensor: dense };
        let range = shard_of(48 / n_splits, rank / n_splits % shards.expert, shards.expert);
        let split = |tensor, row_len| {
            let columns = shard_of(row_len, rank % n_splits, n_splits);
            TensorChunk { row_len, columns, range: range.clone(), tensor }
        };
        // Two experts of six rows: a row of the matrix is an expert.
        let (expert, gate_up) = (split(expert, 8), split(gate_up, 24));
        let mut to_write = Vec::new();
        to_write.extend((rank < shards.dense).then(|| dense.clone()));
        to_write
            .extend((rank < n_splits * shards.expert).then(|| [expert.clone(), gate_up.clone()]).into_iter().flatten());
        let chunks = vec![dense, expert, gate_up];
        let zeros =
            |chunk: &TensorChunk| (chunk.tensor.name.clone(), (chunk.range.start, vec![0.0; chunk.range.len()]));
        Self { values: chunks.iter().map(zeros).collect(), chunks, to_write }
    }

    fn with_values(mut self) -> Self {
        for chunk in &self.chunks {
            let values = chunk.range.clone().map(|at| value(chunk, at)).collect();
            self.values.insert(chunk.tensor.name.clone(), (chunk.range.start, values));
        }
        self
    }
}

impl TrainState for Sharded {
    fn tensors(&self) -> Vec<TensorMeta> {
        metas()
    }
    fn chunks(&self) -> Vec<TensorChunk> {
        self.chunks.clone()
    }
    fn chunks_to_write(&self) -> Vec<TensorChunk> {
        self.to_write.clone()
    }
    fn read(&self, name: &str, start: usize, n_values: usize, take: &mut dyn FnMut(&[f32])) -> Result<(), StateError> {
        let (first, values) = &self.values[name];
        take(&values[start - first..][..n_values]);
        Ok(())
    }
    fn load(&mut self, name: &str, start: usize, values: Vec<f32>) -> Result<(), StateError> {
        let (first, own) = self.values.get_mut(name).ok_or("no such tensor")?;
        own[start - *first..][..values.len()].copy_from_slice(&values);
        Ok(())
    }
}

fn save_on_four(plan: &CheckpointPlan, shards: Shards) {
    let saved = threads::run(4, Options::default(), |world| -> Result<(), String> {
        let state = Sharded::new(world.rank(), 4, shards).with_values();
        let process = ProcessGroup::new(world).map_err(|error| error.to_string())?;
        let saved = save_with(&LocalDisk, SHARD, plan, &run(1), &state, &process);
        saved.map(drop).map_err(|error| error.to_string())
    });
    saved.unwrap();
}

#[test]
fn groups_with_different_writers_load_on_any_number_of_ranks() {
    for shards in [Shards { dense: 4, expert: 1 }, Shards { dense: 2, expert: 2 }, Shards { dense: 1, expert: 2 }] {
        let dir = tempfile::tempdir().unwrap();
        let plan = plan(&dir, None);
        save_on_four(&plan, shards);
        for (n_ranks, shards) in [(4, shards), (2, Shards { dense: 2, expert: 1 }), (1, Shards { dense: 1, expert: 1 })]
        {
            let read = threads::run(n_ranks, Options::default(), |world| -> Result<bool, String> {
                let mut state = Sharded::new(world.rank(), n_ranks, shards);
                let process = ProcessGroup::new(world).map_err(|error| error.to_string())?;
                let resumed = resume(&plan, &fingerprint(), &mut state, &process);
                let resumed = resumed.map_err(|error| error.to_string())?.ok_or("no checkpoint was found")?;
                let want = Sharded::new(world.rank(), n_ranks, shards).with_values();
                Ok(resumed.run == run(1) && state.values == want.values)
            });
            assert!(read.unwrap().into_iter().all(|is_same| is_same), "{n_ranks} ranks");
        }
    }
}

#[test]
fn only_the_writers_of_a_group_write_its_shards() {
    let dir = tempfile::tempdir().unwrap();
    let plan = plan(&dir, None);
    save_on_four(&plan, Shards { dense: 1, expert: 2 });
    let manifest = fs::read(plan.dir(run(1).tag()).join("manifest.json")).unwrap();
    let manifest = Manifest::parse(&manifest).unwrap();
    let writers = |name: &str| -> BTreeSet<String> {
        let entries = manifest.tensors.iter().filter(|entry| entry.name == name);
        entries.map(|entry| entry.file["shard_".len()..][..5].to_owned()).collect()
    };
    assert_eq!(Vec::from_iter(writers(DENSE)), ["00000"]);
    assert_eq!(Vec::from_iter(writers(EXPERT)), ["00000", "00001", "00002", "00003"]);
}
