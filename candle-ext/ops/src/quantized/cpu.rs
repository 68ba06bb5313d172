//! Quantization and dequantization on the CPU.

use std::ops::Range;

use candle_core::{Result, bail};
use half::bf16;
use rayon::prelude::*;

use super::format::{QuantFormat, QuantShape, ScaleRounding};
use crate::floats::{Floats, FloatsMut, first_of};

/// Rows of a quantized matrix.
#[derive(Clone, Copy)]
pub(crate) struct QuantizedRows<'a> {
    codes: &'a [u8],
    /// Value of each code.
    values: &'a [f32; 256],
    scales: Scales<'a>,
    k: usize,
    block_rows: usize,
    block_columns: usize,
    /// Index of the first row in the whole matrix.
    first: usize,
    end: usize,
}

/// Scales of a matrix's blocks, row by row.
#[derive(Clone, Copy)]
pub(crate) enum Scales<'a> {
    /// All are 1.
    One,
    /// Numbers.
    Floats(&'a [f32]),
    /// Four bytes each, little-endian.
    Bytes(&'a [u8]),
}

impl Scales<'_> {
    fn get(self, at: usize) -> f32 {
        match self {
            Self::One => 1.0,
            Self::Floats(scales) => scales[at],
            Self::Bytes(bytes) => {
                let bytes = bytes[at * size_of::<f32>()..][..size_of::<f32>()].try_into();
                f32::from_le_bytes(bytes.expect("a scale has four bytes"))
            }
        }
    }
}

impl<'a> QuantizedRows<'a> {
    /// Borrows all rows of a byte buffer.
    pub(crate) fn new(bytes: &'a [u8], format: &'a QuantFormat, shape: QuantShape) -> Self {
        let (codes, scales) = bytes.split_at(shape.scales_start());
        let QuantShape { n, k, block_rows, block_columns } = shape;
        Self::from_parts(codes, format.codes, Scales::Bytes(scales), &[n, k], [block_rows, block_columns])
    }

    /// Borrows all rows [n, k] of codes and scales that are apart.
    pub(crate) fn from_parts(
        codes: &'a [u8],
        values: &'a [f32; 256],
        scales: Scales<'a>,
        dims: &[usize],
        [block_rows, block_columns]: [usize; 2],
    ) -> Self {
        Self { codes, values, scales, k: dims[1], block_rows, block_columns, first: 0, end: dims[0] }
    }

    /// Borrows some of the rows.
    pub(crate) fn rows(self, rows: Range<usize>) -> Self {
        Self { first: self.first + rows.start, end: self.first + rows.end, ..self }
    }

    /// Dequantizes all rows into `out`, which has the same number of elements.
    pub(crate) fn read_into(self, out: &mut [f32]) {
        let k = self.k;
        if k > 0 {
            out.par_chunks_mut(k).enumerate().for_each(|(row_idx, out)| self.read_row(self.first + row_idx, out));
        }
    }

    /// Dequantizes all rows into the head of `scratch`, and returns them.
    pub(crate) fn widened(self, scratch: &mut Vec<f32>) -> &[f32] {
        let out = first_of(scratch, (self.end - self.first) * self.k);
        self.read_into(out);
        out
    }

    /// Returns all elements in bf16 if each is exact: if all scales are powers of two, or 1. The values of codes have at most
    /// eight significant bits.
    pub(crate) fn try_to_bf16(self) -> Option<Vec<bf16>> {
        let is_exact = match self.scales {
            Scales::One => true,
            Scales::Floats(scales) => {
                scales.iter().all(|scale| scale.to_bits().trailing_zeros() >= f32::MANTISSA_DIGITS - 1)
            }
            Scales::Bytes(_) => false,
        };
        is_exact.then(|| {
            let mut elements = vec![bf16::ZERO; (self.end - self.first) * self.k];
            dequantize(self, FloatsMut::Bf16(&mut elements));
            elements
        })
    }

    /// Dequantizes the first row.
    pub(crate) fn read_one(self, out: &mut [f32]) {
        self.read_row(self.first, out);
    }

    /// Dequantizes a row, indexed in the whole matrix.
    fn read_row(self, row: usize, out: &mut [f32]) {
        let Self { k, block_rows, block_columns, values, .. } = self;
        let codes = &self.codes[row * k..(row + 1) * k];
        if let Scales::One = self.scales {
            out.iter_mut().zip(codes).for_each(|(x, code)| *x = values[usize::from(*code)]);
            return;
        }
        let first_scale = row / block_rows * k.div_ceil(block_columns);
        if let (1, Scales::Floats(scales)) = (block_columns, self.scales) {
            let scales = &scales[first_scale..first_scale + k];
            let elements = out.iter_mut().zip(codes).zip(scales);
            elements.for_each(|((x, code), scale)| *x = scale * values[usize::from(*code)]);
            return;
        }
        let blocks = out.chunks_mut(block_columns).zip(codes.chunks(block_columns));
        for (block_idx, (out, codes)) in blocks.enumerate() {
            let scale = self.scales.get(first_scale + block_idx);
            out.iter_mut().zip(codes).for_each(|(x, code)| *x = scale * values[usize::from(*code)]);
        }
    }
}

/// Dequantizes all elements, each rounded once.
pub(crate) fn dequantize(rows: QuantizedRows<'_>, out: FloatsMut<'_>) {
    let k = rows.k;
    if let FloatsMut::F32(out) = out {
        return rows.read_into(out);
    }
    let of_rows = out.chunks(k.max(1)).into_par_iter().enumerate();
    of_rows.for_each_init(
        || vec![0.0; k],
        |row, (row_idx, mut out)| {
            rows.read_row(rows.first + row_idx, row);
            out.write(0, row);
        },
    );
}

/// Returns codes and scales of `x` [n, k].
pub(super) fn quantize(x: Floats<'_>, format: &QuantFormat, shape: QuantShape) -> Result<Vec<u8>> {
    let QuantShape { n, k, block_rows, block_columns } = shape;
    let mut wide = Vec::new();
    let x = x.widened(&mut wide);
    if let Some(at) = x.iter().position(|x| !x.is_finite()) {
        bail!(
            "quantize: the element at row {}, column {} is {}; {} holds finite values",
            at / k,
            at % k,
            x[at],
            format.name
        )
    }
    let codes = SortedCodes::of(format);
    let max_code = format.max_code();
    let blocks_a_row = shape.blocks_a_row();
    let mut bytes = vec![0; shape.weight_bytes()];
    let (code_bytes, scale_bytes) = bytes.split_at_mut(shape.scales_start());
    let strips = code_bytes[..n * k].par_chunks_mut((block_rows * k).max(1));
    let scales = scale_bytes.par_chunks_mut((blocks_a_row * size_of::<f32>()).max(1));
    strips.zip(scales).zip(x.par_chunks((block_rows * k).max(1))).for_each(|((strip, scales), x)| {
        for (block_idx, scale_bytes) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let columns = block_idx * block_columns..((block_idx + 1) * block_columns).min(k);
            let block = || x.chunks(k).flat_map(|row| &row[columns.clone()]);
            let scale = scale(block().fold(0.0, |max, x| x.abs().max(max)) / max_code, format.scales);
            *scale_bytes = scale.to_le_bytes();
            for (out, x) in strip.chunks_mut(k).zip(x.chunks(k)) {
                let pairs = out[columns.clone()].iter_mut().zip(&x[columns.clone()]);
                pairs.for_each(|(code, x)| *code = codes.nearest(x / scale));
            }
        }
    });
    Ok(bytes)
}

/// Rounds a scale. Zero, the scale of a block of zeros, and values too small to divide by become 1.
fn scale(ratio: f32, rounding: ScaleRounding) -> f32 {
    if !ratio.is_normal() {
        return 1.0;
    }
    match rounding {
        ScaleRounding::Exact => ratio,
        ScaleRounding::PowerOfTwo => {
            let below = f32::from_bits(ratio.to_bits() & 0x7f80_0000);
            if below == ratio { ratio } else { below * 2.0 }
        }
    }
}

/// Finite codes, sorted by value.
struct SortedCodes(Vec<(f32, u8)>);

impl SortedCodes {
    fn of(format: &QuantFormat) -> Self {
        let codes = (0..=u8::MAX).map(|code| (format.codes[usize::from(code)], code));
        let mut codes: Vec<_> = codes.filter(|(value, _)| value.is_finite()).collect();
        codes.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(codes)
    }

    /// Returns the code nearest to `x`; ties go to the even code.
    fn nearest(&self, x: f32) -> u8 {
        let above = self.0.partition_point(|(value, _)| *value < x).min(self.0.len() - 1);
        let ((low, low_code), (high, high_code)) = (self.0[above.saturating_sub(1)], self.0[above]);
        let (to_low, to_high) = (f64::from(x) - f64::from(low), f64::from(high) - f64::from(x));
        let is_low = to_low.abs() < to_high.abs() || (to_low.abs() == to_high.abs() && low_code.is_multiple_of(2));
        if is_low { low_code } else { high_code }
    }
}
