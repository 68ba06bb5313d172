//! Sampling options of the command line.

use anyhow::Result;
use clap::Args;

use crate::answer::sample::SamplingDefaults;
use crate::generate::GenerateOptions;
use crate::lm::Lm;
use crate::sampler::SamplingParams;

/// Sampling options, with transformers' meaning.
#[derive(Clone, Debug, Args)]
pub struct SamplingOptions {
    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from this many most probable tokens; 0 is all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Nucleus sampling: sample from the most probable tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Sample from tokens with at least this probability, relative to the most probable token's
    #[arg(long, default_value_t = 0.0)]
    min_p: f64,
    /// Lower the probability of tokens that have occurred in prompt or answer; 1 is no penalty
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Subtract this from the logits of tokens that the answer already has; from -2 to 2, 0 is no penalty
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f64,
    /// Subtract this from a token's logit for each time the answer has it; from -2 to 2, 0 is no penalty
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f64,
    /// Sampling seed
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Text that ends an answer and is left out of it; repeat it for several
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Maximum number of new tokens [default: 64; in a chat 512]
    #[arg(long)]
    max_new_tokens: Option<usize>,
}

impl SamplingOptions {
    /// Returns the options, checked against the model's context length. The default maximum shrinks to fit a short
    /// context.
    pub(super) fn options(&self, lm: &Lm, default_max: usize) -> Result<GenerateOptions> {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, .. } =
            *self;
        let max_new_tokens = self.max_new_tokens.unwrap_or(default_max.min(lm.context().saturating_sub(1)));
        let penalties =
            SamplingParams { repetition_penalty, presence_penalty, frequency_penalty, ..SamplingParams::GREEDY };
        let sampling = SamplingParams { temperature, top_k, top_p, min_p, ..penalties };
        let options = GenerateOptions { max_new_tokens, sampling, seed: self.seed, stop: self.stop.clone() };
        options.check(lm.context())?;
        // An invalid generation_config.json is an error here, as in evaluations.
        SamplingDefaults::read(lm.folder())?;
        Ok(options)
    }
}
