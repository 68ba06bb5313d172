//! Layout changes around an all-to-all that exchanges tokens for heads, as in DeepSpeed-Ulysses.
//!
//! t tokens, h heads, k head size, n heads of each rank. With fewer heads than ranks, several ranks have the same head.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;
mod sizes;

use candle_core::{Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::span::span;
use crate::storage::{self, host};

use sizes::{OP, RankHeads};

/// Returns the heads of each rank, one rank after the other: [t, h, k] -> [ranks * t, n, k].
///
/// It is not recorded.
pub fn heads_by_rank(x: &Tensor, n_ranks: usize) -> Result<Tensor> {
    let _span = span(OP, "by_rank");
    check_dtype(OP, "the input", x.dtype())?;
    let (t, h, k) = x.dims3()?;
    let sizes = RankHeads::new(t, [h, k], n_ranks)?;
    let x = x.contiguous()?;
    let shape = (n_ranks * t, h / sizes.groups, k);
    on_device!(OP, x, {
        cpu => {
            let mut y = FloatBuf::unwritten(x.dtype(), n_ranks * t * sizes.len)?;
            cpu::by_rank(host(OP, &x)?.floats()?, y.view(), sizes);
            Ok(storage::tensor(y, shape))
        },
        cuda => Ok(cuda::by_rank(&x, sizes)?.into_tensor(shape)),
    })
}

/// Inverts [`heads_by_rank`] for `h` heads: [ranks * t, n, k] -> [t, h, k]. Copies of a head are added up in the order of the
/// ranks, each sum rounded to the dtype.
///
/// It is not recorded.
pub fn heads_of_ranks(y: &Tensor, h: usize, n_ranks: usize) -> Result<Tensor> {
    let _span = span(OP, "of_ranks");
    check_dtype(OP, "the input", y.dtype())?;
    let (rows, n, k) = y.dims3()?;
    let sizes = RankHeads::new(rows / n_ranks.max(1), [h, k], n_ranks)?;
    if rows != n_ranks * sizes.tokens || n * sizes.groups != h {
        bail!("{OP}: {:?} does not hold {h} heads of {n_ranks} ranks", y.dims())
    }
    let y = y.contiguous()?;
    let shape = (sizes.tokens, h, k);
    on_device!(OP, y, {
        cpu => {
            let mut x = FloatBuf::unwritten(y.dtype(), sizes.tokens * h * k)?;
            cpu::of_ranks(host(OP, &y)?.floats()?, x.view(), sizes);
            Ok(storage::tensor(x, shape))
        },
        cuda => Ok(cuda::of_ranks(&y, sizes)?.into_tensor(shape)),
    })
}
