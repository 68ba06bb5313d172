//! RoPE keys in both spellings: `rope_theta` and `rope_scaling`, or all in `rope_parameters`.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value, json};

use super::json::Keys;
use crate::ModelError;

/// Scaling of RoPE frequencies.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RopeKind {
    /// No scaling.
    Default,
    /// Linear scaling: every frequency is divided by a factor.
    Linear { factor: f64 },
    /// Llama 3.1 scaling: long wavelengths are divided by a factor, short ones unchanged, with a ramp between.
    Llama3 { factor: f64, low: f64, high: f64, original_positions: f64 },
    /// YaRN (arXiv:2309.00071).
    Yarn(Yarn),
    /// LongRoPE (arXiv:2402.13753).
    LongRope(LongRope),
    /// Dynamic NTK scaling: a larger base frequency for a sequence longer than the context.
    Dynamic { factor: f64, max_positions: f64 },
}

/// Scaling of YaRN: frequencies with few rotations in the original context are divided by a factor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Yarn {
    pub(crate) factor: f64,
    pub(crate) original_positions: f64,
    /// Rotations in the original context from which a frequency is unchanged.
    pub(crate) beta_fast: f64,
    /// Rotations in the original context up to which a frequency is divided by the whole factor.
    pub(crate) beta_slow: f64,
    /// Factor of cosines and sines.
    pub(crate) attention_factor: f64,
    /// True if the ends of the ramp are rounded to whole pairs.
    pub(crate) truncate: bool,
}

/// Scaling of LongRoPE: each frequency is divided by a factor of its own.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LongRope {
    /// Factors of sequences up to the original context, [r/2].
    pub(crate) short: Vec<f32>,
    /// Factors of longer sequences, [r/2].
    pub(crate) long: Vec<f32>,
    pub(crate) original_positions: f64,
    /// Factor of cosines and sines.
    pub(crate) attention_factor: f64,
}

impl Yarn {
    /// Returns the attention factor that the paper recommends for a factor.
    pub(crate) fn default_attention_factor(factor: f64) -> f64 {
        mscale(factor, 1.0)
    }

    /// Rotations that bound the ramp by default: `beta_fast` and `beta_slow`.
    pub(crate) const DEFAULT_BETAS: (f64, f64) = (32.0, 1.0);

    fn read(scaling: Scaling<'_>) -> Result<Self, ModelError> {
        let Scaling { keys, original_positions, .. } = scaling;
        let factor = scaling.factor()?;
        let mscales = (or_zero(keys, "mscale")?, or_zero(keys, "mscale_all_dim")?);
        let attention_factor = match (optional(keys, "attention_factor")?, mscales) {
            (Some(given), _) => given,
            (None, (Some(own), Some(of_all))) => mscale(factor, own) / mscale(factor, of_all),
            (None, _) => Self::default_attention_factor(factor),
        };
        let (beta_fast, beta_slow) = Self::DEFAULT_BETAS;
        let beta_fast = or_zero(keys, "beta_fast")?.unwrap_or(beta_fast);
        let beta_slow = or_zero(keys, "beta_slow")?.unwrap_or(beta_slow);
        if beta_fast < beta_slow {
            let problem = format!("{beta_fast} is below beta_slow, {beta_slow}: fast frequencies make more rotations");
            return Err(keys.error("beta_fast", problem));
        }
        let truncate = keys.flag("truncate")?.unwrap_or(true);
        Ok(Self { factor, original_positions, beta_fast, beta_slow, attention_factor, truncate })
    }
}

/// Returns YaRN's scale of attention's logits, as a factor of queries and keys.
fn mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl LongRope {
    fn read(scaling: Scaling<'_>, rotary_dim: usize) -> Result<Self, ModelError> {
        let Scaling { keys, original_positions, .. } = scaling;
        let factors = |key: &str| {
            let factors = keys.numbers(key)?.ok_or_else(|| keys.error(key, "missing"))?;
            if factors.len() != rotary_dim / 2 {
                let problem =
                    format!("expected {} factors, one a rotated pair, found {}", rotary_dim / 2, factors.len());
                return Err(keys.error(key, problem));
            }
            match factors.iter().find(|factor| !(**factor > 0.0 && factor.is_finite())) {
                Some(factor) => Err(keys.error(key, format!("expected numbers above 0, found {factor}"))),
                None => Ok(factors.into_iter().map(|factor| factor as f32).collect()),
            }
        };
        let factor = scaling.factor()?;
        let recommended = match factor <= 1.0 {
            true => 1.0,
            false => (1.0 + factor.ln() / original_positions.ln()).sqrt(),
        };
        let attention_factor = optional(keys, "attention_factor")?.unwrap_or(recommended);
        let (short, long) = (factors("short_factor")?, factors("long_factor")?);
        Ok(Self { short, long, original_positions, attention_factor })
    }
}

/// Keys of a scaling that extends the context.
#[derive(Clone, Copy)]
struct Scaling<'a> {
    keys: Keys<'a>,
    max_positions: usize,
    original_positions: f64,
    /// True if a key gives the original context.
    has_original: bool,
}

impl Scaling<'_> {
    /// Returns the factor; without a key, the ratio of the context to the original one.
    fn factor(self) -> Result<f64, ModelError> {
        match optional(self.keys, "factor")? {
            Some(factor) => Ok(factor),
            None if self.has_original => Ok(self.max_positions as f64 / self.original_positions),
            None => Err(self.keys.error("factor", "missing")),
        }
    }
}

/// Keys of config.json that hold a scaling, in the order in which transformers reads them.
pub(super) const SPELLINGS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Returns the object with the scaling keys. If both spellings are present, `rope_scaling` wins, as in transformers.
fn parameters(keys: Keys<'_>) -> Result<Option<Keys<'_>>, ModelError> {
    for (name, prefix) in SPELLINGS.into_iter().zip(["rope_scaling.", "rope_parameters."]) {
        if let Some(map) = keys.object(name)?.filter(|map| !map.is_empty()) {
            return Ok(Some(Keys::nested(map, prefix)));
        }
    }
    Ok(None)
}

pub(super) fn theta(keys: Keys, default: f64) -> Result<f64, ModelError> {
    let nested = match parameters(keys)? {
        Some(nested) => nested.number("rope_theta")?,
        None => None,
    };
    let theta = match nested {
        Some(theta) => theta,
        None => keys.number("rope_theta")?.unwrap_or(default),
    };
    match theta > 1.0 && theta.is_finite() {
        true => Ok(theta),
        false => Err(keys.error("rope_theta", format!("expected a number above 1, found {theta}"))),
    }
}

/// Shape of the rotation that scaling keys refer to.
#[derive(Clone, Copy)]
pub(super) struct RotationShape {
    pub(super) max_positions: usize,
    pub(super) rotary_dim: usize,
}

pub(super) fn kind(keys: Keys, shape: RotationShape) -> Result<RopeKind, ModelError> {
    let Some(nested) = parameters(keys)? else { return Ok(RopeKind::Default) };
    if let Some(layer_type) = nested.first_object() {
        return Err(nested.error(layer_type, "rotary parameters that differ by layer type are not supported"));
    }
    let number = |key: &str| positive(nested, key);
    let max_positions = shape.max_positions;
    let scaling = || extended(keys, nested, max_positions);
    match type_of(nested)? {
        "default" => Ok(RopeKind::Default),
        // Positions of text are equal in all axes.
        MULTIMODAL if nested.get(SECTIONS).is_some() => Ok(RopeKind::Default),
        "linear" => Ok(RopeKind::Linear { factor: number("factor")? }),
        "llama3" => Ok(RopeKind::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original_positions: scaling()?.original_positions,
        }),
        "yarn" => Yarn::read(scaling()?).map(RopeKind::Yarn),
        "longrope" => LongRope::read(scaling()?, shape.rotary_dim).map(RopeKind::LongRope),
        "dynamic" if shape.rotary_dim <= 2 => {
            Err(nested.error("rope_type", "dynamic needs heads of more than 2 elements"))
        }
        "dynamic" => Ok(RopeKind::Dynamic { factor: number("factor")?, max_positions: max_positions as f64 }),
        other => {
            let known = TYPES.map(|(name, _)| name).join(", ");
            Err(nested.error("rope_type", format!("`{other}` is not supported; supported: {known}")))
        }
    }
}

fn type_of(nested: Keys<'_>) -> Result<&str, ModelError> {
    match nested.text("rope_type")? {
        Some(kind) => Ok(kind),
        None => Ok(nested.text("type")?.unwrap_or("default")),
    }
}

/// Reads the original context, which a key of config.json itself may give, as Phi-3's.
fn extended<'a>(keys: Keys<'a>, nested: Keys<'a>, max_positions: usize) -> Result<Scaling<'a>, ModelError> {
    let outer = optional(keys, ORIGINAL)?;
    let given = if outer.is_some() { outer } else { optional(nested, ORIGINAL)? };
    let original_positions = given.unwrap_or(max_positions as f64);
    if original_positions < 2.0 {
        return Err(nested.error(ORIGINAL, format!("expected at least 2, found {original_positions}")));
    }
    Ok(Scaling { keys: nested, max_positions, original_positions, has_original: given.is_some() })
}

const ORIGINAL: &str = "original_max_position_embeddings";

/// Type of Qwen's rotation by time, height and width, in older files. Its sections are those of each axis.
const MULTIMODAL: &str = "mrope";
const SECTIONS: &str = "mrope_section";

/// Types of scaling and their keys. All types have [`SHARED_KEYS`] too.
const TYPES: [(&str, &[&str]); 6] = [
    ("default", &[]),
    ("linear", &["factor"]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL]),
    (
        "yarn",
        &["factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"],
    ),
    ("longrope", &["short_factor", "long_factor", "factor", ORIGINAL, "attention_factor"]),
    ("dynamic", &["factor"]),
];

const SHARED_KEYS: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// Rejects keys of a handwritten scaling that have no effect with its type.
pub(super) fn refuse_unread(name: &str, value: &Value) -> Result<(), ModelError> {
    let Some(map) = value.as_object() else { return Ok(()) };
    let prefix = format!("{name}.");
    let nested = Keys::nested(map, &prefix);
    let kind = type_of(nested)?;
    let Some((_, own)) = TYPES.iter().find(|(name, _)| *name == kind) else { return Ok(()) };
    let known = || own.iter().chain(&SHARED_KEYS).copied();
    match map.keys().find(|key| !known().any(|known| known == *key)) {
        Some(key) => {
            let problem = format!("not a key of rope_type {kind}{}", did_you_mean(key, known()));
            Err(nested.error(key, problem))
        }
        None => Ok(()),
    }
}

/// Returns the number of rotated elements of a head. `default` is the family's factor; `None` allows 1 alone.
pub(super) fn rotary_dim(keys: Keys, head_dim: usize, default: Option<f64>) -> Result<usize, ModelError> {
    const KEY: &str = "partial_rotary_factor";
    let nested = parameters(keys)?.filter(|nested| nested.get(KEY).is_some());
    let keys = nested.unwrap_or(keys);
    let factor = keys.number(KEY)?.or(default).unwrap_or(1.0);
    let Some(_) = default else {
        return if factor == 1.0 { Ok(head_dim) } else { Err(keys.error(KEY, "only 1.0 is supported")) };
    };
    match (head_dim as f64 * factor) as usize {
        n if factor > 0.0 && factor <= 1.0 && n > 0 && n.is_multiple_of(2) => Ok(n),
        n => {
            let problem =
                format!("{factor} rotates {n} of {head_dim} elements of a head; it must be an even number above 0");
            Err(keys.error(KEY, problem))
        }
    }
}

fn positive(keys: Keys, key: &str) -> Result<f64, ModelError> {
    optional(keys, key)?.ok_or_else(|| keys.error(key, "missing"))
}

fn optional(keys: Keys, key: &str) -> Result<Option<f64>, ModelError> {
    match keys.number(key)? {
        Some(x) if !(x > 0.0 && x.is_finite()) => Err(keys.error(key, format!("expected a number above 0, found {x}"))),
        x => Ok(x),
    }
}

/// Reads a number of which 0 means the default, as in transformers.
fn or_zero(keys: Keys, key: &str) -> Result<Option<f64>, ModelError> {
    if keys.number(key)? == Some(0.0) { Ok(None) } else { optional(keys, key) }
}

/// Replaces the scaling in the spelling of the file. It keeps the base frequency, which newer files have inside.
pub(super) fn replace_scaling(raw: &mut Map<String, Value>, key: &str, value: &Value) {
    let scaling = |name: &str| raw.get(name)?.as_object().filter(|map| !map.is_empty()).cloned();
    let earlier = SPELLINGS.iter().find_map(|name| scaling(name)).unwrap_or_default();
    let spelling = SPELLINGS.into_iter().rev().find(|name| raw.contains_key(*name)).unwrap_or(key).to_owned();
    let kept = ["rope_theta", "partial_rotary_factor"].map(|kept| Some((kept, earlier.get(kept)?)));
    let mut value = value.clone();
    for (kept, earlier) in kept.into_iter().flatten() {
        if value.is_null() {
            value = json!({"rope_type": "default"});
        }
        if let Some(map) = value.as_object_mut() {
            map.entry(kept).or_insert_with(|| earlier.clone());
        }
    }
    SPELLINGS.iter().for_each(|name| _ = raw.remove(*name));
    raw.insert(spelling, value);
}

/// Rejects a handwritten scaling without the original context, if `max_position_embeddings` is overridden too.
pub(super) fn require_original(
    raw: &Map<String, Value>,
    name: &str,
    overrides: &Map<String, Value>,
) -> Result<(), ModelError> {
    let Some(map) = overrides.get(name).and_then(Value::as_object) else { return Ok(()) };
    let prefix = format!("{name}.");
    let nested = Keys::nested(map, &prefix);
    let needs_original = matches!(type_of(nested)?, "llama3" | "yarn" | "longrope");
    if needs_original && nested.get(ORIGINAL).is_none() && Keys::new(raw).get(ORIGINAL).is_none() {
        let problem =
            "missing: the context that the model was trained on, which max_position_embeddings no longer gives";
        return Err(nested.error(ORIGINAL, problem));
    }
    Ok(())
}
