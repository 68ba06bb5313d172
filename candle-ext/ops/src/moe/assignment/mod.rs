//! Assignment of tokens to experts, and the order of rows that is sorted by expert.

#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{DType, Result, Tensor, bail};

use crate::device::on_device;
use crate::storage::host;
use crate::transfer::upload;

const OP: &str = "expert assignment";

/// Mark of a dropped slot in [`ExpertAssignment::experts`]: no expert computes it.
pub const DROPPED: u32 = u32::MAX;

/// Experts of each token, with the permutation that sorts them.
///
/// t tokens with k experts each have n = t * k slots; slot `token * k + j` is the token's j-th expert. Rows are slots
/// in the order of their experts, and of slots within an expert. Dropped slots come last, from row `offsets[e]` on.
///
/// Cloning is cheap.
#[derive(Clone, Debug)]
pub struct ExpertAssignment {
    /// Expert of each slot, u32 [t, k]; [`DROPPED`] for a slot without one.
    pub experts: Tensor,
    /// First row of each expert, u32 [e + 1]; the last element counts the rows of all experts.
    pub offsets: Tensor,
    /// Slot of each row, u32 [n]; [`DROPPED`] for a row of padding.
    pub order: Tensor,
    /// Row of each slot, u32 [n].
    pub rows: Tensor,
    /// Rows of each expert without padding, f32 [e]; `None` if nothing is padded.
    counts: Option<Tensor>,
}

impl ExpertAssignment {
    /// Sorts the slots of `experts`, u32 [t, k], by expert.
    ///
    /// # Errors
    ///
    /// On the CPU, if an expert is not below `n_experts`.
    pub fn new(experts: &Tensor, n_experts: usize) -> Result<Self> {
        if experts.dtype() != DType::U32 || experts.rank() != 2 || n_experts == 0 {
            bail!(
                "{OP}: want u32 experts [t, k] of at least one expert, got {:?} {:?} of {n_experts}",
                experts.dtype(),
                experts.dims()
            )
        }
        let experts = experts.contiguous()?;
        let n = experts.elem_count();
        if u32::try_from(n).is_err() {
            bail!("{OP}: {n} slots exceed the range of u32")
        }
        on_device!(OP, experts, {
            cpu => {
                let Sorted { offsets, order, rows } = sorted(host(OP, &experts)?.slice()?, n_experts)?;
                let tensor = |values: Vec<u32>, len: usize| Tensor::from_vec(values, len, experts.device());
                Ok(Self {
                    offsets: tensor(offsets, n_experts + 1)?,
                    order: tensor(order, n)?,
                    rows: tensor(rows, n)?,
                    counts: None,
                    experts,
                })
            },
            cuda => {
                let cuda::SortedOnDevice { offsets, order, rows } = cuda::sort(&experts, n_experts)?;
                Ok(Self { experts, offsets, order, rows, counts: None })
            },
        })
    }

    /// Returns t, the number of tokens.
    pub fn n_tokens(&self) -> usize {
        self.experts.dims()[0]
    }

    /// Returns k, the number of experts per token.
    pub fn top_k(&self) -> usize {
        self.experts.dims()[1]
    }

    /// Returns t * k, the number of slots.
    pub fn n_slots(&self) -> usize {
        self.experts.elem_count()
    }

    /// Returns n, the number of rows: that of slots, and of rows of padding.
    pub fn n_rows(&self) -> usize {
        self.order.elem_count()
    }

    /// Returns e, the number of experts.
    pub fn n_experts(&self) -> usize {
        self.offsets.elem_count() - 1
    }

    /// Pads the rows of each expert to a multiple of `multiple`, as low-precision matmuls need.
    ///
    /// Rows of padding are zeros with the weight 0; Megatron-LM's `pad_routing_map` takes rows of other tokens instead.
    /// The number of rows grows by e * (`multiple` - 1), so that it does not depend on the tokens.
    pub fn padded(&self, multiple: usize) -> Result<Self> {
        if multiple == 0 || self.counts.is_some() {
            bail!("{OP}: want an assignment without padding and a multiple of at least 1, got {multiple}")
        }
        let n_rows = self.n_slots() + self.n_experts() * (multiple - 1);
        on_device!(OP, self.experts, {
            cpu => {
                let (offsets, rows) = (host(OP, &self.offsets)?, host(OP, &self.rows)?);
                let Sorted { offsets, order, rows } = padded(offsets.slice()?, rows.slice()?, multiple, n_rows);
                let tensor = |values: Vec<u32>, shape: &Tensor| Tensor::from_vec(values, shape.shape(), shape.device());
                Ok(Self {
                    experts: self.experts.clone(),
                    offsets: tensor(offsets, &self.offsets)?,
                    order: Tensor::from_vec(order, n_rows, self.order.device())?,
                    rows: tensor(rows, &self.rows)?,
                    counts: Some(self.counts()?),
                })
            },
            cuda => {
                let cuda::SortedOnDevice { offsets, order, rows } = cuda::pad(&self.sorted_on_device(), multiple, n_rows)?;
                Ok(Self { experts: self.experts.clone(), offsets, order, rows, counts: Some(self.counts()?) })
            },
        })
    }

    /// Pads each expert to `n_rows_per_expert` rows: its own, then rows of zeros with the weight 0 that belong to no token.
    ///
    /// The number of rows is e * `n_rows_per_expert`, so that it does not depend on the tokens. Each device computes it with
    /// tensor operations alone.
    ///
    /// # Errors
    ///
    /// If rows are padded already. On the CPU, if an expert has more rows; on CUDA it must not.
    pub fn padded_to(&self, n_rows_per_expert: usize) -> Result<Self> {
        let (e, n_padded) = (self.n_experts(), self.n_experts() * n_rows_per_expert);
        if self.counts.is_some() || u32::try_from(n_padded).is_err() {
            bail!("{OP}: want an assignment without padding and at most 2^32 rows, got {n_padded}")
        }
        on_device!(OP, self.offsets, {
            cpu => check_sizes(host(OP, &self.offsets)?.slice()?, n_rows_per_expert)?,
            cuda => (),
        });
        let device = self.experts.device();
        let starts: Vec<u32> = (0..=e).map(|expert| (expert * n_rows_per_expert) as u32).collect();
        let starts = upload(&starts, e + 1, device)?;
        let within: Vec<u32> = (0..n_rows_per_expert as u32).collect();
        let within = upload(&within, (1, n_rows_per_expert), device)?;
        let [first, end] = [0, 1].map(|bound| self.offsets.narrow(0, bound, e)?.unsqueeze(1));
        let (position, end) = (first?.broadcast_add(&within)?, end?);
        // Rows past an expert's own take the element after the last slot.
        let past = Tensor::full(self.n_rows() as u32, position.shape(), device)?;
        let position = position.broadcast_lt(&end)?.where_cond(&position, &past)?.flatten_all()?;
        let order = Tensor::cat(&[&self.order, &Tensor::full(DROPPED, 1, device)?], 0)?.index_select(&position, 0)?;
        // Rows of dropped slots follow the last expert's.
        let experts = self.experts.flatten_all()?.minimum(e as u32)?;
        let rows = (&self.rows + (&starts - &self.offsets)?.index_select(&experts, 0)?)?;
        Ok(Self { experts: self.experts.clone(), offsets: starts, order, rows, counts: Some(self.counts()?) })
    }

    /// Returns the number of rows of each expert without padding, f32 [e].
    pub fn counts(&self) -> Result<Tensor> {
        if let Some(counts) = &self.counts {
            return Ok(counts.clone());
        }
        let n_experts = self.n_experts();
        let [starts, ends] = [0, 1].map(|first| self.offsets.narrow(0, first, n_experts));
        (ends? - starts?)?.to_dtype(DType::F32)
    }

    /// Removes the rows of dropped slots. `n_kept` must be the number of rows of all experts.
    pub fn without_dropped_rows(&self, n_kept: usize) -> Result<Self> {
        if self.counts.is_some() || n_kept > self.n_rows() {
            bail!("{OP}: want an assignment without padding and at most {} rows, got {n_kept}", self.n_rows())
        }
        Ok(Self { order: self.order.narrow(0, 0, n_kept)?, ..self.clone() })
    }

    #[cfg(any(feature = "cuda", feature = "emulate"))]
    fn sorted_on_device(&self) -> cuda::SortedOnDevice {
        let [offsets, order, rows] = [&self.offsets, &self.order, &self.rows].map(Tensor::clone);
        cuda::SortedOnDevice { offsets, order, rows }
    }
}

/// Result of the sort, as in [`ExpertAssignment`].
struct Sorted {
    offsets: Vec<u32>,
    order: Vec<u32>,
    rows: Vec<u32>,
}

/// Sorts slots by expert, stably, by counting.
fn sorted(experts: &[u32], n_experts: usize) -> Result<Sorted> {
    // Dropped slots count as one more expert, the last.
    let bucket = |expert: u32| if expert == DROPPED { n_experts } else { expert as usize };
    let mut offsets = vec![0u32; n_experts + 2];
    for (slot, &expert) in experts.iter().enumerate() {
        if expert != DROPPED && expert as usize >= n_experts {
            bail!("{OP}: slot {slot} has expert {expert}, but there are {n_experts}")
        }
        offsets[bucket(expert) + 1] += 1;
    }
    (1..offsets.len()).for_each(|i| offsets[i] += offsets[i - 1]);
    let mut next = offsets.clone();
    let (mut order, mut rows) = (vec![0; experts.len()], vec![0; experts.len()]);
    for (slot, &expert) in experts.iter().enumerate() {
        let row = &mut next[bucket(expert)];
        order[*row as usize] = slot as u32;
        rows[slot] = *row;
        *row += 1;
    }
    offsets.truncate(n_experts + 1);
    Ok(Sorted { offsets, order, rows })
}

/// Fails if an expert has more than `most` rows.
fn check_sizes(offsets: &[u32], most: usize) -> Result<()> {
    let size = |pair: &[u32]| (pair[1] - pair[0]) as usize;
    match offsets.windows(2).map(size).enumerate().find(|(_, size)| *size > most) {
        Some((expert, size)) => bail!("{OP}: expert {expert} has {size} rows, which cannot be padded to {most}"),
        None => Ok(()),
    }
}

/// Moves rows so that each expert begins at a multiple of `multiple`.
fn padded(offsets: &[u32], rows: &[u32], multiple: usize, n_rows: usize) -> Sorted {
    let mut starts = vec![0u32];
    for pair in offsets.windows(2) {
        let size = ((pair[1] - pair[0]) as usize).next_multiple_of(multiple) as u32;
        starts.push(starts[starts.len() - 1] + size);
    }
    let mut order = vec![DROPPED; n_rows];
    let mut moved = rows.to_vec();
    for (slot, row) in moved.iter_mut().enumerate() {
        // Rows of dropped slots follow the last expert's.
        let expert = offsets.partition_point(|start| start <= row) - 1;
        *row = starts[expert] + (*row - offsets[expert]);
        order[*row as usize] = slot as u32;
    }
    Sorted { offsets: starts, order, rows: moved }
}
