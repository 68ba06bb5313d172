//! `rms_norm` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor};

use crate::cuda::{Arg, Blocks, FLAT_THREADS, Out, address, columns, gpu, kernels, same_dtype, suffix};

kernels!("rms_norm");

const OP: &str = "rms_norm";
const WARP: usize = 32;

/// Returns the threads of a block that computes a row: about eight elements per thread.
fn row_threads(d: usize) -> usize {
    (d / 8).next_multiple_of(WARP).clamp(WARP, 1024)
}

/// Returns y, and rstd = 1 / sqrt(mean(x^2) + eps) of each row, f32 [t].
pub(super) fn forward(x: &Tensor, w: &Tensor, d: usize, eps: f32) -> Result<(Out, Tensor)> {
    let y = Out::new(gpu(OP, x)?, w.dtype(), x.elem_count())?;
    let rstd = launch_forward([x, w], None, Some(&y), (d, eps))?;
    Ok((y, rstd))
}

/// Returns 1 / sqrt(mean(x^2) + eps) of each row, f32 [t].
pub(super) fn row_factors(x: &Tensor, w: &Tensor, d: usize, eps: f32) -> Result<Tensor> {
    launch_forward([x, w], None, None, (d, eps))
}

/// Returns x + plus, its norm y, and rstd = 1 / sqrt(mean(s^2) + eps) of each row s of the sum, f32 [t].
pub(super) fn add_forward(x: &Tensor, plus: &Tensor, w: &Tensor, d: usize, eps: f32) -> Result<(Out, Out, Tensor)> {
    let on = gpu(OP, x)?;
    let (sum, y) = (Out::new(on, x.dtype(), x.elem_count())?, Out::new(on, w.dtype(), x.elem_count())?);
    let rstd = launch_forward([x, w], Some((plus, &sum)), Some(&y), (d, eps))?;
    Ok((sum, y, rstd))
}

/// Returns x + plus, and 1 / sqrt(mean(s^2) + eps) of each row s of the sum, f32 [t].
pub(super) fn add_row_factors(x: &Tensor, plus: &Tensor, w: &Tensor, d: usize, eps: f32) -> Result<(Out, Tensor)> {
    let sum = Out::new(gpu(OP, x)?, x.dtype(), x.elem_count())?;
    let rstd = launch_forward([x, w], Some((plus, &sum)), None, (d, eps))?;
    Ok((sum, rstd))
}

/// Launches the forward of x, or of x plus another tensor, whose sum is written to the `Out` in `plus`. Returns rstd, and writes
/// the norm to `y` if it is wanted.
fn launch_forward(
    [x, w]: [&Tensor; 2],
    plus: Option<(&Tensor, &Out)>,
    y: Option<&Out>,
    (d, eps): (usize, f32),
) -> Result<Tensor> {
    let on = gpu(OP, x)?;
    let t = x.elem_count() / d;
    let rstd = Out::new(on, DType::F32, t)?;
    let y_at = y.map_or(0, |y| y.address);
    let [x_at, w_at] = [address(OP, x)?, address(OP, w)?];
    let [plus_at, sum_at] = plus.map_or(Ok([0, 0]), |(plus, sum)| address(OP, plus).map(|plus| [plus, sum.address]))?;
    let threads = Threads::of(d, columns::width(x.dtype(), d, &[x_at, plus_at, w_at, sum_at, y_at]));
    let addresses = [x_at, plus_at, w_at, sum_at, y_at, rstd.address];
    let mut args: Vec<Arg> = addresses.into_iter().map(Arg::Address).collect();
    args.extend(matches!(threads, Threads::Packs { .. }).then_some(Arg::I32(t as i32)));
    args.push(Arg::I32(d as i32));
    args.extend(threads.lanes());
    args.push(Arg::F32(eps));
    let name = threads.kernel("forward", &dtypes(x, w)?);
    // SAFETY: x, y, the addend and the sum have t rows of d elements, w one row, rstd t elements. The addend has the dtype of
    // w and y; a zero address means none.
    unsafe { KERNELS.launch(on, &name, [t.div_ceil(threads.rows()), 1, 1], threads.of_block(), &args)? };
    Ok(rstd.into_tensor(t))
}

/// Returns the part of a kernel's name for the dtypes of input and output, which is the weight's.
fn dtypes(x: &Tensor, w: &Tensor) -> Result<String> {
    if x.dtype() != DType::F32 {
        same_dtype(OP, x, w)?;
    }
    Ok(match (suffix(OP, x.dtype())?, suffix(OP, w.dtype())?) {
        (x, w) if x == w => x.to_owned(),
        (x, w) => format!("{x}_{w}"),
    })
}

/// Assignment of threads to rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Threads {
    /// `lanes` of a block's `threads` share a row; each holds `packs` packs of it.
    Packs { packs: usize, lanes: usize, threads: usize },
    /// A block processes one row in a loop.
    Long { threads: usize },
}

impl Threads {
    /// Selects the assignment for rows of d elements that are read `width` at a time.
    fn of(d: usize, width: usize) -> Self {
        const MOST: usize = 512;
        let n_packs = d / width;
        match n_packs {
            _ if width == 1 => Self::Long { threads: row_threads(d) },
            // Up to a warp per row: a block has many rows at once.
            ..=32 => Self::Packs { packs: 1, lanes: n_packs.next_power_of_two(), threads: FLAT_THREADS },
            33..=64 => Self::Packs { packs: 2, lanes: WARP, threads: FLAT_THREADS },
            65..=128 => Self::Packs { packs: 4, lanes: WARP, threads: FLAT_THREADS },
            _ => {
                let packs = if n_packs <= 2 * FLAT_THREADS { 2 } else { 4 };
                let lanes = n_packs.div_ceil(packs).next_multiple_of(WARP);
                if lanes <= MOST {
                    Self::Packs { packs, lanes, threads: lanes }
                } else {
                    Self::Long { threads: row_threads(d) }
                }
            }
        }
    }

    fn kernel(self, pass: &str, suffix: &str) -> String {
        match self {
            Self::Packs { packs, .. } => format!("{pass}_{packs}_{suffix}"),
            Self::Long { .. } => format!("{pass}_long_{suffix}"),
        }
    }

    fn lanes(self) -> Option<Arg> {
        match self {
            Self::Packs { lanes, .. } => Some(Arg::I32(lanes as i32)),
            Self::Long { .. } => None,
        }
    }

    fn of_block(self) -> usize {
        match self {
            Self::Packs { threads, .. } | Self::Long { threads } => threads,
        }
    }

    /// Returns the blocks of a backward, all resident on an H100. Its registers hold half of the larger ones.
    fn blocks(self) -> usize {
        match self {
            Self::Packs { packs, threads, .. } if packs * threads > 384 => columns::BLOCKS / 2,
            _ => columns::BLOCKS,
        }
    }

    /// Returns the shared memory of a backward that copies a row ahead of its use: two stages of 16 bytes of x and dy for each
    /// pack. The kernel has the same rule.
    fn staged_bytes(self) -> usize {
        const MOST_PACKS: usize = 2;
        match self {
            Self::Packs { packs, threads, .. } if packs <= MOST_PACKS => 2 * packs * 2 * threads * 16,
            Self::Packs { .. } | Self::Long { .. } => 0,
        }
    }

    /// Returns the rows per block.
    fn rows(self) -> usize {
        match self {
            Self::Packs { lanes, threads, .. } => threads / lanes,
            Self::Long { .. } => 1,
        }
    }
}

/// Adds the sum of dy n over rows to `dw`, and returns dx plus the accumulated gradient, each if needed. Rows are read
/// once.
pub(super) fn backward(
    [x, w, dy, rstd]: [&Tensor; 4],
    plus: Option<&Tensor>,
    dw: Option<&Tensor>,
    wants_dx: bool,
) -> Result<Option<Tensor>> {
    // Fewest rows per block, in rounds: each block writes a row of sums.
    const LEAST_TURNS: usize = 4;
    same_dtype(OP, dy, w)?;
    let on = gpu(OP, x)?;
    let (t, d) = (rstd.elem_count(), w.elem_count());
    let dx = wants_dx.then(|| Out::new(on, x.dtype(), x.elem_count())).transpose()?;
    let [x_at, w_at, dy_at] = [address(OP, x)?, address(OP, w)?, address(OP, dy)?];
    let dx_at = dx.as_ref().map_or(0, |dx| dx.address);
    let plus_at = plus.map_or(Ok(0), |plus| address(OP, plus))?;
    let threads = Threads::of(d, columns::width(x.dtype(), d, &[x_at, w_at, dy_at, plus_at, dx_at]));
    let n_parts = t.div_ceil(threads.rows() * LEAST_TURNS).min(threads.blocks());
    let parts = dw.map(|_| Out::new(on, DType::F32, n_parts * d)).transpose()?;
    let parts_at = parts.as_ref().map_or(0, |parts| parts.address);
    let mut args: Vec<Arg> =
        [x_at, w_at, dy_at, address(OP, rstd)?, plus_at, dx_at, parts_at].into_iter().map(Arg::Address).collect();
    args.extend([Arg::I32(t as i32), Arg::I32(d as i32)]);
    args.extend(threads.lanes());
    let name = threads.kernel("backward", &dtypes(x, w)?);
    // The kernel's shared memory holds two rows.
    let shared_bytes = if x.dtype() == w.dtype() { threads.staged_bytes() } else { 0 };
    let blocks = Blocks { grid: [n_parts, 1, 1], threads: threads.of_block(), shared_bytes };
    // SAFETY: x, dy, dx and the accumulated gradient have t rows of d elements, w one row, rstd t elements. There is a
    // row of sums for each block.
    unsafe { KERNELS.launch_blocks(on, &name, blocks, &args)? };
    if let Some(dw) = dw {
        // SAFETY: the kernel has written n_parts rows of d elements.
        unsafe { columns::add_parts(&KERNELS, on, parts_at, [n_parts, d], dw)? };
    }
    Ok(dx.map(|dx| dx.into_tensor(x.shape())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_all_of_a_row_between_them() {
        for width in [4, 8] {
            for d in (width..20_000).step_by(width) {
                match Threads::of(d, width) {
                    Threads::Packs { packs, lanes, threads } => {
                        assert!(packs * lanes * width >= d, "{d} {width}");
                        assert!(threads % WARP == 0 && threads % lanes == 0 && threads <= 512, "{d} {width}");
                        assert!(lanes.is_power_of_two() && threads == FLAT_THREADS || lanes == threads, "{d} {width}");
                    }
                    Threads::Long { threads } => assert!(threads <= 1024 && d > 512 * 4 * width, "{d} {width}"),
                }
            }
        }
        assert_eq!(Threads::of(128, 8), Threads::Packs { packs: 1, lanes: 16, threads: 256 });
        assert_eq!(Threads::of(2048, 8), Threads::Packs { packs: 2, lanes: 128, threads: 128 });
        assert_eq!(Threads::of(2560, 8), Threads::Packs { packs: 2, lanes: 160, threads: 160 });
    }
}
