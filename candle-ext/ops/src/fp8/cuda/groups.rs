//! Quantization of the rows of groups on CUDA: launches of `groups.cuh`. Sizes of groups stay on the device.

use candle_core::{DType, Result, Tensor};

use super::blocks::KernelBlock;
use super::{KERNELS, OP, name_of, rounding_args};
use crate::cuda::{Arg, DeviceAddress, FLAT_THREADS, Out, address, gpu, suffix};
use crate::fp8::format::{FP8_BLOCK, Fp8Format};
use crate::fp8::operands::FIRST_SCALES;
use crate::fp8::recipe::{ScaleRule, largest_number};
use crate::fp8::rounding::Fp8Rounding;
use crate::quantized::ScaleBlock;

/// Rows of a tile with one scale. The kernel has the same constant.
const TILE_ROWS: usize = 64;
/// Elements of a tile that a block of threads reads, approximately.
const PER_BLOCK: usize = 1 << 14;

/// A contiguous matrix whose rows are groups.
#[derive(Clone, Copy)]
pub(in crate::fp8) struct GroupInput<'a> {
    pub(in crate::fp8) x: &'a Tensor,
    /// Row offsets, u32 [groups + 1]; `None` for groups of equally many rows.
    pub(in crate::fp8) offsets: Option<&'a Tensor>,
    pub(in crate::fp8) n_groups: usize,
    pub(in crate::fp8) encoding: (Fp8Format, Fp8Rounding),
}

/// Numbers of the groups, every `stride` elements from the first of a tensor on.
#[derive(Clone, Copy)]
pub(in crate::fp8) struct Slots<'a> {
    pub(in crate::fp8) first: &'a Tensor,
    pub(in crate::fp8) stride: usize,
}

/// Scales of groups.
#[derive(Clone, Copy)]
pub(in crate::fp8) enum GroupScales<'a> {
    /// Given scales, rounded down to powers of two. Amaxes raise `slots`, and give the scale of a group whose given one is 0.
    Given { scales: Slots<'a>, slots: Option<Slots<'a>> },
    /// Powers of two by a rule from the amax of each group. Amaxes raise `slots`.
    Current { rule: ScaleRule, slots: Option<Slots<'a>> },
    /// Powers of two by a rule from the amax of each block.
    Blocks { block: ScaleBlock, rule: ScaleRule },
}

/// Codes of the rows of groups with their inverse scales.
#[derive(Clone, Debug)]
pub(in crate::fp8) struct GpuGroupCodes {
    /// Codes, u8 [n, columns]; 0 after the last group.
    codes: Tensor,
    /// Inverse scales, f32: of each group, or of the blocks of each tile.
    scale_inv: Tensor,
    rows: GroupRows,
    format: Fp8Format,
    /// Block of a scale; `None` for a scale per group.
    block: Option<KernelBlock>,
    /// Dtype of the rows.
    dtype: DType,
}

/// Rows of groups.
#[derive(Clone, Debug)]
struct GroupRows {
    /// Row offsets, u32 [groups + 1]; `None` for groups of equally many rows.
    offsets: Option<Tensor>,
    n_groups: usize,
    n: usize,
    columns: usize,
}

impl GroupInput<'_> {
    /// Returns the values of the codes.
    pub(in crate::fp8) fn values(self, scales: GroupScales<'_>) -> Result<Tensor> {
        let [n, columns] = self.sizes();
        let y = Out::new(gpu(OP, self.x)?, self.x.dtype(), n * columns)?;
        self.quantize(scales, [y.address, 0, 0])?;
        Ok(y.into_tensor((n, columns)))
    }

    /// Returns the codes with their inverse scales.
    pub(in crate::fp8) fn codes(self, scales: GroupScales<'_>) -> Result<GpuGroupCodes> {
        let ([n, columns], on) = (self.sizes(), gpu(OP, self.x)?);
        let rows = self.rows();
        let block = match scales {
            GroupScales::Blocks { block, .. } => Some(KernelBlock::of(block)?),
            GroupScales::Given { .. } | GroupScales::Current { .. } => None,
        };
        let n_scales = rows.n_scales(block);
        let (codes, scale_inv) = (Out::new(on, DType::U8, n * columns)?, Out::new(on, DType::F32, n_scales)?);
        self.quantize(scales, [0, codes.address, scale_inv.address])?;
        let (codes, scale_inv) = (codes.into_tensor((n, columns)), scale_inv.into_tensor(n_scales));
        Ok(GpuGroupCodes { codes, scale_inv, rows, format: self.encoding.0, block, dtype: self.x.dtype() })
    }

    /// Writes values, or codes and inverse scales; a zero address means none.
    fn quantize(&self, scales: GroupScales<'_>, outputs: [DeviceAddress; 3]) -> Result<()> {
        match scales {
            GroupScales::Given { scales, slots } => {
                let amaxes = slots.map(|slots| self.amaxes(Some(slots))).transpose()?;
                self.round(outputs, (Some(scales), amaxes.as_ref()), FIRST_SCALES)
            }
            GroupScales::Current { rule, slots } => {
                let amaxes = self.amaxes(slots)?;
                self.round(outputs, (None, Some(&amaxes)), rule)
            }
            GroupScales::Blocks { block, rule } => self.round_blocks(outputs, KernelBlock::of(block)?, rule),
        }
    }

    fn round_blocks(&self, outputs: [DeviceAddress; 3], block: KernelBlock, rule: ScaleRule) -> Result<()> {
        let mut args = self.row_args()?;
        args.extend(outputs.map(Arg::Address));
        args.extend(self.size_args());
        args.extend([Arg::F32(rule.amax_epsilon), Arg::F32(largest_number(self.x.dtype()))]);
        args.extend(rounding_args(self.encoding.1));
        let name = format!("group_blocks_{}_{}", block.name(), self.suffix()?);
        // SAFETY: x, and values or codes, are [n, columns]; each tile of the grid has its scales; offsets are at most n.
        unsafe { KERNELS.launch(gpu(OP, self.x)?, &name, self.rows().block_grid(), FLAT_THREADS, &args) }
    }

    /// Computes the amax of each group, f32 [groups], which raises `slots`.
    fn amaxes(&self, slots: Option<Slots<'_>>) -> Result<Tensor> {
        let on = gpu(OP, self.x)?;
        let amaxes = Tensor::zeros(self.n_groups, DType::F32, self.x.device())?;
        let (slots, stride) = match slots {
            Some(slots) => (address(OP, slots.first)?, slots.stride),
            None => (0, 0),
        };
        let mut args = self.row_args()?;
        args.extend([Arg::Address(address(OP, &amaxes)?), Arg::Address(slots), Arg::I32(stride as i32)]);
        args.extend(self.size_args());
        let name = format!("group_amaxes_{}", suffix(OP, self.x.dtype())?);
        // SAFETY: x is [n, columns]; amaxes have an element per group, slots one every `stride`; a zero address means none.
        unsafe { KERNELS.launch(on, &name, self.rows().grid(), FLAT_THREADS, &args)? };
        Ok(amaxes)
    }

    fn round(
        &self,
        outputs: [DeviceAddress; 3],
        (scales, amaxes): (Option<Slots<'_>>, Option<&Tensor>),
        rule: ScaleRule,
    ) -> Result<()> {
        let (scales, stride) = match scales {
            Some(scales) => (address(OP, scales.first)?, scales.stride),
            None => (0, 0),
        };
        let amaxes = amaxes.map_or(Ok(0), |amaxes| address(OP, amaxes))?;
        let mut args = self.row_args()?;
        args.extend(outputs.map(Arg::Address));
        args.extend([Arg::Address(scales), Arg::I32(stride as i32), Arg::Address(amaxes)]);
        args.extend(self.size_args());
        args.extend([Arg::F32(rule.amax_epsilon), Arg::F32(f32::MAX)]);
        args.extend(rounding_args(self.encoding.1));
        let name = format!("groups_{}", self.suffix()?);
        // SAFETY: x, and values or codes, are [n, columns]; scales have an element every `stride`, and amaxes one per group where
        // a scale is 0 or missing.
        unsafe { KERNELS.launch(gpu(OP, self.x)?, &name, self.rows().grid(), FLAT_THREADS, &args) }
    }

    fn sizes(&self) -> [usize; 2] {
        [self.x.dims()[0], self.x.dims()[1]]
    }

    fn rows(&self) -> GroupRows {
        let [n, columns] = self.sizes();
        GroupRows { offsets: self.offsets.cloned(), n_groups: self.n_groups, n, columns }
    }

    /// Returns x, the table of offsets and the rows per group.
    fn row_args(&self) -> Result<Vec<Arg>> {
        let mut args = vec![Arg::Address(address(OP, self.x)?)];
        args.extend(self.rows().offset_args()?);
        Ok(args)
    }

    fn size_args(&self) -> [Arg; 3] {
        self.rows().size_args()
    }

    fn suffix(&self) -> Result<String> {
        suffix_of(self.encoding.0, self.x.dtype())
    }
}

impl GpuGroupCodes {
    /// Returns the values of the codes, in the dtype of the rows from which they are.
    pub(in crate::fp8) fn values(&self) -> Result<Tensor> {
        let (on, &GroupRows { n, columns, .. }) = (gpu(OP, &self.codes)?, &self.rows);
        let y = Out::new(on, self.dtype, n * columns)?;
        let mut args = vec![Arg::Address(address(OP, &self.codes)?), Arg::Address(address(OP, &self.scale_inv)?)];
        args.extend(self.rows.offset_args()?);
        args.push(Arg::Address(y.address));
        args.extend(self.rows.size_args());
        let suffix = suffix_of(self.format, self.dtype)?;
        let (name, grid) = match self.block {
            None => (format!("group_values_{suffix}"), self.rows.grid()),
            Some(block) => (format!("group_block_values_{}_{suffix}", block.name()), self.rows.block_grid()),
        };
        // SAFETY: codes and y are [n, columns]; the scales are those of a quantization with the same rows and grid.
        unsafe { KERNELS.launch(on, &name, grid, FLAT_THREADS, &args)? };
        Ok(y.into_tensor((n, columns)))
    }
}

impl GroupRows {
    /// Returns the table of offsets and the rows per group.
    fn offset_args(&self) -> Result<[Arg; 2]> {
        let offsets = self.offsets.as_ref().map_or(Ok(0), |offsets| address(OP, offsets))?;
        Ok([Arg::Address(offsets), Arg::I32((self.n / self.n_groups.max(1)) as i32)])
    }

    fn size_args(&self) -> [Arg; 3] {
        [self.n, self.n_groups, self.columns].map(|size| Arg::I32(size as i32))
    }

    /// Returns the number of scales: of groups, or of the blocks of all tiles.
    fn n_scales(&self, block: Option<KernelBlock>) -> usize {
        let [n_tiles, n_column_tiles, _] = self.block_grid();
        match block {
            None => self.n_groups,
            Some(KernelBlock::Rows) => n_tiles * FP8_BLOCK * n_column_tiles,
            Some(KernelBlock::Columns) => n_tiles * self.columns,
            Some(KernelBlock::Tiles) => n_tiles * n_column_tiles,
        }
    }

    /// Returns the most tiles of rows: each group, and the rows after the last, may have one that is not full.
    fn n_tiles(&self, height: usize) -> usize {
        self.n / height + self.n_groups + 1
    }

    fn grid(&self) -> [usize; 3] {
        [self.n_tiles(TILE_ROWS), (TILE_ROWS * self.columns).div_ceil(PER_BLOCK).max(1), 1]
    }

    fn block_grid(&self) -> [usize; 3] {
        [self.n_tiles(FP8_BLOCK), self.columns.div_ceil(FP8_BLOCK).max(1), 1]
    }
}

fn suffix_of(format: Fp8Format, dtype: DType) -> Result<String> {
    Ok(format!("{}_{}", name_of(format), suffix(OP, dtype)?))
}
