//! Validation of config.json: family defaults, ranges of numbers, and rejection of unsupported features.

use candle_core::DType;
use serde_json::{Map, Value};

use super::json::{Keys, MAX_SIZE, size};
use super::{moe, rope, typed::Typed};
use crate::{
    Family, ModelError, QkNorm,
    family::{Bias, FamilySpec, Window, WindowLayers},
};

pub(super) fn typed(raw: &Map<String, Value>) -> Result<Typed, ModelError> {
    let keys = Keys::new(raw);
    let family = Family::find(&keys.texts("architectures")?.unwrap_or_default(), keys.text("model_type")?)?;
    let family_spec = family.spec();
    refuse_unimplemented(keys)?;
    let heads = heads(keys, raw, family_spec)?;
    let n_layers = size(keys, "num_hidden_layers", family_spec.n_layers, MAX_LAYERS)?;
    let vocab_size = size(keys, "vocab_size", family_spec.vocab_size, MAX_SIZE)?;
    let max_positions = size(keys, "max_position_embeddings", family_spec.max_positions, MAX_SIZE)?;
    let rotary_dim = rope::rotary_dim(keys, heads.head_dim, family_spec.partial_rotary)?;
    let typed = Typed {
        family,
        vocab_size,
        hidden_size: heads.hidden_size,
        intermediate_size: size(keys, "intermediate_size", family_spec.intermediate_size, MAX_SIZE)?,
        n_layers,
        n_heads: heads.n_heads,
        n_kv_heads: heads.n_kv_heads,
        head_dim: heads.head_dim,
        max_positions,
        rms_norm_eps: positive(keys, "rms_norm_eps", family_spec.rms_norm_eps)?,
        initializer_range: initializer_range(keys)?,
        rope_theta: rope::theta(keys, family_spec.rope_theta)?,
        rope: rope::kind(keys, rope::RotationShape { max_positions, rotary_dim })?,
        rotary_dim,
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        qkv_bias: bias(keys, family_spec.qkv_bias)?,
        o_bias: bias(keys, family_spec.o_bias)?,
        mlp_bias: bias(keys, family_spec.mlp_bias)?,
        qk_norm: qk_norm(keys, family_spec)?,
        moe: family_spec.moe.map(|family| moe::moe(keys, raw, family, n_layers)).transpose()?.flatten(),
        windows: windows(keys, raw, family_spec.window, n_layers)?,
        bos_id: keys.ids("bos_token_id")?.and_then(|ids| ids.first().copied()).or(family_spec.bos_id),
        eos_ids: keys.ids("eos_token_id")?.unwrap_or_else(|| family_spec.eos_id.into_iter().collect()),
        pad_id: pad_id(keys, vocab_size)?,
        dtype: dtype(keys)?,
    };
    refuse_absurd_total(&typed)?;
    Ok(typed)
}

const MAX_LAYERS: usize = 1 << 12;

fn positive(keys: Keys, key: &str, default: f64) -> Result<f64, ModelError> {
    match keys.number(key)?.unwrap_or(default) {
        x if x > 0.0 && x.is_finite() => Ok(x),
        x => Err(keys.error(key, format!("expected a number above 0, found {x}"))),
    }
}

/// Reads the standard deviation of initialization. transformers replaces 0 by its default, 0.02.
fn initializer_range(keys: Keys) -> Result<f64, ModelError> {
    match keys.number("initializer_range")? {
        None | Some(0.0) => Ok(0.02),
        Some(_) => positive(keys, "initializer_range", 0.02),
    }
}

struct Heads {
    hidden_size: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
}

fn heads(keys: Keys, raw: &Map<String, Value>, family_spec: &FamilySpec) -> Result<Heads, ModelError> {
    let hidden_size = size(keys, "hidden_size", family_spec.hidden_size, MAX_SIZE)?;
    let n_heads = size(keys, "num_attention_heads", family_spec.n_heads, MAX_SIZE)?;
    // An explicit null means as many KV heads as query heads; an absent key means the family's default.
    let kv_default = if raw.contains_key("num_key_value_heads") { None } else { family_spec.n_kv_heads };
    let n_kv_heads = size(keys, "num_key_value_heads", kv_default.unwrap_or(n_heads), MAX_SIZE)?;
    let given_dim = keys.count("head_dim")?.or(family_spec.head_dim);
    if hidden_size % n_heads != 0 && (given_dim.is_none() || family_spec.divisible_hidden) {
        let problem = format!("{hidden_size} is not a multiple of num_attention_heads ({n_heads})");
        return Err(keys.error("hidden_size", problem));
    }
    let head_dim = size(keys, "head_dim", given_dim.unwrap_or(hidden_size / n_heads), MAX_SIZE)?;
    if head_dim % 2 != 0 {
        return Err(keys.error("head_dim", format!("{head_dim} is odd: rotary embedding turns pairs")));
    }
    if n_heads % n_kv_heads != 0 {
        let problem = format!("num_attention_heads ({n_heads}) is not a multiple of {n_kv_heads}");
        return Err(keys.error("num_key_value_heads", problem));
    }
    Ok(Heads { hidden_size, n_heads, n_kv_heads, head_dim })
}

fn bias(keys: Keys, bias: Bias) -> Result<bool, ModelError> {
    match bias {
        Bias::Always => Ok(true),
        Bias::Never => Ok(false),
        Bias::Key(key) => Ok(keys.flag(key)?.unwrap_or(false)),
        Bias::KeyOrTrue(key) => Ok(keys.flag(key)?.unwrap_or(true)),
    }
}

fn qk_norm(keys: Keys, family_spec: &FamilySpec) -> Result<QkNorm, ModelError> {
    match family_spec.qk_norm_key {
        Some(key) if !keys.flag(key)?.unwrap_or(false) => Ok(QkNorm::None),
        _ => Ok(family_spec.qk_norm),
    }
}

fn windows(
    keys: Keys,
    raw: &Map<String, Value>,
    window: Window,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let width = |default| match raw.get("sliding_window") {
        Some(Value::Null) => Ok(None),
        _ => size(keys, "sliding_window", default, usize::MAX).map(Some),
    };
    match window {
        Window::None => Ok(vec![None; n_layers]),
        Window::Every(default) => Ok(vec![width(default)?; n_layers]),
        Window::IfSet => {
            let width = keys.get("sliding_window").map(|_| width(0)).transpose()?.flatten();
            Ok(vec![width; n_layers])
        }
        Window::Some { window, needs_flag, layers } => {
            let on = !needs_flag || keys.flag("use_sliding_window")?.unwrap_or(false);
            let width = if on { width(window)? } else { None };
            windows_of_some(keys, width, layers, n_layers)
        }
    }
}

/// Returns the windows of a family in which some layers have one, of `width` tokens.
fn windows_of_some(
    keys: Keys,
    width: Option<usize>,
    layers: WindowLayers,
    n_layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let Some(types) = keys.texts("layer_types")? else {
        let bound = |default| Ok::<_, ModelError>(keys.count("max_window_layers")?.unwrap_or(default));
        let has_window: Box<dyn Fn(usize) -> bool> = match layers {
            WindowLayers::All => Box::new(|_| true),
            WindowLayers::From(default) => {
                let first = bound(default)?;
                Box::new(move |i| i >= first)
            }
            WindowLayers::EvenBelow(default) => {
                let end = bound(default)?;
                Box::new(move |i| i.is_multiple_of(2) && i < end)
            }
        };
        return Ok((0..n_layers).map(|i| width.filter(|_| has_window(i))).collect());
    };
    if types.len() != n_layers {
        let problem = format!("{} entries for {n_layers} layers (num_hidden_layers)", types.len());
        return Err(keys.error("layer_types", problem));
    }
    let window =
        |(i, kind): (usize, &&str)| match (*kind, width) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(width)) => Ok(Some(width)),
            ("sliding_attention", None) => Err(keys.error(
                "layer_types",
                format!("layer {i} is sliding_attention, but use_sliding_window is false or sliding_window is null"),
            )),
            (other, _) => Err(keys
                .error("layer_types", format!("layer {i} is `{other}`; supported: full_attention, sliding_attention"))),
        };
    types.iter().enumerate().map(window).collect()
}

/// Reads the padding token. A negative id counts from the end of the vocabulary, as in torch's embedding.
fn pad_id(keys: Keys, vocab_size: usize) -> Result<Option<u32>, ModelError> {
    let Some(id) = keys.integer("pad_token_id")? else { return Ok(None) };
    let row = if id < 0 { id.checked_add_unsigned(vocab_size as u64) } else { Some(id) };
    match row.and_then(|row| u32::try_from(row).ok()) {
        Some(row) if (row as usize) < vocab_size => Ok(Some(row)),
        _ => Err(keys.error("pad_token_id", format!("{id} is outside the vocabulary of {vocab_size}"))),
    }
}

const DTYPES: [(&str, DType); 3] = [("float32", DType::F32), ("bfloat16", DType::BF16), ("float16", DType::F16)];

pub(super) fn dtype_name(dtype: DType) -> Option<&'static str> {
    DTYPES.iter().find(|(_, d)| *d == dtype).map(|(name, _)| *name)
}

fn dtype(keys: Keys) -> Result<Option<DType>, ModelError> {
    let key = if keys.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    let Some(text) = keys.text(key)? else { return Ok(None) };
    let name = text.trim_start_matches("torch.");
    match DTYPES.iter().find(|(known, _)| *known == name) {
        Some((_, dtype)) => Ok(Some(*dtype)),
        None if name == "auto" => Ok(None),
        None => Err(keys.error(key, format!("`{text}` is not supported; use float32, bfloat16 or float16"))),
    }
}

fn refuse_unimplemented(keys: Keys) -> Result<(), ModelError> {
    match keys.text("hidden_act")? {
        None | Some("silu" | "swish") => {}
        Some(other) => return Err(keys.error("hidden_act", format!("`{other}` is not supported; only silu is"))),
    }
    for key in ["attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"] {
        if keys.number(key)?.is_some_and(|p| p != 0.0) {
            return Err(keys.error(key, "dropout is not supported; set it to 0"));
        }
    }
    match keys.get("quantization_config") {
        Some(_) => Err(keys
            .error("quantization_config", "quantised weights cannot be trained here; use the unquantised checkpoint")),
        None => Ok(()),
    }
}

/// Rejects a config whose total parameter size cannot be addressed.
fn refuse_absurd_total(typed: &Typed) -> Result<(), ModelError> {
    let product = |a: usize, b: usize| a.checked_mul(b);
    let total = || {
        let attention = product(product(typed.n_heads, typed.head_dim)?, typed.hidden_size)?.checked_mul(4)?;
        let dense = typed.intermediate_size;
        let experts = typed.moe.as_ref().map_or(Some(0), |moe| product(moe.n_experts, moe.expert_size))?;
        let mlp = product(dense.checked_add(experts)?, typed.hidden_size)?.checked_mul(3)?;
        let blocks = attention.checked_add(mlp)?.checked_mul(typed.n_layers)?;
        let embeddings = product(typed.vocab_size, typed.hidden_size)?.checked_mul(2)?;
        blocks.checked_add(embeddings).filter(|&n| n < 1 << 46)
    };
    match total() {
        Some(_) => Ok(()),
        None => Err(ModelError::key(
            "hidden_size",
            format!(
                "hidden_size {}, intermediate_size {}, num_hidden_layers {}, {} heads of {} and vocab_size {} make a \
                 model of more than 2^46 parameters; one of them must be wrong",
                typed.hidden_size,
                typed.intermediate_size,
                typed.n_layers,
                typed.n_heads,
                typed.head_dim,
                typed.vocab_size
            ),
        )),
    }
}
