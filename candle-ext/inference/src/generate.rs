//! Generation of one completion, token by token, with a KV cache.

use std::fmt;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::{D, Tensor};
use candlewick_model::{LengthClass, Model};
use candlewick_ops::to_host;
use candlewick_parallel::{Engine, KvCache};
use candlewick_text::quantity::counted;
use serde::{Deserialize, Serialize};

use crate::sampler::{SamplingParamError, SamplingParams, TokenSampler, seed_of};
use candlewick_runtime::exit::ExitCode;

/// Sampling, length and stop options of a generation.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Maximum number of new tokens. The context length may end the generation earlier.
    pub max_new_tokens: usize,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Seed of sampling.
    pub seed: u64,
    /// Stop strings, which the text excludes. EOS always ends a generation.
    pub stop: Vec<String>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 64, sampling: SamplingParams::GREEDY, seed: 42, stop: Vec::new() }
    }
}

/// Timings of a generation, without model loading.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Seconds until the first new token (prefill).
    pub prompt_time: f64,
    /// Number of new tokens, excluding the stop token.
    pub new_tokens: usize,
    /// Seconds for the tokens after the first (decode).
    pub decode_time: f64,
    /// New tokens divided by prefill and decode time.
    pub tokens_per_second: f64,
}

impl fmt::Display for Timings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prompt_tokens, prompt_time, new_tokens, tokens_per_second, .. } = self;
        write!(
            f,
            "{}, {tokens_per_second:.1} tokens/s (prompt: {}, {prompt_time:.2} s)",
            counted(*new_tokens, "token"),
            counted(*prompt_tokens, "token")
        )
    }
}

/// Reason why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model generated a stop token.
    Stop,
    /// `max_new_tokens` were generated.
    Length,
    /// The context length was reached.
    Context,
    /// The callback requested a stop.
    Interrupted,
}

/// Result of a generation, as tokens.
#[derive(Clone, Debug)]
pub struct GeneratedTokens {
    /// New tokens, excluding the stop token.
    pub tokens: Vec<u32>,
    /// Reason why the generation ended.
    pub finish_reason: FinishReason,
    /// Timings.
    pub timings: Timings,
}

/// Generates a completion of `prompt`, passes each new token to `on_token`, and ends before a token of `stop`.
pub fn generate(
    engine: &Engine,
    prompt: &[u32],
    stop: &[u32],
    options: &GenerateOptions,
    on_token: &mut dyn FnMut(u32) -> Result<ControlFlow<()>>,
) -> Result<GeneratedTokens> {
    let context = engine.model().config().max_positions();
    check_prompt(prompt, context)?;
    let n_left = context - prompt.len();
    let n_max = options.max_new_tokens.min(n_left);
    let at_most = if n_max < options.max_new_tokens { FinishReason::Context } else { FinishReason::Length };
    let mut sampler = TokenSampler::new(options.sampling, seed_of(options.seed, 0));
    sampler.observe(prompt);
    let class = length_class(engine.model(), prompt.len(), n_max);
    let cache = KvCache::new(engine.model().n_blocks(), prompt.len() + n_max);
    let (mut tokens, mut fresh, mut finish_reason) = (Vec::new(), prompt.to_vec(), at_most);
    let began = Instant::now();
    let mut prompt_time = None;
    while tokens.len() < n_max {
        let logits = engine.next_logits(&fresh, cache.n_tokens(), class, &cache).context("failed to compute logits")?;
        check_finite(&logits)?;
        let token = next_token(&mut sampler, &logits).context("failed to choose the next token")?;
        prompt_time.get_or_insert_with(|| began.elapsed().as_secs_f64());
        if stop.contains(&token) {
            finish_reason = FinishReason::Stop;
            break;
        }
        tokens.push(token);
        if on_token(token)?.is_break() {
            finish_reason = FinishReason::Interrupted;
            break;
        }
        fresh = vec![token];
    }
    let timings = timings(prompt.len(), tokens.len(), prompt_time.unwrap_or(0.0), began);
    Ok(GeneratedTokens { tokens, finish_reason, timings })
}

/// Returns the RoPE frequencies of a generation of up to `n_max` tokens. The model reads all of them but the last.
pub(crate) fn length_class(model: &Model, n_prompt: usize, n_max: usize) -> LengthClass {
    model.length_class(n_prompt + n_max.saturating_sub(1))
}

fn next_token(sampler: &mut TokenSampler, logits_v: &Tensor) -> Result<u32> {
    Ok(match sampler.is_argmax() {
        true => to_host(&logits_v.argmax(D::Minus1)?)?.to_scalar()?,
        false => sampler.sample(&mut to_host(logits_v)?.to_vec1()?),
    })
}

/// Rejects an empty prompt, and one that fills the context of `context` tokens.
fn check_prompt(prompt: &[u32], context: usize) -> Result<()> {
    ensure!(!prompt.is_empty(), anyhow!("failed to generate: the prompt has no tokens").context(ExitCode::Data));
    ensure!(
        prompt.len() < context,
        anyhow!(
            "failed to generate: the prompt has {}, but the model's context has {context} (max_position_embeddings) for \
             prompt and answer; shorten the prompt",
            counted(prompt.len(), "token")
        )
        .context(ExitCode::Data)
    );
    Ok(())
}

/// Rejects logits with NaN or infinity.
pub(crate) fn check_finite(logits: &Tensor) -> Result<()> {
    // A single non-finite value makes the sum non-finite, and only the sum is copied from the GPU.
    let sum = to_host(&logits.sum_all()?)?.to_scalar::<f32>()?;
    ensure!(
        sum.is_finite(),
        anyhow!(
            "failed to generate: the model's logits are not finite; its weights hold NaN, or numbers too large for the \
             dtype (try --dtype f32)"
        )
        .context(ExitCode::NonFinite)
    );
    Ok(())
}

fn timings(prompt_tokens: usize, new_tokens: usize, prompt_time: f64, began: Instant) -> Timings {
    let time = began.elapsed().as_secs_f64();
    Timings {
        prompt_tokens,
        prompt_time,
        new_tokens,
        decode_time: time - prompt_time,
        tokens_per_second: new_tokens as f64 / time,
    }
}

impl GenerateOptions {
    /// Validates the options for a context of `context` tokens.
    ///
    /// # Errors
    /// If a value is out of range, or `max_new_tokens` exceeds the context.
    pub fn check(&self, context: usize) -> Result<()> {
        let Self { max_new_tokens, sampling, stop, .. } = self;
        let refuse = |problem: String| Err(anyhow!("failed to start: {problem}").context(ExitCode::Usage));
        if let Err(SamplingParamError { name, value, expected }) = sampling.check() {
            return refuse(format!("--{} {value}: expected {expected}", name.replace('_', "-")));
        }
        if stop.iter().any(String::is_empty) {
            return refuse("--stop '': expected a text that is not empty".to_owned());
        }
        if *max_new_tokens >= context {
            return refuse(format!(
                "--max-new-tokens {max_new_tokens}: the model's context has {}, of which the prompt needs at least 1",
                counted(context, "token")
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn logits_that_are_not_finite_are_refused() {
        let check = |values: &[f32]| check_finite(&Tensor::new(values, &Device::Cpu).unwrap());
        assert!(check(&[1.0, -2.0, 1e30]).is_ok());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = check(&[1.0, bad, 2.0]).unwrap_err();
            assert_eq!(candlewick_runtime::exit::classify(&error), ExitCode::NonFinite, "{bad}");
        }
    }

    #[test]
    fn numbers_that_cannot_be_sampled_with_are_refused() {
        let good = GenerateOptions::default();
        assert!(good.check(100).is_ok());
        let sampling = |sampling| GenerateOptions { sampling, ..good.clone() };
        let greedy = SamplingParams::GREEDY;
        for (options, want) in [
            (sampling(SamplingParams { temperature: f64::NAN, ..greedy }), "--temperature NaN"),
            (sampling(SamplingParams { temperature: -1.0, ..greedy }), "--temperature -1"),
            (sampling(SamplingParams { top_p: 0.0, ..greedy }), "--top-p 0"),
            (sampling(SamplingParams { min_p: 2.0, ..greedy }), "--min-p 2"),
            (sampling(SamplingParams { repetition_penalty: 0.0, ..greedy }), "--repetition-penalty 0"),
            (sampling(SamplingParams { frequency_penalty: 3.0, ..greedy }), "--frequency-penalty 3"),
            (GenerateOptions { stop: vec![String::new()], ..good.clone() }, "--stop ''"),
            (GenerateOptions { max_new_tokens: 99_999_999_999, ..good.clone() }, "context has 100 tokens"),
        ] {
            let error = options.check(100).unwrap_err();
            assert!(format!("{error:#}").contains(want), "{error:#}");
            assert_eq!(candlewick_runtime::exit::classify(&error), ExitCode::Usage);
        }
    }
}
