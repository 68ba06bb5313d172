//! Log-probabilities of the tokens of a text, and the loss on a data set.

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{Device, Tensor};
use candlewick_comm::Reduce;
use candlewick_ops::{CuSeqlens, to_host};
use candlewick_parallel::{Micro, MicroColumns};
use candlewick_runtime::exit::ExitCode;
use candlewick_text::render::Sample;
use candlewick_text::tokenizer::SpecialTokens;
use serde::Serialize;

use super::Lm;
use crate::eval_loss::EvalLoss;

/// A token with its log-probability given the preceding tokens.
#[derive(Clone, Debug, Serialize)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Text of the token.
    pub text: String,
    /// Log-probability in nats; `None` for the first token.
    pub logprob: Option<f32>,
}

impl Lm {
    /// Returns the log-probability of every token of `text`. Collective: all ranks of the model's groups must call it, and
    /// all get the result.
    pub fn score(&self, text: &str) -> Result<Vec<TokenLogprob>> {
        let ids = self.tokenizer.encode(text, SpecialTokens::Include)?;
        ensure!(!ids.is_empty(), anyhow!("failed to score: the text has no tokens").context(ExitCode::Data));
        self.check_length("text", ids.len())?;
        let own = self.engine.token_losses(&micro(&Sample::all_targets(ids.clone()), self.engine.device())?)?;
        // The last pipeline stage alone computes losses; they are 0 on the others.
        let stages = &self.parallel.1.pp;
        let losses = stages.all_reduce(&Tensor::new(own, &Device::Cpu)?, Reduce::Sum)?;
        let losses = to_host(&losses)?.to_vec1::<f32>()?;
        if let Some(at) = losses[..ids.len() - 1].iter().position(|loss| !loss.is_finite()) {
            return Err(not_finite(&format!("token {} of the text", at + 1)));
        }
        let score = |(i, &id): (usize, &u32)| {
            let text = self.tokenizer.id_to_token(id).unwrap_or_default();
            TokenLogprob { id, text, logprob: i.checked_sub(1).map(|before| -losses[before]) }
        };
        Ok(ids.iter().enumerate().map(score).collect())
    }

    /// Returns the mean loss per target token over `sequences`, divided among the data parallel ranks. The string of a
    /// sequence names its source in errors. `on_progress` receives the number of finished sequences. Collective: all ranks
    /// of the model's groups must call it with the same sequences.
    ///
    /// The sum is in the order of the sequences, so it does not depend on the number of data parallel ranks.
    pub fn eval_loss(&self, sequences: &[(String, Sample)], mut on_progress: impl FnMut(usize)) -> Result<EvalLoss> {
        sequences.iter().try_for_each(|(place, sample)| self.check_length(place, sample.len()))?;
        let data_parallel = &self.parallel.1.dp;
        let filler = (String::new(), Sample { ids: vec![0], is_target: vec![false], ..Sample::default() });
        let mut losses = vec![0.0; sequences.len()];
        // Every rank runs equally many forwards, because ranks may share experts or shards of the weights.
        for round in (0..sequences.len()).step_by(data_parallel.size()) {
            on_progress(round);
            let own_idx = round + data_parallel.rank();
            let (place, sample) = sequences.get(own_idx).unwrap_or(&filler);
            let loss = self.engine.loss(&micro(sample, self.engine.device())?);
            let loss = loss.context("failed to compute the held-out loss")?;
            ensure!(loss.is_finite(), not_finite(place));
            if let Some(own) = losses.get_mut(own_idx) {
                *own = loss;
            }
        }
        EvalLoss::of_sequences(
            losses,
            sequences.iter().map(|(_, sample)| n_targets(sample)).sum(),
            &*self.parallel.1.loss,
        )
    }

    fn check_length(&self, what: &str, n_tokens: usize) -> Result<()> {
        let context = self.context();
        ensure!(
            n_tokens <= context,
            anyhow!(
                "failed to score {what}: it has {n_tokens} tokens, but the model's context has {context} \
                 (max_position_embeddings)"
            )
            .context(ExitCode::Data)
        );
        Ok(())
    }
}

/// Returns the number of targets. The first token has no prediction.
fn n_targets(sample: &Sample) -> usize {
    sample.is_target.iter().skip(1).filter(|is_target| **is_target).count()
}

fn not_finite(what: &str) -> anyhow::Error {
    anyhow!(
        "failed to score {what}: its log-probability is not finite; the model's weights hold NaN, or numbers too large \
         for the dtype (try --dtype f32)"
    )
    .context(ExitCode::NonFinite)
}

/// Builds a micro-batch of one sequence. Its first token is never a target.
fn micro(sample: &Sample, device: &Device) -> Result<Micro> {
    let target = |(id, is_target): (&u32, &bool)| if *is_target { i64::from(*id) } else { Micro::IGNORED };
    let mut targets: Vec<i64> = sample.ids.iter().zip(&sample.is_target).skip(1).map(target).collect();
    targets.push(Micro::IGNORED);
    Ok(Micro {
        ids: Tensor::new(sample.ids.as_slice(), device)?,
        targets: Tensor::new(targets, &Device::Cpu)?,
        positions: (0..sample.len() as u32).collect(),
        seqs: CuSeqlens::packed(vec![0, sample.len()])?,
        padding: Vec::new(),
        columns: MicroColumns::default(),
    })
}
