//! Slices and buffers in the dtypes f32, bf16 and f16. Kernels compute in f32: they convert inputs block by block and
//! round outputs once.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Result, Storage, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::gemm::accumulate::Accumulate;
use crate::simd::vectorised;

/// Elements from which a conversion uses all threads.
const PARALLEL_FROM: usize = 1 << 16;

/// Borrowed slice of floats.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a> Floats<'a> {
    /// Borrows `range` of a storage.
    pub(crate) fn of(storage: &'a CpuStorage, range: Range<usize>) -> Result<Self> {
        Ok(match storage {
            CpuStorage::F32(data) => Self::F32(&data[range]),
            CpuStorage::BF16(data) => Self::Bf16(&data[range]),
            CpuStorage::F16(data) => Self::F16(&data[range]),
            other => return Err(unsupported(other.dtype())),
        })
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
            Self::F16(data) => data.len(),
        }
    }

    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(data) => Self::F32(&data[range]),
            Self::Bf16(data) => Self::Bf16(&data[range]),
            Self::F16(data) => Self::F16(&data[range]),
        }
    }

    /// Rounds each of `values` to this dtype, in place.
    pub(crate) fn round_like(self, values: &mut [f32]) {
        match self {
            Self::F32(_) => {}
            Self::Bf16(_) => {
                vectorised!(values.iter_mut().for_each(|x| *x = f32::from_bits(u32::from(bf16_bits(*x)) << 16)))
            }
            Self::F16(_) => values.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        }
    }

    /// Converts everything to f32 into `out`, which has the same length.
    pub(crate) fn read_into(self, out: &mut [f32]) {
        match self {
            Self::F32(data) => out.copy_from_slice(data),
            Self::Bf16(data) => widen_bf16(data, out),
            Self::F16(data) => data.convert_to_f32_slice(out),
        }
    }

    /// Returns the values as f32: borrowed if they are f32, else converted into `scratch`.
    pub(crate) fn widened<'s>(self, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        if let Self::F32(data) = self {
            return data;
        }
        let len = self.len();
        if len < PARALLEL_FROM {
            return self.widened_here(scratch);
        }
        const CHUNK: usize = PARALLEL_FROM / 4;
        let out = first_of(scratch, len);
        out.par_chunks_mut(CHUNK).enumerate().for_each(|(i, out)| {
            self.slice(i * CHUNK..i * CHUNK + out.len()).read_into(out);
        });
        out
    }

    /// Returns the values as [`widened`](Self::widened) does, but converts them on the calling thread.
    pub(crate) fn widened_here<'s>(self, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        if let Self::F32(data) = self {
            return data;
        }
        let out = first_of(scratch, self.len());
        self.read_into(out);
        out
    }
}

/// Mutable slice of floats.
pub(crate) enum FloatsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

impl<'a> FloatsMut<'a> {
    /// Borrows `range` of a storage mutably.
    pub(crate) fn of(storage: &'a mut CpuStorage, range: Range<usize>) -> Result<Self> {
        Ok(match storage {
            CpuStorage::F32(data) => Self::F32(&mut data[range]),
            CpuStorage::BF16(data) => Self::Bf16(&mut data[range]),
            CpuStorage::F16(data) => Self::F16(&mut data[range]),
            other => return Err(unsupported(other.dtype())),
        })
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::Bf16(data) => data.len(),
            Self::F16(data) => data.len(),
        }
    }

    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(data) => Self::F32(&mut data[range]),
            Self::Bf16(data) => Self::Bf16(&mut data[range]),
            Self::F16(data) => Self::F16(&mut data[range]),
        }
    }

    pub(crate) fn floats(&self) -> Floats<'_> {
        match self {
            Self::F32(data) => Floats::F32(data),
            Self::Bf16(data) => Floats::Bf16(data),
            Self::F16(data) => Floats::F16(data),
        }
    }

    /// Borrows the slice again.
    pub(crate) fn view(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(data) => FloatsMut::F32(data),
            Self::Bf16(data) => FloatsMut::Bf16(data),
            Self::F16(data) => FloatsMut::F16(data),
        }
    }

    /// Writes `values` from `start` on, each rounded to nearest even.
    pub(crate) fn write(&mut self, start: usize, values: &[f32]) {
        let range = start..start + values.len();
        match self {
            Self::F32(data) => data[range].copy_from_slice(values),
            Self::Bf16(data) => round_to_bf16(values, &mut data[range]),
            Self::F16(data) => data[range].convert_from_f32_slice(values),
        }
    }

    /// Calls `change` with the values in f32, and rounds them once.
    pub(crate) fn change_in_f32(mut self, accumulate: Accumulate, change: impl FnOnce(&mut [f32])) {
        if let Self::F32(data) = self {
            return change(data);
        }
        let mut values = vec![0.0; self.len()];
        if accumulate == Accumulate::Add {
            self.floats().read_into(&mut values);
        }
        change(&mut values);
        self.write(0, &values);
    }

    /// Splits before element `middle`.
    pub(crate) fn split_at(self, middle: usize) -> (FloatsMut<'a>, FloatsMut<'a>) {
        match self {
            Self::F32(data) => {
                let (left, right) = data.split_at_mut(middle);
                (FloatsMut::F32(left), FloatsMut::F32(right))
            }
            Self::Bf16(data) => {
                let (left, right) = data.split_at_mut(middle);
                (FloatsMut::Bf16(left), FloatsMut::Bf16(right))
            }
            Self::F16(data) => {
                let (left, right) = data.split_at_mut(middle);
                (FloatsMut::F16(left), FloatsMut::F16(right))
            }
        }
    }

    /// Writes zeros.
    pub(crate) fn clear(self) {
        match self {
            Self::F32(data) => data.fill(0.0),
            Self::Bf16(data) => data.fill(bf16::ZERO),
            Self::F16(data) => data.fill(f16::ZERO),
        }
    }

    /// Splits into chunks of `len`; the last may be shorter.
    pub(crate) fn chunks(self, len: usize) -> Vec<FloatsMut<'a>> {
        let len = len.max(1);
        match self {
            Self::F32(data) => data.chunks_mut(len).map(FloatsMut::F32).collect(),
            Self::Bf16(data) => data.chunks_mut(len).map(FloatsMut::Bf16).collect(),
            Self::F16(data) => data.chunks_mut(len).map(FloatsMut::F16).collect(),
        }
    }
}

/// Owned output buffer of an op, before it becomes a storage.
pub(crate) enum FloatBuf {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl FloatBuf {
    pub(crate) fn zeros(dtype: DType, len: usize) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Self::F32(vec![0.0; len]),
            DType::BF16 => Self::Bf16(vec![bf16::ZERO; len]),
            DType::F16 => Self::F16(vec![f16::ZERO; len]),
            other => return Err(unsupported(other)),
        })
    }

    /// Allocates an uninitialised buffer, which the caller must write completely. Debug builds fill it with NaN.
    pub(crate) fn unwritten(dtype: DType, len: usize) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Self::F32(unwritten(len, f32::NAN)),
            DType::BF16 => Self::Bf16(unwritten(len, bf16::NAN)),
            DType::F16 => Self::F16(unwritten(len, f16::NAN)),
            other => return Err(unsupported(other)),
        })
    }

    pub(crate) fn view(&mut self) -> FloatsMut<'_> {
        match self {
            Self::F32(data) => FloatsMut::F32(data),
            Self::Bf16(data) => FloatsMut::Bf16(data),
            Self::F16(data) => FloatsMut::F16(data),
        }
    }

    pub(crate) fn into_storage(self) -> Storage {
        Storage::Cpu(match self {
            Self::F32(data) => CpuStorage::F32(data),
            Self::Bf16(data) => CpuStorage::BF16(data),
            Self::F16(data) => CpuStorage::F16(data),
        })
    }
}

impl From<FloatBuf> for Storage {
    fn from(buffer: FloatBuf) -> Self {
        buffer.into_storage()
    }
}

/// Returns the first `len` elements of a buffer. It grows to `len` if it is smaller, and loses its contents then.
///
/// `resize` would allocate up to twice as much, which threads keep, next to the former buffer.
pub(crate) fn first_of(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        drop(std::mem::take(scratch));
        *scratch = vec![0.0; len];
    }
    &mut scratch[..len]
}

fn unwritten<T: Copy>(len: usize, poison: T) -> Vec<T> {
    if cfg!(debug_assertions) {
        return vec![poison; len];
    }
    let mut buffer = Vec::with_capacity(len);
    // SAFETY: the capacity is `len`, and all bit patterns are floats. A kernel writes each element before it is read;
    // the ops' tests would find the poison.
    #[allow(clippy::uninit_vec)]
    unsafe {
        buffer.set_len(len);
    }
    buffer
}

/// Converts bf16 to f32. half's own conversion quiets signalling NaNs, which prevents vectorisation.
#[inline(always)]
pub(crate) fn wide_bf16(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Converts a slice of bf16 to f32, vectorised, unlike half's loop.
pub(crate) fn widen_bf16(values: &[bf16], out: &mut [f32]) {
    assert_eq!(values.len(), out.len(), "a block and its widened copy have one length");
    vectorised!(values.iter().zip(out).for_each(|(value, out)| *out = wide_bf16(*value)));
}

/// Computes out = [out +] values, rounded once. Inlined, so that callers vectorise it.
#[inline(always)]
pub(crate) fn write_bf16(values: &[f32], out: &mut [bf16], accumulate: Accumulate) {
    let each = out.iter_mut().zip(values);
    match accumulate {
        Accumulate::Overwrite => each.for_each(|(out, value)| *out = rounded_bf16(*value)),
        Accumulate::Add => each.for_each(|(out, value)| *out = rounded_bf16(wide_bf16(*out) + value)),
    }
}

/// Rounds each value to bf16, vectorised.
pub(crate) fn round_to_bf16(values: &[f32], out: &mut [bf16]) {
    assert_eq!(values.len(), out.len(), "a block and its rounded copy have one length");
    vectorised!(values.iter().zip(out).for_each(|(value, out)| *out = rounded_bf16(*value)));
}

/// Rounds to the nearest bf16, ties to even; NaN stays NaN.
#[inline(always)]
fn rounded_bf16(value: f32) -> bf16 {
    bf16::from_bits(bf16_bits(value))
}

/// Rounds to bf16, away from zero with the probability of the 16 bits that are dropped. Uses the top 16 random bits.
#[inline(always)]
pub(crate) fn stochastic_bf16(value: f32, random: u32) -> f32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(random >> 16) & 0xffff_0000;
    f32::from_bits(if value.is_nan() { bits } else { rounded })
}

#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    (if value.is_nan() { quiet_nan } else { rounded }) as u16
}

/// Fails unless `dtype` is f32, bf16 or f16.
pub(crate) fn check_dtype(op: &str, what: &str, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        other => bail!("{op}: {what} is {other:?}, want f32, bf16 or f16"),
    }
}

fn unsupported(dtype: DType) -> candle_core::Error {
    candle_core::Error::Msg(format!("dtype {dtype:?} is not supported: want f32, bf16 or f16")).bt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        let patterns = (0..=u32::MAX).step_by(9973).chain([0, 1, 0x7f80_0000, 0xff80_0000, 0x7f7f_ffff, 0x3f80_8000]);
        let values: Vec<f32> = patterns.map(f32::from_bits).collect();
        let mut rounded = vec![bf16::ZERO; values.len()];
        round_to_bf16(&values, &mut rounded);
        let mut widened = vec![0.0; values.len()];
        widen_bf16(&rounded, &mut widened);
        for ((&value, got), widened) in values.iter().zip(rounded).zip(widened) {
            let want = bf16::from_f32(value);
            assert_eq!(got.to_bits(), want.to_bits(), "{value}");
            assert_eq!(widened.to_bits(), u32::from(want.to_bits()) << 16, "{value}");
        }
    }
}
