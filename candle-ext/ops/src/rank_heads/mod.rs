//! Layout changes around an all-to-all that exchanges tokens for heads, as in DeepSpeed-Ulysses.
//!
//! t tokens, h heads, k head size, n heads of each rank. With fewer heads than ranks, several ranks have the same head.

mod cpu;
#[cfg(any(feature = "cuda", feature = "emulate"))]
mod cuda;

use candle_core::{Result, Tensor, bail};

use crate::device::on_device;
use crate::floats::{FloatBuf, check_dtype};
use crate::span::span;
use crate::storage::{self, host};

const OP: &str = "rank_heads";

/// Sizes of a layout change: [tokens, groups, len] in one layout, [groups * copies, tokens, len] in the other.
#[derive(Clone, Copy, Debug)]
struct RankHeads {
    tokens: usize,
    /// Consecutive heads that one rank has, or that several ranks have copies of.
    groups: usize,
    /// Ranks with the same heads.
    copies: usize,
    /// Elements of a group's heads.
    len: usize,
}

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

impl RankHeads {
    fn new(tokens: usize, [h, k]: [usize; 2], n_ranks: usize) -> Result<Self> {
        if h > 0 && n_ranks > 0 && h.is_multiple_of(n_ranks) {
            return Ok(Self { tokens, groups: n_ranks, copies: 1, len: h / n_ranks * k });
        }
        if h > 0 && n_ranks > 0 && n_ranks.is_multiple_of(h) {
            return Ok(Self { tokens, groups: h, copies: n_ranks / h, len: k });
        }
        bail!("{OP}: {h} heads over {n_ranks} ranks: one must be a multiple of the other")
    }
}
