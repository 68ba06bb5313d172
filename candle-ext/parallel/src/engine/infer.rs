//! Forward alone: losses of held-out tokens, and the scores of the next one.

use candle_core::{DType, Result, Tensor};
use candlewick_model::Seams;
use candlewick_ops::{Reduction, Rows, Seqs, Upstream, span};

use super::{Engine, Micro};
use crate::placement::Norms;
use crate::sequence::Part;
use crate::tensor::{Shared, TensorRanks};

impl Engine {
    /// Returns the sum of the token losses of a micro-batch: of this rank's tokens, where ranks share them, and 0 where it [does
    /// not know them](Engine::knows_losses). Records nothing.
    pub fn loss(&self, micro: &Micro) -> Result<f64> {
        match self.evaluate(&*micro.padded(self.multiple())?, Reduction::Sum)? {
            Some(loss) => loss.to_dtype(DType::F64)?.to_scalar(),
            None => Ok(0.0),
        }
    }

    /// Returns the loss of each token of a micro-batch, f32 `[t]`; zero where there is no target, or where this rank [does not
    /// know it](Engine::knows_losses). Records nothing. Ranks that share the tokens all get the losses of all.
    pub fn token_losses(&self, micro: &Micro) -> Result<Vec<f32>> {
        let n_tokens = micro.seqs.n_tokens();
        let padded = micro.padded(self.multiple())?;
        let Some(own) = self.evaluate(&padded, Reduction::None)? else { return Ok(vec![0.0; n_tokens]) };
        let n_padded = padded.seqs.n_tokens();
        let all = self.sequence.as_ref().map(|sequence| sequence.join(&own, n_padded)).transpose()?;
        all.unwrap_or(own).narrow(0, 0, n_tokens)?.to_vec1()
    }

    /// The loss of as many tokens as ranks can share evenly.
    fn evaluate(&self, micro: &Micro, reduction: Reduction) -> Result<Option<Tensor>> {
        let _span = span("evaluation", "forward");
        let _awake = self.stay_awake();
        let Part { micro, .. } = &self.part(micro)?;
        self.with_seams(None, |seams| {
            let x_td = self.hidden(&micro.ids, &micro.positions, &micro.seqs, seams)?;
            let Some(x_td) = x_td else { return Ok(None) };
            let weights = self.store.fetch(self.head())?;
            let lm_head = self.model.lm_head(&weights)?;
            let normed = seams.enter(&self.model.norm(&weights, &x_td)?)?;
            let loss = self.cross_entropy(&normed, &lm_head, &micro.targets, reduction, Upstream::NoGrad)?.loss;
            self.store.release(self.head());
            Ok(Some(loss))
        })
    }

    /// Returns the f32 logits `[v]` after the last token of one sequence that continues what `seams` remembers. All ranks that
    /// share the model call it, and get the same.
    pub fn next_logits(&self, ids: &[u32], first_position: usize, seams: &dyn Seams) -> Result<Tensor> {
        let _awake = self.stay_awake();
        let positions: Vec<u32> = (0..ids.len()).map(|i| (first_position + i) as u32).collect();
        let seqs = Seqs::packed(vec![0, ids.len()])?;
        let n_vocab = self.model.config().vocab_size();
        // One token cannot be shared out.
        let tensor = self.tensor.as_ref().map(|tensor| TensorRanks { norms: Norms::Whole, ..tensor.clone() });
        let shared = tensor.as_ref().map(|tensor| Shared { tensor, n_vocab, attend: seams });
        let seams = shared.as_ref().map_or(seams, |shared| shared);
        let logits = match self.hidden(&Tensor::new(ids, &self.device)?, &positions, &seqs, seams)? {
            Some(x_td) => {
                let weights = self.store.fetch(self.head())?;
                let normed = self.model.norm(&weights, &x_td.narrow(0, ids.len() - 1, 1)?)?;
                let logits = self.model.logits(&weights, &normed)?;
                self.store.release(self.head());
                tensor.map_or_else(|| Ok(logits.clone()), |tensor| tensor.whole_logits(&logits, n_vocab))?.squeeze(0)?
            }
            None => Tensor::zeros(n_vocab, DType::F32, &self.device)?,
        };
        let stages = self.pipeline.stages();
        Ok(stages.broadcast(&logits, stages.size() - 1)?)
    }

    /// What the last block gives, on the stage that has it.
    fn hidden(&self, ids: &Tensor, positions: &[u32], seqs: &Seqs, seams: &dyn Seams) -> Result<Option<Tensor>> {
        let (cos, sin) = self.model.rope(positions, &self.device)?;
        let rows = Rows::all();
        let cx = self.cx([&cos, &sin], seqs, &rows, seams);
        let (layout, stage) = (self.pipeline.layout(), self.pipeline.stage());
        for chunk in 0..layout.n_chunks() {
            let mut x = match layout.is_first(stage, chunk) {
                true => self.model.embed(&self.store.fetch(0)?, ids, seams)?,
                false => self.pipeline.receive_activation()?,
            };
            self.store.release(0);
            for block_idx in layout.blocks(stage, chunk) {
                x = self.model.block(block_idx, &self.fetch(block_idx + 1, Some(block_idx + 2))?, &x, &cx)?;
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
