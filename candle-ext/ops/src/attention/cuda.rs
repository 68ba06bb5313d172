//! `attention` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Result, Tensor, bail};

use super::cu_seqlens::{CuSeqlens, SequenceRange};
use super::layout::HeadCounts;
use super::spec::AttentionSpec;
use crate::cuda::{Arg, Blocks, DeviceAddress, Gpu, Out, address, gpu, kernels, suffix};
use crate::transfer::upload_table;

kernels!("attention");

const OP: &str = "attention";
/// Threads of a block that computes delta or merges; a warp handles one row.
const DELTA_THREADS: usize = 256;
const DELTA_ROWS: usize = DELTA_THREADS / 32;
/// Most rows or keys that the kernels can index with an int, and the widest window.
const MAX_ROWS: usize = 1 << 30;
/// Largest head dim of all kernels.
const MAX_DIM: usize = 256;
/// Alignment in bytes that the widest loads need.
const ALIGNMENT: u64 = 16;

/// Statistics of a forward that backward needs besides inputs and output.
pub(super) struct FusedForwardState {
    /// Log-sum-exp of each row, f32 [t, hq].
    lse: Tensor,
    problem: Problem,
}

/// Inputs of the backward.
pub(super) struct BackwardInputs<'a> {
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) o: &'a Tensor,
    pub(super) d_o: &'a Tensor,
}

impl FusedForwardState {
    /// Builds the state from a known log-sum-exp, f32 [t, hq].
    pub(super) fn new(
        lse: &Tensor,
        q: &Tensor,
        seqs: &CuSeqlens,
        spec: &AttentionSpec,
        heads: HeadCounts,
    ) -> Result<Self> {
        Ok(Self { lse: lse.clone(), problem: Problem::new(q, seqs, spec, heads)? })
    }

    /// Returns the log-sum-exp of each row, f32 [t hq].
    pub(super) fn lse(&self) -> &Tensor {
        &self.lse
    }
}

/// Computes the output o [t, hq, k] and the state that backward needs.
pub(super) fn forward(
    [q, k, v]: [&Tensor; 3],
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> Result<(Out, FusedForwardState)> {
    let on = gpu(OP, q)?;
    let problem = Problem::new(q, seqs, spec, heads)?;
    let (q, k, v) = (aligned(q)?, aligned(k)?, aligned(v)?);
    let n_rows = q.elem_count() / heads.dim;
    let (o, lse) = (Out::new(on, q.dtype(), q.elem_count())?, Out::new(on, DType::F32, n_rows)?);
    let addresses = [address(OP, &q)?, address(OP, &k)?, address(OP, &v)?, o.address, lse.address];
    // SAFETY: q and o are [t, hq, k], k and v [s, hkv, k], lse is [t, hq], as seqs has t and s.
    unsafe { problem.launch(on, Kernel::Forward, &addresses)? };
    Ok((o, FusedForwardState { lse: lse.into_tensor(n_rows), problem }))
}

/// Returns dq, dk and dv.
pub(super) fn backward(inputs: &BackwardInputs<'_>, state: &FusedForwardState) -> Result<[Tensor; 3]> {
    let BackwardInputs { q, k, v, o, d_o } = *inputs;
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

/// Returns sum(o do) of each row of `dim` elements, f32 [t, hq].
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

/// Merges attention over other keys into out [t, hq, k] and lse [t, hq]. All tensors are f32, except `other_out`.
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

/// Returns the tensor, or a copy if its address is not aligned.
pub(super) fn aligned(x: &Tensor) -> Result<Tensor> {
    if address(OP, x)?.is_multiple_of(ALIGNMENT) { Ok(x.clone()) } else { x.force_contiguous() }
}

#[derive(Clone, Copy)]
enum Kernel {
    Forward,
    GradQ,
    GradKv,
}

/// Arithmetic of a kernel.
#[derive(Clone, Copy)]
enum MathMode {
    /// f32 arithmetic on CUDA cores.
    CudaCores,
    /// Tensor cores.
    TensorCores,
}

/// A kernel variant and its tile sizes.
#[derive(Clone, Copy)]
struct TileConfig {
    math: MathMode,
    /// Largest head dim that the variant supports.
    dim: usize,
    threads: usize,
    /// Rows of a tile: queries times the heads that share a KV head.
    rows: usize,
    keys: usize,
}

impl TileConfig {
    const fn tensor_cores(dim: usize) -> Self {
        Self { math: MathMode::TensorCores, dim, threads: 128, rows: 128, keys: 64 }
    }

    const fn cuda_cores(dim: usize) -> Self {
        Self { math: MathMode::CudaCores, dim, threads: 256, rows: 64, keys: 64 }
    }

    /// Selects the variant for a dtype and head dim. Tensor cores need a 16-bit dtype, rows aligned to 16 bytes, and a
    /// positive scale.
    fn choose(dtype: DType, dim: usize, scale: f32) -> Result<Self> {
        const F32: &[TileConfig] = &[
            TileConfig::cuda_cores(64),
            TileConfig::cuda_cores(96),
            TileConfig::cuda_cores(128),
            TileConfig::cuda_cores(MAX_DIM),
        ];
        const ALIGNED: &[TileConfig] = &[
            TileConfig::tensor_cores(64),
            TileConfig::tensor_cores(96),
            TileConfig::tensor_cores(128),
            TileConfig::cuda_cores(MAX_DIM),
        ];
        const OTHERS: &[TileConfig] = &[TileConfig::cuda_cores(MAX_DIM)];
        let configs = match dtype {
            DType::F32 => F32,
            _ if dim.is_multiple_of(8) && scale > 0.0 => ALIGNED,
            _ => OTHERS,
        };
        match configs.iter().find(|tiles| dim <= tiles.dim) {
            Some(tiles) => Ok(*tiles),
            None => bail!("{OP}: on CUDA a head dim of at most {MAX_DIM}, not {dim}"),
        }
    }

    /// Returns the dynamic shared memory of a block in bytes, as forward_mma.cuh and backward_mma.cuh lay it out.
    ///
    /// It holds rows of 16-bit elements. For dk and dv it also holds lse, delta and probabilities in f32.
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

/// Arguments that all kernels share: the sequences, cut into tiles of one sequence each.
struct Problem {
    /// u32 [5, n_seqs + 1]. Rows 0 to 3 are cumulative counts of queries, keys, row tiles and key tiles. Row 4 is the
    /// position of each sequence's first query among its keys, in two's complement.
    table: Tensor,
    n_seqs: usize,
    n_row_tiles: usize,
    n_key_tiles: usize,
    tiles: TileConfig,
    dtype: DType,
    heads: HeadCounts,
    spec: AttentionSpec,
}

impl Problem {
    fn new(q: &Tensor, seqs: &CuSeqlens, spec: &AttentionSpec, heads: HeadCounts) -> Result<Self> {
        let n_rows = seqs.n_tokens().saturating_mul(heads.n_kv * heads.group).max(seqs.n_keys());
        if n_rows > MAX_ROWS {
            bail!("{OP}: {n_rows} queries of all heads, or keys, are more than {MAX_ROWS}")
        }
        // The kernels count distances with an int; they stay below the widest window.
        let distance =
            |span: SequenceRange| (span.first + span.q.len() as isize).max(span.k.len() as isize - span.first);
        if let Some(distance) = seqs.spans().map(distance).find(|distance| *distance > MAX_ROWS as isize) {
            bail!("{OP}: a query and a key are {distance} tokens apart, more than {MAX_ROWS}")
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

    /// Launches `kernel` over all tiles.
    ///
    /// # Safety
    ///
    /// `addresses` must be the kernel's first parameters, valid for the rows and keys of these sequences.
    unsafe fn launch(&self, on: Gpu, kernel: Kernel, addresses: &[DeviceAddress]) -> Result<()> {
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
        // SAFETY: the caller guarantees valid addresses; the table has five rows of n_seqs + 1.
        unsafe { KERNELS.launch_blocks(on, &name, blocks, &args) }
    }
}

/// Returns 0 followed by the running sums of `numbers`.
fn cumulative(numbers: impl Iterator<Item = usize>) -> Vec<usize> {
    let sums = numbers.scan(0, |sum, n| {
        *sum += n;
        Some(*sum)
    });
    std::iter::once(0).chain(sums).collect()
}
