//! FP8 recipes, with TransformerEngine's names: how a tensor's scale follows from its largest magnitude (amax).

use candle_core::DType;

use super::format::{FP8_BLOCK, Fp8Format};
use super::rounding::Fp8Rounding;
use crate::quantized::ScaleBlock;

/// Settings of FP8 training: the recipe of the scales, the formats and the rounding of gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Config {
    /// Recipe of the scales.
    pub recipe: Fp8Recipe,
    /// Formats of the operands.
    pub formats: Fp8Formats,
    /// Rounding of the gradients of outputs. Inputs and weights are rounded to nearest.
    pub gradient_rounding: Fp8Rounding,
    /// True if linear layers multiply the values of the codes in the dtype of their input, on any device, as routed experts
    /// do: TransformerEngine's `FakeQuant`.
    pub fake_quantize: bool,
}

/// Recipe of the scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fp8Recipe {
    /// Delayed scaling: one scale per tensor, from the amaxes of earlier steps.
    Delayed(DelayedScaling),
    /// Current scaling: one scale per tensor, from its own amax.
    Current(ScaleRule),
    /// Blockwise scaling: a scale per 1x128 elements of activations and gradients, and per 128x128 of weights.
    Blockwise(ScaleRule),
}

/// Settings of delayed scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedScaling {
    /// Scales are divided by 2^margin.
    pub margin: i32,
    /// Number of steps whose amaxes are kept.
    pub amax_history_len: usize,
    /// Choice of the amax from the history.
    pub amax_compute: AmaxHistoryPolicy,
}

/// Choice of the amax that decides a delayed scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmaxHistoryPolicy {
    /// The largest of the history.
    Max,
    /// That of the last step.
    MostRecent,
}

/// Rule of a scale from the amax of the same tensor or block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleRule {
    /// Rounds scales down to powers of two.
    pub power_of_two: bool,
    /// Smaller amaxes count as this one.
    pub amax_epsilon: f32,
}

/// Formats of the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Formats {
    /// E4M3 for inputs and weights, E5M2 for gradients.
    Hybrid,
    /// E4M3 for all.
    E4m3,
}

/// Operand of a linear layer's matmuls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Operand {
    /// Input x.
    Input,
    /// Weight W.
    Weight,
    /// Gradient of the output, dy.
    GradOutput,
}

/// Dimension that a matmul sums over, and along which blocks of 1x128 extend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contraction {
    /// The columns of the matrix.
    Columns,
    /// The rows of the matrix, as in dw = dy^T x.
    Rows,
}

/// Matmuls that read a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fp8Orientation {
    /// Matmuls that sum over its columns.
    Rowwise,
    /// Matmuls that sum over its rows.
    Columnwise,
    /// Both.
    Both,
}

impl Fp8Operand {
    /// All operands, in the order of a layer's state.
    pub const ALL: [Self; 3] = [Self::Input, Self::Weight, Self::GradOutput];
}

impl Fp8Orientation {
    /// Returns the orientation that serves these matmuls; `None` if there are none.
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    pub(super) fn of(is_rowwise: bool, is_columnwise: bool) -> Option<Self> {
        match (is_rowwise, is_columnwise) {
            (true, true) => Some(Self::Both),
            (true, false) => Some(Self::Rowwise),
            (false, true) => Some(Self::Columnwise),
            (false, false) => None,
        }
    }

    pub(super) fn is_rowwise(self) -> bool {
        self != Self::Columnwise
    }

    pub(super) fn is_columnwise(self) -> bool {
        self != Self::Rowwise
    }
}

impl Fp8Formats {
    /// Returns the format of an operand.
    pub fn of(self, operand: Fp8Operand) -> Fp8Format {
        match (self, operand) {
            (Self::Hybrid, Fp8Operand::GradOutput) => Fp8Format::E5m2,
            _ => Fp8Format::E4m3,
        }
    }
}

impl Fp8Recipe {
    /// Returns the elements of an operand that share a scale.
    pub fn block(self, operand: Fp8Operand, contraction: Contraction) -> ScaleBlock {
        let Self::Blockwise(_) = self else { return ScaleBlock::Tensor };
        let (rows, columns) = match (operand, contraction) {
            (Fp8Operand::Weight, _) => (FP8_BLOCK, FP8_BLOCK),
            (_, Contraction::Columns) => (1, FP8_BLOCK),
            (_, Contraction::Rows) => (FP8_BLOCK, 1),
        };
        ScaleBlock::Tile { rows, columns }
    }
}

impl ScaleRule {
    /// Returns the scale of elements whose largest magnitude is `amax`: max / amax, rounded once.
    ///
    /// As in TransformerEngine's `compute_scale_from_amax`, the scale is 1 if `amax` is 0 or not finite, and `largest`,
    /// the largest number of the elements' dtype, if the quotient is infinite.
    pub(crate) fn scale(self, amax: f32, format: Fp8Format, largest: f32) -> f32 {
        let amax = if amax < self.amax_epsilon { self.amax_epsilon } else { amax };
        if amax == 0.0 || !amax.is_finite() {
            return 1.0;
        }
        let scale = format.max() / amax;
        let scale = if scale.is_infinite() { largest } else { scale };
        if self.power_of_two { power_of_two_below(scale) } else { scale }
    }
}

impl DelayedScaling {
    /// Returns the scale for the amax of a history: max / amax / 2^margin, or `f32::MAX` if that is infinite.
    pub(crate) fn scale(self, amax: f32, format: Fp8Format) -> f32 {
        let scale = format.max() / amax / 2f32.powi(self.margin);
        if scale.is_infinite() { f32::MAX } else { scale }
    }
}

/// Returns the largest finite number of a dtype, as f32.
pub(super) fn largest_number(dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::MAX.to_f32(),
        DType::F16 => half::f16::MAX.to_f32(),
        _ => f32::MAX,
    }
}

/// Clears the mantissa of a positive number.
pub(super) fn power_of_two_below(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & f32::INFINITY.to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gradients of outputs alone depend on `format`.
    #[test]
    fn each_operand_has_the_format_of_the_recipe() {
        let of = |formats: Fp8Formats| Fp8Operand::ALL.map(|operand| formats.of(operand));
        assert_eq!(of(Fp8Formats::Hybrid), [Fp8Format::E4m3, Fp8Format::E4m3, Fp8Format::E5m2]);
        assert_eq!(of(Fp8Formats::E4m3), [Fp8Format::E4m3; 3]);
    }

    #[test]
    fn scales_of_odd_amaxes_are_those_of_the_rule() {
        let rule = |power_of_two, amax_epsilon| ScaleRule { power_of_two, amax_epsilon };
        let scale = |rule: ScaleRule, amax| rule.scale(amax, Fp8Format::E4m3, 12.0);
        let exact = rule(false, 0.0);
        assert_eq!([0.0, f32::INFINITY, f32::NAN].map(|amax| scale(exact, amax)), [1.0; 3]);
        assert_eq!(scale(exact, 3.0), 448.0 / 3.0);
        assert_eq!(scale(exact, 1e-44), 12.0, "448 / 1e-44 is infinite");
        assert_eq!(scale(rule(false, 2.0), 0.0), 224.0);
        assert_eq!([3.0, 448.0, 450.0].map(|amax| scale(rule(true, 0.0), amax)), [128.0, 1.0, 0.5]);
    }

    #[test]
    fn a_delayed_scale_is_finite() {
        let scaling = DelayedScaling { margin: 1, amax_history_len: 1, amax_compute: AmaxHistoryPolicy::Max };
        let scale = |amax| scaling.scale(amax, Fp8Format::E5m2);
        assert_eq!([scale(4.0), scale(1e-40)], [7168.0, f32::MAX]);
    }
}
