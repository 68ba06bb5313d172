//! Cache key of a GEMM: everything that cuBLASLt selects an algorithm by.

use std::fmt;

use candle_core::DType;

use super::operands::{Fp8Accumulation, Fp8Inputs, Gemm, GemmInputs, Scaling};
use crate::fp8::Fp8Format;

/// Largest alignment in bytes that an algorithm may rely on.
const MAX_ALIGNMENT: u64 = 256;

/// Sizes, strides, dtypes and alignments of a GEMM, without its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GemmKey {
    /// Sizes m, n and k.
    sizes: [usize; 3],
    /// Leading dimensions of a, b and c.
    strides: [usize; 3],
    inputs: InputsKey,
    c_dtype: DType,
    /// Transposes of a and b.
    transposed: [bool; 2],
    plus: Plus,
    has_bias: bool,
    /// Alignments in bytes of the addresses of a, b, c and the addend.
    pub(super) alignments: [u32; 4],
}

/// Elements of a and b.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum InputsKey {
    Floats(DType),
    Fp8 { formats: [Fp8Format; 2], scalings: [Scaling; 2], accumulation: Fp8Accumulation },
}

/// Kind of the addend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Plus {
    Nothing,
    Output,
    Other,
}

impl GemmKey {
    pub(super) fn of(gemm: &Gemm) -> Self {
        let Gemm { m, n, k, a, b, .. } = *gemm;
        // cuBLASLt has no preference for the bias's alignment; it is read as the output is written.
        let output = gemm.bias.map_or(gemm.c, |bias| gemm.c | bias);
        Self {
            sizes: [m, n, k],
            strides: [a.in_memory([m, k]), b.in_memory([k, n]), gemm.output().in_memory([m, n])].map(|[_, _, s]| s),
            inputs: match gemm.inputs {
                GemmInputs::Floats(dtype) => InputsKey::Floats(dtype),
                GemmInputs::Fp8(Fp8Inputs { a, b, accumulation }) => {
                    InputsKey::Fp8 { formats: [a.format, b.format], scalings: [a.scaling, b.scaling], accumulation }
                }
            },
            c_dtype: gemm.c_dtype,
            transposed: [a.is_transposed, b.is_transposed],
            plus: match gemm.plus {
                None => Plus::Nothing,
                Some(plus) if plus == gemm.c => Plus::Output,
                Some(_) => Plus::Other,
            },
            has_bias: gemm.bias.is_some(),
            alignments: [a.address, b.address, output, gemm.plus.unwrap_or(gemm.c)].map(alignment),
        }
    }

    /// Returns the key of all GEMMs that differ from this one in the number of rows of a and c, or in the first row. a is not
    /// transposed. Their addresses have the alignment of a row.
    pub(super) fn without_rows(&self) -> Self {
        const MAX_ALIGNMENT_OF_ROWS: u32 = 16;
        let [of_a, of_b, of_c, of_plus] = self.alignments.map(|alignment| alignment.min(MAX_ALIGNMENT_OF_ROWS));
        let [a, _, c, plus] = self.element_sizes();
        let [lda, _, ldc] = self.strides.map(|stride| stride as u64);
        let of_row =
            |alignment: u32, stride: u64, element: u32| alignment.min(self::alignment(stride * u64::from(element)));
        let alignments = [of_row(of_a, lda, a), of_b, of_row(of_c, ldc, c), of_row(of_plus, ldc, plus)];
        let [_, n, k] = self.sizes;
        Self { sizes: [0, n, k], alignments, ..*self }
    }

    /// Returns the element sizes in bytes of a, b, c and the addend.
    pub(super) fn element_sizes(&self) -> [u32; 4] {
        let input = match self.inputs {
            InputsKey::Floats(dtype) => dtype.size_in_bytes() as u32,
            InputsKey::Fp8 { .. } => 1,
        };
        let output = self.c_dtype.size_in_bytes() as u32;
        [input, input, output, output]
    }
}

/// Name of the key in messages and in the file of tuned algorithms. Different keys have different names.
impl fmt::Display for GemmKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.sizes;
        let [lda, ldb, ldc] = self.strides;
        let (inputs, c_dtype) = (self.inputs, self.c_dtype.as_str());
        let [a, b] = self.transposed.map(|is_transposed| if is_transposed { 'T' } else { 'N' });
        let plus = match self.plus {
            Plus::Nothing => "",
            Plus::Output => " +c",
            Plus::Other => " +d",
        };
        let bias = if self.has_bias { " +bias" } else { "" };
        let [of_a, of_b, of_c, of_plus] = self.alignments;
        write!(f, "m{m} n{n} k{k} {a}{b} {inputs}->{c_dtype}{plus}{bias} ld {lda},{ldb},{ldc} ")?;
        write!(f, "aligned {of_a},{of_b},{of_c},{of_plus}")
    }
}

impl fmt::Display for InputsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (formats, scalings, accumulation) = match self {
            Self::Floats(dtype) => return f.write_str(dtype.as_str()),
            Self::Fp8 { formats, scalings, accumulation } => (formats, scalings, accumulation),
        };
        let [a, b] = formats.map(|format| match format {
            Fp8Format::E4m3 => "e4m3",
            Fp8Format::E5m2 => "e5m2",
        });
        let [of_a, of_b] = scalings.map(|scaling| match scaling {
            Scaling::Tensor => "",
            Scaling::Vector128 => "/1x128",
            Scaling::Block128 => "/128x128",
        });
        let accumulation = if *accumulation == Fp8Accumulation::Fast { " fast" } else { "" };
        write!(f, "{a}{of_a},{b}{of_b}{accumulation}")
    }
}

fn alignment(address: u64) -> u32 {
    (1u64 << address.trailing_zeros().min(8)).min(MAX_ALIGNMENT) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{Matrix, ScaledInput};
    use super::*;

    #[test]
    fn every_property_that_an_algorithm_depends_on_makes_another_key_and_another_name() {
        let plain = Gemm {
            a: Matrix::plain(0x1000),
            b: Matrix::plain(0x2000),
            c: 0x3000,
            ..Gemm::new([16, 32, 64], DType::BF16)
        };
        let others = [
            Gemm { m: 17, ..plain },
            Gemm { n: 33, ..plain },
            Gemm { k: 65, ..plain },
            Gemm { a: Matrix::transposed(0x1000), ..plain },
            Gemm { b: Matrix::transposed(0x2000), ..plain },
            Gemm { a: plain.a.with_row_stride(80), ..plain },
            Gemm { b: plain.b.with_row_stride(80), ..plain },
            Gemm { c_stride: Some(80), ..plain },
            Gemm { inputs: GemmInputs::Floats(DType::F16), ..plain },
            Gemm { c_dtype: DType::F32, ..plain },
            Gemm { plus: Some(plain.c), ..plain },
            Gemm { plus: Some(0x4000), ..plain },
            Gemm { plus: Some(0x4002), ..plain },
            Gemm { bias: Some(0x4000), ..plain },
            Gemm { bias: Some(0x4002), ..plain },
            Gemm { a: Matrix::plain(0x1008), ..plain },
            Gemm { b: Matrix::plain(0x2008), ..plain },
            Gemm { c: 0x3010, ..plain },
        ];
        let keys: HashSet<GemmKey> = others.iter().chain([&plain]).map(GemmKey::of).collect();
        let names: HashSet<String> = keys.iter().map(GemmKey::to_string).collect();
        assert_eq!((keys.len(), names.len()), (others.len() + 1, others.len() + 1));
    }

    #[test]
    fn formats_scalings_and_accumulation_make_other_keys_and_names() {
        let scaled = |format, scaling| ScaledInput { format, scale_inv: 0x5000, scaling };
        let (e4m3, e5m2) = (Fp8Format::E4m3, Fp8Format::E5m2);
        let of = |a, b, accumulation| Gemm {
            inputs: GemmInputs::Fp8(Fp8Inputs { a, b, accumulation }),
            ..Gemm::new([16, 16, 16], DType::BF16)
        };
        let tensor = |format| scaled(format, Scaling::Tensor);
        let vector = scaled(e4m3, Scaling::Vector128);
        let gemms = [
            Gemm::new([16, 16, 16], DType::BF16),
            of(tensor(e4m3), tensor(e4m3), Fp8Accumulation::Fast),
            of(tensor(e4m3), tensor(e4m3), Fp8Accumulation::Split),
            of(tensor(e5m2), tensor(e4m3), Fp8Accumulation::Fast),
            of(tensor(e4m3), tensor(e5m2), Fp8Accumulation::Fast),
            of(vector, tensor(e4m3), Fp8Accumulation::Fast),
            of(vector, vector, Fp8Accumulation::Fast),
            of(vector, scaled(e4m3, Scaling::Block128), Fp8Accumulation::Fast),
        ];
        let names: HashSet<String> = gemms.iter().map(|gemm| GemmKey::of(gemm).to_string()).collect();
        assert_eq!(names.len(), gemms.len(), "{names:?}");
        let elsewhere = |scale_inv| of(ScaledInput { scale_inv, ..vector }, vector, Fp8Accumulation::Split);
        assert_eq!(GemmKey::of(&elsewhere(0x10)), GemmKey::of(&elsewhere(0x20)));
    }

    #[test]
    fn other_addresses_of_the_same_alignment_share_a_key() {
        let at = |c| Gemm { c, ..Gemm::new([4, 4, 4], DType::F32) };
        assert_eq!(GemmKey::of(&at(0x1100)), GemmKey::of(&at(0x4_0000)));
        assert_eq!(GemmKey::of(&at(0x1004)).alignments, [256, 256, 4, 4]);
        assert_eq!(GemmKey::of(&at(0x1004)).to_string(), "m4 n4 k4 NN f32->f32 ld 4,4,4 aligned 256,256,4,4");
    }

    #[test]
    fn gemms_that_differ_in_the_rows_of_a_and_c_alone_have_one_key_without_rows() {
        let plain = Gemm {
            a: Matrix::plain(0x1000),
            b: Matrix::transposed(0x2000),
            c: 0x3000,
            ..Gemm::new([16, 32, 64], DType::BF16)
        };
        let of = |gemm: Gemm| GemmKey::of(&gemm).without_rows();
        // Rows of 128 bytes in a and of 64 in c. Their first row may have any place in a buffer.
        for (m, first) in [(1, 0), (17, 1), (1000, 2)] {
            let (a, c) = (Matrix::plain(0x1000 + 128 * first), 0x3000 + 64 * first);
            assert_eq!(of(Gemm { m, a, c, ..plain }), of(plain), "{m} rows from row {first}");
        }
        for other in [Gemm { n: 33, ..plain }, Gemm { k: 65, ..plain }, Gemm { c_dtype: DType::F32, ..plain }] {
            assert_ne!(of(other), of(plain), "{other:?}");
        }
        // Rows of 6 bytes start at multiples of 2.
        let narrow = |first: u64| Gemm { k: 3, a: Matrix::plain(0x1000 + 6 * first), ..plain };
        assert_eq!(of(narrow(0)), of(narrow(1)));
    }
}
