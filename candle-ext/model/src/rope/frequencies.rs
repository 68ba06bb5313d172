//! Inverse frequencies of each scaling, in the arithmetic of transformers' `modeling_rope_utils`.

use crate::config::{LongRope, RopeKind, Typed, Yarn};

/// Rotation of the tokens of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rotation {
    /// Inverse frequencies, [r/2] for r rotated elements of a head.
    pub(super) frequencies: Vec<f32>,
    /// Factor of the cosines and sines.
    pub(super) attention_factor: f32,
}

/// Frequencies that a sequence of some length has. Cached keys serve sequences of their own class only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum LengthClass {
    /// Every length; or the lengths up to the original context.
    #[default]
    Short,
    /// Lengths above LongRoPE's original context.
    Long,
    /// Lengths above the context of dynamic scaling, each with frequencies of its own.
    Dynamic {
        /// Number of tokens of the sequence.
        n_tokens: u32,
    },
}

impl LengthClass {
    /// Returns the class of a sequence of `n_tokens`.
    pub(super) fn of(kind: &RopeKind, n_tokens: u32) -> Self {
        let exceeds = |n_positions: f64| f64::from(n_tokens) > n_positions;
        match kind {
            RopeKind::LongRope(scaling) if exceeds(scaling.original_positions) => Self::Long,
            RopeKind::Dynamic { max_positions, .. } if exceeds(*max_positions) => Self::Dynamic { n_tokens },
            _ => Self::Short,
        }
    }
}

/// Returns the rotation of sequences of a class.
pub(super) fn rotation(typed: &Typed, class: LengthClass) -> Rotation {
    let powers = powers(typed.rope_theta, typed.rotary_dim);
    let plain = |frequencies| Rotation { frequencies, attention_factor: 1.0 };
    match &typed.rope {
        RopeKind::Default => plain(inverse(powers)),
        RopeKind::Linear { factor } => plain(inverse(powers).into_iter().map(|f| f / *factor as f32).collect()),
        RopeKind::Llama3 { .. } => plain(inverse(powers).into_iter().map(|f| llama3(&typed.rope, f)).collect()),
        RopeKind::Yarn(scaling) => {
            Rotation { frequencies: yarn(scaling, typed, powers), attention_factor: scaling.attention_factor as f32 }
        }
        RopeKind::LongRope(scaling) => Rotation {
            frequencies: long_rope(scaling, class, &powers),
            attention_factor: scaling.attention_factor as f32,
        },
        RopeKind::Dynamic { factor, max_positions } => plain(match class {
            LengthClass::Dynamic { n_tokens } => dynamic(typed, *factor as f32, *max_positions as f32, n_tokens as f32),
            LengthClass::Short | LengthClass::Long => inverse(powers),
        }),
    }
}

/// Returns theta^(2i/r) for each pair i.
fn powers(theta: f64, rotary_dim: usize) -> Vec<f32> {
    let exponent = |pair: usize| (2 * pair) as f32 / rotary_dim as f32;
    (0..rotary_dim / 2).map(|pair| theta.powf(f64::from(exponent(pair))) as f32).collect()
}

fn inverse(powers: Vec<f32>) -> Vec<f32> {
    powers.into_iter().map(|power| 1.0 / power).collect()
}

fn llama3(kind: &RopeKind, frequency: f32) -> f32 {
    let RopeKind::Llama3 { factor, low, high, original_positions } = *kind else { return frequency };
    let wavelength = std::f32::consts::TAU / frequency;
    let slowed = frequency / factor as f32;
    if wavelength > (original_positions / low) as f32 {
        return slowed;
    }
    if wavelength < (original_positions / high) as f32 {
        return frequency;
    }
    let smooth = (original_positions as f32 / wavelength - low as f32) / (high - low) as f32;
    (1.0 - smooth) * slowed + smooth * frequency
}

/// Returns YaRN's frequencies (arXiv:2309.00071, section 3.2): pairs with many rotations in the original context keep theirs,
/// pairs with few have theirs divided by the factor, with a ramp between.
fn yarn(scaling: &Yarn, typed: &Typed, powers: Vec<f32>) -> Vec<f32> {
    let (low, high) = yarn_range(scaling, typed);
    let width = if low == high { 0.001 } else { high - low };
    let of_pair = |(pair, power): (usize, f32)| {
        let ramp = ((pair as f32 - low as f32) / width as f32).clamp(0.0, 1.0);
        let kept = 1.0 - ramp;
        1.0 / (scaling.factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
    };
    powers.into_iter().enumerate().map(of_pair).collect()
}

/// Returns the first and last pair of the ramp.
fn yarn_range(scaling: &Yarn, typed: &Typed) -> (f64, f64) {
    let dim = typed.rotary_dim as f64;
    // The pair that makes this many rotations in the original context.
    let pair_of = |n_rotations: f64| {
        let positions = scaling.original_positions / (n_rotations * std::f64::consts::TAU);
        dim * positions.ln() / (2.0 * typed.rope_theta.ln())
    };
    let (low, high) = (pair_of(scaling.beta_fast), pair_of(scaling.beta_slow));
    let (low, high) = if scaling.truncate { (low.floor(), high.ceil()) } else { (low, high) };
    (low.max(0.0), high.min(dim - 1.0))
}

fn long_rope(scaling: &LongRope, class: LengthClass, powers: &[f32]) -> Vec<f32> {
    let factors = match class {
        LengthClass::Long => &scaling.long,
        LengthClass::Short | LengthClass::Dynamic { .. } => &scaling.short,
    };
    factors.iter().zip(powers).map(|(factor, power)| 1.0 / (factor * power)).collect()
}

/// Returns the frequencies of dynamic NTK scaling. transformers computes the base from a length in a tensor, so in f32.
fn dynamic(typed: &Typed, factor: f32, max_positions: f32, n_tokens: f32) -> Vec<f32> {
    let dim = typed.rotary_dim as f64;
    let growth = factor * n_tokens / max_positions - (factor - 1.0);
    let base = typed.rope_theta as f32 * growth.powf((dim / (dim - 2.0)) as f32);
    inverse(powers(f64::from(base), typed.rotary_dim))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use super::*;
    use crate::Config;

    /// Frequencies are f32: pow and the operations after it round a few times, by 6e-8 each.
    #[test]
    fn frequencies_and_attention_factors_are_those_of_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rope.json");
        let recorded: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for (name, case) in recorded["frequencies"].as_object().unwrap() {
            let typed = Config::from_json(case["config"].clone()).unwrap().typed;
            for want in case["rotations"].as_array().unwrap() {
                let n_tokens = want["n_tokens"].as_u64().unwrap() as u32;
                let ours = rotation(&typed, LengthClass::of(&typed.rope, n_tokens));
                let frequencies: Vec<f32> = serde_json::from_value(want["frequencies"].clone()).unwrap();
                assert_eq!(ours.frequencies.len(), frequencies.len(), "{name}");
                for (pair, (ours, want)) in ours.frequencies.iter().zip(&frequencies).enumerate() {
                    assert!(
                        ((ours - want) / want).abs() < 1e-6,
                        "{name}, {n_tokens}, pair {pair}: {ours}, want {want}"
                    );
                }
                let want = want["attention_factor"].as_f64().unwrap() as f32;
                assert!((ours.attention_factor - want).abs() < 1e-6, "{name}: {ours:?}");
            }
        }
    }

    const LLAMA3: RopeKind = RopeKind::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_positions: 8192.0 };

    #[test]
    fn llama3_keeps_short_waves_and_slows_long_ones() {
        assert_eq!(llama3(&LLAMA3, 1.0), 1.0);
        assert_eq!(llama3(&LLAMA3, 1e-5), 1e-5 / 8.0);
        let between = llama3(&LLAMA3, 1.5e-3);
        assert!(between > 1.5e-3 / 8.0 && between < 1.5e-3, "{between}");
    }

    #[test]
    fn a_length_above_the_original_context_has_other_frequencies() {
        let scaling = LongRope { short: vec![], long: vec![], original_positions: 8.0, attention_factor: 1.0 };
        let (long_rope, dynamic) = (RopeKind::LongRope(scaling), RopeKind::Dynamic { factor: 2.0, max_positions: 8.0 });
        assert_eq!(LengthClass::of(&long_rope, 8), LengthClass::Short);
        assert_eq!(LengthClass::of(&long_rope, 9), LengthClass::Long);
        assert_eq!(LengthClass::of(&dynamic, 8), LengthClass::Short);
        assert_eq!(LengthClass::of(&dynamic, 9), LengthClass::Dynamic { n_tokens: 9 });
        assert_eq!(LengthClass::of(&LLAMA3, 100_000), LengthClass::Short);
    }
}
