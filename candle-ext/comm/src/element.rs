//! The dtypes that travel: their bytes, and how their sums are taken.

use bytemuck::Pod;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};
use half::{bf16, f16};

use crate::Reduce;

/// A number that tensors hold.
pub(crate) trait Element: Pod + WithDType {
    /// In what it is summed.
    type Wide: Pod;

    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn sum(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn largest(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn smallest(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! float {
    ($T:ty, $Wide:ty, $widen:expr, $narrow:expr) => {
        impl Element for $T {
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

            // The second wins where nothing can be compared: if it is the NaN it stays, if `a` is, `a` is returned.
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
        impl Element for $T {
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

/// The dtypes that travel; a dtype's place is its name on the wire.
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
            other => unreachable!("{other:?} was refused by the caller"),
        }
    };
}
pub(crate) use with_type;

/// Calls `read` with the elements of a CPU tensor of dtype `T`, in row-major order.
pub(crate) fn with_elements<T: Element, R>(x: &Tensor, read: impl FnOnce(&[T]) -> R) -> candle_core::Result<R> {
    let x = x.contiguous()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("read a tensor that is not on the CPU") };
    let (start, end) = layout.contiguous_offsets().expect("it was made contiguous above");
    Ok(read(&CpuStorage::as_slice::<T>(storage)?[start..end]))
}

/// Calls `read` with the bytes of a CPU tensor, in row-major order.
pub(crate) fn with_bytes<R>(x: &Tensor, read: impl FnOnce(&[u8]) -> R) -> candle_core::Result<R> {
    with_type!(x.dtype(), T => with_elements::<T, R>(x, |elements| read(bytemuck::cast_slice(elements))))
}

/// Makes a CPU tensor.
pub(crate) fn tensor<T: Element>(elements: Vec<T>, shape: &[usize]) -> candle_core::Result<Tensor> {
    Tensor::from_vec(elements, shape, &Device::Cpu)
}

/// Combines `parts`, given in rank order, into `out`; `wide` is as long, and what it holds does not matter.
pub(crate) fn combine<T: Element>(op: Reduce, parts: &[&[T]], wide: &mut [T::Wide], out: &mut [T]) {
    let (first, rest) = parts.split_first().expect("a group has a rank");
    wide.iter_mut().zip(*first).for_each(|(wide, x)| *wide = x.widen());
    let merge = match op {
        Reduce::Sum => fold::<T>,
        Reduce::Max => |wide: &mut [T::Wide], part: &[T]| fold_by::<T>(wide, part, T::largest),
        Reduce::Min => |wide: &mut [T::Wide], part: &[T]| fold_by::<T>(wide, part, T::smallest),
    };
    rest.iter().for_each(|part| merge(wide, part));
    out.iter_mut().zip(wide).for_each(|(out, wide)| *out = T::narrow(*wide));
}

fn fold<T: Element>(wide: &mut [T::Wide], part: &[T]) {
    fold_by::<T>(wide, part, T::sum);
}

#[inline(always)]
fn fold_by<T: Element>(wide: &mut [T::Wide], part: &[T], by: impl Fn(T::Wide, T::Wide) -> T::Wide) {
    wide.iter_mut().zip(part).for_each(|(wide, x)| *wide = by(*wide, x.widen()));
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use super::*;

    #[track_caller]
    fn check<T: Element + std::fmt::Debug>(op: Reduce, parts: &[&[T]], want: &[T]) {
        let mut out = vec![T::zeroed(); want.len()];
        combine(op, parts, &mut vec![T::Wide::zeroed(); want.len()], &mut out);
        let bits = |x: &[T]| bytemuck::cast_slice::<T, u8>(x).to_vec();
        assert_eq!(bits(&out), bits(want), "{out:?}, not {want:?}");
    }

    #[test]
    fn narrow_sums_are_rounded_once() {
        // 256 + 1 is 256 in bf16; 256 + 1 + 1 is not. In f16 so with 2048.
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
    fn a_nan_is_not_lost() {
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
}
