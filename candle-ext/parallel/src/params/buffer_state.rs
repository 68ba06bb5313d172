//! Buffers: frozen f32 state, such as expert biases, that the engine updates and checkpoints store.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candlewick_model::ParamSpec;
use candlewick_ops::copy_into;

use super::ParamStore;

/// This rank's shard of a buffer, a flat view that a checkpoint reads and writes in place.
pub struct BufferState {
    /// Hugging Face name of the buffer.
    pub name: String,
    /// Shape of the whole buffer.
    pub shape: Vec<usize>,
    /// Range of the shard, in row-major order.
    pub range: Range<usize>,
    /// True if this rank writes the shard to a checkpoint: one of its replicas does.
    pub writes_checkpoint: bool,
    /// Values, f32.
    pub value: Tensor,
}

impl ParamStore {
    /// Returns this rank's shards of all buffers, in model order.
    pub fn buffers(&self) -> Result<Vec<BufferState>> {
        let here = self.layout.units.iter().enumerate().filter(|(unit_idx, _)| self.layout.has(*unit_idx));
        let specs = here.flat_map(|(unit_idx, unit)| unit.params.iter().map(move |spec| (unit_idx, spec)));
        let buffers = specs.filter(|(_, spec)| spec.is_buffer());
        buffers.filter_map(|(unit_idx, spec)| self.buffer(unit_idx, spec).transpose()).collect()
    }

    /// Adds `change`, f32 and equal on all ranks, to the buffer `name` of a unit. Another stage's buffer stays as it is.
    ///
    /// Each rank updates its shard or, if the buffer is resident, all of it.
    pub fn add_to_buffer(&self, unit_idx: usize, name: &str, change: &Tensor) -> Result<()> {
        if !self.layout.has(unit_idx) {
            return Ok(());
        }
        let (group_idx, _, param) = self.layout.find(unit_idx, name);
        if let Some(BufferState { value, range, .. }) = self.buffer(unit_idx, &param.spec)? {
            let change = change.flatten_all()?.narrow(0, range.start, range.len())?.to_device(value.device())?;
            copy_into(&value, &(&value + change)?)?;
        }
        let weights = self.buffers.group_weights(group_idx);
        // A gathered copy has the old values.
        if weights.is_resident() { Ok(()) } else { weights.publish() }
    }

    /// Returns a buffer's state; `None` if it is outside this rank's shard.
    fn buffer(&self, unit_idx: usize, spec: &ParamSpec) -> Result<Option<BufferState>> {
        let (group_idx, group, param) = self.layout.find(unit_idx, &spec.name);
        let (values, elements) = self.frozen_elements(group_idx)?;
        let Some(piece) = param.piece(&elements) else { return Ok(None) };
        let ranks = &group.ranks;
        let is_resident = self.buffers.group_weights(group_idx).is_resident();
        let replicas = [&ranks.replicate, &ranks.split].into_iter().chain(is_resident.then_some(&ranks.shard));
        Ok(Some(BufferState {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            range: piece.start - param.range.start..piece.end - param.range.start,
            writes_checkpoint: self.layout.owns(unit_idx) && replicas.into_iter().all(|group| group.rank() == 0),
            value: values.narrow(0, piece.start - elements.start, piece.len())?,
        }))
    }
}
