//! The operations of a group of ranks.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use crate::{Pending, Recv, Reduce, Result};

/// A communicator over an ordered set of ranks. Every rank of a group calls the same operations in the same order, with
/// tensors of one dtype and shape but for the rows of [`all_to_all`](Self::all_to_all). Results have no gradient.
///
/// An [`Error::Call`] leaves the group as it was. An [`Error::Failed`] is the end of the world: every later call to any
/// of its groups fails with the same.
///
/// The `start_*` forms return at once: the group's own thread does the work, one operation after another, while the
/// caller computes or uses other groups. The tensor must not be written to until the operation is finished.
pub trait Collective: Send + Sync {
    /// Returns this process's place in the group, `0..size`.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Fails if tensors of this device cannot travel in the group.
    fn check_device(&self, device: &Device) -> Result<()>;

    /// Returns true if the group uses tensors of any device where they lie: none needs a copy on the host.
    fn leaves_tensors_in_place(&self) -> bool {
        false
    }

    /// Starts [`all_reduce`](Self::all_reduce).
    fn start_all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Pending>;

    /// Starts [`all_gather`](Self::all_gather).
    fn start_all_gather(&self, x: &Tensor) -> Result<Pending>;

    /// Starts [`reduce_scatter`](Self::reduce_scatter).
    fn start_reduce_scatter(&self, x: &Tensor) -> Result<Pending>;

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

    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// Makes smaller groups: each list names ranks of this group, each rank is in one list, and its place there is its
    /// new rank. Every rank gives the same lists and gets the group it is in. `name` is for messages.
    fn split(&self, name: &str, lists: &[Vec<usize>]) -> Result<Arc<dyn Collective>>;

    /// Combines `x` over the ranks, element by element; every rank gets the same bits, of the shape and dtype of `x`.
    fn all_reduce(&self, x: &Tensor, op: Reduce) -> Result<Tensor> {
        self.start_all_reduce(x, op)?.wait()
    }

    /// Puts the ranks' tensors one below another, along dim 0: `[rows, ...]` becomes `[size * rows, ...]`. A scalar is
    /// refused.
    fn all_gather(&self, x: &Tensor) -> Result<Tensor> {
        self.start_all_gather(x)?.wait()
    }

    /// Sums over the ranks and keeps this rank's share of the rows, in rank order: `[rows, ...]` becomes
    /// `[rows / size, ...]`. Rows that are no multiple of `size` are refused.
    fn reduce_scatter(&self, x: &Tensor) -> Result<Tensor> {
        self.start_reduce_scatter(x)?.wait()
    }

    /// Sends the first `send[0]` rows to rank 0, the next `send[1]` to rank 1, and so on; receives `recv[r]` rows from
    /// rank `r` and puts them one below another: `[sum of recv, ...]`. Counts may be zero; `send` adds up to the rows of `x`.
    fn all_to_all(&self, x: &Tensor, send: &[usize], recv: &[usize]) -> Result<Tensor> {
        self.start_all_to_all(x, send, recv)?.wait()
    }

    /// Gives all ranks the tensor of `root`. The others pass one of the same shape and dtype.
    fn broadcast(&self, x: &Tensor, root: usize) -> Result<Tensor> {
        self.start_broadcast(x, root)?.wait()
    }

    /// Sends `x` to one rank, receives from one, or both at once. Only these ranks call it. A tensor of another dtype or
    /// shape than `recv` says ends the world. A large send returns when the receiver takes it: order sends and receives so
    /// that they meet. Returns `None` if `recv` is `None`.
    fn send_recv(&self, x: Option<&Tensor>, to: Option<usize>, recv: Option<Recv>) -> Result<Option<Tensor>> {
        self.start_send_recv(x, to, recv)?.wait()
    }
}

/// Sums a number over a group. A count is exact up to 2^53.
pub fn sum(group: &dyn Collective, x: f64) -> Result<f64> {
    Ok(group.all_reduce(&Tensor::new(x, &Device::Cpu)?, Reduce::Sum)?.to_scalar()?)
}

/// Gives every rank what each rank has to say, in rank order: bytes of any length. For small things.
pub fn exchange_bytes(group: &dyn Collective, own: &[u8]) -> Result<Vec<Vec<u8>>> {
    let lengths = group.all_gather(&Tensor::new(&[own.len() as i64], &Device::Cpu)?)?.to_vec1::<i64>()?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    // Nothing is no tensor: there is always a byte.
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
