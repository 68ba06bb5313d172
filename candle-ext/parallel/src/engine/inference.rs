//! Forwards that nothing is learnt from: losses and scores of tokens, and the logits that the next token is chosen by.
//!
//! t tokens (packed), d model, v vocabulary, n rows that are asked about

use candle_core::{DType, Result, Tensor};
use candlewick_model::Seams;
use candlewick_ops::{Reduction, Seqs, TokenScores, Upstream, linear_cross_entropy, span, token_scores};

use super::{Engine, Micro};
use crate::sequence::Part;

/// Tokens of a forward. Which sequences they belong to, and what those remember, is the seams' affair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids, t of them.
    pub ids: Vec<u32>,
    /// The place of each in its sequence.
    pub positions: Vec<u32>,
}

/// A question: how likely is `id` after the token in row `row`?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The token before, as a row of the forward.
    pub row: u32,
    /// The token.
    pub id: u32,
}

impl Engine {
    /// Returns the sum of the token losses of a micro-batch. Records nothing.
    pub fn loss(&self, micro: &Micro) -> Result<f64> {
        self.evaluate(micro, Reduction::Sum)?.to_dtype(DType::F64)?.to_scalar()
    }

    /// Returns the loss of each token of a micro-batch, f32 `[t]`; zero where there is no target. Records nothing.
    pub fn token_losses(&self, micro: &Micro) -> Result<Vec<f32>> {
        self.evaluate(micro, Reduction::None)?.to_vec1()
    }

    fn evaluate(&self, micro: &Micro, reduction: Reduction) -> Result<Tensor> {
        let _span = span("evaluation", "forward");
        let _awake = self.stay_awake();
        let Part { micro, .. } = &self.part(micro)?;
        let x_td = self.hidden(&micro.ids, &micro.positions, &micro.seqs, self.seams())?;
        let weights = self.store.fetch(self.head())?;
        let lm_head = self.model.lm_head(&weights)?;
        let spec = self.cross_entropy(lm_head.dims(), reduction)?;
        let normed = self.model.norm(&weights, &x_td)?;
        let loss = linear_cross_entropy(&normed, &lm_head, &micro.targets, &spec, Upstream::NoGrad)?.loss;
        self.store.release(self.head());
        Ok(loss)
    }

    /// Returns the f32 logits `[v]` after the last token of one sequence that continues what `seams` remembers.
    pub fn next_logits(&self, ids: &[u32], first_position: usize, seams: &dyn Seams) -> Result<Tensor> {
        let positions = (0..ids.len()).map(|i| (first_position + i) as u32).collect();
        let tokens = Tokens { ids: ids.to_vec(), positions };
        self.logits_of(&tokens, &[ids.len() as u32 - 1], seams)?.squeeze(0)
    }

    /// Returns the f32 logits `[n, v]` after the tokens in `rows`. On the CPU the bits of a row do not depend on what else
    /// is computed; one token alone in a forward is the exception.
    pub fn logits(&self, tokens: &Tokens, rows: &[u32], seams: &dyn Seams) -> Result<Tensor> {
        self.logits_of(tokens, &in_pairs(rows), seams)?.narrow(0, 0, rows.len())
    }

    fn logits_of(&self, tokens: &Tokens, rows: &[u32], seams: &dyn Seams) -> Result<Tensor> {
        let _awake = self.stay_awake();
        let x_td = self.rows_of(tokens, rows, seams)?;
        let weights = self.store.fetch(self.head())?;
        let logits = self.model.logits(&weights, &self.model.norm(&weights, &x_td)?)?;
        self.store.release(self.head());
        Ok(logits)
    }

    /// Returns how likely the tokens are that are asked about: logits exist for their rows only, and for a part of them at a
    /// time. On the CPU the bits of an answer do not depend on what else is asked; one token alone in a forward is the
    /// exception.
    pub fn token_scores(&self, tokens: &Tokens, asked: &[Asked], seams: &dyn Seams) -> Result<TokenScores> {
        let _awake = self.stay_awake();
        let (rows, ids): (Vec<u32>, Vec<u32>) = asked.iter().map(|asked| (asked.row, asked.id)).unzip();
        let (rows, ids) = (in_pairs(&rows), in_pairs(&ids));
        let x_td = self.rows_of(tokens, &rows, seams)?;
        let weights = self.store.fetch(self.head())?;
        let lm_head = self.model.lm_head(&weights)?;
        let chunk = self.cross_entropy(lm_head.dims(), Reduction::None)?.chunk.next_multiple_of(2);
        let mut scores = token_scores(&self.model.norm(&weights, &x_td)?, &lm_head, &ids, chunk)?;
        self.store.release(self.head());
        scores.logprobs.truncate(asked.len());
        scores.is_top.truncate(asked.len());
        Ok(scores)
    }

    /// Some rows of what the last block gives.
    fn rows_of(&self, tokens: &Tokens, rows: &[u32], seams: &dyn Seams) -> Result<Tensor> {
        let _span = span("evaluation", "forward");
        let Tokens { ids, positions } = tokens;
        let seqs = Seqs::packed(vec![0, ids.len()])?;
        let x_td = self.hidden(&Tensor::new(ids.as_slice(), &self.device)?, positions, &seqs, seams)?;
        x_td.index_select(&Tensor::new(rows, &self.device)?, 0)
    }

    fn hidden(&self, ids: &Tensor, positions: &[u32], seqs: &Seqs, seams: &dyn Seams) -> Result<Tensor> {
        let (cos, sin) = self.model.rope(positions, &self.device)?;
        let cx = self.cx([&cos, &sin], seqs, seams);
        let mut x = self.model.embed(&self.store.fetch(0)?, ids)?;
        self.store.release(0);
        for block_idx in 0..self.model.n_blocks() {
            x = self.model.block(block_idx, &self.fetch(block_idx + 1, Some(block_idx + 2))?, &x, &cx)?;
            self.store.release(block_idx + 1);
        }
        Ok(x)
    }
}

/// The same with the last once more if their number is odd: a product of one row takes another way and rounds otherwise, so
/// rows are computed by twos at least.
fn in_pairs(rows: &[u32]) -> Vec<u32> {
    rows.iter().chain(rows.last().filter(|_| rows.len() % 2 == 1)).copied().collect()
}
