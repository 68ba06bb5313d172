//! The function that llama.cpp computes from a GGUF file, layer by layer, in f32.
//!
//! It follows llama.cpp's `src/models/*.cpp` and ggml's RoPE, knows a model by the file alone, and shares no code with the export
//! above the reader of tensors. Tests compare it with candle-transformers' quantized models.
//!
//! Dimensions: t tokens of all prompts, d hidden size, h attention heads, g KV heads, k head size, r rotated elements of a head,
//! e experts, v vocabulary size

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::gguf_file::Value;
use candle_core::{D, Device, IndexOp, Tensor};
use candlewick_model::{GgufFile, TensorCallback};
use candlewick_ops::to_host;

use super::prompts::PackedPrompts;
use super::routing::{RoutingDifference, RoutingSums};

/// ggml's default `beta_fast` and `beta_slow` of YaRN.
const YARN_BETAS: [f64; 2] = [32.0, 1.0];

/// A GGUF file as llama.cpp's graph.
pub(super) struct LlamaCppGraph<'a> {
    file: &'a GgufFile,
    architecture: String,
    device: &'a Device,
    n_heads: usize,
    n_kv_heads: usize,
    head_size: usize,
    norm_eps: f64,
}

/// Elements of a head that RoPE rotates together: ggml's `LLAMA_ROPE_TYPE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RotatedPair {
    /// 2i and 2i + 1.
    Adjacent,
    /// i and i + r/2.
    Halves,
}

impl<'a> LlamaCppGraph<'a> {
    /// Reads the settings of a file.
    pub(super) fn new(file: &'a GgufFile, device: &'a Device) -> Result<Self> {
        let architecture = match file.value("general.architecture") {
            Some(Value::String(name)) => name.clone(),
            _ => bail!("the file has no general.architecture"),
        };
        let mut this = Self { file, architecture, device, n_heads: 0, n_kv_heads: 0, head_size: 0, norm_eps: 0.0 };
        this.n_heads = this.count("attention.head_count")?;
        this.n_kv_heads = this.count("attention.head_count_kv")?;
        this.head_size = this.count("attention.key_length")?;
        this.norm_eps = this.float("attention.layer_norm_rms_epsilon")?;
        Ok(this)
    }

    /// Computes the logits of all prompts, f32 [t, v], with the `experts` that the source selects, u32 [t, k] by layer. Returns the
    /// difference to the file's own selections, too. `on_unit` gets the numbers of finished layers and of all, with those of
    /// embedding and output.
    pub(super) fn logits(
        &self,
        prompts: &PackedPrompts,
        experts: &BTreeMap<usize, Tensor>,
        on_unit: TensorCallback,
    ) -> Result<(Tensor, Option<RoutingDifference>)> {
        let n_layers = self.count("block_count")?;
        let n_all = n_layers + 2;
        on_unit(0, n_all);
        let ids = Tensor::new(prompts.ids(), self.device)?;
        let mut x_td = self.tensor("token_embd.weight")?.index_select(&ids, 0)?;
        let rope = self.rope(prompts.positions())?;
        let mut routing = Vec::new();
        for layer_idx in 0..n_layers {
            on_unit(1 + layer_idx, n_all);
            x_td = self.attend(layer_idx, &x_td, prompts, &rope)?;
            let (out, of_layer) = self.feed_forward(layer_idx, &x_td, experts.get(&layer_idx))?;
            x_td = (x_td + out)?;
            routing.push(of_layer);
        }
        on_unit(n_all - 1, n_all);
        let normed = self.norm(&x_td, "output_norm")?;
        let output = if self.has("output.weight") { "output" } else { "token_embd" };
        let logits = self.linear(&normed, output)?;
        on_unit(n_all, n_all);
        Ok((logits, routing.into_iter().sum::<RoutingSums>().difference()))
    }

    /// Computes the first sublayer, [t, d] -> [t, d].
    fn attend(
        &self,
        layer_idx: usize,
        x_td: &Tensor,
        prompts: &PackedPrompts,
        rope: &(Tensor, Tensor),
    ) -> Result<Tensor> {
        let name = |module: &str| format!("blk.{layer_idx}.{module}");
        let normed = self.norm(x_td, &name("attn_norm"))?;
        let heads = |module: &str, n_heads: usize| -> Result<Tensor> {
            let x_thk = self.linear(&normed, &name(module))?.reshape(((), n_heads, self.head_size))?;
            let norm = name(&format!("{module}_norm"));
            if self.has(&format!("{norm}.weight")) { self.norm(&x_thk, &norm) } else { Ok(x_thk) }
        };
        let q_thk = self.rotate(&heads("attn_q", self.n_heads)?, rope)?;
        let k_tgk = self.rotate(&heads("attn_k", self.n_kv_heads)?, rope)?;
        let v_tgk = heads("attn_v", self.n_kv_heads)?;
        let attended = self.attention(&q_thk, &k_tgk, &v_tgk, prompts)?;
        Ok((x_td + self.linear(&attended, &name("attn_output"))?)?)
    }

    /// Computes the output of the second sublayer, [t, d] -> [t, d].
    fn feed_forward(&self, layer_idx: usize, x_td: &Tensor, experts: Option<&Tensor>) -> Result<(Tensor, RoutingSums)> {
        let name = |module: &str| format!("blk.{layer_idx}.{module}");
        let normed = self.norm(x_td, &name("ffn_norm"))?;
        match (self.has(&name("ffn_gate_inp.weight")), experts) {
            (true, Some(experts)) => self.experts(&normed, &to_host(experts)?.to_vec2()?, &name),
            (false, None) => {
                let out = self.mlp(&normed, ["ffn_gate", "ffn_up", "ffn_down"].map(name))?;
                Ok((out, RoutingSums::default()))
            }
            (true, None) => bail!("layer {layer_idx} is a mixture of experts in the file, and not in its source"),
            (false, Some(_)) => bail!("layer {layer_idx} is a mixture of experts in the source, and not in the file"),
        }
    }

    /// Attends causally within each prompt: q [t, h, k], k and v [t, g, k] -> [t, h * k].
    fn attention(&self, q_thk: &Tensor, k_tgk: &Tensor, v_tgk: &Tensor, prompts: &PackedPrompts) -> Result<Tensor> {
        let n_repeats = self.n_heads / self.n_kv_heads;
        let mut outputs = Vec::new();
        for range in prompts.ranges() {
            let n = range.len();
            let of_prompt = |x: &Tensor| x.narrow(0, range.start, n)?.transpose(0, 1)?.contiguous();
            // Heads i * n_repeats and after it read KV head i.
            let repeated = |x: &Tensor| {
                let x_gtk = of_prompt(x)?.unsqueeze(1)?;
                let shape = (self.n_kv_heads, n_repeats, n, self.head_size);
                x_gtk.broadcast_as(shape)?.reshape((self.n_heads, n, self.head_size))
            };
            let mask: Vec<f32> = (0..n * n).map(|i| if i % n > i / n { f32::NEG_INFINITY } else { 0.0 }).collect();
            let scores = of_prompt(q_thk)?.matmul(&repeated(k_tgk)?.t()?)?;
            let scores = (scores / (self.head_size as f64).sqrt())?;
            let scores = scores.broadcast_add(&Tensor::from_vec(mask, (n, n), self.device)?)?;
            let y_htk = softmax(&scores)?.matmul(&repeated(v_tgk)?)?;
            outputs.push(y_htk.transpose(0, 1)?.reshape((n, ()))?);
        }
        Ok(Tensor::cat(&outputs, 0)?)
    }

    fn mlp(&self, x_td: &Tensor, [gate, up, down]: [String; 3]) -> Result<Tensor> {
        self.linear(&(self.linear(x_td, &gate)?.silu()? * self.linear(x_td, &up)?)?, &down)
    }

    /// Computes a mixture of experts: softmax over all experts, then the selected ones [t, k].
    fn experts(
        &self,
        x_td: &Tensor,
        selected: &[Vec<u32>],
        name: &impl Fn(&str) -> String,
    ) -> Result<(Tensor, RoutingSums)> {
        let logits = self.linear(x_td, &name("ffn_gate_inp"))?;
        let scores: Vec<Vec<f32>> = to_host(&softmax(&logits)?)?.to_vec2()?;
        let logits: Vec<Vec<f32>> = to_host(&logits)?.to_vec2()?;
        let n = (self.count("expert_count")?, self.count("expert_used_count")?);
        let n_of_source = (scores.first().map_or(0, Vec::len), selected.first().map_or(0, Vec::len));
        ensure!(
            n == n_of_source,
            "the file has {n:?} experts and selected experts of a token, its source {n_of_source:?}"
        );
        let mut tokens = vec![Vec::new(); n.0];
        for (token, (scores, selected)) in scores.iter().zip(selected).enumerate() {
            let score = |expert: &u32| scores[*expert as usize];
            let total: f32 = if self.normalizes_experts()? { selected.iter().map(score).sum() } else { 1.0 };
            selected.iter().for_each(|expert| tokens[*expert as usize].push((token as u32, score(expert) / total)));
        }
        let routed = self.routed(x_td, &tokens, name)?;
        let routing = logits.iter().zip(selected).map(|(logits, selected)| RoutingSums::of(logits, selected)).sum();
        if !self.has(&name("ffn_gate_inp_shexp.weight")) {
            return Ok((routed, routing));
        }
        let gate = self.tensor(&name("ffn_gate_inp_shexp.weight"))?.reshape(((), 1))?;
        let gate = x_td.matmul(&gate)?.neg()?.exp()?.affine(1.0, 1.0)?.recip()?;
        let shared = self.mlp(x_td, ["ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"].map(name))?;
        Ok(((routed + shared.broadcast_mul(&gate)?)?, routing))
    }

    /// Sums the outputs of experts for their tokens, each with its weight.
    fn routed(&self, x_td: &Tensor, tokens: &[Vec<(u32, f32)>], name: &impl Fn(&str) -> String) -> Result<Tensor> {
        let matrices = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
        let [gate, up, down] = matrices.map(|module| self.tensor(&format!("{}.weight", name(module))));
        let (gate, up, down) = (gate?, up?, down?);
        let mut out = x_td.zeros_like()?;
        for (expert, tokens) in tokens.iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
            let (rows, weights): (Vec<u32>, Vec<f32>) = tokens.iter().copied().unzip();
            let rows = Tensor::new(rows, self.device)?;
            let x_td = x_td.index_select(&rows, 0)?;
            let multiply = |x: &Tensor, matrices: &Tensor| x.matmul(&matrices.i(expert)?.t()?);
            let hidden = (multiply(&x_td, &gate)?.silu()? * multiply(&x_td, &up)?)?;
            let y_td = multiply(&hidden, &down)?.broadcast_mul(&Tensor::new(weights, self.device)?.unsqueeze(1)?)?;
            out = out.index_add(&rows, &y_td, 0)?;
        }
        Ok(out)
    }

    /// Returns true if the weights of the selected experts are divided by their sum.
    fn normalizes_experts(&self) -> Result<bool> {
        match self.architecture.as_str() {
            "llama" | "qwen3moe" => Ok(true),
            "qwen2moe" => Ok(false),
            other => bail!("experts of the architecture {other} are not known"),
        }
    }

    fn rotated_pair(&self) -> Result<RotatedPair> {
        match self.architecture.as_str() {
            "llama" => Ok(RotatedPair::Adjacent),
            "qwen2" | "qwen3" | "qwen2moe" | "qwen3moe" => Ok(RotatedPair::Halves),
            other => bail!("the architecture {other} is not known"),
        }
    }

    /// Rotates the first r elements of each head of x [t, h, k] by cosines and sines [t, r/2].
    fn rotate(&self, x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
        let (n_tokens, n_heads, head_size) = x.dims3()?;
        let n_pairs = cos.dim(1)?;
        let rotated = x.narrow(2, 0, 2 * n_pairs)?;
        let (shape, pair_dim) = match self.rotated_pair()? {
            RotatedPair::Adjacent => ([n_tokens, n_heads, n_pairs, 2], 3),
            RotatedPair::Halves => ([n_tokens, n_heads, 2, n_pairs], 2),
        };
        let pairs = rotated.reshape(&shape)?;
        let [a, b] = [0, 1].map(|i| pairs.narrow(pair_dim, i, 1).and_then(|x| x.squeeze(pair_dim)));
        let (a, b) = (a?, b?);
        let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
        let rotated = Tensor::stack(&[first, second], pair_dim)?.reshape((n_tokens, n_heads, 2 * n_pairs))?;
        let rest = x.narrow(2, 2 * n_pairs, head_size - 2 * n_pairs)?;
        Ok(if rest.elem_count() == 0 { rotated } else { Tensor::cat(&[rotated, rest], 2)? })
    }

    /// Returns cosines and sines, f32 [t, r/2] each: ggml's `ggml_rope_cache_init`.
    fn rope(&self, positions: &[u32]) -> Result<(Tensor, Tensor)> {
        let n_rotated = self.count("rope.dimension_count")?;
        ensure!(n_rotated > 0 && n_rotated % 2 == 0, "rope.dimension_count is {n_rotated}");
        let base = self.float("rope.freq_base")?;
        let factors: Vec<f32> = match self.has("rope_freqs.weight") {
            true => to_host(&self.tensor("rope_freqs.weight")?)?.to_vec1()?,
            false => vec![1.0; n_rotated / 2],
        };
        let (scale, ramp) = self.rope_scaling(n_rotated, base)?;
        let magnitude = if ramp.is_some() { 1.0 + 0.1 * (1.0 / scale).ln() } else { 1.0 };
        let angle = |position: u32, pair: usize| {
            let exact = f64::from(position) * base.powf(-2.0 * pair as f64 / n_rotated as f64);
            let exact = exact / f64::from(factors[pair]);
            // The share of the angle that is not scaled.
            let share =
                ramp.map_or(0.0, |[low, high]| 1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0));
            exact * scale * (1.0 - share) + exact * share
        };
        let table = |of: fn(f64) -> f64| {
            let pairs = positions.iter().flat_map(|position| (0..n_rotated / 2).map(move |pair| (*position, pair)));
            let values: Vec<f32> =
                pairs.map(|(position, pair)| (of(angle(position, pair)) * magnitude) as f32).collect();
            Tensor::from_vec(values, (positions.len(), n_rotated / 2), self.device)
        };
        Ok((table(f64::cos)?, table(f64::sin)?))
    }

    /// Returns the factor of angles, and the pairs between which YaRN's ramp falls from 1 to 0.
    fn rope_scaling(&self, n_rotated: usize, base: f64) -> Result<(f64, Option<[f64; 2]>)> {
        // Without a factor there is no scaling, and a factor without a type is linear.
        if self.file.value(&self.key("rope.scaling.factor")).is_none() {
            return Ok((1.0, None));
        }
        let scale = 1.0 / self.float("rope.scaling.factor")?;
        match self.file.value(&self.key("rope.scaling.type")) {
            None => Ok((scale, None)),
            Some(Value::String(kind)) if kind == "none" => Ok((1.0, None)),
            Some(Value::String(kind)) if kind == "linear" => Ok((scale, None)),
            Some(Value::String(kind)) if kind == "yarn" => {
                let n_original = self.count("rope.scaling.original_context_length")? as f64;
                let pair = |beta: f64| {
                    let n_rotated = n_rotated as f64;
                    n_rotated * (n_original / (beta * 2.0 * std::f64::consts::PI)).ln() / (2.0 * base.ln())
                };
                let [fast, slow] = YARN_BETAS.map(pair);
                Ok((scale, Some([fast.floor().max(0.0), slow.ceil().min(n_rotated as f64 - 1.0)])))
            }
            Some(other) => bail!("the scaling of RoPE {other:?} is not known"),
        }
    }

    /// Multiplies x [.., n] by the matrix `<name>.weight`, and adds `<name>.bias` if there is one.
    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let y = x.matmul(&self.tensor(&format!("{name}.weight"))?.t()?)?;
        match self.has(&format!("{name}.bias")) {
            true => Ok(y.broadcast_add(&self.tensor(&format!("{name}.bias"))?)?),
            false => Ok(y),
        }
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let normed = x.broadcast_div(&mean_square.affine(1.0, self.norm_eps)?.sqrt()?)?;
        Ok(normed.broadcast_mul(&self.tensor(&format!("{name}.weight"))?)?)
    }

    fn has(&self, tensor: &str) -> bool {
        self.file.tensor_type(tensor).is_some()
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        Ok(self.file.tensor(name)?.to_device(self.device)?)
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn count(&self, key: &str) -> Result<usize> {
        let value = self.file.value(&self.key(key)).with_context(|| format!("the file has no {}", self.key(key)))?;
        Ok(value.to_u32()? as usize)
    }

    fn float(&self, key: &str) -> Result<f64> {
        let value = self.file.value(&self.key(key)).with_context(|| format!("the file has no {}", self.key(key)))?;
        Ok(f64::from(value.to_f32()?))
    }
}

/// Softmax over the last dim.
fn softmax(x: &Tensor) -> Result<Tensor> {
    let exp = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?)
}
