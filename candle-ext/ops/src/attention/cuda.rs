//! `attention` on CUDA: launches of `kernel.cu`.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{AttentionSpec, Heads, Seqs};
use crate::cuda::{Address, Arg, Gpu, Out, address, gpu, kernels, suffix};
use crate::transfer::upload;

kernels!("attention");

const OP: &str = "attention";
/// Rows (queries times heads of a group) or keys in a tile.
const TILE: usize = 64;
/// Threads of a block.
const THREADS: usize = 256;
/// Rows whose delta a block computes: a warp for each.
const ROWS: usize = THREADS / 32;
/// The head dims that kernels are made for: each also takes smaller ones.
const DIMS: [usize; 4] = [64, 96, 128, 256];
/// Rows or keys that the kernels count with an int, with room to step past the end.
const MAX_ROWS: usize = 1 << 30;

/// What a forward leaves to its backward, beside its inputs and output.
pub(super) struct Kept {
    /// f32 [t, hq]
    lse: Tensor,
    tiles: Tiles,
}

/// What the backward starts from.
pub(super) struct Inputs<'a> {
    pub(super) q: &'a Tensor,
    pub(super) k: &'a Tensor,
    pub(super) v: &'a Tensor,
    pub(super) o: &'a Tensor,
    pub(super) d_o: &'a Tensor,
}

/// Returns o.
pub(super) fn forward([q, k, v]: [&Tensor; 3], seqs: &Seqs, spec: &AttentionSpec, heads: Heads) -> Result<(Out, Kept)> {
    let on = gpu(OP, q)?;
    let tiles = Tiles::new(seqs, heads, q.device())?;
    let n_rows = q.elem_count() / heads.dim;
    let (o, lse) = (Out::new(on, q.dtype(), q.elem_count())?, Out::new(on, DType::F32, n_rows)?);
    let addresses = [address(OP, q)?, address(OP, k)?, address(OP, v)?, o.address, lse.address];
    // SAFETY: q and o are [t, hq, k], k and v [s, hkv, k], lse is [t, hq], as seqs has t and s.
    unsafe { tiles.launch(on, "forward", q.dtype(), tiles.n_row_tiles, &addresses, spec, heads)? };
    Ok((o, Kept { lse: lse.into_tensor(n_rows), tiles }))
}

/// Returns dq, dk and dv.
pub(super) fn backward(inputs: &Inputs<'_>, kept: &Kept, spec: &AttentionSpec, heads: Heads) -> Result<[Tensor; 3]> {
    let Inputs { q, k, v, o, d_o } = *inputs;
    let (on, dtype, tiles) = (gpu(OP, q)?, q.dtype(), &kept.tiles);
    let delta = row_products(o, d_o, heads.dim)?;
    let saved = [q, k, v, d_o, &kept.lse, &delta];
    let mut addresses = saved.iter().map(|saved| address(OP, saved)).collect::<Result<Vec<_>>>()?;
    let n_saved = addresses.len();
    let [dq, dk, dv] = [q, k, v].map(|x| Out::new(on, dtype, x.elem_count()));
    let (dq, dk, dv) = (dq?, dk?, dv?);

    addresses.extend([dk.address, dv.address]);
    // SAFETY: q and d_o are [t, hq, k], k, v, dk and dv [s, hkv, k], lse and delta [t, hq], as seqs has t and s.
    unsafe { tiles.launch(on, "grad_kv", dtype, tiles.n_key_tiles, &addresses, spec, heads)? };
    addresses.truncate(n_saved);
    addresses.push(dq.address);
    // SAFETY: as above, and dq is like q.
    unsafe { tiles.launch(on, "grad_q", dtype, tiles.n_row_tiles, &addresses, spec, heads)? };
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
    unsafe { KERNELS.launch(on, &name, [n_rows.div_ceil(ROWS), 1, 1], THREADS, &args)? };
    Ok(delta.into_tensor(n_rows))
}

/// The tiles that the sequences are cut into, none across two of them.
struct Tiles {
    /// u32 [4, n_seqs + 1]: queries, keys, tiles of rows and tiles of keys before each sequence, and of all.
    cumulative: Tensor,
    n_seqs: usize,
    n_row_tiles: usize,
    n_key_tiles: usize,
}

impl Tiles {
    fn new(seqs: &Seqs, heads: Heads, device: &Device) -> Result<Self> {
        let n_rows = seqs.n_tokens().saturating_mul(heads.n_kv * heads.group).max(seqs.n_keys());
        if n_rows > MAX_ROWS {
            bail!("{OP}: {n_rows} queries of all heads, or keys, are more than {MAX_ROWS}")
        }
        let row_tiles = cumulative(seqs.spans().map(|span| (span.q.len() * heads.group).div_ceil(TILE)));
        let key_tiles = cumulative(seqs.spans().map(|span| span.k.len().div_ceil(TILE)));
        let n_seqs = seqs.n_seqs();
        let (n_row_tiles, n_key_tiles) = (row_tiles[n_seqs], key_tiles[n_seqs]);
        let all = [seqs.cu_q(), seqs.cu_k(), &row_tiles, &key_tiles].concat();
        let all: Vec<u32> = all.into_iter().map(|n| n as u32).collect();
        let cumulative = upload(&all, (4, n_seqs + 1), device)?;
        Ok(Self { cumulative, n_seqs, n_row_tiles, n_key_tiles })
    }

    /// # Safety
    ///
    /// The addresses must be the kernel's first parameters, good for the rows and keys of these sequences.
    #[expect(clippy::too_many_arguments, reason = "a launch is what the kernel takes")]
    unsafe fn launch(
        &self,
        on: Gpu,
        kernel: &str,
        dtype: DType,
        n_tiles: usize,
        addresses: &[Address],
        spec: &AttentionSpec,
        heads: Heads,
    ) -> Result<()> {
        let Some(largest) = DIMS.iter().find(|&&largest| heads.dim <= largest) else {
            bail!("{OP}: on CUDA a head dim of at most {}, not {}", DIMS[DIMS.len() - 1], heads.dim)
        };
        let mut args: Vec<Arg> = addresses.iter().map(|address| Arg::Address(*address)).collect();
        args.extend([
            Arg::Address(address(OP, &self.cumulative)?),
            Arg::I32(self.n_seqs as i32),
            Arg::I32(heads.group as i32),
            Arg::I32(heads.dim as i32),
            Arg::I32(i32::from(spec.causal)),
            Arg::I32(spec.window.and_then(|window| window.try_into().ok()).unwrap_or(i32::MAX)),
            Arg::F32(spec.scale),
        ]);
        let name = format!("{kernel}_{}_{largest}", suffix(OP, dtype)?);
        // SAFETY: the caller answers for the addresses; the table has four rows of n_seqs + 1.
        unsafe { KERNELS.launch(on, &name, [n_tiles, heads.n_kv, 1], THREADS, &args) }
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
