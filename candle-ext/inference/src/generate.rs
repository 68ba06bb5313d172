//! GenerationPlan: continues one prompt, token by token, with a KV cache.

use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use candle_core::Tensor;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candlewick_ops::to_host;
use candlewick_parallel::{Engine, KvCache};
use serde::Serialize;

use candlewick_runtime::exit::ExitCode;

/// The choice of the next token, and the length of the answer.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The most tokens to generate. The model's context may end the answer before.
    pub max_new_tokens: usize,
    /// 0 takes the likeliest token; above, the logits are divided by it before sampling.
    pub temperature: f64,
    /// Samples only from the likeliest tokens whose probabilities reach this sum. 1 means all.
    pub top_p: f64,
    /// Seeds the sampling.
    pub seed: u64,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self { max_new_tokens: 64, temperature: 0.0, top_p: 1.0, seed: 42 }
    }
}

/// The duration of a generation. Loading the model and reading the prompt are not in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Timings {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Seconds until the first new token was chosen.
    pub prompt_time: f64,
    /// New tokens, without the stop token that ended them.
    pub new_tokens: usize,
    /// Seconds for those after the first.
    pub decode_time: f64,
    /// `new_tokens` over both times.
    pub tokens_per_second: f64,
}

/// The reason why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose a stop token.
    Stop,
    /// `max_new_tokens` were generated.
    Length,
    /// The model's context is full.
    Context,
    /// The receiver of the tokens asked to stop.
    Interrupted,
}

/// The tokens of one answer.
#[derive(Clone, Debug)]
pub struct GeneratedTokens {
    /// The new tokens, without the stop token that ended them.
    pub tokens: Vec<u32>,
    /// The reason for the end.
    pub finish_reason: FinishReason,
    /// The duration.
    pub timings: Timings,
}

/// Continues `prompt`, hands each new token to `on_token`, and ends before one of `stop`.
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
    let mut sampler = LogitsProcessor::from_sampling(options.seed, options.sampling());
    let cache = KvCache::new(engine.model().n_blocks(), prompt.len() + n_max);
    let (mut tokens, mut fresh, mut finish_reason) = (Vec::new(), prompt.to_vec(), at_most);
    let began = Instant::now();
    let mut prompt_time = None;
    while tokens.len() < n_max {
        let logits = engine.next_logits(&fresh, cache.n_tokens(), &cache).context("failed to compute logits")?;
        check_finite(&logits)?;
        let token = sampler.sample(&logits).context("failed to choose the next token")?;
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

/// Refuses a prompt that leaves no room for an answer in a context of `context` tokens.
fn check_prompt(prompt: &[u32], context: usize) -> Result<()> {
    ensure!(!prompt.is_empty(), anyhow!("failed to generate: the prompt has no tokens").context(ExitCode::Data));
    ensure!(
        prompt.len() < context,
        anyhow!(
            "failed to generate: the prompt has {} tokens, but the model's context has {context} \
             (max_position_embeddings) for prompt and answer; shorten the prompt",
            prompt.len()
        )
        .context(ExitCode::Data)
    );
    Ok(())
}

/// Refuses logits of which one is NaN or infinite: a token chosen from them means nothing.
pub(crate) fn check_finite(logits: &Tensor) -> Result<()> {
    // One value that is not finite makes the sum so, and a sum is all that leaves a GPU.
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
    /// Refuses numbers that cannot be sampled with, and more new tokens than a context of `context` tokens holds.
    pub fn check(&self, context: usize) -> Result<()> {
        let Self { max_new_tokens, temperature, top_p, .. } = self;
        let refuse = |problem: String| Err(anyhow!("failed to start: {problem}").context(ExitCode::Usage));
        if !(0.0..=f64::MAX).contains(temperature) {
            return refuse(format!("--temperature {temperature}: expected a number of at least 0"));
        }
        if !(*top_p > 0.0 && *top_p <= 1.0) {
            return refuse(format!("--top-p {top_p}: expected a number above 0 and at most 1"));
        }
        if *max_new_tokens >= context {
            return refuse(format!(
                "--max-new-tokens {max_new_tokens}: the model's context has {context} tokens, of which the prompt needs \
                 at least 1"
            ));
        }
        Ok(())
    }

    fn sampling(&self) -> Sampling {
        match (self.temperature, self.top_p) {
            (temperature, _) if temperature <= 0.0 => Sampling::ArgMax,
            (temperature, p) if p >= 1.0 => Sampling::All { temperature },
            (temperature, p) => Sampling::TopP { p, temperature },
        }
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
        for (options, want) in [
            (GenerateOptions { temperature: f64::NAN, ..good.clone() }, "--temperature NaN"),
            (GenerateOptions { temperature: -1.0, ..good.clone() }, "--temperature -1"),
            (GenerateOptions { top_p: 0.0, ..good.clone() }, "--top-p 0"),
            (GenerateOptions { top_p: f64::NAN, ..good.clone() }, "--top-p NaN"),
            (GenerateOptions { max_new_tokens: 99_999_999_999, ..good.clone() }, "context has 100 tokens"),
        ] {
            let error = options.check(100).unwrap_err();
            assert!(format!("{error:#}").contains(want), "{error:#}");
            assert_eq!(candlewick_runtime::exit::classify(&error), ExitCode::Usage);
        }
    }
}
