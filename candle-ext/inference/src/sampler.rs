//! Sampling of the next token: logit bias and penalties as in vLLM, then transformers' logits processors in their order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Parameters of the sampler, with transformers' names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 is greedy decoding.
    pub temperature: f64,
    /// Number of most probable tokens to sample from; 0 for all.
    pub top_k: usize,
    /// Nucleus sampling: the most probable tokens whose probabilities add up to `top_p`. 1 disables it.
    pub top_p: f64,
    /// Least probability of a token, relative to that of the most probable one. 0 disables it.
    pub min_p: f64,
    /// Divides positive logits of tokens that have occurred, and multiplies negative ones. 1 disables it.
    pub repetition_penalty: f64,
    /// Subtracted from the logits of tokens that have been generated. 0 disables it.
    pub presence_penalty: f64,
    /// Subtracted from the logit of a token once for each time it has been generated. 0 disables it.
    pub frequency_penalty: f64,
}

/// Numbers added to the logits of tokens, before the penalties.
pub type LogitBias = Arc<[(u32, f32)]>;

/// Error: a sampling parameter out of range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}, expected {expected}")]
pub struct SamplingParamError {
    /// Name of the parameter, as in [`SamplingParams`].
    pub name: &'static str,
    /// Value of the parameter.
    pub value: f64,
    /// Allowed values.
    pub expected: &'static str,
}

impl SamplingParams {
    /// Greedy decoding without a penalty.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };

    /// Validates the parameters.
    pub fn check(&self) -> Result<(), SamplingParamError> {
        let Self { temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, .. } = *self;
        let penalty_is_valid = repetition_penalty > 0.0 && (repetition_penalty as f32).is_normal();
        for (name, value, is_valid, expected) in [
            ("temperature", temperature, (0.0..=f64::MAX).contains(&temperature), "a number of at least 0"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "a number above 0 and at most 1"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1"),
            ("repetition_penalty", repetition_penalty, penalty_is_valid, "a number above 0; 1 is no penalty"),
            ("presence_penalty", presence_penalty, (-2.0..=2.0).contains(&presence_penalty), "a number from -2 to 2"),
            (
                "frequency_penalty",
                frequency_penalty,
                (-2.0..=2.0).contains(&frequency_penalty),
                "a number from -2 to 2",
            ),
        ] {
            if !is_valid {
                return Err(SamplingParamError { name, value, expected });
            }
        }
        Ok(())
    }
}

/// Sampler of the tokens of one generation.
#[derive(Clone, Debug)]
pub struct TokenSampler {
    params: SamplingParams,
    bias: LogitBias,
    random: ChaCha8Rng,
    /// Tokens of prompt and answer, if there is a repetition penalty.
    seen: BTreeSet<u32>,
    /// Counts of the generated tokens, if there is a presence or frequency penalty.
    n_generated: BTreeMap<u32, u32>,
}

impl TokenSampler {
    /// Creates a sampler of valid parameters. The tokens depend on `seed` and on the logits alone.
    pub fn new(params: SamplingParams, seed: [u8; 32]) -> Self {
        let random = ChaCha8Rng::from_seed(seed);
        Self { params, bias: LogitBias::default(), random, seen: BTreeSet::new(), n_generated: BTreeMap::new() }
    }

    /// Adds a bias to the logits.
    #[must_use]
    pub fn with_bias(self, bias: LogitBias) -> Self {
        Self { bias, ..self }
    }

    /// Returns true if the sampled token is the one with the largest logit.
    pub fn is_argmax(&self) -> bool {
        let SamplingParams { temperature, repetition_penalty, .. } = self.params;
        temperature == 0.0 && repetition_penalty == 1.0 && !self.counts_tokens() && self.bias.is_empty()
    }

    /// Adds tokens of the prompt to those that have occurred.
    pub fn observe(&mut self, ids: &[u32]) {
        if self.params.repetition_penalty != 1.0 {
            self.seen.extend(ids);
        }
    }

    /// Samples a token, which then has been generated. Overwrites `logits`. A logit of negative infinity excludes its
    /// token.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        self.adjust(logits);
        let token = match self.params.temperature {
            0.0 => argmax(logits),
            _ => self.draw(&self.params.weights(logits)),
        };
        self.count(token);
        token
    }

    /// Adds a generated token to those that have occurred.
    fn count(&mut self, token: u32) {
        self.observe(&[token]);
        if self.counts_tokens() {
            *self.n_generated.entry(token).or_default() += 1;
        }
    }

    fn counts_tokens(&self) -> bool {
        self.params.presence_penalty != 0.0 || self.params.frequency_penalty != 0.0
    }

    /// Adds the bias, then applies the penalties in vLLM's order: repetition, frequency, presence.
    fn adjust(&self, logits: &mut [f32]) {
        for (id, bias) in &*self.bias {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        let penalty = self.params.repetition_penalty as f32;
        for id in &self.seen {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
        for (id, n) in &self.n_generated {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit -= self.params.frequency_penalty as f32 * *n as f32;
                *logit -= self.params.presence_penalty as f32;
            }
        }
    }

    fn draw(&mut self, weights: &[(u32, f64)]) -> u32 {
        let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
        let mut left = self.random.random::<f64>() * sum;
        let drawn = weights.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave a rest after the last token.
        drawn.or(weights.last()).map_or(0, |(id, _)| *id)
    }
}

impl SamplingParams {
    /// Returns the tokens that may be sampled, with weights proportional to their probabilities.
    ///
    /// The steps are temperature, `top_k`, `top_p`, `min_p`, as in transformers' `_get_logits_processor`.
    fn weights(&self, logits: &[f32]) -> Vec<(u32, f64)> {
        let mut kept: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        if self.top_k > 0 && self.top_k < kept.len() {
            let (_, (_, least), _) = kept.select_nth_unstable_by(self.top_k - 1, |a, b| b.1.total_cmp(&a.1));
            // All tokens with at least the k-th logit.
            let least = *least;
            kept = (0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit >= least).collect();
        }
        let max = f64::from(kept.iter().fold(f32::NEG_INFINITY, |max, (_, logit)| max.max(*logit)));
        let weight = |(id, logit): (u32, f32)| (id, ((f64::from(logit) - max) / self.temperature).exp());
        let mut weights: Vec<(u32, f64)> = kept.into_iter().map(weight).collect();
        if self.top_p < 1.0 {
            keep_nucleus(&mut weights, self.top_p);
        }
        // The most probable token has the weight 1, an excluded one 0.
        weights.retain(|(_, weight)| *weight > 0.0 && *weight >= self.min_p);
        weights
    }
}

/// Keeps the most probable tokens, up to the one with which their probabilities reach `top_p`.
fn keep_nucleus(weights: &mut Vec<(u32, f64)>, top_p: f64) {
    weights.sort_by(|a, b| b.1.total_cmp(&a.1));
    let enough = top_p * weights.iter().map(|(_, weight)| weight).sum::<f64>();
    let mut before = 0.0;
    let n_kept = weights.iter().take_while(|(_, weight)| {
        let is_kept = before < enough;
        before += weight;
        is_kept
    });
    weights.truncate(n_kept.count().max(1));
}

/// Returns the index of the largest logit (argmax), the first of equal ones.
pub fn argmax(logits: &[f32]) -> u32 {
    let larger = |best: (usize, f32), (id, &logit): (usize, &f32)| if logit > best.1 { (id, logit) } else { best };
    logits.iter().enumerate().fold((0, f32::NEG_INFINITY), larger).0 as u32
}

/// Returns the seed of the generation `index` of a request with the seed `seed`.
pub fn seed_of(seed: u64, index: u64) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&index.to_le_bytes());
    bytes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    const SAMPLED: SamplingParams = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };

    /// Returns the counts of four tokens in 4000 draws.
    fn draws(params: SamplingParams) -> [usize; 4] {
        let logits = [0.4f32, 0.3, 0.1, 0.2].map(f32::ln);
        let mut counts = [0; 4];
        let mut sampler = TokenSampler::new(params, [1; 32]);
        (0..4000).for_each(|_| counts[sampler.sample(&mut logits.clone()) as usize] += 1);
        counts
    }

    #[track_caller]
    fn assert_frequencies(counts: [usize; 4], want: [f64; 4]) {
        for (count, want) in counts.into_iter().zip(want) {
            assert!((count as f64 / 4000.0 - want).abs() < 0.03 && (want > 0.0 || count == 0), "{counts:?}");
        }
    }

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_probable() {
        assert_frequencies(draws(SAMPLED), [0.4, 0.3, 0.1, 0.2]);
        let cooler = SamplingParams { temperature: 0.5, ..SAMPLED };
        assert_frequencies(draws(cooler), [16.0 / 30.0, 9.0 / 30.0, 1.0 / 30.0, 4.0 / 30.0]);
        assert_frequencies(draws(SamplingParams { top_k: 2, ..SAMPLED }), [4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0]);
        assert_frequencies(draws(SamplingParams { top_p: 0.75, ..SAMPLED }), [4.0 / 9.0, 3.0 / 9.0, 0.0, 2.0 / 9.0]);
        assert_frequencies(draws(SamplingParams { min_p: 0.6, ..SAMPLED }), [4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0]);
        assert_frequencies(draws(SamplingParams { top_p: 0.3, ..SAMPLED }), [1.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn a_repetition_penalty_lowers_tokens_that_have_occurred() {
        let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::GREEDY };
        let after = |seen: &[u32]| {
            let mut sampler = TokenSampler::new(params, [0; 32]);
            sampler.observe(seen);
            sampler
        };
        assert!(!after(&[]).is_argmax());
        assert_eq!(after(&[0]).sample(&mut [3.0, 2.0, -1.0]), 1);
        assert_eq!(after(&[1]).sample(&mut [-3.0, -2.0, -2.5]), 2);
        let mut sampler = after(&[]);
        let sampled: Vec<u32> = (0..3).map(|_| sampler.sample(&mut [1.0, 1.5, 1.9])).collect();
        assert_eq!(sampled, [2, 1, 0]);
    }

    #[test]
    fn presence_and_frequency_penalties_lower_generated_tokens_alone() {
        let sampled = |params: SamplingParams, logits: [f32; 3]| {
            let mut sampler = TokenSampler::new(params, [0; 32]);
            assert!(!sampler.is_argmax());
            sampler.observe(&[0]);
            (0..4).map(|_| sampler.sample(&mut logits.clone())).collect::<Vec<u32>>()
        };
        let presence = SamplingParams { presence_penalty: 0.5, ..SamplingParams::GREEDY };
        // The prompt's token 0 has no penalty, and a second occurrence adds none.
        assert_eq!(sampled(presence, [2.0, 1.8, 1.4]), [0, 1, 0, 0]);
        let frequency = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::GREEDY };
        assert_eq!(sampled(frequency, [2.0, 1.8, 1.4]), [0, 1, 0, 2]);
        let negative = SamplingParams { presence_penalty: -1.0, ..SamplingParams::GREEDY };
        assert_eq!(sampled(negative, [2.0, 1.8, 1.4]), [0; 4]);
    }

    #[test]
    fn a_bias_excludes_and_forces_tokens() {
        let logits = [1.0f32, 3.0, 2.0];
        let sample = |params: SamplingParams, bias: &[(u32, f32)]| {
            let mut sampler = TokenSampler::new(params, [0; 32]).with_bias(bias.into());
            (0..100).map(|_| sampler.sample(&mut logits.clone())).collect::<BTreeSet<u32>>()
        };
        for params in [SamplingParams::GREEDY, SAMPLED] {
            assert_eq!(sample(params, &[(0, 100.0), (9, 100.0)]), BTreeSet::from([0]));
        }
        assert_eq!(sample(SamplingParams::GREEDY, &[(1, -100.0)]), BTreeSet::from([2]));
        assert_eq!(sample(SAMPLED, &[(1, -100.0)]), BTreeSet::from([0, 2]));
        let only_one = SamplingParams { top_k: 2, ..SAMPLED };
        assert_eq!(sample(only_one, &[(1, f32::NEG_INFINITY), (2, f32::NEG_INFINITY)]), BTreeSet::from([0]));
    }

    /// Compares probabilities with those of a fixture. Ours are f64, so the tolerance is 1e-5.
    fn check_fixture(name: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() >= 8);
        for case in &cases {
            let number = |key: &str| case.get(key).map_or(0.0, |value| value.as_f64().unwrap());
            let ids = |key: &str| -> Vec<u32> {
                serde_json::from_value(case.get(key).cloned().unwrap_or_else(|| json!([]))).unwrap()
            };
            let params = SamplingParams {
                temperature: number("temperature"),
                top_k: case["top_k"].as_u64().unwrap() as usize,
                top_p: number("top_p"),
                min_p: number("min_p"),
                repetition_penalty: number("repetition_penalty"),
                presence_penalty: number("presence_penalty"),
                frequency_penalty: number("frequency_penalty"),
            };
            let bias = case.get("logit_bias").cloned().unwrap_or_else(|| json!([]));
            let bias: Vec<(u32, f32)> = serde_json::from_value(bias).unwrap();
            let mut logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
            let want: Vec<f64> = serde_json::from_value(case["probabilities"].clone()).unwrap();
            let mut sampler = TokenSampler::new(params, [0; 32]).with_bias(bias.into());
            sampler.observe(&ids("seen"));
            ids("generated").into_iter().for_each(|id| sampler.count(id));
            sampler.adjust(&mut logits);
            let weights = params.weights(&logits);
            let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
            let mut found = vec![0.0; logits.len()];
            weights.iter().for_each(|(id, weight)| found[*id as usize] = weight / sum);
            for (id, (found, want)) in found.iter().zip(&want).enumerate() {
                let is_kept_by_both = (*found > 0.0) == (*want > 0.0);
                assert!(is_kept_by_both && (found - want).abs() < 1e-5, "token {id}: {found}, {want} in {params:?}");
            }
        }
    }

    #[test]
    fn probabilities_equal_those_of_transformers() {
        check_fixture("sampling.json");
    }

    #[test]
    fn probabilities_with_penalties_follow_the_definitions_of_openai_and_vllm() {
        check_fixture("penalties.json");
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        SAMPLED.check().unwrap();
        for (params, want) in [
            (
                SamplingParams { temperature: f64::NAN, ..SAMPLED },
                "temperature is NaN, expected a number of at least 0",
            ),
            (SamplingParams { top_p: 0.0, ..SAMPLED }, "top_p is 0"),
            (SamplingParams { top_p: 1.5, ..SAMPLED }, "top_p is 1.5"),
            (SamplingParams { min_p: -0.1, ..SAMPLED }, "min_p is -0.1"),
            (SamplingParams { repetition_penalty: 0.0, ..SAMPLED }, "repetition_penalty is 0"),
            (SamplingParams { repetition_penalty: 1e300, ..SAMPLED }, "repetition_penalty is 1"),
            (
                SamplingParams { presence_penalty: 2.5, ..SAMPLED },
                "presence_penalty is 2.5, expected a number from -2 to 2",
            ),
            (SamplingParams { frequency_penalty: f64::NAN, ..SAMPLED }, "frequency_penalty is NaN"),
        ] {
            let error = params.check().unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
