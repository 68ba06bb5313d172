//! Sampling of the next token, with transformers' logits processors in their order.

use std::collections::BTreeSet;

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
}

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
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 };

    /// Validates the parameters.
    pub fn check(&self) -> Result<(), SamplingParamError> {
        let Self { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let penalty_is_valid = repetition_penalty > 0.0 && (repetition_penalty as f32).is_normal();
        for (name, value, is_valid, expected) in [
            ("temperature", temperature, (0.0..=f64::MAX).contains(&temperature), "a number of at least 0"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "a number above 0 and at most 1"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1"),
            ("repetition_penalty", repetition_penalty, penalty_is_valid, "a number above 0; 1 is no penalty"),
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
    random: ChaCha8Rng,
    /// Tokens that have occurred, if there is a penalty on them.
    seen: BTreeSet<u32>,
}

impl TokenSampler {
    /// Creates a sampler of valid parameters. The tokens depend on `seed` and on the logits alone.
    pub fn new(params: SamplingParams, seed: [u8; 32]) -> Self {
        Self { params, random: ChaCha8Rng::from_seed(seed), seen: BTreeSet::new() }
    }

    /// Returns true if the sampled token is the one with the largest logit.
    pub fn is_argmax(&self) -> bool {
        self.params.temperature == 0.0 && !self.has_penalty()
    }

    /// Adds tokens of the prompt to those that have occurred.
    pub fn observe(&mut self, ids: &[u32]) {
        if self.has_penalty() {
            self.seen.extend(ids);
        }
    }

    /// Samples a token, which then has occurred. Overwrites `logits`.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        self.penalize(logits);
        let token = match self.params.temperature {
            0.0 => argmax(logits),
            _ => self.draw(&self.params.weights(logits)),
        };
        self.observe(&[token]);
        token
    }

    fn has_penalty(&self) -> bool {
        self.params.repetition_penalty != 1.0
    }

    fn penalize(&self, logits: &mut [f32]) {
        let penalty = self.params.repetition_penalty as f32;
        for id in &self.seen {
            if let Some(logit) = logits.get_mut(*id as usize) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
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
        // The most probable token has the weight 1.
        weights.retain(|(_, weight)| *weight >= self.min_p);
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

    use serde_json::Value;

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

    /// The fixture has the probabilities of transformers' processors in f32. Ours are f64, so the tolerance is 1e-5.
    #[test]
    fn probabilities_equal_those_of_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sampling.json");
        let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() >= 8);
        for case in &cases {
            let number = |key: &str| case[key].as_f64().unwrap();
            let params = SamplingParams {
                temperature: number("temperature"),
                top_k: case["top_k"].as_u64().unwrap() as usize,
                top_p: number("top_p"),
                min_p: number("min_p"),
                repetition_penalty: number("repetition_penalty"),
            };
            let mut logits: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
            let seen: Vec<u32> = serde_json::from_value(case["seen"].clone()).unwrap();
            let want: Vec<f64> = serde_json::from_value(case["probabilities"].clone()).unwrap();
            let mut sampler = TokenSampler::new(params, [0; 32]);
            sampler.observe(&seen);
            sampler.penalize(&mut logits);
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
        ] {
            let error = params.check().unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
