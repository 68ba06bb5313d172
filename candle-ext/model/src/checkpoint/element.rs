//! Dtypes of a checkpoint, and conversions between them through f32.

use std::borrow::Cow;

use bytemuck::NoUninit;
use candle_core::{CpuStorage, DType, Storage, Tensor, WithDType};
use candlewick_ops::to_host_contiguous;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

/// A floating-point element of weights: f32, bf16 or f16.
pub trait Element: Copy + Send + Sync + 'static {
    /// Dtype of the element.
    const DTYPE: DType;
    /// Converts from f32, rounding to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
    /// Converts to f32 without rounding.
    fn to_f32(self) -> f32;
}

macro_rules! element {
    ($type:ty, $dtype:ident, $from:expr, $to:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            fn from_f32(x: f32) -> Self {
                $from(x)
            }
            fn to_f32(self) -> f32 {
                $to(self)
            }
        }
    };
}

element!(f32, F32, |x| x, |x| x);
element!(bf16, BF16, bf16::from_f32, bf16::to_f32);
element!(f16, F16, f16::from_f32, f16::to_f32);

/// Returns the safetensors dtype of a supported weight dtype.
pub(super) fn disk_dtype(dtype: DType) -> Option<Dtype> {
    match dtype {
        DType::F32 => Some(Dtype::F32),
        DType::BF16 => Some(Dtype::BF16),
        DType::F16 => Some(Dtype::F16),
        _ => None,
    }
}

/// Decodes little-endian `bytes` of `dtype` into `out`, whose length must fit.
pub(super) fn decode<T: Element>(dtype: Dtype, bytes: &[u8], out: &mut [T]) {
    match dtype {
        Dtype::F32 => decode_from(bytes, out, |b: [u8; 4]| f32::from_le_bytes(b)),
        Dtype::BF16 => decode_from(bytes, out, |b: [u8; 2]| bf16::from_le_bytes(b).to_f32()),
        _ => decode_from(bytes, out, |b: [u8; 2]| f16::from_le_bytes(b).to_f32()),
    }
}

const PIECE: usize = 1 << 16;

fn decode_from<T: Element, const W: usize>(bytes: &[u8], out: &mut [T], widen: impl Fn([u8; W]) -> f32 + Sync) {
    out.par_chunks_mut(PIECE).zip(bytes.par_chunks(PIECE * W)).for_each(|(out, bytes)| {
        for (x, raw) in out.iter_mut().zip(bytes.as_chunks::<W>().0) {
            *x = T::from_f32(widen(*raw));
        }
    });
}

/// Calls `take` with the elements of a tensor in order, without a copy if it is contiguous and on the host.
pub(crate) fn with_elements<T: WithDType, R>(tensor: &Tensor, take: impl FnOnce(&[T]) -> R) -> candle_core::Result<R> {
    let tensor = to_host_contiguous(tensor)?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match &*storage {
        Storage::Cpu(storage) => Ok(take(&storage.as_slice()?[range])),
        _ => candle_core::bail!("the tensor was moved to the CPU"),
    }
}

/// Encodes a tensor in `dtype` and passes the bytes on chunk by chunk.
pub(super) fn encode(
    tensor: &Tensor,
    dtype: DType,
    mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> candle_core::Result<()> {
    let tensor = to_host_contiguous(tensor)?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    let Storage::Cpu(storage) = &*storage else { candle_core::bail!("the tensor was moved to the CPU") };
    match storage {
        CpuStorage::F32(x) if dtype == DType::F32 => {
            Ok(x[range].chunks(PIECE * 16).try_for_each(|piece| write(&little_endian(piece)))?)
        }
        CpuStorage::F32(x) => encode_slice(&x[range], dtype, &mut write),
        CpuStorage::BF16(x) => encode_slice(&x[range], dtype, &mut write),
        CpuStorage::F16(x) => encode_slice(&x[range], dtype, &mut write),
        _ => candle_core::bail!("weights of type {:?} cannot be saved", tensor.dtype()),
    }
}

/// Returns little-endian bytes: a borrowed view on little-endian machines.
pub fn little_endian<T: NoUninit>(values: &[T]) -> Cow<'_, [u8]> {
    let bytes = bytemuck::cast_slice(values);
    match cfg!(target_endian = "little") {
        true => Cow::Borrowed(bytes),
        false => bytes.chunks(size_of::<T>()).flat_map(|value| value.iter().rev()).copied().collect(),
    }
}

fn encode_slice<S: Element>(
    values: &[S],
    dtype: DType,
    write: &mut impl FnMut(&[u8]) -> std::io::Result<()>,
) -> candle_core::Result<()> {
    for piece in values.chunks(PIECE * 16) {
        let bytes = match dtype {
            DType::F32 => encode_piece(piece, |x| x.to_le_bytes()),
            DType::BF16 => encode_piece(piece, |x| bf16::from_f32(x).to_le_bytes()),
            _ => {
                refuse_overflow(piece)?;
                encode_piece(piece, |x| f16::from_f32(x).to_le_bytes())
            }
        };
        write(&bytes)?;
    }
    Ok(())
}

fn encode_piece<S: Element, const W: usize>(values: &[S], narrow: impl Fn(f32) -> [u8; W] + Sync) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * W];
    bytes.par_chunks_mut(PIECE * W).zip(values.par_chunks(PIECE)).for_each(|(bytes, values)| {
        for (raw, x) in bytes.as_chunks_mut::<W>().0.iter_mut().zip(values) {
            *raw = narrow(x.to_f32());
        }
    });
    bytes
}

/// Rejects a finite value that overflows to infinity.
fn refuse_overflow<S: Element>(values: &[S]) -> candle_core::Result<()> {
    match values.iter().map(|x| x.to_f32()).find(|x| x.is_finite() && f16::from_f32(*x).is_infinite()) {
        Some(x) => candle_core::bail!("{x} does not fit in float16 (at most 65504); save as bfloat16 or float32"),
        None => Ok(()),
    }
}
