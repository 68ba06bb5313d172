//! `attention` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor, bail};

use super::cu_seqlens::{CuSeqlens, Span};
use super::layout::Heads;
use super::spec::AttentionSpec;
use crate::cuda::{Address, Arg, Blocks, Gpu, Out, address, gpu, kernels, suffix};
use crate::transfer::upload_table;

kernels!("attention");

const OP: &str = "attention";
/// Threads of a block that computes delta or merges, and its rows: a warp for each.
const DELTA_THREADS: usize = 256;
const DELTA_ROWS: usize = DELTA_THREADS / 32;
/// Rows or keys that the kernels count with an int, with room to step past the end; and the widest window.
const MAX_ROWS: usize = 1 << 30;
/// The largest head dim of all kernels.
const MAX_DIM: usize = 256;
/// What the addresses of tensors are multiples of, for the widest access there is.
const ALIGNMENT: u64 = 16;

/// Statistics of a forward that backward needs besides inputs and output.
pub(super) struct ForwardState {
    /// f32 [t, hq]
    lse: Tensor,
    problem: Problem,
}

/// What the backward starts from.
pub(super) struct Inputs<'a> {
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) o: &'a Tensor,
    pub(super) d_o: &'a Tensor,
}

impl ForwardState {
    /// Of a forward whose log-sum-exp is known, f32 [t, hq].
    pub(super) fn new(lse: &Tensor, q: &Tensor, seqs: &CuSeqlens, spec: &AttentionSpec, heads: Heads) -> Result<Self> {
        Ok(Self { lse: lse.clone(), problem: Problem::new(q, seqs, spec, heads)? })
    }

    /// f32 [t hq]
    pub(super) fn lse(&self) -> &Tensor {
        &self.lse
    }
}

/// Returns o.
pub(super) fn forward(
    [q, k, v]: [&Tensor; 3],
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: Heads,
) -> Result<(Out, ForwardState)> {
    let on = gpu(OP, q)?;
    let problem = Problem::new(q, seqs, spec, heads)?;
    let (q, k, v) = (aligned(q)?, aligned(k)?, aligned(v)?);
    let n_rows = q.elem_count() / heads.dim;
    let (o, lse) = (Out::new(on, q.dtype(), q.elem_count())?, Out::new(on, DType::F32, n_rows)?);
    let addresses = [address(OP, &q)?, address(OP, &k)?, address(OP, &v)?, o.address, lse.address];
    // SAFETY: q and o are [t, hq, k], k and v [s, hkv, k], lse is [t, hq], as seqs has t and s.
    unsafe { problem.launch(on, Kernel::Forward, &addresses)? };
    Ok((o, ForwardState { lse: lse.into_tensor(n_rows), problem }))
}

/// Returns dq, dk and dv.
pub(super) fn backward(inputs: &Inputs<'_>, state: &ForwardState) -> Result<[Tensor; 3]> {
    let Inputs { q, k, v, o, d_o } = *inputs;
    let (on, problem) = (gpu(OP, q)?, &state.problem);
    let delta = row_products(o, d_o, problem.heads.dim)?;
    let saved = [&aligned(q)?, &aligned(k)?, &aligned(v)?, &aligned(d_o)?, &state.lse, &delta];
    let mut addresses = saved.iter().map(|saved| address(OP, saved)).collect::<Result<Vec<_>>>()?;
    let n_saved = addresses.len();
    let [dq, dk, dv] = [q, k, v].map(|x| Out::new(on, q.dtype(), x.elem_count()));
    let (dq, dk, dv) = (dq?, dk?, dv?);

    addresses.extend([dk.address, dv.address]);
    // SAFETY: q and d_o are [t, hq, k], k, v, dk and dv [s, hkv, k], lse and delta [t, hq], as seqs has t and s.
    unsafe { problem.launch(on, Kernel::GradKv, &addresses)? };
    addresses.truncate(n_saved);
    addresses.push(dq.address);
    // SAFETY: as above, and dq is like q.
    unsafe { problem.launch(on, Kernel::GradQ, &addresses)? };
    Ok([dq.into_tensor(q.shape()), dk.into_tensor(k.shape()), dv.into_tensor(v.shape())])
}

/// sum(o do) of each row of `dim` elements, f32 [t, hq]
fn row_products(o: &Tensor, d_o: &Tensor, dim: usize) -> Result<Tensor> {
    let on = gpu(OP, o)?;
    let n_rows = o.elem_count() / dim;
    let delta = Out::new(on, DType::F32, n_rows)?;
    let args = [
        Arg::Address(address(OP, o)?),
        Arg::Address(address(OP, d_o)?),
        Arg::Address(delta.address),
        Arg::I32(n_rows as i32),
        Arg::I32(dim as i32),
    ];
    let name = format!("delta_{}", suffix(OP, o.dtype())?);
    // SAFETY: o and d_o have n_rows rows of dim elements, delta n_rows elements.
    unsafe { KERNELS.launch(on, &name, [n_rows.div_ceil(DELTA_ROWS), 1, 1], DELTA_THREADS, &args)? };
    Ok(delta.into_tensor(n_rows))
}

/// Merges what attention to other keys gave into out [t, hq, k] and lse [t, hq]: all f32 but for the other out.
pub(super) fn merge([out, lse]: [&Tensor; 2], [other_out, other_lse]: [&Tensor; 2]) -> Result<()> {
    let on = gpu(OP, out)?;
    let (t, hq, dim) = out.dims3()?;
    let n_rows = t * hq;
    let args = [
        Arg::Address(address(OP, out)?),
        Arg::Address(address(OP, lse)?),
        Arg::Address(address(OP, other_out)?),
        Arg::Address(address(OP, other_lse)?),
        Arg::I32(n_rows as i32),
        Arg::I32(dim as i32),
    ];
    let name = format!("merge_{}", suffix(OP, other_out.dtype())?);
    // SAFETY: both outs have n_rows rows of dim elements, both lse n_rows elements; they do not overlap.
    unsafe { KERNELS.launch(on, &name, [n_rows.div_ceil(DELTA_ROWS), 1, 1], DELTA_THREADS, &args) }
}

/// The tensor, or a copy if it is a view that begins anywhere.
pub(super) fn aligned(x: &Tensor) -> Result<Tensor> {
    if address(OP, x)?.is_multiple_of(ALIGNMENT) { Ok(x.clone()) } else { x.force_contiguous() }
}

#[derive(Clone, Copy)]
enum Kernel {
    Forward,
    GradQ,
    GradKv,
}

/// How kernels multiply.
#[derive(Clone, Copy)]
enum MathMode {
    /// By ordinary arithmetic in f32.
    CudaCores,
    /// On tensor cores.
    TensorCores,
}

/// Which form of the kernels, and the tiles that it takes.
#[derive(Clone, Copy)]
struct TileConfig {
    math: MathMode,
    /// The largest head dim.
    dim: usize,
    threads: usize,
    /// Rows, queries times heads of a group, in a tile.
    rows: usize,
    keys: usize,
}

impl TileConfig {
    const fn mma(dim: usize) -> Self {
        Self { math: MathMode::TensorCores, dim, threads: 128, rows: 128, keys: 64 }
    }

    const fn plain(dim: usize) -> Self {
        Self { math: MathMode::CudaCores, dim, threads: 256, rows: 64, keys: 64 }
    }

    /// Tensor cores take 16-bit formats, rows that can be read 16 bytes at a time, and a scale under which the greatest
    /// product is the greatest score.
    fn choose(dtype: DType, dim: usize, scale: f32) -> Result<Self> {
        const F32: &[TileConfig] =
            &[TileConfig::plain(64), TileConfig::plain(96), TileConfig::plain(128), TileConfig::plain(MAX_DIM)];
        const ALIGNED: &[TileConfig] =
            &[TileConfig::mma(64), TileConfig::mma(96), TileConfig::mma(128), TileConfig::plain(MAX_DIM)];
        const OTHERS: &[TileConfig] = &[TileConfig::plain(MAX_DIM)];
        let forms = match dtype {
            DType::F32 => F32,
            _ if dim.is_multiple_of(8) && scale > 0.0 => ALIGNED,
            _ => OTHERS,
        };
        match forms.iter().find(|tiles| dim <= tiles.dim) {
            Some(tiles) => Ok(*tiles),
            None => bail!("{OP}: on CUDA a head dim of at most {MAX_DIM}, not {dim}"),
        }
    }

    /// Dynamic shared memory of a block, as forward_mma.cuh and backward_mma.cuh share it out: rows of 16-bit elements,
    /// and for dk and dv the lse and delta of two tiles of rows and the probabilities of one, in f32.
    fn shared_bytes(self, kernel: Kernel) -> usize {
        let step_keys = if self.dim > 64 { 32 } else { 64 };
        let step_rows = if self.dim > 96 { 32 } else { 64 };
        let (n_rows, n_floats) = match (self.math, kernel) {
            (MathMode::CudaCores, _) => (0, 0),
            (MathMode::TensorCores, Kernel::Forward) => (self.rows + 4 * 64, 0),
            (MathMode::TensorCores, Kernel::GradQ) => (2 * self.rows + 4 * step_keys, 0),
            (MathMode::TensorCores, Kernel::GradKv) => (2 * self.keys + 4 * step_rows, (4 + self.keys) * step_rows),
        };
        n_rows * self.dim * 2 + n_floats * 4
    }
}

/// What all kernels are told: the sequences, cut into tiles, none across two of them.
struct Problem {
    /// u32 [5, n_seqs + 1]: queries, keys, tiles of rows and tiles of keys before each sequence, and of all; then the position
    /// of each one's first query among its keys, in two's complement.
    table: Tensor,
    n_seqs: usize,
    n_row_tiles: usize,
    n_key_tiles: usize,
    tiles: TileConfig,
    dtype: DType,
    heads: Heads,
    spec: AttentionSpec,
}

impl Problem {
    fn new(q: &Tensor, seqs: &CuSeqlens, spec: &AttentionSpec, heads: Heads) -> Result<Self> {
        let n_rows = seqs.n_tokens().saturating_mul(heads.n_kv * heads.group).max(seqs.n_keys());
        if n_rows > MAX_ROWS {
            bail!("{OP}: {n_rows} queries of all heads, or keys, are more than {MAX_ROWS}")
        }
        // Distances are counted with an int, too, and are less than the widest window.
        let distance = |span: Span| (span.first + span.q.len() as isize).max(span.k.len() as isize - span.first);
        if let Some(distance) = seqs.spans().map(distance).find(|distance| *distance > MAX_ROWS as isize) {
            bail!("{OP}: a query and a key lie {distance} tokens apart, more than {MAX_ROWS}")
        }
        let tiles = TileConfig::choose(q.dtype(), heads.dim, spec.scale)?;
        let row_tiles = cumulative(seqs.spans().map(|span| (span.q.len() * heads.group).div_ceil(tiles.rows)));
        let key_tiles = cumulative(seqs.spans().map(|span| span.k.len().div_ceil(tiles.keys)));
        let n_seqs = seqs.n_seqs();
        let mut table: Vec<u32> = [seqs.cu_seqlens_q(), seqs.cu_seqlens_k(), &row_tiles, &key_tiles]
            .concat()
            .into_iter()
            .map(|n| n as u32)
            .collect();
        table.extend(seqs.spans().map(|span| span.first as i32 as u32).chain([0]));
        Ok(Self {
            table: upload_table(&table, (5, n_seqs + 1), q.device())?,
            n_seqs,
            n_row_tiles: row_tiles[n_seqs],
            n_key_tiles: key_tiles[n_seqs],
            tiles,
            dtype: q.dtype(),
            heads,
            spec: *spec,
        })
    }

    /// # Safety
    ///
    /// The addresses must be the kernel's first parameters, good for the rows and keys of these sequences.
    unsafe fn launch(&self, on: Gpu, kernel: Kernel, addresses: &[Address]) -> Result<()> {
        let Self { tiles, heads, spec, .. } = self;
        let (name, n_tiles) = match kernel {
            Kernel::Forward => ("forward", self.n_row_tiles),
            Kernel::GradQ => ("grad_q", self.n_row_tiles),
            Kernel::GradKv => ("grad_kv", self.n_key_tiles),
        };
        let mut args: Vec<Arg> = addresses.iter().map(|address| Arg::Address(*address)).collect();
        args.extend([
            Arg::Address(address(OP, &self.table)?),
            Arg::I32(self.n_seqs as i32),
            Arg::I32(heads.group as i32),
            Arg::I32(heads.dim as i32),
            Arg::I32(i32::from(spec.causal)),
            Arg::I32(spec.window.unwrap_or(MAX_ROWS).min(MAX_ROWS) as i32),
            Arg::F32(spec.scale),
        ]);
        let math = match tiles.math {
            MathMode::CudaCores => "plain",
            MathMode::TensorCores => "mma",
        };
        let name = format!("{name}_{math}_{}_{}", suffix(OP, self.dtype)?, tiles.dim);
        let grid = [n_tiles, heads.n_kv, 1];
        let blocks = Blocks { grid, threads: tiles.threads, shared_bytes: tiles.shared_bytes(kernel) };
        // SAFETY: the caller answers for the addresses; the table has five rows of n_seqs + 1.
        unsafe { KERNELS.launch_blocks(on, &name, blocks, &args) }
    }
}

/// 0 and the sums of the numbers up to each.
fn cumulative(numbers: impl Iterator<Item = usize>) -> Vec<usize> {
    let sums = numbers.scan(0, |sum, n| {
        *sum += n;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}
