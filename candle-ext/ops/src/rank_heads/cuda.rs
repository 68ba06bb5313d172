//! `rank_heads` on CUDA: launches of `kernel.cu`.

use candle_core::{Result, Tensor, bail};

use super::sizes::{OP, RankHeads};
use crate::cuda::{Arg, Out, address, gpu, kernels, suffix};

kernels!("rank_heads");

/// Threads of a block; a warp copies one row.
const THREADS: usize = 256;
const ROWS: usize = THREADS / 32;

/// Returns y [groups * copies, tokens, len] of x [tokens, groups, len].
pub(super) fn by_rank(x: &Tensor, sizes: RankHeads) -> Result<Out> {
    launch("by_rank", x, sizes.groups * sizes.copies * sizes.tokens, sizes)
}

/// Returns x [tokens, groups, len], the sums over copies of y [groups * copies, tokens, len].
pub(super) fn of_ranks(y: &Tensor, sizes: RankHeads) -> Result<Out> {
    launch("of_ranks", y, sizes.tokens * sizes.groups, sizes)
}

/// Launches a kernel that writes rows of `len` elements.
fn launch(kernel: &str, from: &Tensor, n_rows: usize, sizes: RankHeads) -> Result<Out> {
    let on = gpu(OP, from)?;
    let RankHeads { tokens, groups, copies, len } = sizes;
    if i32::try_from(n_rows).is_err() {
        bail!("{OP}: {tokens} tokens of {} ranks exceed 2^31 rows", groups * copies)
    }
    let to = Out::new(on, from.dtype(), n_rows * len)?;
    let mut args = vec![Arg::Address(address(OP, from)?), Arg::Address(to.address)];
    for size in [tokens, groups, copies, len] {
        args.push(Arg::I32(i32::try_from(size).map_err(candle_core::Error::wrap)?));
    }
    let name = format!("{kernel}_{}", suffix(OP, from.dtype())?);
    // SAFETY: both tensors have the sizes of the kernel's layouts, and `to` is new.
    unsafe { KERNELS.launch(on, &name, [n_rows.div_ceil(ROWS), 1, 1], THREADS, &args)? };
    Ok(to)
}
