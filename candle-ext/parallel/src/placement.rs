//! Tensor parallel placement of each parameter (shard, replicate or partial), from the meaning of its dimensions.

use candle_core::{DType, Result, Tensor, bail};
use candlewick_comm::Collective;
use candlewick_model::{Dim, ParamGroupKind, ParamScope, ParamSpec};
use candlewick_ops::WeightStorage;

/// Megatron-LM's sequence parallelism: sharding of the residual stream over the tensor parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceParallel {
    /// Each rank holds all tokens of the residual stream.
    Off,
    /// Each rank holds a shard of the tokens of the residual stream.
    On,
}

/// Tensor parallel placement of a parameter, as DTensor's placements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// A slice of the parameter, with its complete gradient.
    Shard(Slice),
    /// The whole parameter. Each rank computes the complete gradient.
    Replicate,
    /// The whole parameter. Gradients are partial sums to all-reduce.
    Partial,
    /// The whole parameter, used by rank 0 alone: a bias added once to the reduced output.
    Rank0Only,
}

/// Rows or columns of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) dim: usize,
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// Length on the first rank, which has the most.
    pub(crate) max_len: usize,
}

/// Rank and size of the group that splits a parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankOf {
    pub(crate) rank: usize,
    pub(crate) n_ranks: usize,
}

/// Returns the maximum bytes of a parameter's shard on any of `n_ranks` ranks. `dense` is the dtype of unquantized
/// weights.
pub fn max_shard_bytes(spec: &ParamSpec, n_ranks: usize, dense: DType) -> Result<usize> {
    let placement = Placement::of(spec, SequenceParallel::Off, RankOf { rank: 0, n_ranks })?;
    spec.storage.n_bytes(&placement.max_shape(&spec.shape), dense)
}

/// Returns the maximum number of elements of a parameter's shard on any of `n_ranks` ranks.
pub fn max_shard_numel(spec: &ParamSpec, n_ranks: usize) -> Result<usize> {
    Ok(Placement::of(spec, SequenceParallel::Off, RankOf { rank: 0, n_ranks })?.max_numel(&spec.shape))
}

impl Placement {
    /// Returns the placement of a parameter on one rank. Tensor parallel ranks split dense parameters, expert parallel
    /// ranks split experts.
    pub(crate) fn of(spec: &ParamSpec, sequence_parallel: SequenceParallel, rank: RankOf) -> Result<Self> {
        let is_split = |dim: &Dim| match spec.group {
            ParamGroupKind::Dense => matches!(dim, Dim::Vocab | Dim::Heads | Dim::KvHeads | Dim::Ffn),
            ParamGroupKind::Expert => *dim == Dim::Experts,
        };
        if let Some(dim) = spec.dims.iter().position(is_split) {
            let slice = Slice::of(spec, dim, rank)?;
            slice.check_scales(spec)?;
            return Ok(Self::Shard(slice));
        }
        if spec.group == ParamGroupKind::Expert {
            bail!("{} belongs to an expert, but none of its dims {:?} counts experts", spec.name, spec.dims)
        }
        Ok(match (spec.scope, spec.dims.as_slice(), sequence_parallel) {
            (ParamScope::ResidualStream, _, SequenceParallel::Off) => Self::Replicate,
            // The bias of a row-parallel projection.
            (ParamScope::Sublayer, [Dim::Embed], _) => Self::Rank0Only,
            (ParamScope::ResidualStream, _, SequenceParallel::On) | (ParamScope::Sublayer, ..) => Self::Partial,
        })
    }

    /// Returns the shape of this rank's shard.
    pub(crate) fn shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Self::Shard(slice) = self {
            shape[slice.dim] = slice.len;
        }
        shape
    }

    /// Returns the maximum number of elements on any rank.
    pub(crate) fn max_numel(&self, whole: &[usize]) -> usize {
        self.max_shape(whole).iter().product()
    }

    /// Returns the shape of the largest shard.
    pub(crate) fn max_shape(&self, whole: &[usize]) -> Vec<usize> {
        let mut shape = whole.to_vec();
        if let Self::Shard(slice) = self {
            shape[slice.dim] = slice.max_len;
        }
        shape
    }

    /// Returns this rank's shard of the whole parameter.
    pub(crate) fn cut(&self, whole: &Tensor) -> Result<Tensor> {
        match self {
            Self::Shard(Slice { dim, start, len, .. }) => whole.narrow(*dim, *start, *len)?.contiguous(),
            _ => Ok(whole.clone()),
        }
    }

    /// Gathers the whole parameter from padded shards of [`Placement::max_numel`] elements. Collective: all ranks must
    /// call it.
    pub(crate) fn gather(&self, piece: &Tensor, whole: &[usize], ranks: &dyn Collective) -> Result<Tensor> {
        let Self::Shard(slice) = self else { return piece.reshape(whole) };
        let all = ranks.all_gather(piece)?;
        if slice.dim == 0 {
            return all.narrow(0, 0, whole.iter().product())?.reshape(whole);
        }
        let by_rank = all.reshape((ranks.size(), whole[0], slice.max_len))?;
        by_rank.transpose(0, 1)?.contiguous()?.reshape(whole)
    }

    /// Returns true if gradients are partial sums.
    pub(crate) fn is_partial(&self) -> bool {
        matches!(self, Self::Partial | Self::Rank0Only)
    }
}

impl Slice {
    /// Rejects a slice with a border inside a quantization block.
    fn check_scales(&self, spec: &ParamSpec) -> Result<()> {
        let WeightStorage::Quantized(format) = spec.storage else { return Ok(()) };
        let (start, end, n) = (self.start, self.start + self.len, spec.shape[self.dim]);
        if let Some(at) = [start, end].into_iter().find(|at| *at > 0 && *at < n && !format.splits_at(self.dim, *at)) {
            bail!("{}: {} values with one scale cannot be split at {at} of dim {}", spec.name, format.name, self.dim)
        }
        Ok(())
    }

    fn of(spec: &ParamSpec, dim: usize, RankOf { rank, n_ranks }: RankOf) -> Result<Self> {
        let n = spec.shape[dim];
        let kind = match spec.group {
            ParamGroupKind::Dense => "tensor",
            ParamGroupKind::Expert => "expert",
        };
        // Only the vocabulary may be split unevenly. Heads are whole, and columns must match rows of the next matrix.
        if !n.is_multiple_of(n_ranks) && spec.dims[dim] != Dim::Vocab {
            bail!("{} of {:?} over {n_ranks} {kind} parallel ranks: dim {dim} is not divisible", spec.name, spec.shape)
        }
        let max_len = n.div_ceil(n_ranks);
        let start = (rank * max_len).min(n);
        let len = max_len.min(n - start);
        if len == 0 {
            bail!(
                "{} of {:?} over {n_ranks} {kind} parallel ranks: nothing is left for rank {rank}",
                spec.name,
                spec.shape
            )
        }
        Ok(Self { dim, start, len, max_len })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::{Device, IndexOp};
    use candlewick_comm::{Options, threads};
    use candlewick_model::Init;

    fn spec(shape: &[usize], dims: &[Dim], scope: ParamScope) -> ParamSpec {
        let (name, shape, dims) = ("w".to_owned(), shape.to_vec(), dims.to_vec());
        let (init, group) = (Init::Zeros, ParamGroupKind::Dense);
        let storage = WeightStorage::Dense;
        ParamSpec { name, shape, dims, scope, init, decay: true, trainable: true, group, storage, hub: None }
    }

    #[test]
    fn shards_of_a_parameter_assemble_to_the_whole() {
        for (shape, dims) in [
            (&[6, 5][..], &[Dim::Heads, Dim::Embed][..]),
            (&[5, 6], &[Dim::Embed, Dim::Ffn]),
            (&[8, 3], &[Dim::Vocab, Dim::Embed]),
            (&[6], &[Dim::KvHeads]),
            (&[4], &[Dim::HeadDim]),
        ] {
            let spec = spec(shape, dims, ParamScope::Sublayer);
            let n = spec.numel();
            let whole = Tensor::arange(0.0f32, n as f32, &Device::Cpu).unwrap().reshape(shape).unwrap();
            let all = threads::run(3, Options::default(), |world| -> Result<Tensor> {
                let place = Placement::of(&spec, SequenceParallel::Off, RankOf { rank: world.rank(), n_ranks: 3 })?;
                let kept = place.cut(&whole)?.flatten_all()?;
                assert_eq!(kept.elem_count(), place.shape(shape).iter().product::<usize>());
                let padded = kept.pad_with_zeros(0, 0, place.max_numel(shape) - kept.elem_count())?;
                place.gather(&padded, shape, &*world.group())
            });
            for got in all.unwrap() {
                assert_eq!(got.dims(), shape);
                assert_eq!(
                    got.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
                    whole.flatten_all().unwrap().to_vec1::<f32>().unwrap()
                );
            }
        }
    }

    #[test]
    fn parameters_that_cannot_be_sharded_are_refused_by_name() {
        let refused = |shape: &[usize], dims: &[Dim], rank, n_ranks| {
            let ranks = RankOf { rank, n_ranks };
            Placement::of(&spec(shape, dims, ParamScope::Sublayer), SequenceParallel::Off, ranks)
                .unwrap_err()
                .to_string()
        };
        assert!(refused(&[5, 4], &[Dim::Heads, Dim::Embed], 0, 2).contains("w of [5, 4] over 2"));
        assert!(refused(&[3, 4], &[Dim::Vocab, Dim::Embed], 3, 4).contains("nothing is left for rank 3"));
    }

    const SECOND: RankOf = RankOf { rank: 1, n_ranks: 2 };

    #[test]
    fn norms_are_replicated_or_partial() {
        let norm = spec(&[4], &[Dim::Embed], ParamScope::ResidualStream);
        assert_eq!(Placement::of(&norm, SequenceParallel::Off, SECOND).unwrap(), Placement::Replicate);
        assert_eq!(Placement::of(&norm, SequenceParallel::On, SECOND).unwrap(), Placement::Partial);
        let bias = spec(&[4], &[Dim::Embed], ParamScope::Sublayer);
        assert_eq!(Placement::of(&bias, SequenceParallel::Off, SECOND).unwrap(), Placement::Rank0Only);
        let whole = Tensor::zeros(4, candle_core::DType::F32, &Device::Cpu).unwrap();
        assert_eq!(Placement::Replicate.cut(&whole).unwrap().i(0).unwrap().to_scalar::<f32>().unwrap(), 0.0);
    }

    #[test]
    fn experts_are_split_over_expert_parallel_ranks() {
        let expert =
            |dims: &[Dim]| ParamSpec { group: ParamGroupKind::Expert, ..spec(&[6, 4], dims, ParamScope::Sublayer) };
        let rows = Slice { dim: 0, start: 3, len: 3, max_len: 3 };
        let place = |dims: &[Dim]| Placement::of(&expert(dims), SequenceParallel::Off, SECOND);
        assert_eq!(place(&[Dim::Experts, Dim::Embed]).unwrap(), Placement::Shard(rows));
        assert_eq!(
            place(&[Dim::Ffn, Dim::Experts]).unwrap(),
            Placement::Shard(Slice { dim: 1, start: 2, len: 2, max_len: 2 })
        );
        assert!(place(&[Dim::Ffn, Dim::Embed]).unwrap_err().to_string().contains("w belongs to an expert"));
        let four = RankOf { rank: 0, n_ranks: 4 };
        let refused = Placement::of(&expert(&[Dim::Experts, Dim::Embed]), SequenceParallel::Off, four).unwrap_err();
        assert!(refused.to_string().contains("over 4 expert parallel ranks: dim 0 is not divisible"), "{refused}");
        let router = spec(&[6, 4], &[Dim::Experts, Dim::Embed], ParamScope::ResidualStream);
        assert_eq!(Placement::of(&router, SequenceParallel::Off, SECOND).unwrap(), Placement::Replicate);
    }
}
