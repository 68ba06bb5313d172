//! The units of a model, [embedding, block 0.., head], with every parameter's name and shape.

use crate::{
    Config, Dim, GroupKind, Init, LoraConfig, ModelError, ParamSpec, Region,
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
    pub(crate) out: Extent,
    pub(crate) input: Extent,
    bias: bool,
}

/// A dim and its length.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) dim: Dim,
    pub(crate) len: usize,
}

pub(crate) fn block_prefix(block_idx: usize) -> String {
    format!("model.layers.{block_idx}")
}

/// The linear layers of a block in the order of its forward.
pub(crate) fn linears(config: &Config, block_idx: usize) -> Vec<Linear> {
    let t = &config.typed;
    let extent = |dim, len| Extent { dim, len };
    let (d, ffn) = (extent(Dim::Embed, t.hidden_size), extent(Dim::Ffn, t.intermediate_size));
    let (q, kv) = (extent(Dim::Heads, t.n_heads * t.head_dim), extent(Dim::KvHeads, t.n_kv_heads * t.head_dim));
    let table = [
        ("self_attn.q_proj", q, d, t.qkv_bias),
        ("self_attn.k_proj", kv, d, t.qkv_bias),
        ("self_attn.v_proj", kv, d, t.qkv_bias),
        ("self_attn.o_proj", d, q, t.o_bias),
        ("mlp.gate_proj", ffn, d, t.mlp_bias),
        ("mlp.up_proj", ffn, d, t.mlp_bias),
        ("mlp.down_proj", d, ffn, t.mlp_bias),
    ];
    let linear = |(name, out, input, bias)| {
        let module = format!("{}.{name}", block_prefix(block_idx));
        Linear { module, out, input, bias }
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
    let zero_row = config.typed.pad_id.map(|id| id as usize);
    let init = Init::Normal { std: config.typed.initializer_range, zero_row };
    let params = vec![ParamSpec { init, ..vocabulary(EMBEDDING, config) }];
    Unit { name: "embed".to_string(), params, shared: Vec::new(), adapters: Vec::new() }
}

fn block(config: &Config, block_idx: usize) -> Unit {
    let prefix = block_prefix(block_idx);
    let t = &config.typed;
    let d = Extent { dim: Dim::Embed, len: t.hidden_size };
    let mut params = vec![norm(format!("{prefix}.input_layernorm.weight"), d, Region::Residual)];
    for linear in linears(config, block_idx) {
        let init = Init::Normal { std: t.initializer_range, zero_row: None };
        let name = format!("{}.weight", linear.module);
        params.push(matrix(name, [linear.out, linear.input], Region::Branch, init));
        if linear.bias {
            params.push(vector(format!("{}.bias", linear.module), linear.out, Region::Branch, Init::Zeros));
        }
    }
    if t.qk_norm {
        let head = Extent { dim: Dim::HeadDim, len: t.head_dim };
        let name = |norm: &str| format!("{prefix}.self_attn.{norm}.weight");
        params.extend(["q_norm", "k_norm"].map(|of| norm(name(of), head, Region::Branch)));
    }
    params.push(norm(format!("{prefix}.post_attention_layernorm.weight"), d, Region::Residual));
    Unit { name: format!("block {block_idx}"), params, shared: Vec::new(), adapters: Vec::new() }
}

fn head(config: &Config) -> Unit {
    let d = Extent { dim: Dim::Embed, len: config.typed.hidden_size };
    let mut params = vec![norm(FINAL_NORM.to_string(), d, Region::Residual)];
    let mut shared = Vec::new();
    if config.typed.tied {
        shared.push(Shared { unit: 0, name: EMBEDDING.to_string() });
    } else {
        params.push(vocabulary(LM_HEAD, config));
    }
    Unit { name: "head".to_string(), params, shared, adapters: Vec::new() }
}

/// A row for each token.
fn vocabulary(name: &str, config: &Config) -> ParamSpec {
    let t = &config.typed;
    let extent = |dim, len| Extent { dim, len };
    let init = Init::Normal { std: t.initializer_range, zero_row: None };
    let shape = [extent(Dim::Vocab, t.vocab_size), extent(Dim::Embed, t.hidden_size)];
    matrix(name.to_string(), shape, Region::Residual, init)
}

pub(crate) fn matrix(name: String, [rows, columns]: [Extent; 2], region: Region, init: Init) -> ParamSpec {
    let (shape, dims) = (vec![rows.len, columns.len], vec![rows.dim, columns.dim]);
    ParamSpec { name, shape, dims, region, init, decay: true, trainable: true, group: GroupKind::Dense }
}

fn norm(name: String, width: Extent, region: Region) -> ParamSpec {
    vector(name, width, region, Init::Ones)
}

fn vector(name: String, width: Extent, region: Region, init: Init) -> ParamSpec {
    let (shape, dims) = (vec![width.len], vec![width.dim]);
    ParamSpec { name, shape, dims, region, init, decay: false, trainable: true, group: GroupKind::Dense }
}
