//! Sampling of the next token, with transformers' steps.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};

use crate::request::GenerationSettings;
use candlewick_runtime::exit::ExitCode;

/// Sampling defaults of `generation_config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// Repetition penalty: divides positive logits of earlier tokens, multiplies negative ones.
    pub repetition_penalty: f32,
    /// Default `top_k`; 50 in transformers.
    pub top_k: usize,
    /// `top_p`, if the task has 1.
    pub top_p: f64,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self { repetition_penalty: 1.0, top_k: 50, top_p: 1.0 }
    }
}

/// Unsupported keys of `generation_config.json`, with their neutral values.
const UNKNOWN: [(&str, f64); 8] = [
    ("no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("min_p", 0.0),
    ("min_new_tokens", 0.0),
    ("num_beams", 1.0),
];

impl SamplingDefaults {
    /// Reads the defaults from a model folder. Unsupported settings are logged as warnings.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("generation_config.json");
        if !path.exists() {
            return Ok(Self::default());
        }
        let read = || -> Result<Map<String, Value>> {
            Ok(serde_json::from_slice(without_bom(&read_regular_file(&path, MAX_CONFIG_FILE_BYTES)?))?)
        };
        let config = read().with_context(|| format!("failed to read {}", path.display()))?;
        for (key, harmless) in UNKNOWN {
            if let Some(value) = config.get(key).and_then(Value::as_f64).filter(|value| *value != harmless) {
                tracing::warn!("{}: {key} = {value} has no effect here", path.display());
            }
        }
        let number = |key: &str| config.get(key).and_then(Value::as_f64);
        let of = Self::default();
        if let Some(penalty) = config.get("repetition_penalty").filter(|value| !value.is_null()) {
            ensure!(
                penalty.as_f64().is_some_and(|penalty| penalty > 0.0 && (penalty as f32).is_finite()),
                anyhow::anyhow!(
                    "failed to read {}: repetition_penalty is {penalty}, expected a number above 0; 1 is no penalty",
                    path.display()
                )
                .context(ExitCode::Data)
            );
        }
        Ok(Self {
            repetition_penalty: number("repetition_penalty").map_or(of.repetition_penalty, |penalty| penalty as f32),
            top_k: config.get("top_k").and_then(Value::as_u64).map_or(of.top_k, |k| k as usize),
            top_p: number("top_p").unwrap_or(of.top_p),
        })
    }
}

/// Sampler of the tokens of one generation.
#[derive(Clone, Debug)]
pub struct TokenSampler {
    penalty: f32,
    sampling: Option<Sampling>,
}

#[derive(Clone, Debug)]
struct Sampling {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    random: ChaCha8Rng,
}

impl TokenSampler {
    /// Creates a sampler of a task's settings, completed by `defaults`. The tokens depend on `seed` alone.
    pub fn new(settings: &GenerationSettings, defaults: SamplingDefaults, seed: [u8; 32]) -> Result<Self> {
        let GenerationSettings { do_sample, temperature, top_p, top_k, .. } = settings;
        let penalty = defaults.repetition_penalty;
        if !do_sample {
            return Ok(Self { penalty, sampling: None });
        }
        let valid = *temperature > 0.0 && temperature.is_finite() && *top_p > 0.0;
        ensure!(
            valid,
            anyhow::anyhow!(
                "failed to sample (do_sample=true) with temperature {temperature} and top_p {top_p}: both must be greater than \
                 0; do_sample=false takes the likeliest token"
            )
            .context(ExitCode::Usage)
        );
        let top_p = if *top_p < 1.0 { *top_p } else { defaults.top_p };
        let sampling = Sampling {
            temperature: *temperature,
            top_k: top_k.unwrap_or(defaults.top_k),
            top_p,
            random: ChaCha8Rng::from_seed(seed),
        };
        Ok(Self { penalty, sampling: Some(sampling) })
    }

    /// Returns true if the sampler is greedy and has no penalties.
    pub fn is_greedy(&self) -> bool {
        self.sampling.is_none() && self.penalty == 1.0
    }

    /// Samples a token and overwrites `logits`. `seen` are the tokens of the text so far.
    pub fn sample(&mut self, logits: &mut [f32], seen: &BTreeSet<u32>) -> u32 {
        if self.penalty != 1.0 {
            for id in seen {
                let logit = &mut logits[*id as usize];
                *logit = if *logit < 0.0 { *logit * self.penalty } else { *logit / self.penalty };
            }
        }
        match &mut self.sampling {
            None => argmax(logits),
            Some(sampling) => sampling.draw(logits),
        }
    }
}

/// Returns the index of the largest logit (argmax), the first of equal ones.
pub fn argmax(logits: &[f32]) -> u32 {
    let larger = |best: (usize, f32), (id, &logit): (usize, &f32)| if logit > best.1 { (id, logit) } else { best };
    logits.iter().enumerate().fold((0, f32::NEG_INFINITY), larger).0 as u32
}

impl Sampling {
    fn draw(&mut self, logits: &[f32]) -> u32 {
        let mut ids: Vec<usize> = (0..logits.len()).collect();
        ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        if self.top_k > 0 && self.top_k < ids.len() {
            // All tokens with at least the k-th logit.
            let least = logits[ids[self.top_k - 1]];
            ids.truncate(ids.partition_point(|id| logits[*id] >= least));
        }
        let max = f64::from(logits[ids[0]]);
        let weight = |id: &usize| ((f64::from(logits[*id]) - max) / self.temperature).exp();
        let mut weights: Vec<f64> = ids.iter().map(weight).collect();
        if self.top_p < 1.0 {
            let enough = self.top_p * weights.iter().sum::<f64>();
            let mut before = 0.0;
            let n_kept = weights.iter().take_while(|weight| {
                let is_kept = before < enough;
                before += **weight;
                is_kept
            });
            weights.truncate(n_kept.count().max(1));
        }
        let mut left = self.random.random::<f64>() * weights.iter().sum::<f64>();
        let drawn = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        ids[drawn.unwrap_or(weights.len() - 1)] as u32
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn settings(temperature: f64, top_p: f64, top_k: Option<usize>) -> GenerationSettings {
        GenerationSettings { until: Vec::new(), max_gen_toks: None, do_sample: true, temperature, top_p, top_k }
    }

    /// Returns the counts of four tokens in 4000 draws.
    fn draws(settings: &GenerationSettings, defaults: SamplingDefaults) -> [usize; 4] {
        let logits = [0.4f32, 0.3, 0.1, 0.2].map(f32::ln);
        let mut counts = [0; 4];
        let mut sampler = TokenSampler::new(settings, defaults, [1; 32]).unwrap();
        (0..4000).for_each(|_| counts[sampler.sample(&mut logits.clone(), &BTreeSet::new()) as usize] += 1);
        counts
    }

    #[track_caller]
    fn assert_shares(counts: [usize; 4], want: [f64; 4]) {
        for (count, want) in counts.into_iter().zip(want) {
            assert!((count as f64 / 4000.0 - want).abs() < 0.03 && (want > 0.0 || count == 0), "{counts:?}");
        }
    }

    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let all = SamplingDefaults::default();
        assert_shares(draws(&settings(1.0, 1.0, None), all), [0.4, 0.3, 0.1, 0.2]);
        assert_shares(draws(&settings(0.5, 1.0, None), all), [16.0 / 30.0, 9.0 / 30.0, 1.0 / 30.0, 4.0 / 30.0]);
        assert_shares(draws(&settings(1.0, 1.0, Some(2)), all), [4.0 / 7.0, 3.0 / 7.0, 0.0, 0.0]);
        assert_shares(draws(&settings(1.0, 0.75, None), all), [4.0 / 9.0, 3.0 / 9.0, 0.0, 2.0 / 9.0]);
        assert_shares(draws(&settings(1.0, 1.0, None), SamplingDefaults { top_k: 1, ..all }), [1.0, 0.0, 0.0, 0.0]);
        assert_shares(
            draws(&settings(1.0, 1.0, Some(0)), SamplingDefaults { top_p: 0.3, ..all }),
            [1.0, 0.0, 0.0, 0.0],
        );
    }

    #[test]
    fn a_repetition_penalty_lowers_tokens_that_have_occurred() {
        let greedy = GenerationSettings { do_sample: false, ..settings(0.0, 1.0, None) };
        let defaults = SamplingDefaults { repetition_penalty: 2.0, ..SamplingDefaults::default() };
        let mut sampler = TokenSampler::new(&greedy, defaults, [0; 32]).unwrap();
        assert!(!sampler.is_greedy());
        assert_eq!(sampler.sample(&mut [3.0, 2.0, -1.0], &BTreeSet::from([0])), 1);
        assert_eq!(sampler.sample(&mut [-3.0, -2.0, -2.5], &BTreeSet::from([1])), 2);
        assert_eq!(sampler.sample(&mut [1.0, 2.0, 2.0], &BTreeSet::new()), 1);
    }

    #[test]
    fn a_penalty_that_is_not_positive_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let read = |penalty: &str| {
            let text = format!("{{\"repetition_penalty\": {penalty}}}");
            std::fs::write(folder.path().join("generation_config.json"), text).unwrap();
            SamplingDefaults::read(folder.path())
        };
        assert_eq!(read("1.5").unwrap().repetition_penalty, 1.5);
        assert_eq!(read("null").unwrap().repetition_penalty, 1.0);
        for wrong in ["0", "-1", "\"2\"", "1e300"] {
            let error = format!("{:#}", read(wrong).unwrap_err());
            assert!(error.contains("repetition_penalty is") && error.contains("expected a number above 0"), "{error}");
        }
    }

    #[test]
    fn sampling_without_a_temperature_is_refused() {
        let error = TokenSampler::new(&settings(0.0, 1.0, None), SamplingDefaults::default(), [0; 32]).unwrap_err();
        assert!(format!("{error:#}").contains("temperature 0 and top_p 1: both must be greater than 0"));
    }
}
