//! Quantization with one scale on CUDA: launches of `tensor.cuh` and `patches.cuh`.

use candle_core::{DType, Result, Tensor, bail};

use super::{KERNELS, MULTIPLE, OP, PER_THREAD, TILE, finish_parts, is_stochastic, key_of, name_of};
use crate::cuda::{Arg, Blocks, FLAT_THREADS, Gpu, Out, address, columns, gpu, suffix};
use crate::fp8::format::Fp8Format;
use crate::fp8::kernels::Fp8Kernels;
use crate::fp8::recipe::{Fp8Orientation, ScaleRule};
use crate::fp8::rounding::Fp8Rounding;
use crate::quantized::ScaleBlock;

/// Rows and columns of a block's patches. The kernels have the same constant.
const PATCHES: usize = 128;
/// Rows and columns of a thread's patch.
const PATCH: usize = 8;

/// Matrices that one launch quantizes, [rows, columns]: one in memory, or those that are computed where they are quantized.
#[derive(Clone, Copy)]
pub(in crate::fp8) enum CastSource<'a> {
    /// A contiguous matrix.
    Matrix(&'a Tensor),
    /// The SwiGLU of gate and up.
    GatedInput([&'a Tensor; 2]),
    /// The RMSNorm of x, from x, its weight, and 1 / sqrt(mean(x^2) + eps) of each row in f32.
    NormedInput([&'a Tensor; 3]),
    /// The gradients of gate and up, from gate, up and the gradient of their SwiGLU.
    GatedGrads([&'a Tensor; 3]),
}

impl CastSource<'_> {
    fn tensors(&self) -> &[&Tensor] {
        match self {
            Self::Matrix(x) => std::slice::from_ref(x),
            Self::GatedInput(tensors) => tensors,
            Self::NormedInput(tensors) | Self::GatedGrads(tensors) => tensors,
        }
    }

    /// Returns the first of the tensors.
    pub(super) fn tensor(&self) -> &Tensor {
        self.tensors()[0]
    }

    pub(super) fn sizes(&self) -> [usize; 2] {
        let dims = self.tensor().dims();
        [dims[0], dims[1]]
    }

    pub(super) fn gpu(&self) -> Result<Gpu<'_>> {
        gpu(OP, self.tensor())
    }

    pub(super) fn dtype(&self) -> DType {
        self.tensor().dtype()
    }

    /// Returns the addresses of the tensors, as the first arguments of a kernel.
    pub(super) fn args(&self) -> Result<Vec<Arg>> {
        self.tensors().iter().map(|x| Ok(Arg::Address(address(OP, x)?))).collect()
    }

    /// Returns true if kernels can read the matrices in patches: bf16 in rows of whole patches, aligned to 16 bytes.
    pub(in crate::fp8) fn has_patches(&self) -> Result<bool> {
        let is_whole = self.sizes()[1].is_multiple_of(PATCH);
        let in_patches = match self {
            Self::NormedInput([x, w, _]) => &[*x, *w],
            _ => self.tensors(),
        };
        for x in in_patches {
            if !is_whole || x.dtype() != DType::BF16 || !x.is_contiguous() || !address(OP, x)?.is_multiple_of(16) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns true if the matrices are read in patches: computed ones, and those in memory if these kernels are selected.
    /// Patches are rounded to nearest.
    pub(super) fn uses_patches(&self, rounding: Fp8Rounding) -> Result<bool> {
        match self {
            Self::Matrix(_)
                if rounding != Fp8Rounding::Nearest || Fp8Kernels::selected() == Fp8Kernels::SharedMemory =>
            {
                Ok(false)
            }
            Self::Matrix(_) => self.has_patches(),
            Self::GatedInput(_) | Self::NormedInput(_) | Self::GatedGrads(_) if !self.has_patches()? => {
                let dims: Vec<&[usize]> = self.tensors().iter().map(|x| x.dims()).collect();
                bail!("{OP}: {dims:?} cannot be read in patches: want contiguous bf16 in rows of multiples of {PATCH}")
            }
            Self::GatedInput(_) | Self::NormedInput(_) | Self::GatedGrads(_) => Ok(true),
        }
    }
}

/// Returns the blocks of a launch in patches.
pub(super) fn patch_blocks([rows, columns]: [usize; 2]) -> Blocks {
    // At least one block, which writes the inverse scale.
    let grid = [columns.div_ceil(PATCHES).max(1), rows.div_ceil(PATCHES).max(1), 1];
    Blocks { grid, threads: FLAT_THREADS, shared_bytes: 0 }
}

/// Outputs of a quantization with one scale.
#[derive(Clone, Copy)]
pub(super) struct CastLayout {
    /// Rows of the codes [rows, columns], with padding.
    pub(super) codes: Option<usize>,
    /// Rows that are columns of the transposed codes [columns, rows], with padding; a multiple of 16.
    pub(super) transposed: Option<usize>,
}

/// Scale and rounding of a matrix.
#[derive(Clone, Copy)]
pub(in crate::fp8) struct CastScale<'a> {
    /// Scale, f32 [1].
    pub(in crate::fp8) scale: &'a Tensor,
    /// Amaxes to raise, f32 [1]: a slot, and that of the matrix if it is wanted.
    pub(in crate::fp8) record: Option<(&'a Tensor, Option<&'a Tensor>)>,
    pub(in crate::fp8) rounding: Fp8Rounding,
}

/// Codes, transposed codes and inverse scale of a matrix. Outputs that are not wanted have no elements.
pub(super) struct CastOutput {
    pub(super) codes: Out,
    pub(super) transposed: Out,
    pub(super) scale_inv: Tensor,
}

/// Quantizes the matrices of a source, each with its scale.
pub(super) fn cast<const N: usize>(
    source: CastSource<'_>,
    layout: CastLayout,
    scales: [CastScale<'_>; N],
    format: Fp8Format,
) -> Result<[CastOutput; N]> {
    let ([rows, columns], on) = (source.sizes(), source.gpu()?);
    let padded_rows = layout.codes.or(layout.transposed).unwrap_or(rows);
    let mut args = source.args()?;
    let mut outputs = Vec::new();
    for scale in scales {
        let out = |rows: Option<usize>| Out::new(on, DType::U8, rows.unwrap_or(0) * columns);
        let (codes, transposed, scale_inv) =
            (out(layout.codes)?, out(layout.transposed)?, Out::new(on, DType::F32, 1)?);
        let (slot, amax) = scale.record.map_or((None, None), |(slot, amax)| (Some(slot), amax));
        let at = |x: Option<&Tensor>| x.map_or(Ok(0), |x| address(OP, x));
        let wanted = |out: &Out, rows: Option<usize>| rows.map_or(0, |_| out.address);
        args.extend([
            Arg::Address(address(OP, scale.scale)?),
            Arg::Address(scale_inv.address),
            Arg::Address(wanted(&codes, layout.codes)),
            Arg::Address(wanted(&transposed, layout.transposed)),
            Arg::Address(at(amax)?),
            Arg::Address(at(slot)?),
            key_of(scale.rounding),
        ]);
        outputs.push(CastOutput { codes, transposed, scale_inv: scale_inv.into_tensor(1) });
    }
    args.extend([rows, padded_rows, columns].map(|n| Arg::I32(n as i32)));
    args.push(is_stochastic(scales[0].rounding));
    let (name, blocks) = cast_kernel(source, (format, scales[0].rounding), padded_rows)?;
    // SAFETY: the matrices are [rows, columns]; the codes have padded rows; zero addresses mean no output.
    unsafe { KERNELS.launch_blocks(on, &name, blocks, &args)? };
    match outputs.try_into() {
        Ok(outputs) => Ok(outputs),
        Err(_) => unreachable!("there is an output per scale"),
    }
}

/// Returns name and blocks of a kernel with one scale.
fn cast_kernel(
    source: CastSource<'_>,
    (format, rounding): (Fp8Format, Fp8Rounding),
    padded_rows: usize,
) -> Result<(String, Blocks)> {
    let [_, columns] = source.sizes();
    let (format, uses_patches) = (name_of(format), source.uses_patches(rounding)?);
    let name = match source {
        CastSource::Matrix(x) if !uses_patches => {
            let grid = [columns.div_ceil(TILE).max(1), padded_rows.div_ceil(TILE).max(1), 1];
            let name = format!("cast_{format}_{}", suffix(OP, x.dtype())?);
            return Ok((name, Blocks { grid, threads: FLAT_THREADS, shared_bytes: 0 }));
        }
        CastSource::Matrix(_) => format!("cast_patches_{format}"),
        CastSource::GatedInput(_) => "cast_gated_input".to_owned(),
        CastSource::NormedInput(_) => "cast_normed_input".to_owned(),
        CastSource::GatedGrads(_) => format!("cast_gated_grads_{format}"),
    };
    Ok((name, patch_blocks([padded_rows, columns])))
}

/// Codes along the sum of a matmul, and their inverse scales in cuBLASLt's order.
pub(in crate::fp8) struct GemmCodes {
    pub(in crate::fp8) codes: Tensor,
    pub(in crate::fp8) scale_inv: Tensor,
    pub(in crate::fp8) block: ScaleBlock,
}

/// Format of codes, and the matmuls that read them.
#[derive(Clone, Copy)]
pub(in crate::fp8) struct CodeEncoding {
    pub(in crate::fp8) format: Fp8Format,
    pub(in crate::fp8) orientation: Fp8Orientation,
}

/// Quantizes the matrices [rows, columns] of a source with one scale each for cuBLASLt. Returns rowwise codes [padded rows,
/// columns] and columnwise ones [columns, padded rows] of each; padding is zero.
pub(in crate::fp8) fn cast_operands<const N: usize>(
    source: CastSource<'_>,
    scales: [CastScale<'_>; N],
    CodeEncoding { format, orientation }: CodeEncoding,
) -> Result<[[Option<GemmCodes>; 2]; N]> {
    let [rows, columns] = source.sizes();
    let padded = rows.next_multiple_of(MULTIPLE);
    let layout = CastLayout {
        codes: orientation.is_rowwise().then_some(padded),
        transposed: orientation.is_columnwise().then_some(padded),
    };
    let outputs = cast(source, layout, scales, format)?;
    Ok(outputs.map(|CastOutput { codes, transposed, scale_inv }| {
        let of = |codes: Out, shape: (usize, usize)| GemmCodes {
            codes: codes.into_tensor(shape),
            scale_inv: scale_inv.clone(),
            block: ScaleBlock::Tensor,
        };
        [
            orientation.is_rowwise().then(|| of(codes, (padded, columns))),
            orientation.is_columnwise().then(|| of(transposed, (columns, padded))),
        ]
    }))
}

/// Returns the scales that follow from the amaxes of a source's N matrices, f32 [1] each. They are computed twice: here, and
/// where they are quantized.
pub(in crate::fp8) fn current_scales<const N: usize>(
    source: CastSource<'_>,
    rule: ScaleRule,
    format: Fp8Format,
) -> Result<[Tensor; N]> {
    let ([rows, columns], on) = (source.sizes(), source.gpu()?);
    let name = match source {
        CastSource::GatedInput(_) => "amax_gated_input",
        CastSource::GatedGrads(_) => "amax_gated_grads",
        CastSource::Matrix(_) | CastSource::NormedInput(_) => bail!("{OP}: the amax is not that of computed elements"),
    };
    if !source.has_patches()? {
        bail!("{OP}: [{rows}, {columns}] elements cannot be computed in patches")
    }
    let n_parts = (rows * columns).div_ceil(PER_THREAD * FLAT_THREADS).clamp(1, columns::BLOCKS);
    let parts: Vec<Out> = (0..N).map(|_| Out::new(on, DType::F32, n_parts)).collect::<Result<_>>()?;
    let mut args = source.args()?;
    args.extend(parts.iter().map(|parts| Arg::Address(parts.address)));
    args.push(Arg::I64((rows * columns) as i64));
    // SAFETY: the tensors have rows * columns elements; the parts of each matrix one per block.
    unsafe { KERNELS.launch(on, name, [n_parts, 1, 1], FLAT_THREADS, &args)? };
    let like = source.tensor();
    let mut scales = Vec::new();
    for parts in &parts {
        let (amax, scale) = (Out::new(on, DType::F32, 1)?, Out::new(on, DType::F32, 1)?);
        // SAFETY: there are n_parts parts, and both outputs have one element.
        unsafe { finish_parts(like, (parts.address, n_parts), amax.address, Some((scale.address, rule, format)))? };
        scales.push(scale.into_tensor(1));
    }
    match scales.try_into() {
        Ok(scales) => Ok(scales),
        Err(_) => unreachable!("there is a scale per matrix"),
    }
}
