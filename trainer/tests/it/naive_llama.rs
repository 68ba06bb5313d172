//! A Llama with MTP layers in f64, written down without the code under test. It computes one sequence.
//!
//! Dimensions: t tokens, d hidden size, h heads, k head size

use std::collections::HashMap;
use std::path::Path;

use candle_core::{D, DType, Device, Result, Tensor};

/// Sizes of the tests' model.
const N_LAYERS: usize = 2;
const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const EPS: f64 = 1e-5;
const ROPE_BASE: f64 = 10000.0;

pub(crate) struct NaiveLlama {
    weights: HashMap<String, Tensor>,
}

impl NaiveLlama {
    /// Reads the weights of an exported model whose output layer is the embedding.
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        let in_f64 = |(name, value): (String, Tensor)| Ok((name, value.to_dtype(DType::F64)?));
        Ok(Self { weights: weights.into_iter().map(in_f64).collect::<Result<_>>()? })
    }

    /// Returns hidden states after the final norm, [t, d].
    pub(crate) fn hidden(&self, ids: &[u32]) -> Result<Tensor> {
        let mut layers = (0..N_LAYERS).map(|i| format!("model.layers.{i}"));
        let x_td = layers.try_fold(self.embed(ids)?, |x, layer| self.layer(&layer, &x))?;
        self.norm("model.norm", &x_td)
    }

    /// Returns the output of MTP layer `depth` after its norm, from the hidden states of the layer before and the ids of later
    /// tokens.
    pub(crate) fn mtp(&self, depth: usize, hidden_td: &Tensor, later_ids: &[u32]) -> Result<Tensor> {
        let layer = format!("model.layers.{}", N_LAYERS + depth - 1);
        let embedded_td = self.norm(&format!("{layer}.enorm"), &self.embed(later_ids)?)?;
        let hidden_td = self.norm(&format!("{layer}.hnorm"), hidden_td)?;
        let x_td = self.linear(&format!("{layer}.eh_proj"), &Tensor::cat(&[embedded_td, hidden_td], 1)?)?;
        self.norm(&format!("{layer}.shared_head.norm"), &self.layer(&layer, &x_td)?)
    }

    /// Returns the loss of each row for its target.
    pub(crate) fn losses(&self, hidden_td: &Tensor, targets: &[u32]) -> Result<Vec<f64>> {
        let logits_tv = hidden_td.matmul(&self.weights["model.embed_tokens.weight"].t()?)?;
        let targets = Tensor::new(targets, &Device::Cpu)?.unsqueeze(1)?;
        (logits_tv.log_sum_exp(1)? - logits_tv.gather(&targets, 1)?.squeeze(1)?)?.to_vec1()
    }

    fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.weights["model.embed_tokens.weight"].index_select(&Tensor::new(ids, &Device::Cpu)?, 0)
    }

    fn linear(&self, module: &str, x: &Tensor) -> Result<Tensor> {
        x.matmul(&self.weights[&format!("{module}.weight")].t()?)
    }

    fn norm(&self, module: &str, x: &Tensor) -> Result<Tensor> {
        let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + EPS)?.sqrt()?;
        x.broadcast_div(&rms)?.broadcast_mul(&self.weights[&format!("{module}.weight")])
    }

    fn layer(&self, layer: &str, x_td: &Tensor) -> Result<Tensor> {
        let normed = self.norm(&format!("{layer}.input_layernorm"), x_td)?;
        let x_td = (x_td + self.attention(&format!("{layer}.self_attn"), &normed)?)?;
        let normed = self.norm(&format!("{layer}.post_attention_layernorm"), &x_td)?;
        let gate = self.linear(&format!("{layer}.mlp.gate_proj"), &normed)?.silu()?;
        let gated = (gate * self.linear(&format!("{layer}.mlp.up_proj"), &normed)?)?;
        x_td + self.linear(&format!("{layer}.mlp.down_proj"), &gated)?
    }

    fn attention(&self, attention: &str, x_td: &Tensor) -> Result<Tensor> {
        let t = x_td.dim(0)?;
        let heads = |name: &str, n: usize| -> Result<Tensor> {
            let y = self.linear(&format!("{attention}.{name}"), x_td)?;
            y.reshape((t, n, y.dim(1)? / n))?.transpose(0, 1)?.contiguous()
        };
        let repeated = |x_gtk: Tensor| {
            let heads: Vec<Tensor> =
                (0..N_HEADS).map(|head| x_gtk.get(head * N_KV_HEADS / N_HEADS)).collect::<Result<_>>()?;
            Tensor::stack(&heads, 0)
        };
        let (q, k) = (rotated(&heads("q_proj", N_HEADS)?)?, repeated(rotated(&heads("k_proj", N_KV_HEADS)?)?)?);
        let v = repeated(heads("v_proj", N_KV_HEADS)?)?;
        let scores = (q.matmul(&k.transpose(1, 2)?)? / (q.dim(2)? as f64).sqrt())?;
        let mask: Vec<f64> = (0..t * t).map(|i| if i % t > i / t { f64::NEG_INFINITY } else { 0.0 }).collect();
        let scores = scores.broadcast_add(&Tensor::from_vec(mask, (t, t), &Device::Cpu)?)?;
        let exps = scores.broadcast_sub(&scores.max_keepdim(2)?)?.exp()?;
        let probabilities = exps.broadcast_div(&exps.sum_keepdim(2)?)?;
        let y_td = probabilities.matmul(&v)?.transpose(0, 1)?.contiguous()?.reshape((t, x_td.dim(1)?))?;
        self.linear(&format!("{attention}.o_proj"), &y_td)
    }
}

/// Rotates the halves of each head [h, t, k] by its positions 0, 1, ...
fn rotated(x_htk: &Tensor) -> Result<Tensor> {
    let (_, t, k) = x_htk.dims3()?;
    let angle = |i: usize| (i / (k / 2)) as f64 * ROPE_BASE.powf(-2.0 * (i % (k / 2)) as f64 / k as f64);
    let of = |f: fn(f64) -> f64| {
        let values: Vec<f64> = (0..t * k / 2).map(|i| f(angle(i))).collect();
        Tensor::from_vec(values, (t, k / 2), &Device::Cpu)
    };
    let (cos, sin) = (of(f64::cos)?, of(f64::sin)?);
    let (first, second) = (x_htk.narrow(2, 0, k / 2)?, x_htk.narrow(2, k / 2, k / 2)?);
    let new_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let new_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
    Tensor::cat(&[new_first, new_second], 2)
}
