//! Launches of `split.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use super::{KERNELS, OP};
use crate::cuda::{Arg, DeviceAddress, FLAT_THREADS, Out, address, columns, gpu, suffix};
use crate::rope::head_rows::HeadRows;
use crate::weight::{GradSink, Weight};

const WARP: usize = 32;
/// Packs of a thread, at most.
const MOST_PACKS: usize = 2;
/// Fewest heads per group of threads in a backward, as in `rms_norm`.
const LEAST_TURNS: usize = 4;

/// Assignment of threads to heads.
#[derive(Clone, Copy)]
enum HeadThreads {
    /// `lanes` threads share a head; each has `packs` packs of it.
    Packs { packs: usize, lanes: usize },
    /// A block has one head in a loop.
    Long { threads: usize },
}

/// Returns the heads of each part, [t, n, k].
pub(in crate::rope) fn split(rows: &HeadRows, x: &Tensor) -> Result<Vec<Tensor>> {
    let on = gpu(OP, x)?;
    let count = |n: usize| rows.n_tokens * n;
    let outs: Vec<Out> = rows
        .parts
        .iter()
        .map(|part| Out::new(on, x.dtype(), count(part.heads.n * part.heads.dim)))
        .collect::<Result<_>>()?;
    let heads: Vec<DeviceAddress> = outs.iter().map(|out| out.address).collect();
    let (mut args, threads) = arguments(rows, address(OP, x)?, &heads, x.dtype())?;
    args.extend(threads.lanes());
    let n_heads = count(rows.parts.iter().map(|part| part.heads.n).sum());
    let name = threads.kernel("split", x.dtype())?;
    let grid = [n_heads.div_ceil(threads.heads_of_block()), 1, 1];
    // SAFETY: x has rows of `stride` elements for all tokens, the outputs hold the heads of all tokens, the weights have an
    // element for each of a head.
    unsafe { KERNELS.launch(on, &name, grid, threads.of_block(), &args)? };
    let shapes = rows.parts.iter().map(|part| (rows.n_tokens, part.heads.n, part.heads.dim));
    Ok(outs.into_iter().zip(shapes).map(|(out, shape)| out.into_tensor(shape)).collect())
}

/// Adds the gradients of the norms' weights to their sinks, and returns the gradient of the joined rows.
pub(in crate::rope) fn join_grads(rows: &HeadRows, x: Option<&Tensor>, grads: &[Tensor]) -> Result<Tensor> {
    let (like, dim) = (&grads[0], rows.parts[0].heads.dim);
    let on = gpu(OP, like)?;
    let dx = Out::new(on, like.dtype(), rows.n_tokens * rows.stride)?;
    let heads: Vec<DeviceAddress> = grads.iter().map(|dy| address(OP, dy)).collect::<Result<_>>()?;
    let x_at = x.map_or(Ok(0), |x| address(OP, x))?;
    let (mut args, threads) = arguments(rows, x_at, &heads, like.dtype())?;
    let blocks: Vec<usize> =
        rows.parts.iter().map(|part| threads.blocks_of_grads(rows.n_tokens * part.heads.n)).collect();
    let mut sums = Vec::new();
    for (part, n_blocks) in rows.parts.iter().zip(&blocks) {
        let Some(sink) = part.norm.as_ref().and_then(Weight::sink) else { continue };
        if *n_blocks > 0 {
            sums.push((Out::new(on, DType::F32, n_blocks * dim)?, *n_blocks, sink));
        }
    }
    let mut partial = rows.parts.iter().scan(sums.iter(), |sums, part| {
        let is_summed = part.norm.as_ref().and_then(Weight::sink).is_some();
        Some(if is_summed { sums.next().map_or(0, |(out, ..)| out.address) } else { 0 })
    });
    let [of_q, of_k] = [blocks[0], blocks.get(1).copied().unwrap_or(0)];
    args.push(Arg::Address(dx.address));
    args.extend([partial.next(), partial.next()].map(|at| Arg::Address(at.unwrap_or(0))));
    args.extend([of_q, of_k].map(|n| Arg::I32(n as i32)));
    // The kernel's last arguments follow the lanes.
    if let Some(lanes) = threads.lanes() {
        args.insert(args.len() - 5, lanes);
    }
    let name = threads.kernel("join_grads", like.dtype())?;
    // SAFETY: as above; dx has the joined rows of all tokens, and each block of queries and keys a row of sums.
    unsafe { KERNELS.launch(on, &name, [blocks.iter().sum(), 1, 1], threads.of_block(), &args)? };
    for (sum, n_blocks, sink) in sums {
        // SAFETY: the kernel has written n_blocks rows of k elements.
        unsafe { columns::add_parts(&KERNELS, on, sum.address, [n_blocks, dim], &GradSink::grad(sink)?)? };
    }
    Ok(dx.into_tensor((rows.n_tokens, rows.stride)))
}

/// Returns the arguments that both kernels begin with, and their threads.
fn arguments(
    rows: &HeadRows,
    x: DeviceAddress,
    heads: &[DeviceAddress],
    dtype: DType,
) -> Result<(Vec<Arg>, HeadThreads)> {
    let (dim, n) = (rows.parts[0].heads.dim, |i: usize| rows.parts.get(i).map_or(0, |part| part.heads.n));
    let of_heads = |i: usize| heads.get(i).copied().unwrap_or(0);
    let weight = |i: usize| match rows.parts.get(i).and_then(|part| part.norm.as_ref()) {
        Some(weight) => address(OP, &weight.value()?),
        None => Ok(0),
    };
    let [cos, sin] = &rows.table;
    let addresses = [x, of_heads(0), of_heads(1), of_heads(2), weight(0)?, weight(1)?];
    if rows.n_tokens > i32::MAX as usize {
        bail!("{OP}: too many tokens, {}", rows.n_tokens)
    }
    let mut args: Vec<Arg> =
        addresses.into_iter().chain([address(OP, cos)?, address(OP, sin)?]).map(Arg::Address).collect();
    args.extend([rows.n_tokens, n(0), n(1), dim, cos.dim(1)?].map(|n| Arg::I32(n as i32)));
    args.extend([Arg::I64(rows.stride as i64), Arg::F32(rows.eps)]);
    Ok((args, HeadThreads::of(dim, columns::width(dtype, dim, &addresses))))
}

impl HeadThreads {
    /// Selects the assignment of `rms_norm` for heads of `dim` elements that are read `width` at a time.
    fn of(dim: usize, width: usize) -> Self {
        match dim / width {
            n_packs if width > 1 && n_packs <= WARP => Self::Packs { packs: 1, lanes: n_packs.next_power_of_two() },
            n_packs if width > 1 && n_packs <= MOST_PACKS * WARP => Self::Packs { packs: MOST_PACKS, lanes: WARP },
            _ => Self::Long { threads: (dim / 8).next_multiple_of(WARP).clamp(WARP, 1024) },
        }
    }

    fn kernel(self, pass: &str, dtype: DType) -> Result<String> {
        let suffix = suffix(OP, dtype)?;
        Ok(match self {
            Self::Packs { packs, .. } => format!("{pass}_{packs}_{suffix}"),
            Self::Long { .. } => format!("{pass}_long_{suffix}"),
        })
    }

    fn lanes(self) -> Option<Arg> {
        match self {
            Self::Packs { lanes, .. } => Some(Arg::I32(lanes as i32)),
            Self::Long { .. } => None,
        }
    }

    fn of_block(self) -> usize {
        match self {
            Self::Packs { .. } => FLAT_THREADS,
            Self::Long { threads } => threads,
        }
    }

    fn heads_of_block(self) -> usize {
        match self {
            Self::Packs { lanes, .. } => FLAT_THREADS / lanes,
            Self::Long { .. } => 1,
        }
    }

    /// Returns the blocks of a part's gradients with `n_heads` heads: those of `rms_norm`, so that sums have its order.
    fn blocks_of_grads(self, n_heads: usize) -> usize {
        let most =
            if matches!(self, Self::Packs { packs: MOST_PACKS, .. }) { columns::BLOCKS / 2 } else { columns::BLOCKS };
        n_heads.div_ceil(self.heads_of_block() * LEAST_TURNS).min(most)
    }
}
