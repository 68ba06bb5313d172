//! One decoder block, and what it asks of the world around it.
//!
//! t tokens (packed), d model, h query heads, g key heads, k head dim, f MLP width

use candle_core::{D, Error, Result, Tensor};
use candlewick_ops::{self as ops, AttentionChoice, AttentionSpec, Columns, Precision, QkvHeads, Rows, Seqs, Weight};

use crate::{Config, Weights, unit::block_prefix, weights::Dropped};

/// The questions a model may ask the world; the defaults answer for one device.
pub trait Seams {
    /// Looks tokens up: u32 [t] in a table of the vocabulary -> [t, d]. `padding` gets no gradient.
    fn look_up(&self, ids: &Tensor, table: &Weight, padding: Option<u32>) -> Result<Tensor> {
        ops::embedding(ids, table, padding)
    }

    /// What a branch reads, as its first matrices want it: [t, d] -> [t, d].
    fn enter(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }

    /// Returns the number of ranks that share the tokens outside of branches.
    fn token_parts(&self) -> usize {
        1
    }

    /// Which part of its input a branch's last matrix has here.
    fn columns(&self) -> Columns {
        Columns::ALL
    }

    /// What a branch's last matrix gives, as the residual stream wants it: [t, d] -> [t, d].
    fn leave(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.clone())
    }

    /// Attention of block `block_idx`: q [t, h, k], k and v [t, g, k] -> [t, h, k].
    fn attend(
        &self,
        block_idx: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        seqs: &Seqs,
        spec: &AttentionSpec,
    ) -> Result<Tensor> {
        let _ = block_idx;
        ops::attention(q, k, v, seqs, spec)
    }
}

/// The seams of a whole model on one device, without a cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneDevice;

impl Seams for OneDevice {}

/// How the MLP of a block passes over the tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MlpRows {
    /// All at once: what backward needs of it is kept.
    #[default]
    Together,
    /// In tiles of about as many tokens as the model is wide: nothing of a tile is kept, and backward computes it again.
    InTiles,
}

/// What all blocks of one forward have in common.
#[derive(Clone, Copy)]
pub struct Cx<'a> {
    /// Cosines of the rotary angles, f32 [t, k/2].
    pub cos: &'a Tensor,
    /// Sines of the rotary angles, f32 [t, k/2].
    pub sin: &'a Tensor,
    /// Where the sequences begin and end.
    pub seqs: &'a Seqs,
    /// Chooses what dropout drops; `None` outside of training, where nothing is.
    pub dropout_key: Option<u64>,
    /// Which of the micro-batch's tokens these are.
    pub rows: &'a Rows,
    /// What computes attention.
    pub attention: AttentionChoice,
    /// How the MLP passes over the tokens.
    pub mlp_rows: MlpRows,
    /// The world around the block.
    pub seams: &'a dyn Seams,
}

impl Cx<'_> {
    fn dropped(&self) -> Option<Dropped> {
        self.dropout_key.map(|key| Dropped::new(key, self.rows))
    }
}

/// x + attention(norm(x)), then + mlp(norm(x)). Head counts are read off the weights.
pub(crate) fn forward(config: &Config, block_idx: usize, w: &Weights, x_td: &Tensor, cx: &Cx) -> Result<Tensor> {
    let block = Block { config, block_idx, prefix: block_prefix(block_idx), w };
    let normed_td = block.norm("input_layernorm", x_td)?;
    let attended_td = block.attention(&normed_td, cx)?;
    let weight = block.norm_weight("post_attention_layernorm")?;
    let (x_td, normed_td) = ops::add_rms_norm(x_td, &attended_td, weight, config.rms_norm_eps())?;
    ops::add(&x_td, &block.mlp(&normed_td, cx)?)
}

struct Block<'a> {
    config: &'a Config,
    block_idx: usize,
    prefix: String,
    w: &'a Weights,
}

impl Block<'_> {
    fn attention(&self, x_td: &Tensor, cx: &Cx) -> Result<Tensor> {
        let x_td = &cx.seams.enter(x_td)?;
        let [q_thk, k_tgk, v_tgk] = self.qkv(x_td, cx)?;
        let spec = AttentionSpec {
            scale: (self.config.head_dim() as f64).powf(-0.5) as f32,
            causal: true,
            window: self.config.window(self.block_idx),
            choice: cx.attention,
        };
        let n_out = q_thk.dim(1)? * q_thk.dim(2)?;
        let y_thk = cx.seams.attend(self.block_idx, &q_thk, &k_tgk, &v_tgk, cx.seqs, &spec)?;
        let y_td = ops::reshape(&y_thk, (x_td.dim(0)?, n_out))?;
        let dropped = cx.dropped().map(|dropped| dropped.in_columns(cx.seams.columns()));
        cx.seams.leave(&self.w.linear(&format!("{}.self_attn.o_proj", self.prefix), &y_td, dropped.as_ref())?)
    }

    fn mlp(&self, x_td: &Tensor, cx: &Cx) -> Result<Tensor> {
        let (dropped, columns) = (cx.dropped(), cx.seams.columns());
        let x_td = &cx.seams.enter(x_td)?;
        let y_td = match cx.mlp_rows {
            MlpRows::Together => mlp(self.w, &self.prefix, x_td, dropped.as_ref(), columns)?,
            MlpRows::InTiles => {
                let (w, prefix) = (self.w.clone(), self.prefix.clone());
                let tile_rows = ops::tile_rows(x_td.dim(0)?, self.config.hidden_size());
                ops::tiled(x_td, tile_rows, move |x_td, first_row| {
                    let dropped = dropped.as_ref().map(|dropped| dropped.at_row(first_row));
                    mlp(&w, &prefix, x_td, dropped.as_ref(), columns)
                })?
            }
        };
        cx.seams.leave(&y_td)
    }

    /// Returns queries and keys, rotated, and values: by one matmul where the weights are adjacent.
    fn qkv(&self, x_td: &Tensor, cx: &Cx) -> Result<[Tensor; 3]> {
        let modules =
            ["q_proj", "k_proj", "v_proj"].map(|projection| format!("{}.self_attn.{projection}", self.prefix));
        let joined = if self.config.typed.qk_norm { None } else { self.w.joined(&modules, x_td) };
        let Some(joined) = joined else {
            let q_thk = self.turn(&self.heads("q_proj", "q_norm", x_td, cx)?, cx)?;
            let k_tgk = self.turn(&self.heads("k_proj", "k_norm", x_td, cx)?, cx)?;
            return Ok([q_thk, k_tgk, self.split("v_proj", x_td, cx)?]);
        };
        let dim = self.config.head_dim();
        let n_heads = |module: &str| Ok::<_, Error>(self.w.get(&format!("{module}.weight"))?.dims()[0] / dim);
        let heads = QkvHeads { n_q: n_heads(&modules[0])?, n_kv: n_heads(&modules[1])?, dim };
        ops::split_qkv(&ops::linear(x_td, &joined, None, Precision::Compute)?, heads, cx.cos, cx.sin)
    }

    /// A projection split into heads, each normalised if the family does so.
    fn heads(&self, projection: &str, norm: &str, x_td: &Tensor, cx: &Cx) -> Result<Tensor> {
        let y_thk = self.split(projection, x_td, cx)?;
        match self.config.typed.qk_norm {
            true => self.norm(&format!("self_attn.{norm}"), &y_thk),
            false => Ok(y_thk),
        }
    }

    fn split(&self, projection: &str, x_td: &Tensor, cx: &Cx) -> Result<Tensor> {
        let y = self.linear(&format!("self_attn.{projection}"), x_td, cx)?;
        let n_heads = y.dim(D::Minus1)? / self.config.head_dim();
        ops::reshape(&y, (y.dim(0)?, n_heads, self.config.head_dim()))
    }

    fn turn(&self, x_thk: &Tensor, cx: &Cx) -> Result<Tensor> {
        ops::rope(x_thk, cx.cos, cx.sin)
    }

    fn linear(&self, name: &str, x: &Tensor, cx: &Cx) -> Result<Tensor> {
        self.w.linear(&format!("{}.{name}", self.prefix), x, cx.dropped().as_ref())
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, self.norm_weight(name)?, self.config.rms_norm_eps())
    }

    fn norm_weight(&self, name: &str) -> Result<&Weight> {
        self.w.get(&format!("{}.{name}.weight", self.prefix))
    }
}

/// `columns` are those of the last matrix's input.
fn mlp(w: &Weights, prefix: &str, x_td: &Tensor, dropped: Option<&Dropped>, columns: Columns) -> Result<Tensor> {
    let name = |projection: &str| format!("{prefix}.mlp.{projection}");
    let modules = ["gate_proj", "up_proj"].map(name);
    let gated_tf = match w.joined(&modules, x_td) {
        Some(joined) => ops::swiglu_joined(&ops::linear(x_td, &joined, None, Precision::Compute)?)?,
        None => ops::swiglu(&w.linear(&modules[0], x_td, dropped)?, &w.linear(&modules[1], x_td, dropped)?)?,
    };
    let dropped = dropped.map(|dropped| dropped.in_columns(columns));
    w.linear(&name("down_proj"), &gated_tf, dropped.as_ref())
}
