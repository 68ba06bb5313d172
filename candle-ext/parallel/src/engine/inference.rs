//! Evaluation and inference: token losses, log-probabilities and next-token logits.
//!
//! Dimensions: t tokens (packed), d hidden size, v vocabulary size, n queried rows

use candle_core::{DType, Result, Tensor};
use candlewick_model::{LengthClass, ParallelOps, SequenceMixing, SingleDevice, TokenParallel};
use candlewick_ops::{
    CuSeqlens, LossGrad, Reduction, RowRanges, TokenScores, span, spin_workers, to_host, token_scores,
};

use super::Engine;
use crate::batch::Micro;
use crate::placement::SequenceParallel;
use crate::tensor_parallel::{TensorParallel, TensorParallelOps};

/// Packed tokens of a forward. Sequence boundaries and caches belong to the attention that is passed along.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackedTokens {
    /// Token ids, t of them.
    pub ids: Vec<u32>,
    /// Position of each token in its sequence.
    pub positions: Vec<u32>,
    /// RoPE frequencies of each token's sequence.
    pub classes: Vec<LengthClass>,
}

impl PackedTokens {
    /// Appends tokens of a sequence from `position` on.
    pub fn extend(&mut self, ids: &[u32], position: usize, class: LengthClass) {
        self.ids.extend(ids);
        self.positions.extend((position..position + ids.len()).map(|position| position as u32));
        self.classes.resize(self.ids.len(), class);
    }
}

/// A query for the log-probability of token `id` after row `row`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreQuery {
    /// Row of the preceding token.
    pub row: u32,
    /// Token whose log-probability is queried.
    pub id: u32,
}

impl Engine {
    /// Returns the summed token losses of a micro-batch, over this rank's tokens, without autograd.
    ///
    /// Returns 0 on ranks without [losses](Engine::has_loss).
    pub fn loss(&self, micro: &Micro) -> Result<f64> {
        match self.evaluate(&*micro.padded(self.multiple())?, Reduction::Sum)? {
            Some(loss) => to_host(&loss.to_dtype(DType::F64)?)?.to_scalar(),
            None => Ok(0.0),
        }
    }

    /// Returns the loss of each token, f32 `[t]`, without autograd. Context parallel ranks all get the losses of all
    /// tokens.
    ///
    /// Losses are 0 where there is no target, and on ranks without [losses](Engine::has_loss).
    pub fn token_losses(&self, micro: &Micro) -> Result<Vec<f32>> {
        to_host(&self.losses_of_tokens(micro)?)?.to_vec1()
    }

    /// Returns the losses of [`Engine::token_losses`] on the device.
    pub(super) fn losses_of_tokens(&self, micro: &Micro) -> Result<Tensor> {
        let n_tokens = micro.seqs.n_tokens();
        let padded = micro.padded(self.multiple())?;
        match self.evaluate(&padded, Reduction::None)? {
            Some(own) => self.of_all_tokens(&own, &padded)?.narrow(0, 0, n_tokens),
            None => Tensor::zeros(n_tokens, DType::F32, &self.device),
        }
    }

    /// Computes the losses of a micro-batch that has been padded to split evenly over the ranks.
    fn evaluate(&self, micro: &Micro, reduction: Reduction) -> Result<Option<Tensor>> {
        let _span = span("evaluation", "forward");
        let _spinning = spin_workers(&self.device);
        let part = &self.part(micro)?;
        let rope = self.rope_of(micro, part)?;
        let micro = &part.micro;
        self.with_parallel_ops(None, |parallel_ops| {
            let x_td = self.hidden(&micro.ids, &rope, &micro.seqs, parallel_ops)?;
            let Some(x_td) = x_td else { return Ok(None) };
            let weights = self.store.fetch(self.head())?;
            let lm_head = self.model.lm_head(weights)?;
            let normed = parallel_ops.tokens.copy_to_tp(&self.model.final_norm(weights, &x_td)?)?;
            let loss = self.cross_entropy(&normed, &lm_head, &micro.targets, reduction, LossGrad::NoGrad)?.loss;
            self.store.release(self.head());
            Ok(Some(loss))
        })
    }

    /// Returns the f32 logits `[v]` after the last token of a sequence, whose earlier tokens `sequence` caches.
    /// Collective: all ranks of the model replica must call it, and all get the result.
    ///
    /// `class` is that of the length that the sequence may reach, in all calls with one cache.
    pub fn next_logits(
        &self,
        ids: &[u32],
        first_position: usize,
        class: LengthClass,
        sequence: &dyn SequenceMixing,
    ) -> Result<Tensor> {
        let mut tokens = PackedTokens::default();
        tokens.extend(ids, first_position, class);
        self.logits_of(&tokens, &[ids.len() as u32 - 1], sequence)?.squeeze(0)
    }

    /// Returns the f32 logits `[n, v]` after the tokens in `rows`. Collective: all ranks of the model replica must call
    /// it.
    ///
    /// On the CPU a row's bits do not depend on the other tokens of the forward, except in a forward of a single token.
    pub fn logits(&self, tokens: &PackedTokens, rows: &[u32], sequence: &dyn SequenceMixing) -> Result<Tensor> {
        self.logits_of(tokens, &pad_to_two_rows(rows), sequence)?.narrow(0, 0, rows.len())
    }

    fn logits_of(&self, tokens: &PackedTokens, rows: &[u32], sequence: &dyn SequenceMixing) -> Result<Tensor> {
        let _spinning = spin_workers(&self.device);
        let logits = match self.last_hidden_rows(tokens, rows, sequence)? {
            Some(x_td) => {
                let weights = self.store.fetch(self.head())?;
                let logits = self.logits_of_rows(&self.model.final_norm(weights, &x_td)?, weights)?;
                self.store.release(self.head());
                logits
            }
            None => Tensor::zeros((rows.len(), self.n_vocab()), DType::F32, &self.device)?,
        };
        self.broadcast_from_last_stage(&logits)
    }

    /// Returns the log-probabilities of the queried tokens. Logits are computed in chunks, for queried rows only.
    /// Collective.
    ///
    /// On the CPU a result's bits do not depend on the other queries, except in a forward of a single token.
    pub fn token_scores(
        &self,
        tokens: &PackedTokens,
        queries: &[ScoreQuery],
        sequence: &dyn SequenceMixing,
    ) -> Result<TokenScores> {
        let _spinning = spin_workers(&self.device);
        let (rows, ids): (Vec<u32>, Vec<u32>) = queries.iter().map(|queries| (queries.row, queries.id)).unzip();
        let (rows, ids) = (pad_to_two_rows(&rows), pad_to_two_rows(&ids));
        let scores = match self.last_hidden_rows(tokens, &rows, sequence)? {
            Some(x_td) => {
                let weights = self.store.fetch(self.head())?;
                let lm_head = self.model.lm_head(weights)?;
                let normed = self.model.final_norm(weights, &x_td)?;
                let chunk = self.max_logit_rows(self.n_vocab()).next_multiple_of(2);
                let scores = match &self.tensor {
                    None => token_scores(&normed, &lm_head, &ids, chunk)?,
                    Some(_) => self.vocab_parallel_scores(&normed, weights, &ids, chunk)?,
                };
                self.store.release(self.head());
                scores
            }
            None => TokenScores { logprobs: vec![0.0; ids.len()], is_greedy: vec![false; ids.len()] },
        };
        let marks = scores.is_greedy.iter().map(|is_greedy| f32::from(u8::from(*is_greedy)));
        let numbers: Vec<f32> = scores.logprobs.iter().copied().chain(marks).collect();
        let all = self.broadcast_from_last_stage(&Tensor::from_vec(numbers, (2, ids.len()), &self.device)?)?;
        let all = to_host(&all)?.to_vec2::<f32>()?;
        let n = queries.len();
        Ok(TokenScores {
            logprobs: all[0][..n].to_vec(),
            is_greedy: all[1][..n].iter().map(|mark| *mark != 0.0).collect(),
        })
    }

    /// Returns the log-probabilities when each rank has the logits of a vocabulary shard.
    fn vocab_parallel_scores(
        &self,
        normed: &Tensor,
        weights: &candlewick_model::UnitWeights,
        ids: &[u32],
        chunk: usize,
    ) -> Result<TokenScores> {
        let mut scores = TokenScores::default();
        for (i, ids) in ids.chunks(chunk).enumerate() {
            let logits = self.logits_of_rows(&normed.narrow(0, i * chunk, ids.len())?, weights)?;
            let logits = to_host(&logits)?.to_vec2::<f32>()?;
            for (logits, id) in logits.iter().zip(ids) {
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
                let at_target = logits[*id as usize];
                scores.logprobs.push(at_target - max - sum.ln());
                scores.is_greedy.push(logits.iter().position(|logit| *logit == max) == Some(*id as usize));
            }
        }
        Ok(scores)
    }

    /// Returns the logits over the whole vocabulary, f32 `[n, v]`.
    fn logits_of_rows(&self, normed: &Tensor, weights: &candlewick_model::UnitWeights) -> Result<Tensor> {
        let logits = self.model.logits(weights, normed)?;
        match &self.tensor {
            None => Ok(logits),
            Some(tensor) => tensor.gather_logits(&logits, self.n_vocab()),
        }
    }

    /// Broadcasts a tensor from the last pipeline stage.
    fn broadcast_from_last_stage(&self, x: &Tensor) -> Result<Tensor> {
        let stages = self.pipeline.stages();
        Ok(stages.broadcast(x, stages.size() - 1)?)
    }

    fn n_vocab(&self) -> usize {
        self.model.config().vocab_size()
    }

    /// Returns rows of the last layer's output, on the last pipeline stage.
    fn last_hidden_rows(
        &self,
        packed: &PackedTokens,
        rows: &[u32],
        sequence: &dyn SequenceMixing,
    ) -> Result<Option<Tensor>> {
        let _span = span("evaluation", "forward");
        let PackedTokens { ids, positions, classes } = packed;
        let seqs = CuSeqlens::packed(vec![0, ids.len()])?;
        // A few rows cannot be split over the sequence parallel ranks.
        let tensor = self
            .tensor
            .as_ref()
            .map(|tensor| TensorParallel { sequence_parallel: SequenceParallel::Off, ..tensor.clone() });
        let n_vocab = self.n_vocab();
        let shared = tensor.as_ref().map(|tensor| TensorParallelOps { tensor, n_vocab });
        let inner: &dyn TokenParallel = shared.as_ref().map_or(&SingleDevice, |shared| shared);
        let routed = self.routing.exchange_ops(inner);
        let tokens = routed.as_ref().map_or(inner, |routed| routed);
        let parallel_ops = ParallelOps { tokens, sequence };
        let rope = self.model.rope(positions, classes, &self.device)?;
        let x_td = self.hidden(&Tensor::new(ids.as_slice(), &self.device)?, &rope, &seqs, parallel_ops)?;
        x_td.map(|x_td| x_td.index_select(&Tensor::new(rows, &self.device)?, 0)).transpose()
    }

    /// Returns the last layer's output, on the last pipeline stage.
    fn hidden(
        &self,
        ids: &Tensor,
        (cos, sin): &(Tensor, Tensor),
        seqs: &CuSeqlens,
        parallel_ops: ParallelOps,
    ) -> Result<Option<Tensor>> {
        let _fp8 = self.enable_fixed_fp8()?;
        let rows = RowRanges::all();
        let context = self.context([cos, sin], seqs, &rows, parallel_ops);
        let (layout, stage) = (self.pipeline.layout(), self.pipeline.stage());
        for chunk in 0..layout.n_chunks() {
            let mut x = match layout.is_first(stage, chunk) {
                true => self.model.embed(self.store.fetch(0)?, ids, parallel_ops.tokens)?,
                false => self.pipeline.receive_activation(self.hidden_states(ids.dim(0)?, parallel_ops))?,
            };
            self.store.release(0);
            for block_idx in layout.blocks(stage, chunk) {
                x = self.model.block(self.fetch(block_idx + 1, Some(self.next_unit(block_idx)))?, &x, &context)?;
                self.store.release(block_idx + 1);
            }
            if layout.is_last(stage, chunk) {
                return Ok(Some(x));
            }
            self.pipeline.send_activation(&x)?;
            self.pipeline.finish_all_but(layout.n_stages())?;
        }
        Ok(None)
    }
}

/// Repeats the last row if the number of rows is odd. A GEMM of one row takes another kernel and rounds differently.
fn pad_to_two_rows(rows: &[u32]) -> Vec<u32> {
    rows.iter().chain(rows.last().filter(|_| rows.len() % 2 == 1)).copied().collect()
}
