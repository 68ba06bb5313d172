//! Placement of each parameter on tensor and expert parallel ranks (shard, replicate or partial), from the meaning of its
//! dimensions.

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

/// Placement of a parameter on a rank, as DTensor's placements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// A slice of the parameter, with its complete gradient.
    Shard(Slice),
    /// A slice of the parameter that all ranks of the tensor axis hold. Gradients are partial sums to all-reduce.
    PartialShard(Slice),
    /// The whole parameter. Each rank computes the complete gradient.
    Replicate,
    /// The whole parameter. Gradients are partial sums to all-reduce.
    Partial,
    /// The whole parameter, used by rank 0 alone: a bias added once to the reduced output.
    Rank0Only,
}

/// Rank and size of the group that splits a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankOf {
    pub(crate) rank: usize,
    pub(crate) n_ranks: usize,
}

/// Position of a rank among those that split a parameter. The tensor axis varies fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitRank {
    /// Expert parallel ranks; one rank for dense parameters.
    pub(crate) expert: RankOf,
    /// Tensor parallel ranks for dense parameters, expert tensor parallel ranks for experts.
    pub(crate) tensor: RankOf,
}

/// Numbers of ranks that split parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitSizes {
    /// Tensor parallel ranks.
    pub tensor: usize,
    /// Expert parallel ranks.
    pub expert: usize,
    /// Expert tensor parallel ranks.
    pub expert_tensor: usize,
}

impl SplitSizes {
    /// Returns the position of the first rank among those that split `spec`.
    fn first_rank(self, spec: &ParamSpec) -> SplitRank {
        let first = |n_ranks| RankOf { rank: 0, n_ranks };
        match spec.group {
            ParamGroupKind::Dense => SplitRank { expert: first(1), tensor: first(self.tensor) },
            ParamGroupKind::Expert => SplitRank { expert: first(self.expert), tensor: first(self.expert_tensor) },
        }
    }
}

/// Returns the maximum bytes of a parameter's shard on any rank. `dense` is the dtype of unquantized weights.
pub fn max_shard_bytes(spec: &ParamSpec, sizes: SplitSizes, dense: DType) -> Result<usize> {
    let placement = Placement::of(spec, SequenceParallel::Off, sizes.first_rank(spec))?;
    spec.storage.n_bytes(&placement.max_shape(&spec.shape), dense)
}

/// Returns the maximum number of elements of a parameter's shard on any rank.
pub fn max_shard_numel(spec: &ParamSpec, sizes: SplitSizes) -> Result<usize> {
    Ok(Placement::of(spec, SequenceParallel::Off, sizes.first_rank(spec))?.max_numel(&spec.shape))
}

impl Placement {
    /// Returns the placement of a parameter on one rank. Tensor parallel ranks split dense parameters. Expert parallel
    /// ranks divide the experts, and expert tensor parallel ranks split each expert.
    pub(crate) fn of(spec: &ParamSpec, sequence_parallel: SequenceParallel, rank: SplitRank) -> Result<Self> {
        let is_expert = spec.group == ParamGroupKind::Expert;
        if let Some(slice) = Slice::of(spec, rank)? {
            slice.check_scales(spec)?;
            let has_copies = is_expert && !slice.is_split_along(SplitAxis::Tensor);
            return Ok(if has_copies { Self::PartialShard(slice) } else { Self::Shard(slice) });
        }
        if is_expert {
            bail!("{} belongs to an expert, but none of its dims {:?} counts experts", spec.name, spec.dims)
        }
        Ok(match (spec.scope, spec.dims.as_slice(), sequence_parallel) {
            (ParamScope::ResidualStream, _, SequenceParallel::Off) => Self::Replicate,
            // The bias of a row-parallel projection.
            (ParamScope::Sublayer, [Dim::Embed], _) => Self::Rank0Only,
            (ParamScope::ResidualStream, _, SequenceParallel::On) | (ParamScope::Sublayer, ..) => Self::Partial,
        })
    }

    /// Returns the slice, if the rank has only one.
    pub(crate) fn slice(&self) -> Option<&Slice> {
        match self {
            Self::Shard(slice) | Self::PartialShard(slice) => Some(slice),
            Self::Replicate | Self::Partial | Self::Rank0Only => None,
        }
    }

    /// Returns the shape of this rank's shard.
    pub(crate) fn shape(&self, whole: &[usize]) -> Vec<usize> {
        self.slice().map_or_else(|| whole.to_vec(), |slice| slice.shape(whole, slice.rows.len, slice.columns.len))
    }

    /// Returns the maximum number of elements on any rank.
    pub(crate) fn max_numel(&self, whole: &[usize]) -> usize {
        self.max_shape(whole).iter().product()
    }

    /// Returns the shape of the largest shard.
    pub(crate) fn max_shape(&self, whole: &[usize]) -> Vec<usize> {
        self.slice()
            .map_or_else(|| whole.to_vec(), |slice| slice.shape(whole, slice.rows.max_len, slice.columns.max_len))
    }

    /// Returns this rank's shard of the whole parameter.
    pub(crate) fn cut(&self, whole: &Tensor) -> Result<Tensor> {
        let Some(slice) = self.slice() else { return Ok(whole.clone()) };
        let Slice { matrix: [n_rows, n_columns], rows, columns } = slice;
        let matrix = whole.reshape((*n_rows, *n_columns))?;
        let part = matrix.narrow(0, rows.start, rows.len)?.narrow(1, columns.start, columns.len)?;
        part.contiguous()?.reshape(self.shape(whole.dims()))
    }

    /// Gathers the whole parameter from padded shards of [`Placement::max_numel`] elements. Collective: all ranks of
    /// `split`, of which `n_tensor` neighbours each are on the tensor axis, must call it.
    pub(crate) fn gather(
        &self,
        piece: &Tensor,
        whole: &[usize],
        (split, n_tensor): (&dyn Collective, usize),
    ) -> Result<Tensor> {
        let Some(slice) = self.slice() else { return piece.reshape(whole) };
        let all = split.all_gather(piece)?;
        slice.join_whole(&all, whole, [split.size() / n_tensor, n_tensor])
    }

    /// Joins the whole parameter from the padded shards of all ranks of the tensor axis, which `shard_of` returns by rank. `own` is
    /// this rank.
    pub(crate) fn join(
        &self,
        shard_of: impl Fn(usize) -> Result<Tensor>,
        whole: &[usize],
        own: RankOf,
    ) -> Result<Tensor> {
        let Some(slice) = self.slice() else { return shard_of(own.rank)?.reshape(whole) };
        let all = (0..own.n_ranks).map(shard_of).collect::<Result<Vec<_>>>()?;
        slice.join_whole(&Tensor::cat(&all, 0)?, whole, [1, own.n_ranks])
    }

    /// Returns true if gradients are partial sums.
    pub(crate) fn is_partial(&self) -> bool {
        matches!(self, Self::PartialShard(_) | Self::Partial | Self::Rank0Only)
    }
}

/// Mesh axis that splits a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SplitAxis {
    Expert,
    Tensor,
}

/// Rows and columns of a parameter, seen as a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Rows and columns of the matrix. It has the parameter's elements in row-major order.
    pub(crate) matrix: [usize; 2],
    pub(crate) rows: DimSlice,
    pub(crate) columns: DimSlice,
}

/// Range of a rank along one dimension of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DimSlice {
    pub(crate) start: usize,
    pub(crate) len: usize,
    /// Length on the first rank, which has the most.
    pub(crate) max_len: usize,
    /// Axis that splits the dimension; `None` for the whole dimension.
    axis: Option<SplitAxis>,
}

impl Slice {
    /// Returns the slice of a parameter on one rank; `None` if no axis splits it.
    fn of(spec: &ParamSpec, rank: SplitRank) -> Result<Option<Self>> {
        let axis = |dim: &Dim| match (spec.group, dim) {
            (ParamGroupKind::Dense, Dim::Vocab | Dim::Heads | Dim::KvHeads | Dim::Ffn) => Some(SplitAxis::Tensor),
            (ParamGroupKind::Expert, Dim::Ffn) => Some(SplitAxis::Tensor),
            (ParamGroupKind::Expert, Dim::Experts | Dim::ExpertFfn { .. }) => Some(SplitAxis::Expert),
            _ => None,
        };
        let axes: Vec<_> = spec.dims.iter().map(axis).collect();
        let Some(first) = axes.iter().position(Option::is_some) else { return Ok(None) };
        let part = |dim: usize| DimSlice::of(spec, dim, axes[dim], rank);
        let n = spec.numel();
        if let Dim::ExpertFfn { n_matrices } = spec.dims[0] {
            let matrix = [n_matrices, n / n_matrices];
            let rows = DimSlice::of_len(spec, n_matrices, Some(SplitAxis::Expert), rank)?;
            let columns = DimSlice::of_len(spec, matrix[1], Some(SplitAxis::Tensor), rank)?;
            if !(spec.shape[0] / n_matrices).is_multiple_of(rank.tensor.n_ranks) {
                bail!("{}", indivisible(spec, SplitAxis::Tensor, rank))
            }
            return Ok(Some(Self { matrix, rows, columns }));
        }
        if spec.shape.len() == 2 && (first == 1 || axes[1].is_some()) {
            let matrix = [spec.shape[0], spec.shape[1]];
            return Ok(Some(Self { matrix, rows: part(0)?, columns: part(1)? }));
        }
        let matrix = [spec.shape[0], spec.shape[1..].iter().product()];
        Ok(Some(Self { matrix, rows: part(0)?, columns: DimSlice::whole(matrix[1]) }))
    }

    /// Returns the shape of a slice with `n_rows` rows and `n_columns` columns of a parameter of shape `whole`.
    fn shape(&self, whole: &[usize], n_rows: usize, n_columns: usize) -> Vec<usize> {
        match whole {
            [_] => vec![n_rows],
            [_, width] if self.matrix[1] != *width => vec![n_rows * n_columns / width, *width],
            [_, _] => vec![n_rows, n_columns],
            [_, rest @ ..] => [&[n_rows], rest].concat(),
            [] => Vec::new(),
        }
    }

    fn is_split_along(&self, axis: SplitAxis) -> bool {
        [self.rows, self.columns].iter().any(|part| part.axis == Some(axis))
    }

    /// Joins the padded slices of all ranks to the parameter of shape `whole`.
    fn join_whole(&self, all: &Tensor, whole: &[usize], axes: [usize; 2]) -> Result<Tensor> {
        self.join(all, axes)?.narrow(0, 0, whole.iter().product())?.reshape(whole)
    }

    /// Joins the padded slices of all ranks, [expert axis, tensor axis, ..] -> [elements]. Only the last rows may be
    /// padding.
    fn join(&self, all: &Tensor, [n_expert, n_tensor]: [usize; 2]) -> Result<Tensor> {
        let (rows, columns) = (self.rows, self.columns);
        let mut all = all.reshape(vec![n_expert, n_tensor, rows.max_len, columns.max_len])?;
        // Copies along an axis that does not split the parameter are equal.
        for (dim, axis) in [SplitAxis::Expert, SplitAxis::Tensor].into_iter().enumerate() {
            if !self.is_split_along(axis) {
                all = all.narrow(dim, 0, 1)?;
            }
        }
        // The axis that splits the columns comes between rows and columns, every other axis before the rows.
        let order = match columns.axis {
            None => [0, 1, 2, 3],
            Some(SplitAxis::Expert) => [1, 2, 0, 3],
            Some(SplitAxis::Tensor) => [0, 2, 1, 3],
        };
        all.permute(order)?.contiguous()?.flatten_all()
    }

    /// Rejects a slice with a border inside a quantization block.
    fn check_scales(&self, spec: &ParamSpec) -> Result<()> {
        let WeightStorage::Quantized(format) = spec.storage else { return Ok(()) };
        for (dim, border) in self.borders(spec) {
            if !format.splits_at(dim, border) {
                bail!(
                    "{}: {} values with one scale cannot be split at {border} of dim {dim}; use fewer ranks, or do not quantize it",
                    spec.name,
                    format.name
                )
            }
        }
        Ok(())
    }

    /// Returns the borders of the slice inside of the parameter, as dim and position.
    fn borders(&self, spec: &ParamSpec) -> Vec<(usize, usize)> {
        let inside = |dim: usize, at: usize| (0 < at && at < spec.shape[dim]).then_some((dim, at));
        let ends = |part: DimSlice| [part.start, part.start + part.len];
        if spec.dims.len() == 2 && self.matrix[1] != spec.shape[1] {
            // Each row of the matrix is a block of rows of the parameter.
            let (width, height) = (spec.shape[1], self.matrix[1] / spec.shape[1]);
            if self.columns.len == self.matrix[1] {
                return ends(self.rows).into_iter().filter_map(|row| inside(0, row * height)).collect();
            }
            let rows = (0..self.matrix[0]).flat_map(|row| ends(self.columns).map(|at| row * height + at / width));
            return rows.filter_map(|at| inside(0, at)).collect();
        }
        let rows = ends(self.rows).into_iter().filter_map(|at| inside(0, at));
        let columns = ends(self.columns).into_iter().filter(|_| spec.dims.len() == 2);
        rows.chain(columns.filter_map(|at| inside(1, at))).collect()
    }
}

impl DimSlice {
    fn whole(n: usize) -> Self {
        Self { start: 0, len: n, max_len: n, axis: None }
    }

    fn of(spec: &ParamSpec, dim: usize, axis: Option<SplitAxis>, rank: SplitRank) -> Result<Self> {
        let n = spec.shape[dim];
        // Only the vocabulary may be split unevenly. Heads are whole, and columns must match rows of the next matrix.
        let n_ranks = axis.map_or(1, |axis| rank.along(axis).n_ranks);
        if !n.is_multiple_of(n_ranks) && spec.dims[dim] == Dim::Vocab {
            return Self::uneven(spec, n, rank);
        }
        Self::of_len(spec, n, axis, rank)
    }

    fn of_len(spec: &ParamSpec, n: usize, axis: Option<SplitAxis>, rank: SplitRank) -> Result<Self> {
        let Some(split) = axis else { return Ok(Self::whole(n)) };
        let RankOf { rank: index, n_ranks } = rank.along(split);
        if !n.is_multiple_of(n_ranks) {
            bail!("{}", indivisible(spec, split, rank))
        }
        let len = n / n_ranks;
        Ok(Self { start: index * len, len, max_len: len, axis })
    }

    /// Splits the vocabulary: the last ranks may have fewer rows.
    fn uneven(spec: &ParamSpec, n: usize, rank: SplitRank) -> Result<Self> {
        let RankOf { rank: index, n_ranks } = rank.tensor;
        let max_len = n.div_ceil(n_ranks);
        let start = (index * max_len).min(n);
        let len = max_len.min(n - start);
        if len == 0 {
            let (name, shape) = (&spec.name, &spec.shape);
            bail!("{name} of {shape:?} over {n_ranks} tensor parallel ranks: nothing is left for rank {index}")
        }
        Ok(Self { start, len, max_len, axis: Some(SplitAxis::Tensor) })
    }
}

impl SplitRank {
    fn along(self, axis: SplitAxis) -> RankOf {
        match axis {
            SplitAxis::Expert => self.expert,
            SplitAxis::Tensor => self.tensor,
        }
    }
}

/// Describes a parameter that an axis cannot split.
fn indivisible(spec: &ParamSpec, axis: SplitAxis, rank: SplitRank) -> String {
    let kind = match (axis, spec.group) {
        (SplitAxis::Expert, _) => "expert",
        (SplitAxis::Tensor, ParamGroupKind::Dense) => "tensor",
        (SplitAxis::Tensor, ParamGroupKind::Expert) => "expert tensor",
    };
    let n_ranks = rank.along(axis).n_ranks;
    format!("{} of {:?} over {n_ranks} {kind} parallel ranks: it cannot be divided", spec.name, spec.shape)
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

    /// Returns the position of a tensor parallel rank.
    fn tensor(rank: usize, n_ranks: usize) -> SplitRank {
        SplitRank { expert: RankOf { rank: 0, n_ranks: 1 }, tensor: RankOf { rank, n_ranks } }
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
                let place = Placement::of(&spec, SequenceParallel::Off, tensor(world.rank(), 3))?;
                let kept = place.cut(&whole)?.flatten_all()?;
                assert_eq!(kept.elem_count(), place.shape(shape).iter().product::<usize>());
                let padded = kept.pad_with_zeros(0, 0, place.max_numel(shape) - kept.elem_count())?;
                place.gather(&padded, shape, (&*world.group(), 3))
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
            let ranks = tensor(rank, n_ranks);
            let spec = spec(shape, dims, ParamScope::Sublayer);
            Placement::of(&spec, SequenceParallel::Off, ranks).unwrap_err().to_string()
        };
        assert!(refused(&[5, 4], &[Dim::Heads, Dim::Embed], 0, 2).contains("w of [5, 4] over 2"));
        assert!(refused(&[3, 4], &[Dim::Vocab, Dim::Embed], 3, 4).contains("nothing is left for rank 3"));
    }

    #[test]
    fn norms_are_replicated_or_partial() {
        let norm = spec(&[4], &[Dim::Embed], ParamScope::ResidualStream);
        assert_eq!(Placement::of(&norm, SequenceParallel::Off, tensor(1, 2)).unwrap(), Placement::Replicate);
        assert_eq!(Placement::of(&norm, SequenceParallel::On, tensor(1, 2)).unwrap(), Placement::Partial);
        let bias = spec(&[4], &[Dim::Embed], ParamScope::Sublayer);
        assert_eq!(Placement::of(&bias, SequenceParallel::Off, tensor(1, 2)).unwrap(), Placement::Rank0Only);
        let whole = Tensor::zeros(4, candle_core::DType::F32, &Device::Cpu).unwrap();
        assert_eq!(Placement::Replicate.cut(&whole).unwrap().i(0).unwrap().to_scalar::<f32>().unwrap(), 0.0);
    }

    fn expert(shape: &[usize], dims: &[Dim]) -> ParamSpec {
        ParamSpec { group: ParamGroupKind::Expert, ..spec(shape, dims, ParamScope::Sublayer) }
    }

    /// Returns the position of rank `rank` of `ep` x `etp` ranks.
    fn split_rank(rank: usize, [ep, etp]: [usize; 2]) -> SplitRank {
        let [expert, tensor] = [(rank / etp, ep), (rank % etp, etp)].map(|(rank, n_ranks)| RankOf { rank, n_ranks });
        SplitRank { expert, tensor }
    }

    const SECOND: SplitRank =
        SplitRank { expert: RankOf { rank: 1, n_ranks: 2 }, tensor: RankOf { rank: 0, n_ranks: 1 } };

    #[test]
    fn experts_are_split_over_expert_parallel_ranks() {
        let place = |dims: &[Dim]| Placement::of(&expert(&[6, 4], dims), SequenceParallel::Off, SECOND);
        let (rows, columns) = ([3, 3], [2, 2]);
        let ranges = |placement: Placement| {
            let slice = placement.slice().unwrap().clone();
            [slice.rows, slice.columns].map(|part| [part.start, part.len])
        };
        assert_eq!(ranges(place(&[Dim::Experts, Dim::Embed]).unwrap()), [rows, [0, 4]]);
        assert_eq!(ranges(place(&[Dim::Embed, Dim::Experts]).unwrap()), [[0, 6], columns]);
        assert!(place(&[Dim::Embed, Dim::Embed]).unwrap_err().to_string().contains("w belongs to an expert"));
        let four = SplitRank { expert: RankOf { rank: 0, n_ranks: 4 }, ..SECOND };
        let spec_of_six = expert(&[6, 4], &[Dim::Experts, Dim::Embed]);
        let refused = Placement::of(&spec_of_six, SequenceParallel::Off, four).unwrap_err();
        assert!(refused.to_string().contains("over 4 expert parallel ranks"), "{refused}");
        let router = spec(&[6, 4], &[Dim::Experts, Dim::Embed], ParamScope::ResidualStream);
        assert_eq!(Placement::of(&router, SequenceParallel::Off, tensor(1, 2)).unwrap(), Placement::Replicate);
    }

    /// Gate and up of two experts with four rows each: the second of two ranks has the last two rows of each.
    #[test]
    fn every_expert_is_split_over_expert_tensor_parallel_ranks() {
        let gate_up = expert(&[16, 3], &[Dim::ExpertFfn { n_matrices: 4 }, Dim::Embed]);
        let placement = Placement::of(&gate_up, SequenceParallel::Off, split_rank(1, [1, 2])).unwrap();
        let whole = Tensor::arange(0u32, 48, &Device::Cpu).unwrap().reshape((16, 3)).unwrap();
        let part = placement.cut(&whole).unwrap();
        assert_eq!(part.dims(), [8, 3]);
        let first_column = part.i((.., 0)).unwrap().to_vec1::<u32>().unwrap();
        assert_eq!(first_column, [2, 3, 6, 7, 10, 11, 14, 15].map(|row| 3 * row));
        let three = Placement::of(&gate_up, SequenceParallel::Off, split_rank(0, [1, 3])).unwrap_err().to_string();
        assert!(three.contains("w of [16, 3] over 3 expert tensor parallel ranks: it cannot be divided"), "{three}");
    }

    #[test]
    fn shards_of_experts_assemble_to_the_whole() {
        for (shape, dims) in [
            (&[24, 5][..], &[Dim::ExpertFfn { n_matrices: 4 }, Dim::Embed][..]),
            (&[6, 4], &[Dim::Experts, Dim::Ffn]),
            (&[4, 3], &[Dim::Experts, Dim::Embed]),
            (&[3, 4], &[Dim::Embed, Dim::Experts]),
            (&[8], &[Dim::Experts]),
        ] {
            for grid in [[2, 2], [1, 2], [2, 1], [1, 1]] {
                let spec = expert(shape, dims);
                let whole = Tensor::arange(0u32, spec.numel() as u32, &Device::Cpu).unwrap().reshape(shape).unwrap();
                let all = threads::run(grid[0] * grid[1], Options::default(), |world| -> Result<Tensor> {
                    let rank = split_rank(world.rank(), grid);
                    let placement = Placement::of(&spec, SequenceParallel::Off, rank)?;
                    let part = placement.cut(&whole)?;
                    assert_eq!(part.dims(), placement.shape(shape));
                    placement.gather(&part.flatten_all()?, shape, (&*world.group(), grid[1]))
                });
                for got in all.unwrap() {
                    assert_eq!(got.to_string(), whole.to_string(), "{dims:?} over {grid:?}");
                }
            }
        }
    }
}
