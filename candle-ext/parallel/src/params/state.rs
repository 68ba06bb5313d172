//! Trainable parameters with their optimizer state, as a checkpoint reads and writes them.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candlewick_model::ParamSpec;

use super::ParamStore;
use crate::placement::Placement;

/// This rank's part of one trainable parameter with its state: flat views of the part, written in place.
pub struct ParamState {
    /// The parameter's Hugging Face name.
    pub name: String,
    /// The shape of all of it.
    pub shape: Vec<usize>,
    /// The columns (the elements of a vector) of which this is a part.
    pub columns: Range<usize>,
    /// The elements of these columns, in the order of the rows.
    pub range: Range<usize>,
    /// True if this rank writes it to a checkpoint: of the ranks with the same elements, one does.
    pub writes_checkpoint: bool,
    /// The weights that the optimizer updates, in [`ParamDtypes::masters`](super::ParamDtypes::masters).
    pub master: Tensor,
    /// The gradient summed since [`ParamStore::zero_grads`], over the ranks once [`ParamStore::wait_grad_reduction`] has been called.
    pub grad: Tensor,
    /// Adam's running mean of the gradient, in [`ParamDtypes::moments`](super::ParamDtypes::moments).
    pub exp_avg: Tensor,
    /// Adam's running mean of the squared gradient, likewise.
    pub exp_avg_sq: Tensor,
}

impl ParamStore {
    /// Returns this rank's part of the trainable parameters with their gradients and optimizer state, in model order.
    pub fn states(&self) -> Result<Vec<ParamState>> {
        let here = self.layout.units.iter().enumerate().filter(|(unit_idx, _)| self.layout.has(*unit_idx));
        let specs = here.flat_map(|(unit_idx, unit)| unit.params.iter().map(move |spec| (unit_idx, spec)));
        specs.filter_map(|(unit_idx, spec)| self.state(unit_idx, spec).transpose()).collect()
    }

    /// Returns the state of a trainable parameter if this rank's shard has some of it.
    fn state(&self, unit_idx: usize, spec: &ParamSpec) -> Result<Option<ParamState>> {
        let (group_idx, group, param) = self.layout.find(unit_idx, &spec.name);
        let (Some(optimizer), Some(piece)) = (self.optimizer.shard(group_idx), param.piece(&group.shard)) else {
            return Ok(None);
        };
        let part = |shard: &Tensor| shard.narrow(0, piece.start - group.shard.start, piece.len());
        let (columns, before) = param.columns();
        let start = before + piece.start - param.range.start;
        let has_slice = matches!(param.placement, Placement::Shard(_));
        let ranks = &group.ranks;
        Ok(Some(ParamState {
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            columns,
            range: start..start + piece.len(),
            writes_checkpoint: self.layout.owns(unit_idx)
                && ranks.replicate.rank() == 0
                && (has_slice || ranks.split.rank() == 0),
            master: part(&optimizer.master)?,
            grad: part(&self.reducer.reduced(group_idx)?)?,
            exp_avg: part(&optimizer.exp_avg)?,
            exp_avg_sq: part(&optimizer.exp_avg_sq)?,
        }))
    }
}
