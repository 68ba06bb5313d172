//! 8-bit floating-point formats: encoding with saturation, and the values of the codes.

use crate::quantized::{QuantFormat, ScaleBlock, ScaleRounding};

/// 8-bit floating-point format of the OCP specification "OFP8" (2023).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// 4 exponent bits and 3 mantissa bits: up to 448, without infinities.
    E4m3,
    /// 5 exponent bits and 2 mantissa bits: up to 57344.
    E5m2,
}

/// Side of a block in blockwise scaling.
pub const FP8_BLOCK: usize = 128;

/// Bit pattern of NaN, as NVIDIA's conversion instructions write it in both formats.
const NAN: u8 = 0x7f;

/// Parameters of a format's encoding.
struct Layout {
    mantissa_bits: u32,
    exponent_bias: u32,
    max: f32,
}

const E4M3: Layout = Layout { mantissa_bits: 3, exponent_bias: 7, max: 448.0 };
const E5M2: Layout = Layout { mantissa_bits: 2, exponent_bias: 15, max: 57344.0 };

/// Storage of frozen weights in E4M3 with a scale per 128x128 elements.
///
/// Scales are powers of two, so that a dequantized weight is exact in bf16. Other scales gain no precision, because E4M3
/// is a floating-point format.
pub static FP8_STORAGE: QuantFormat = QuantFormat {
    name: "fp8",
    codes: &E4M3_VALUES,
    block: ScaleBlock::Tile { rows: FP8_BLOCK, columns: FP8_BLOCK },
    scales: ScaleRounding::PowerOfTwo,
};

static E4M3_VALUES: [f32; 256] = values(&E4M3);
static E5M2_VALUES: [f32; 256] = values(&E5M2);

impl Fp8Format {
    /// Returns the largest finite value: 448 or 57344.
    pub fn max(self) -> f32 {
        match self {
            Self::E4m3 => E4M3.max,
            Self::E5m2 => E5M2.max,
        }
    }

    /// Returns the smallest positive value, a subnormal number: 2^-9 or 2^-16.
    pub fn min_positive(self) -> f32 {
        self.values()[1]
    }

    /// Returns the value of each code. Codes of NaN have NaN; E5M2 also has infinities, which encoding never gives.
    pub fn values(self) -> &'static [f32; 256] {
        match self {
            Self::E4m3 => &E4M3_VALUES,
            Self::E5m2 => &E5M2_VALUES,
        }
    }

    /// Encodes a number: the nearest value, ties to even; larger magnitudes and infinities become the largest value.
    ///
    /// The bits are those of NVIDIA's `cvt.rn.satfinite`.
    pub fn encode(self, x: f32) -> u8 {
        match self {
            Self::E4m3 => e4m3(x),
            Self::E5m2 => e5m2(x),
        }
    }
}

#[inline(always)]
pub(super) fn e4m3(x: f32) -> u8 {
    nearest(x, &E4M3)
}

#[inline(always)]
pub(super) fn e5m2(x: f32) -> u8 {
    nearest(x, &E5M2)
}

/// Encodes with stochastic rounding: up with the probability of the distance to the value below. `random` has 32 random
/// bits.
#[inline(always)]
pub(super) fn stochastic_e4m3(x: f32, random: u32) -> u8 {
    stochastic(x, random, &E4M3)
}

#[inline(always)]
pub(super) fn stochastic_e5m2(x: f32, random: u32) -> u8 {
    stochastic(x, random, &E5M2)
}

/// Rounds to the nearest code, ties to even.
#[inline(always)]
fn nearest(x: f32, layout: &Layout) -> u8 {
    let Layout { mantissa_bits, exponent_bias, .. } = *layout;
    let shift = 23 - mantissa_bits;
    // A step of the subnormal numbers is the last bit of this one, so that an addition rounds to steps.
    let aligned = 2f32.powi(24 - exponent_bias as i32 - mantissa_bits as i32);
    encode(
        x,
        layout,
        |bits| bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1),
        |magnitude| (magnitude + aligned).to_bits() - aligned.to_bits(),
    )
}

/// Rounds up if the random number is below the distance to the code below. Both have as many bits as are dropped.
#[inline(always)]
fn stochastic(x: f32, random: u32, layout: &Layout) -> u8 {
    let Layout { mantissa_bits, exponent_bias, .. } = *layout;
    let shift = 23 - mantissa_bits;
    let random = random >> (32 - shift);
    // The mantissa of a sum with the smallest normal number counts steps of the subnormal numbers.
    let aligned = 2f32.powi(1 - exponent_bias as i32);
    encode(
        x,
        layout,
        |bits| bits + random,
        |magnitude| (((magnitude + aligned).to_bits() + random) >> shift) - (aligned.to_bits() >> shift),
    )
}

/// Encodes a number. `round` rounds the bits of a normal number by its low ones; `subnormal` returns the code of a
/// magnitude below the normal ones, which is its number of steps.
#[inline(always)]
fn encode(x: f32, layout: &Layout, round: impl Fn(u32) -> u32, subnormal: impl Fn(f32) -> u32) -> u8 {
    let Layout { mantissa_bits, exponent_bias, max } = *layout;
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = if x.abs() > max { max } else { x.abs() };
    let normal =
        (round(magnitude.to_bits()) >> (23 - mantissa_bits)).wrapping_sub((127 - exponent_bias) << mantissa_bits);
    let is_normal = magnitude >= 2f32.powi(1 - exponent_bias as i32);
    let code = if is_normal { normal } else { subnormal(magnitude) };
    if x.is_nan() { NAN } else { sign | code as u8 }
}

const fn values(layout: &Layout) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = value(code as u32, layout);
        code += 1;
    }
    values
}

const fn value(code: u32, layout: &Layout) -> f32 {
    let Layout { mantissa_bits, exponent_bias, max } = *layout;
    let magnitude = code & 0x7f;
    let max_code = (max.to_bits() >> (23 - mantissa_bits)) - ((127 - exponent_bias) << mantissa_bits);
    let sign = (code & 0x80) << 24;
    if magnitude > max_code {
        // The code after the largest value of E5M2 is infinity, as in IEEE 754; E4M3 has none.
        let is_infinite = mantissa_bits == 2 && magnitude == max_code + 1;
        return if is_infinite { f32::from_bits(sign | f32::INFINITY.to_bits()) } else { f32::NAN };
    }
    let step = f32::from_bits((127 + 1 - exponent_bias - mantissa_bits) << 23);
    let below_normal = 1 << mantissa_bits;
    let value = if magnitude < below_normal {
        magnitude as f32 * step
    } else {
        f32::from_bits((magnitude << (23 - mantissa_bits)) + ((127 - exponent_bias) << 23))
    };
    f32::from_bits(value.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];

    #[test]
    fn values_are_those_of_the_specification() {
        let e4m3 = Fp8Format::E4m3.values();
        assert_eq!(
            [e4m3[0x01], e4m3[0x08], e4m3[0x38], e4m3[0x7e], e4m3[0xfe]],
            [2f32.powi(-9), 2f32.powi(-6), 1.0, 448.0, -448.0]
        );
        assert!(e4m3[0x7f].is_nan() && e4m3[0xff].is_nan());
        let e5m2 = Fp8Format::E5m2.values();
        assert_eq!(
            [e5m2[0x01], e5m2[0x04], e5m2[0x3c], e5m2[0x7b], e5m2[0x7c], e5m2[0xfc]],
            [2f32.powi(-16), 2f32.powi(-14), 1.0, 57344.0, f32::INFINITY, f32::NEG_INFINITY]
        );
        assert!(e5m2[0x7d].is_nan() && e5m2[0x7f].is_nan());
    }

    /// Every number between two neighbouring codes goes to the nearer one, and the middle to the even one.
    #[test]
    fn numbers_between_codes_go_to_the_nearest() {
        for format in FORMATS {
            let values = format.values();
            let mut code = 0u8;
            while values[usize::from(code)] < format.max() {
                let (low, high) = (values[usize::from(code)], values[usize::from(code) + 1]);
                let middle = (low + high) / 2.0;
                assert_eq!(format.encode(low), code);
                assert_eq!(format.encode(middle.next_down()), code, "{format:?} below {middle}");
                assert_eq!(format.encode(middle.next_up()), code + 1, "{format:?} above {middle}");
                assert_eq!(format.encode(middle), code + code % 2, "{format:?} at {middle}");
                assert_eq!(format.encode(-middle.next_up()), (code + 1) | 0x80, "{format:?} below -{middle}");
                code += 1;
            }
        }
    }

    #[test]
    fn large_numbers_saturate_and_nan_stays() {
        for format in FORMATS {
            let max = format.encode(format.max());
            for x in [format.max() * 1.07, f32::MAX, f32::INFINITY] {
                assert_eq!([format.encode(x), format.encode(-x)], [max, max | 0x80], "{format:?} {x}");
            }
            assert_eq!(format.encode(f32::NAN), NAN);
            assert_eq!([format.encode(0.0), format.encode(-0.0)], [0, 0x80]);
            let tiny = format.min_positive() / 2.0;
            assert_eq!(
                [format.encode(tiny), format.encode(tiny.next_up()), format.encode(f32::MIN_POSITIVE)],
                [0, 1, 0]
            );
        }
    }

    /// With all random numbers in turn, the share of the upper code is the position between the two.
    #[test]
    fn stochastic_rounding_goes_up_with_the_distance() {
        for format in FORMATS {
            let round = |x, random| match format {
                Fp8Format::E4m3 => stochastic_e4m3(x, random),
                Fp8Format::E5m2 => stochastic_e5m2(x, random),
            };
            let values = format.values();
            for code in [0usize, 1, 5, 8, 0x30, 0x77] {
                let (low, high) = (values[code], values[code + 1]);
                for (quarters, share) in [(0.0, 0), (1.0, 64), (2.0, 128), (3.0, 192)] {
                    let x = low + (high - low) * quarters / 4.0;
                    let codes: Vec<u8> = (0..256u32).map(|i| round(x, (i << 24) | 0x00ff_ffff)).collect();
                    let up = codes.iter().filter(|got| usize::from(**got) == code + 1).count();
                    let down = codes.iter().filter(|got| usize::from(**got) == code).count();
                    assert_eq!([up, down], [share, 256 - share], "{format:?} {low} to {high}, {quarters} quarters");
                }
            }
            assert_eq!(round(f32::INFINITY, u32::MAX), format.encode(format.max()));
        }
    }
}
