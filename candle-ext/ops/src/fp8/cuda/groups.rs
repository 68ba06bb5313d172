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

impl GroupInput<'_> {
    /// Returns the values of the codes with given scales, rounded down to powers of two. Amaxes raise `slots`, and give the
    /// scale of a group whose given one is 0.
    pub(in crate::fp8) fn with_scales(self, scales: Slots<'_>, slots: Option<Slots<'_>>) -> Result<Tensor> {
        let amaxes = slots.map(|slots| self.amaxes(Some(slots))).transpose()?;
        let amaxes = amaxes.as_ref().map_or(Ok(0), |amaxes| address(OP, amaxes))?;
        self.round(Some(scales), amaxes, FIRST_SCALES)
    }

    /// Returns the values of the codes with scales by `rule`, as powers of two, from the amax of each group. Amaxes raise
    /// `slots`.
    pub(in crate::fp8) fn with_current_scales(self, rule: ScaleRule, slots: Option<Slots<'_>>) -> Result<Tensor> {
        let amaxes = self.amaxes(slots)?;
        self.round(None, address(OP, &amaxes)?, rule)
    }

    /// Returns the values of the codes with a scale by `rule`, as a power of two, for each block.
    pub(in crate::fp8) fn with_block_scales(self, block: ScaleBlock, rule: ScaleRule) -> Result<Tensor> {
        let [n, columns] = self.sizes();
        let y = Out::new(gpu(OP, self.x)?, self.x.dtype(), n * columns)?;
        let mut args = self.row_args()?;
        args.push(Arg::Address(y.address));
        args.extend(self.size_args());
        args.extend([Arg::F32(rule.amax_epsilon), Arg::F32(largest_number(self.x.dtype()))]);
        args.extend(rounding_args(self.encoding.1));
        let name = format!("group_blocks_{}_{}", KernelBlock::of(block)?.name(), self.suffix()?);
        let grid = [self.n_tiles(FP8_BLOCK), columns.div_ceil(FP8_BLOCK).max(1), 1];
        // SAFETY: x and y are [n, columns]; offsets are at most n.
        unsafe { KERNELS.launch(gpu(OP, self.x)?, &name, grid, FLAT_THREADS, &args)? };
        Ok(y.into_tensor((n, columns)))
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
        unsafe { KERNELS.launch(on, &name, self.grid(), FLAT_THREADS, &args)? };
        Ok(amaxes)
    }

    fn round(&self, scales: Option<Slots<'_>>, amaxes: DeviceAddress, rule: ScaleRule) -> Result<Tensor> {
        let [n, columns] = self.sizes();
        let on = gpu(OP, self.x)?;
        let y = Out::new(on, self.x.dtype(), n * columns)?;
        let (scales, stride) = match scales {
            Some(scales) => (address(OP, scales.first)?, scales.stride),
            None => (0, 0),
        };
        let mut args = self.row_args()?;
        args.extend([Arg::Address(y.address), Arg::Address(scales), Arg::I32(stride as i32), Arg::Address(amaxes)]);
        args.extend(self.size_args());
        args.extend([Arg::F32(rule.amax_epsilon), Arg::F32(f32::MAX)]);
        args.extend(rounding_args(self.encoding.1));
        let name = format!("groups_{}", self.suffix()?);
        // SAFETY: x and y are [n, columns]; scales have an element every `stride`, and amaxes one per group where a scale may be 0 or is missing.
        unsafe { KERNELS.launch(on, &name, self.grid(), FLAT_THREADS, &args)? };
        Ok(y.into_tensor((n, columns)))
    }

    fn sizes(&self) -> [usize; 2] {
        [self.x.dims()[0], self.x.dims()[1]]
    }

    /// Returns x, the table of offsets and the rows per group.
    fn row_args(&self) -> Result<Vec<Arg>> {
        let offsets = self.offsets.map_or(Ok(0), |offsets| address(OP, offsets))?;
        let rows_per_group = self.x.dims()[0] / self.n_groups.max(1);
        Ok(vec![Arg::Address(address(OP, self.x)?), Arg::Address(offsets), Arg::I32(rows_per_group as i32)])
    }

    fn size_args(&self) -> [Arg; 3] {
        let [n, columns] = self.sizes();
        [n, self.n_groups, columns].map(|size| Arg::I32(size as i32))
    }

    fn suffix(&self) -> Result<String> {
        Ok(format!("{}_{}", name_of(self.encoding.0), suffix(OP, self.x.dtype())?))
    }

    /// Returns the most tiles of rows: each group, and the rows after the last, may have one that is not full.
    fn n_tiles(&self, height: usize) -> usize {
        self.sizes()[0] / height + self.n_groups + 1
    }

    fn grid(&self) -> [usize; 3] {
        [self.n_tiles(TILE_ROWS), (TILE_ROWS * self.sizes()[1]).div_ceil(PER_BLOCK).max(1), 1]
    }
}
