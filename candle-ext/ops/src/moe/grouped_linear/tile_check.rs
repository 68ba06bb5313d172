//! Check of a tile on a device: it multiplies small groups, and the results must agree with those of our kernels.

use candle_core::{DType, Device, Result, Tensor};

use super::operands::GroupedLibrary;
use super::{fused, library};
use crate::cuda::gemm::grouped::GroupedOutput;
use crate::gemm::Accumulate;
use crate::grouped_tile::{GroupedTile, TileUse};
use crate::transfer::to_host;
use crate::weight_matmul::Dims;

type Checked = std::result::Result<(), String>;

/// Sizes of groups, outputs and inputs of a check. Some rows follow the last group.
struct CheckedSizes {
    groups: &'static [u32],
    n_rest: usize,
    n: usize,
    k: usize,
}

/// Groups without rows, with one row, and with rows of several tiles; columns and terms of several tiles.
#[cfg(feature = "cuda")]
const SIZES: CheckedSizes = CheckedSizes { groups: &[0, 600, 1, 77, 0, 256], n_rest: 3, n: 328, k: 200 };

/// Returns the reason why a tile is unusable on a device, if any. A tile is checked once per device.
#[cfg(feature = "cuda")]
pub(super) fn of_device(device: &candle_core::CudaDevice, tile: &'static GroupedTile) -> Checked {
    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};

    use crate::cuda::gemm::cutlass::object::object;

    static CHECKED: Mutex<Option<HashMap<(usize, &'static str), Checked>>> = Mutex::new(None);
    let ordinal = device.cuda_stream().context().ordinal();
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    let check = || object(tile).and_then(|_| SIZES.check(tile, &Device::Cuda(device.clone())));
    let checked = checked.get_or_insert_default().entry((ordinal, tile.name)).or_insert_with(|| {
        check().inspect_err(|why| tracing::warn!("experts: the tile {} of CUTLASS is not used: {why}", tile.name))
    });
    checked.clone()
}

impl CheckedSizes {
    fn check(&self, tile: &'static GroupedTile, device: &Device) -> Checked {
        let failed = |error: candle_core::Error| format!("the check of the tile {} failed: {error}", tile.name);
        let inputs = CheckInputs::new(self, device).map_err(failed)?;
        let by = GroupedLibrary::Cutlass(tile);
        let pairs = match tile.usage {
            TileUse::Multiply => [GroupedOutput::Y, GroupedOutput::X].map(|output| inputs.multiply(by, output)),
            TileUse::GradW => [DType::F32, DType::BF16].map(|dtype| inputs.grad_w(by, dtype)),
        };
        for (pair, what) in pairs.into_iter().zip(tile.usage.names()) {
            let [got, want] = pair.map_err(failed)?;
            agree(&got, &want).map_err(|why| format!("the check of the tile {} failed: {what} {why}", tile.name))?;
        }
        Ok(())
    }
}

impl TileUse {
    fn names(self) -> [&'static str; 2] {
        match self {
            Self::Multiply => ["y", "dx"],
            Self::GradW => ["dw in f32", "dw in bf16"],
        }
    }
}

/// Operands of a check, in bf16.
struct CheckInputs {
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    offsets: Tensor,
    dims: Dims,
}

impl CheckInputs {
    fn new(&CheckedSizes { groups, n_rest, n, k }: &CheckedSizes, device: &Device) -> Result<Self> {
        let mut ends = vec![0];
        ends.extend(groups.iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        }));
        let t = *ends.last().unwrap_or(&0) as usize + n_rest;
        let [x, dy, w] = [(t, k, 1), (t, n, 2), (groups.len() * n, k, 3)]
            .map(|(rows, columns, seed)| values(rows, columns, seed)?.to_dtype(DType::BF16)?.to_device(device));
        Ok(Self { x: x?, dy: dy?, w: w?, offsets: Tensor::new(ends, device)?, dims: Dims { t, n, k } })
    }

    /// Computes y or dx by a library and by our kernels.
    fn multiply(&self, by: GroupedLibrary, output: GroupedOutput) -> Result<[Tensor; 2]> {
        let from = if output == GroupedOutput::Y { &self.x } else { &self.dy };
        Ok([
            library::multiply(by, output, from, &self.w, &self.offsets, self.dims)?,
            fused::multiply(output, from, &self.w, &self.offsets, self.dims)?,
        ])
    }

    /// Overwrites dw and adds to it, by a library and by our kernels.
    fn grad_w(&self, by: GroupedLibrary, dtype: DType) -> Result<[Tensor; 2]> {
        let Self { x, dy, w, offsets, dims } = self;
        let sum = |add: &dyn Fn(&Tensor, Accumulate) -> Result<()>| {
            let dw = Tensor::full(7f32, w.shape(), w.device())?.to_dtype(dtype)?;
            add(&dw, Accumulate::Overwrite)?;
            add(&dw, Accumulate::Add)?;
            Ok::<_, candle_core::Error>(dw)
        };
        Ok([
            sum(&|dw, accumulate| library::grad_w(by, dy, x, offsets, (dw, accumulate), *dims))?,
            sum(&|dw, accumulate| fused::grad_w(dy, x, offsets, (dw, accumulate), *dims))?,
        ])
    }
}

/// Returns numbers between -1 and 1 that look random.
fn values(rows: usize, columns: usize, seed: u64) -> Result<Tensor> {
    let hash = |i: u64| (i + 1).wrapping_mul(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 40;
    let values: Vec<f32> = (0..(rows * columns) as u64).map(|i| hash(i) as f32 / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_vec(values, (rows, columns), &Device::Cpu)
}

/// Returns the relative norm of the difference if it exceeds the rounding of the dtype. NaN exceeds it.
fn agree(got: &Tensor, want: &Tensor) -> Checked {
    let most = if want.dtype() == DType::F32 { 1e-4 } else { 8e-3 };
    let norms = || -> Result<[f32; 2]> {
        let [got, want] = [got, want].map(|x| to_host(x)?.to_dtype(DType::F32));
        let (got, want) = (got?, want?);
        let norm = |x: Tensor| to_host(&x.sqr()?.sum_all()?)?.to_scalar::<f32>();
        Ok([norm((got - &want)?)?, norm(want)?])
    };
    let [difference, size] = norms().map_err(|error| error.to_string())?;
    let relative = (difference / size).sqrt();
    if relative <= most {
        Ok(())
    } else {
        Err(format!("differs from that of our kernels by {relative:.1e} of its norm"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::grouped_tile::grouped_tiles;

    const SMALL: CheckedSizes = CheckedSizes { groups: &[0, 33, 1, 7], n_rest: 3, n: 40, k: 24 };

    #[test]
    fn every_emulated_tile_passes_its_check() {
        for tile in grouped_tiles() {
            assert_eq!(SMALL.check(tile, &Device::Cpu), Ok(()), "{}", tile.name);
        }
    }

    #[test]
    fn wrong_numbers_fail_a_check() {
        let want = values(30, 40, 1).unwrap();
        let changed = |at: usize, value: f32| {
            let mut numbers = want.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            numbers[at] = value;
            Tensor::from_vec(numbers, (30, 40), &Device::Cpu).unwrap()
        };
        assert_eq!(agree(&want, &want), Ok(()));
        for value in [2.0, f32::NAN, f32::INFINITY] {
            let why = agree(&changed(77, value), &want).unwrap_err();
            assert!(why.contains("differs from that of our kernels by"), "{why}");
        }
        let missing_row = changed(0, 0.0).to_dtype(DType::BF16).unwrap();
        assert!(agree(&missing_row, &want.to_dtype(DType::BF16).unwrap()).is_err());
    }
}
