//! Collective and point-to-point operations of a process group.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::{Pending, Recv, Reduce, Result};

/// Process group: an ordered set of ranks.
///
/// Every rank calls the same operations in the same order, with tensors of one dtype and shape. Only the rows of
/// [`all_to_all`](Self::all_to_all) may differ. Results have no gradient.
///
/// After [`Error::Call`] the group is unchanged. [`Error::Failed`] aborts the world: every later call to any of its groups
/// returns the same error.
///
/// The `start_*` methods are asynchronous. The group's thread runs one operation after another while the caller computes or
/// uses other groups. Do not write to the tensor before the operation has finished.
pub trait Collective: Send + Sync {
    /// Returns this process's rank in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Fails if the group does not support tensors of `device`.
    fn check_device(&self, device: &Device) -> Result<()>;

    /// Returns true if the group reads and writes tensors of any device without a copy in host memory.
    fn leaves_tensors_in_place(&self) -> bool {
        false
    }

    /// Starts [`all_reduce`](Self::all_reduce).
    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending>;

    /// Starts [`all_gather`](Self::all_gather).
    fn start_all_gather(&self, x: &Tensor) -> Result<Pending>;

    /// Starts [`reduce_scatter`](Self::reduce_scatter).
    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending>;

    /// Starts a sum like [`start_all_reduce`](Self::start_all_reduce), which may round partial sums to the dtype of `x`. NCCL then
    /// sends that dtype, instead of f32 for bf16 and f16.
    fn start_all_reduce_in_dtype(&self, x: &Tensor) -> Result<Pending> {
        self.start_all_reduce(x, Reduce::Sum)
    }

    /// Starts [`reduce_scatter`](Self::reduce_scatter), with sums as in
    /// [`start_all_reduce_in_dtype`](Self::start_all_reduce_in_dtype).
    fn start_reduce_scatter_in_dtype(&self, x: &Tensor) -> Result<Pending> {
        self.start_reduce_scatter(x)
    }

    /// Starts [`all_to_all`](Self::all_to_all).
    fn start_all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Pending>;

    /// Starts [`broadcast`](Self::broadcast).
    fn start_broadcast(&self, x: &Tensor, root: usize) -> Result<Pending>;

    /// Starts [`send_recv`](Self::send_recv).
    fn start_send_recv(
        &self,
        x: Option<&Tensor>,
        to: Option<usize>,
        recv: Option<Recv>,
    ) -> Result<Pending<Option<Tensor>>>;

    /// Blocks until every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// Splits the group into subgroups and returns this rank's subgroup.
    ///
    /// Each list has ranks of this group, and each rank is in one list. A rank's index in its list is its rank in the
    /// subgroup. Every rank passes the same lists. Messages show `name`.
    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>>;

    /// Reduces `x` over the ranks, elementwise. Every rank gets the same bits, in the shape and dtype of `x`.
    fn all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Tensor> {
        self.start_all_reduce(x, op)?.wait()
    }

    /// Concatenates the ranks' tensors along dim 0: `[rows, ...]` becomes `[size * rows, ...]`. Fails for a scalar.
    fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.start_all_gather(x)?.wait()
    }

    /// Gathers the ranks' shards of `whole`, `[size * rows, ...]`, in its memory. This rank's shard is up to date there, and the
    /// other rows are overwritten.
    ///
    /// Returns false without a call if the group gathers into new memory only. Every rank gets the same answer if its tensor is
    /// contiguous on the group's device.
    fn all_gather_in_place(&self, _whole: &Tensor) -> Result<bool> {
        Ok(false)
    }

    /// Sums over the ranks and returns this rank's shard of dim 0: `[rows, ...]` becomes `[rows / size, ...]`.
    ///
    /// Fails if the rows cannot be divided by `size`.
    fn reduce_scatter(&self, x: &Tensor) -> Result<Tensor> {
        self.start_reduce_scatter(x)?.wait()
    }

    /// Sends `send[r]` rows of `x` to each rank `r`, in rank order, and receives `recv[r]` rows from it.
    ///
    /// Returns the received rows in rank order: `[sum of recv, ...]`. Counts may be zero. `send` must add up to the rows
    /// of `x`.
    fn all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Tensor> {
        self.start_all_to_all(x, send, recv)?.wait()
    }

    /// Returns the tensor of `root` on all ranks. The other ranks pass a tensor of its shape and dtype.
    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        self.start_broadcast(x, root)?.wait()
    }

    /// Sends `x` to one rank, receives a tensor from one rank, or does both concurrently. Only these ranks call it.
    ///
    /// If the received tensor has another dtype or shape than `recv`, the world is aborted. A large send blocks until the
    /// receiver posts the matching receive, so order sends and receives accordingly. Returns `None` if `recv` is `None`.
    fn send_recv(&self, x: Option<&Tensor>, to: Option<usize>, recv: Option<Recv>) -> Result<Option<Tensor>> {
        self.start_send_recv(x, to, recv)?.wait()
    }
}

/// Sums a number over a group. Integers are exact up to 2^53.
pub fn sum(group: &dyn Collective, x: f64) -> Result<f64> {
    Ok(group.all_reduce(&Tensor::new(x, &Device::Cpu)?, Reduce::Sum)?.to_scalar()?)
}

/// Gathers byte strings of any length from all ranks, in rank order. Use it for small data.
pub fn exchange_bytes(group: &dyn Collective, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let lengths = group.all_gather(&Tensor::new(&[own.len() as i64], &Device::Cpu)?)?.to_vec1::<i64>()?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    // A tensor cannot be empty here: send at least one byte.
    let mut padded = own.to_vec();
    padded.resize(longest + 1, 0);
    let all = group.all_gather(&Tensor::from_vec(padded, longest + 1, &Device::Cpu)?)?.to_vec1::<u8>()?;
    Ok(all.chunks(longest + 1).zip(lengths).map(|(bytes, n)| bytes[..n as usize].to_vec()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Solo;

    #[test]
    fn a_count_survives_the_sum() -> Result<()> {
        assert_eq!(sum(&Solo, 9_007_199_254_740_991.0)? as u64, 9_007_199_254_740_991);
        Ok(())
    }
}
