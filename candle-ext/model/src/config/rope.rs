//! RoPE keys in both spellings: `rope_theta` and `rope_scaling`, or all in `rope_parameters`.

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
}

/// Returns the object with the scaling keys. If both spellings are present, `rope_scaling` wins, as in transformers.
fn parameters(keys: Keys<'_>) -> Result<Option<Keys<'_>>, ModelError> {
    for (name, prefix) in [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")] {
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

pub(super) fn kind(keys: Keys, max_positions: usize) -> Result<RopeKind, ModelError> {
    let Some(nested) = parameters(keys)? else { return Ok(RopeKind::Default) };
    if let Some(layer_type) = nested.first_object() {
        return Err(nested.error(layer_type, "rotary parameters that differ by layer type are not supported"));
    }
    let kind = match nested.text("rope_type")? {
        Some(kind) => kind,
        None => nested.text("type")?.unwrap_or("default"),
    };
    let number = |key: &str| positive(nested, key);
    match kind {
        "default" => Ok(RopeKind::Default),
        "linear" => Ok(RopeKind::Linear { factor: number("factor")? }),
        "llama3" => Ok(RopeKind::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original_positions: match nested.get("original_max_position_embeddings") {
                Some(_) => number("original_max_position_embeddings")?,
                None => max_positions as f64,
            },
        }),
        other => {
            Err(nested.error("rope_type", format!("`{other}` is not supported; supported: default, linear, llama3")))
        }
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
    match keys.number(key)? {
        Some(x) if x > 0.0 && x.is_finite() => Ok(x),
        Some(x) => Err(keys.error(key, format!("expected a number above 0, found {x}"))),
        None => Err(keys.error(key, "missing")),
    }
}
