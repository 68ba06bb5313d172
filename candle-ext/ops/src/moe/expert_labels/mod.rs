//! Renumbering of experts for parallel ranks: shards of experts as experts of their own, or the experts of one rank.
//!
//! t tokens, k experts per token, s shards of an expert

use candle_core::{DType, Result, Tensor, bail};

use super::assignment::{DROPPED, ExpertAssignment};
use crate::recording::record;
use crate::transfer::upload;

const OP: &str = "expert labels";

/// Replaces the expert of each slot by `s` labels: u32 [t, k] -> [t, k * s], with the labels [e * s] of all experts.
///
/// A slot that is dropped stays dropped. The label [`DROPPED`] drops a slot.
pub fn relabel_experts(experts: &Tensor, labels: &[u32], n_labels: usize) -> Result<Tensor> {
    let (t, k) = experts.dims2()?;
    if n_labels == 0 || labels.is_empty() || !labels.len().is_multiple_of(n_labels) {
        bail!("{OP}: want {n_labels} labels of each expert, got {}", labels.len())
    }
    let n_experts = labels.len() / n_labels;
    let of_dropped = std::iter::repeat_n(DROPPED, n_labels);
    let table: Vec<u32> = labels.iter().copied().chain(of_dropped).collect();
    let table = upload(&table, (n_experts + 1, n_labels), experts.device())?;
    let rows = experts.flatten_all()?.minimum(n_experts as u32)?;
    table.index_select(&rows, 0)?.reshape((t, k * n_labels))
}

impl ExpertAssignment {
    /// Returns the assignment to `s` shards of each expert: [t, k] -> [t, k * s]. Shards are experts of their own.
    ///
    /// Owners have `n_local` experts each, and s ranks hold the shards of an owner's experts. The shards are numbered by
    /// rank: shard j of expert e is (e / n_local * s + j) * n_local + e % n_local.
    pub fn sharded(&self, n_local: usize, n_copies: usize) -> Result<Self> {
        if n_copies == 1 {
            return Ok(self.clone());
        }
        let shard = |expert: usize, j: usize| ((expert / n_local * n_copies + j) * n_local + expert % n_local) as u32;
        let labels = (0..self.n_experts()).flat_map(|expert| (0..n_copies).map(move |j| shard(expert, j)));
        let experts = relabel_experts(&self.experts, &labels.collect::<Vec<_>>(), n_copies)?;
        Self::new(&experts, self.n_experts() * n_copies)
    }
}

/// Repeats the weight of each slot for `s` shards of its expert: f32 [t, k] -> [t, k * s].
///
/// The gradient of a weight is the sum over its copies.
pub fn repeat_weights(weights: &Tensor, n_copies: usize) -> Result<Tensor> {
    let (t, k) = weights.dims2()?;
    if weights.dtype() != DType::F32 {
        bail!("repeat_weights: want f32 weights, got {:?}", weights.dtype())
    }
    let repeated = weights.unsqueeze(2)?.broadcast_as((t, k, n_copies))?.contiguous()?.reshape((t, k * n_copies))?;
    Ok(record("repeat_weights", [weights.into()], repeated, move |dy, _| {
        Ok([Some(dy.reshape((t, k, n_copies))?.sum(2)?)])
    }))
}

/// Repeats the key of each slot for `s` shards of its expert: [t, k] -> [t, k * s].
pub fn repeat_dropout_keys(keys: &Tensor, n_copies: usize) -> Result<Tensor> {
    let (t, k) = keys.dims2()?;
    keys.unsqueeze(2)?.broadcast_as((t, k, n_copies))?.contiguous()?.reshape((t, k * n_copies))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn shards_are_numbered_by_rank() {
        // Four experts on two owners, each split over two ranks: rank 0 has the first shards of experts 0 and 1.
        let experts = Tensor::new(&[[0u32, 3], [2, DROPPED]], &Device::Cpu).unwrap();
        let sharded = ExpertAssignment::new(&experts, 4).unwrap().sharded(2, 2).unwrap();
        assert_eq!(sharded.experts.to_vec2::<u32>().unwrap(), [[0, 2, 5, 7], [4, 6, DROPPED, DROPPED]]);
        assert_eq!(sharded.counts().unwrap().to_vec1::<f32>().unwrap(), [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn labels_select_the_experts_of_a_rank() {
        let experts = Tensor::new(&[[0u32, 3], [2, DROPPED]], &Device::Cpu).unwrap();
        let own = relabel_experts(&experts, &[DROPPED, DROPPED, 0, 1], 1).unwrap();
        assert_eq!(own.to_vec2::<u32>().unwrap(), [[DROPPED, 1], [0, DROPPED]]);
        assert!(relabel_experts(&experts, &[0, 1, 2], 2).unwrap_err().to_string().contains("2 labels of each expert"));
    }
}
