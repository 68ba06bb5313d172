//! A checkpoint in memory: whole tensors, assembled from the shards that the ranks write.

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor};
use candlewick_ops::copy_into;
use candlewick_parallel::{ParamState, ParamStore};

use super::mixture::units;

/// Whole tensors of a checkpoint by name.
pub(crate) type SavedTensors = BTreeMap<String, Vec<f32>>;

/// Returns the positions of a state's elements in the whole parameter.
fn partition(state: &ParamState) -> impl Iterator<Item = usize> + use<> {
    let (width, columns) = (state.row_len, state.columns.clone());
    state.range.clone().map(move |at| at / columns.len() * width + columns.start + at % columns.len())
}

fn tensors(state: &ParamState) -> Vec<(String, Tensor)> {
    let named = |part: &str, x: &Tensor| (format!("{part}/{}", state.name), x.clone());
    let slots = state.slots.iter().map(|(slot, x)| named(slot, x));
    [named("master", &state.master), named("grad", &state.grad)].into_iter().chain(slots).collect()
}

/// A rank's shard of a tensor.
pub(crate) struct TensorShard {
    pub(crate) name: String,
    /// Elements of the whole tensor.
    numel: usize,
    /// Positions in the whole tensor, and their values.
    pub(crate) values: Vec<(usize, f32)>,
    is_written: bool,
}

pub(crate) fn shards(store: &ParamStore) -> Result<Vec<TensorShard>> {
    let mut shards = Vec::new();
    for state in store.states()? {
        let (numel, is_written) = (state.shape.iter().product(), state.writes_checkpoint);
        for (name, tensor) in tensors(&state) {
            let values = partition(&state).zip(tensor.to_vec1::<f32>()?).collect();
            shards.push(TensorShard { name, numel, values, is_written });
        }
    }
    Ok(shards)
}

/// Assembles the written shards. Every element must be written once, and equal the replicas that are not written.
pub(crate) fn join(shards: &[TensorShard]) -> SavedTensors {
    let mut saved = SavedTensors::new();
    let (written, held): (Vec<_>, Vec<_>) = shards.iter().partition(|shard| shard.is_written);
    for TensorShard { name, numel, values, .. } in written {
        let whole = saved.entry(name.clone()).or_insert_with(|| vec![f32::NAN; *numel]);
        for (at, value) in values {
            assert!(whole[*at].is_nan(), "element {at} of {name} is written twice");
            whole[*at] = *value;
        }
    }
    let n_names = 4 * units().iter().map(|unit| unit.params.len()).sum::<usize>();
    assert_eq!(saved.len(), n_names, "written were {:?}", saved.keys());
    for (name, whole) in &saved {
        assert!(whole.iter().all(|x| !x.is_nan()), "{name} is not written whole");
    }
    for TensorShard { name, values, .. } in held {
        assert!(values.iter().all(|(at, value)| saved[name][*at] == *value), "replicas of {name} differ");
    }
    saved
}

pub(crate) fn load(store: &ParamStore, saved: &SavedTensors) -> Result<()> {
    for state in store.states()? {
        for (name, tensor) in tensors(&state) {
            let values: Vec<f32> = partition(&state).map(|at| saved[&name][at]).collect();
            copy_into(&tensor, &Tensor::new(values, &Device::Cpu)?)?;
        }
    }
    store.refresh()
}
