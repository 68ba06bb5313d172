//! Trainable parameters with optimizer states, as checkpoints store them.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candlewick_model::ParamSpec;
use candlewick_ops::ShardPosition;

use super::ParamStore;
use crate::optimizer::StateSlot;
use crate::placement::Placement;

/// This rank's shard of a trainable parameter and its optimizer state: flat views that a checkpoint reads and writes in
/// place.
pub struct ParamState {
    /// Hugging Face name of the parameter.
    pub name: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// Elements of a row of the whole parameter, seen as a matrix: its last dim, or more if ranks split every expert.
    pub row_len: usize,
    /// Columns of this matrix that the shard belongs to; elements if the parameter is a vector.
    pub columns: Range<usize>,
    /// Range of the shard within these columns, in row-major order.
    pub range: Range<usize>,
    /// True if this rank writes the shard to a checkpoint: one of its replicas does.
    pub writes_checkpoint: bool,
    /// Master weights, in [`ParamDtypes::masters`](super::ParamDtypes::masters).
    pub master: Tensor,
    /// Gradient accumulated since [`ParamStore::zero_grads`]. It is reduced over the ranks after
    /// [`ParamStore::wait_grad_reduction`].
    pub grad: Tensor,
    /// Optimizer state by the name of its slot.
    pub slots: Vec<(&'static str, Tensor)>,
}

impl ParamState {
    /// Returns a tensor of optimizer state by name.
    pub fn slot(&self, name: &str) -> Option<&Tensor> {
        self.slots.iter().find(|(slot, _)| *slot == name).map(|(_, state)| state)
    }
}

impl ParamStore {
    /// Returns the slots of optimizer state of a parameter, on whichever rank they are; none if it is frozen.
    pub fn slots(&self, spec: &ParamSpec) -> &'static [StateSlot] {
        match self.options.mode.trains(spec) {
            true => self.options.optimizer.group_of(spec).kind.slots(),
            false => &[],
        }
    }

    /// Returns this rank's shards of all trainable parameters with gradients and optimizer states, in model order.
    pub fn states(&self) -> Result<Vec<ParamState>> {
        let here = self.layout.units.iter().enumerate().filter(|(unit_idx, _)| self.layout.has(*unit_idx));
        let specs = here.flat_map(|(unit_idx, unit)| unit.params.iter().map(move |spec| (unit_idx, spec)));
        specs.filter_map(|(unit_idx, spec)| self.state(unit_idx, spec).transpose()).collect()
    }

    /// Returns a parameter's state; `None` if it is frozen or outside this rank's shard.
    fn state(&self, unit_idx: usize, spec: &ParamSpec) -> Result<Option<ParamState>> {
        let (group_idx, group, param) = self.layout.find(unit_idx, &spec.name);
        let (Some(optimizer), Some(piece)) = (self.optimizer.shard(group_idx), param.piece(&group.shard)) else {
            return Ok(None);
        };
        let part = |shard: &Tensor| shard.narrow(0, piece.start - group.shard.start, piece.len());
        let ShardPosition { row_len, columns, first } = param.position(&piece);
        let is_distinct = matches!(param.placement, Placement::Shard(_));
        let ranks = &group.ranks;
        let slots = optimizer.slots.iter().zip(&optimizer.states).map(|(slot, state)| Ok((slot.name, part(state)?)));
        Ok(Some(ParamState {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            row_len,
            columns,
            range: first..first + piece.len(),
            writes_checkpoint: self.layout.owns(unit_idx)
                && ranks.replicate.rank() == 0
                && (is_distinct || ranks.tensor.rank() == 0),
            master: part(&optimizer.master)?,
            grad: part(&self.reducer.reduced(group_idx)?)?,
            slots: slots.collect::<Result<_>>()?,
        }))
    }
}
