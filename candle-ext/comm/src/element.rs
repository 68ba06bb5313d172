//! The supported dtypes: their bytes and their reductions.

use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};
use half::{bf16, f16};

use crate::Reduce;

/// Element type of a tensor that can be reduced.
pub(crate) trait ReduceElement: Pod + WithDType {
    /// Accumulation type.
    type Wide: Pod;

    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn largest(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn smallest(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float {
    ($T:ty, $Wide:ty, $widen:expr, $narrow:expr) => {
        impl ReduceElement for $T {
            type Wide = $Wide;

            fn widen(self) -> $Wide {
                $widen(self)
            }

            fn narrow(wide: $Wide) -> Self {
                $narrow(wide)
            }

            fn sum(a: $Wide, b: $Wide) -> $Wide {
                a + b
            }

            // NaN propagates: a comparison with NaN is false, so a NaN in `b` is returned by the else branch.
            fn largest(a: $Wide, b: $Wide) -> $Wide {
                if a.is_nan() || a > b { a } else { b }
            }

            fn smallest(a: $Wide, b: $Wide) -> $Wide {
                if a.is_nan() || a < b { a } else { b }
            }
        }
    };
}

macro_rules! integer {
    ($T:ty) => {
        impl ReduceElement for $T {
            type Wide = $T;

            fn widen(self) -> $T {
                self
            }

            fn narrow(wide: $T) -> Self {
                wide
            }

            fn sum(a: $T, b: $T) -> $T {
                a.wrapping_add(b)
            }

            fn largest(a: $T, b: $T) -> $T {
                Ord::max(a, b)
            }

            fn smallest(a: $T, b: $T) -> $T {
                Ord::min(a, b)
            }
        }
    };
}

float!(f32, f32, |x| x, |x| x);
float!(f64, f64, |x| x, |x| x);
float!(bf16, f32, bf16::to_f32, bf16::from_f32);
float!(f16, f32, f16::to_f32, f16::from_f32);
integer!(u8);
integer!(u32);
integer!(i64);

/// The supported dtypes. A dtype's index is its code in messages.
pub(crate) const DTYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];

/// Runs `$body` with `$T` as the type of `$dtype`, which is one of [`DTYPES`].
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::U8 => {
                type $T = u8;
                $body
            }
            candle_core::DType::U32 => {
                type $T = u32;
                $body
            }
            candle_core::DType::I64 => {
                type $T = i64;
                $body
            }
            other => unreachable!("{other:?} was rejected by the caller"),
        }
    };
}
pub(crate) use with_type;

/// Bytes of a CPU tensor in row-major order, read in chunks.
///
/// candle locks the storage against writers of all its views while it is read. The lock must not be held during an exchange
/// with other ranks.
pub(crate) struct TensorBytes(Tensor);

impl TensorBytes {
    pub(crate) fn new(x: &Tensor) -> candle_core::Result<Self> {
        Ok(Self(x.contiguous()?))
    }

    pub(crate) fn n_bytes(&self) -> usize {
        self.0.elem_count() * self.0.dtype().size_in_bytes()
    }

    /// Copies the bytes from offset `start` into `into`.
    pub(crate) fn read(&self, start: usize, into: &mut [u8]) -> candle_core::Result<()> {
        with_type!(self.0.dtype(), T => {
            let (storage, layout) = self.0.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else { candle_core::bail!("read a tensor that is not on the CPU") };
            let (first, end) = layout.contiguous_offsets().expect("it was made contiguous above");
            let bytes: &[u8] = cast_slice(&CpuStorage::as_slice::<T>(storage)?[first..end]);
            into.copy_from_slice(&bytes[start..start + into.len()]);
            Ok(())
        })
    }

    /// Copies the elements from index `start` into `into`. `T` is the tensor's dtype.
    pub(crate) fn read_elements<T: ReduceElement>(&self, start: usize, into: &mut [T]) -> candle_core::Result<()> {
        self.read(start * size_of::<T>(), cast_slice_mut(into))
    }
}

/// Creates a CPU tensor.
pub(crate) fn tensor<T: ReduceElement>(elements: Vec<T>, shape: &[usize]) -> candle_core::Result<Tensor> {
    Tensor::from_vec(elements, shape, &Device::Cpu)
}

/// Number of elements that are reduced at a time. Their accumulators fit into the L1 cache.
const LANE: usize = 1024;

/// Reduces `parts`, in rank order, into `out`. All have the same length.
pub(crate) fn combine<T: ReduceElement>(op: Reduce, parts: &[&[T]], out: &mut [T]) {
    let merge = match op {
        Reduce::Sum => |wide: &mut [T::Wide], part: &[T]| fold_with::<T>(wide, part, T::sum),
        Reduce::Max => |wide: &mut [T::Wide], part: &[T]| fold_with::<T>(wide, part, T::largest),
        Reduce::Min => |wide: &mut [T::Wide], part: &[T]| fold_with::<T>(wide, part, T::smallest),
    };
    let (first, rest) = parts.split_first().expect("a group has a rank");
    let mut wide = [T::Wide::zeroed(); LANE];
    for (lane, out) in out.chunks_mut(LANE).enumerate() {
        let at = lane * LANE..lane * LANE + out.len();
        let wide = &mut wide[..out.len()];
        wide.iter_mut().zip(&first[at.clone()]).for_each(|(wide, x)| *wide = x.widen());
        rest.iter().for_each(|part| merge(wide, &part[at.clone()]));
        out.iter_mut().zip(wide).for_each(|(out, wide)| *out = T::narrow(*wide));
    }
}

#[inline(always)]
fn fold_with<T: ReduceElement>(wide: &mut [T::Wide], part: &[T], by: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    wide.iter_mut().zip(part).for_each(|(wide, x)| *wide = by(*wide, x.widen()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check<T: ReduceElement + std::fmt::Debug>(op: Reduce, parts: &[&[T]], want: &[T]) {
        let mut out = vec![T::zeroed(); want.len()];
        combine(op, parts, &mut out);
        let bits = |x: &[T]| bytemuck::cast_slice::<T, u8>(x).to_vec();
        assert_eq!(bits(&out), bits(want), "{out:?}, not {want:?}");
    }

    #[test]
    fn bf16_and_f16_sums_are_rounded_once() {
        // In bf16, 256 + 1 rounds to 256 and 256 + 1 + 1 is exact. In f16, the limit is 2048.
        let [large, one] = [256.0, 1.0].map(bf16::from_f32);
        check(Reduce::Sum, &[&[large], &[one], &[one]], &[bf16::from_f32(258.0)]);
        let [large, one] = [2048.0, 1.0].map(f16::from_f32);
        check(Reduce::Sum, &[&[large], &[one], &[one]], &[f16::from_f32(2050.0)]);
    }

    #[test]
    fn sums_are_taken_in_rank_order() {
        check(Reduce::Sum, &[&[1e8f32], &[-1e8], &[1.0]], &[1.0]);
        check(Reduce::Sum, &[&[1.0f32], &[1e8], &[-1e8]], &[0.0]);
        check(Reduce::Sum, &[&[-0.0f64], &[-0.0]], &[-0.0]);
    }

    #[test]
    fn nan_propagates() {
        let nan = f32::NAN;
        for op in [Reduce::Sum, Reduce::Max, Reduce::Min] {
            check(op, &[&[nan, 1.0, 1.0], &[1.0, nan, 1.0], &[2.0, 2.0, nan]], &[nan; 3]);
        }
        check(Reduce::Max, &[&[-1.0f32, f32::NEG_INFINITY], &[2.0, -3.0]], &[2.0, -3.0]);
        check(Reduce::Min, &[&[-1.0f32, f32::INFINITY], &[2.0, -3.0]], &[-1.0, -3.0]);
    }

    #[test]
    fn integers_wrap() {
        check(Reduce::Sum, &[&[250u8], &[10]], &[4]);
        check(Reduce::Sum, &[&[i64::MAX], &[1]], &[i64::MIN]);
        check(Reduce::Max, &[&[3u32, 1], &[2, 4]], &[3, 4]);
        check(Reduce::Min, &[&[3i64, 1], &[-2, 4]], &[-2, 1]);
    }

    #[test]
    fn more_than_a_lane_is_reduced() {
        let [a, b] = [1, 2].map(|k| (0..2 * LANE as u32 + 3).map(|i| k * i).collect::<Vec<_>>());
        check(Reduce::Sum, &[&a, &b], &a.iter().map(|x| 3 * x).collect::<Vec<_>>());
    }
}
