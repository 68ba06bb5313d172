//! The units of a model, [embedding, block 0.., head], with every parameter's name and shape.

use crate::{
    Config, Init, LoraConfig, ModelError, ParamSpec,
    lora::{Adapter, factors},
};

/// A group of parameters that is fetched, computed and differentiated together.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// "embed", "block 0", ..., "head".
    pub name: String,
    /// The parameters it owns.
    pub params: Vec<ParamSpec>,
    /// The parameters it borrows.
    pub shared: Vec<Shared>,
    /// The adapters on its linear layers.
    pub adapters: Vec<Adapter>,
}

/// A parameter that another unit owns, such as the embedding that serves as the output layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Shared {
    /// The owner's index among the units.
    pub unit: usize,
    /// The parameter's name there and here.
    pub name: String,
}

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const FINAL_NORM: &str = "model.norm.weight";
pub(crate) const LM_HEAD: &str = "lm_head.weight";

/// A linear layer of a block: module name, outputs, inputs, whether it has a bias.
pub(crate) struct Linear {
    pub(crate) module: String,
    pub(crate) n_out: usize,
    pub(crate) n_in: usize,
    bias: bool,
}

pub(crate) fn block_prefix(block_idx: usize) -> String {
    format!("model.layers.{block_idx}")
}

/// The linear layers of a block in the order of its forward.
pub(crate) fn linears(config: &Config, block_idx: usize) -> Vec<Linear> {
    let t = &config.typed;
    let (q, kv) = (t.n_heads * t.head_dim, t.n_kv_heads * t.head_dim);
    let (d, ffn) = (t.hidden_size, t.intermediate_size);
    let table = [
        ("self_attn.q_proj", q, d, t.qkv_bias),
        ("self_attn.k_proj", kv, d, t.qkv_bias),
        ("self_attn.v_proj", kv, d, t.qkv_bias),
        ("self_attn.o_proj", d, q, t.o_bias),
        ("mlp.gate_proj", ffn, d, t.mlp_bias),
        ("mlp.up_proj", ffn, d, t.mlp_bias),
        ("mlp.down_proj", d, ffn, t.mlp_bias),
    ];
    let linear = |(name, n_out, n_in, bias)| {
        let module = format!("{}.{name}", block_prefix(block_idx));
        Linear { module, n_out, n_in, bias }
    };
    table.into_iter().map(linear).collect()
}

/// All units; with an adapter, its factors beside a frozen base.
pub(crate) fn units(config: &Config, lora: Option<&LoraConfig>) -> Result<Vec<Unit>, ModelError> {
    let mut units = vec![embed(config)];
    units.extend((0..config.n_layers()).map(|block_idx| block(config, block_idx)));
    units.push(head(config));
    if let Some(lora) = lora {
        attach(config, lora, &mut units)?;
    }
    Ok(units)
}

fn attach(config: &Config, lora: &LoraConfig, units: &mut [Unit]) -> Result<(), ModelError> {
    units.iter_mut().flat_map(|unit| &mut unit.params).for_each(|param| param.trainable = false);
    let targets = lora.targets(config)?;
    for (block_idx, unit) in units[1..].iter_mut().take(config.n_layers()).enumerate() {
        for linear in linears(config, block_idx) {
            let Some(adapter) = targets.iter().find(|adapter| adapter.module == linear.module) else { continue };
            unit.params.extend(factors(adapter, &linear));
            unit.adapters.push(adapter.clone());
        }
    }
    Ok(())
}

fn embed(config: &Config) -> Unit {
    let t = &config.typed;
    let zero_row = t.pad_id.map(|id| id as usize);
    let init = Init::Normal { std: t.initializer_range, zero_row };
    Unit {
        name: "embed".to_string(),
        params: vec![matrix(EMBEDDING, [t.vocab_size, t.hidden_size], init)],
        shared: Vec::new(),
        adapters: Vec::new(),
    }
}

fn block(config: &Config, block_idx: usize) -> Unit {
    let prefix = block_prefix(block_idx);
    let t = &config.typed;
    let mut params = vec![norm(format!("{prefix}.input_layernorm.weight"), t.hidden_size)];
    for linear in linears(config, block_idx) {
        let init = Init::Normal { std: t.initializer_range, zero_row: None };
        params.push(matrix(&format!("{}.weight", linear.module), [linear.n_out, linear.n_in], init));
        if linear.bias {
            params.push(vector(format!("{}.bias", linear.module), linear.n_out, Init::Zeros));
        }
    }
    if t.qk_norm {
        let norms = ["q_norm", "k_norm"].map(|name| norm(format!("{prefix}.self_attn.{name}.weight"), t.head_dim));
        params.extend(norms);
    }
    params.push(norm(format!("{prefix}.post_attention_layernorm.weight"), t.hidden_size));
    Unit { name: format!("block {block_idx}"), params, shared: Vec::new(), adapters: Vec::new() }
}

fn head(config: &Config) -> Unit {
    let t = &config.typed;
    let mut params = vec![norm(FINAL_NORM.to_string(), t.hidden_size)];
    let mut shared = Vec::new();
    if t.tied {
        shared.push(Shared { unit: 0, name: EMBEDDING.to_string() });
    } else {
        let init = Init::Normal { std: t.initializer_range, zero_row: None };
        params.push(matrix(LM_HEAD, [t.vocab_size, t.hidden_size], init));
    }
    Unit { name: "head".to_string(), params, shared, adapters: Vec::new() }
}

fn matrix(name: &str, shape: [usize; 2], init: Init) -> ParamSpec {
    ParamSpec { name: name.to_string(), shape: shape.to_vec(), init, decay: true, trainable: true }
}

fn norm(name: String, width: usize) -> ParamSpec {
    vector(name, width, Init::Ones)
}

fn vector(name: String, width: usize, init: Init) -> ParamSpec {
    ParamSpec { name, shape: vec![width], init, decay: false, trainable: true }
}
