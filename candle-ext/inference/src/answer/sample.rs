//! Sampling parameters of a request, completed by `generation_config.json`.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use serde_json::{Map, Value};

use crate::request::GenerationSettings;
use crate::sampler::SamplingParams;
use candlewick_runtime::exit::ExitCode;

/// Sampling defaults of `generation_config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// Repetition penalty: divides positive logits of earlier tokens, multiplies negative ones.
    pub repetition_penalty: f64,
    /// Default `top_k`; 50 in transformers.
    pub top_k: usize,
    /// `top_p`, if the task has 1.
    pub top_p: f64,
    /// Least probability of a token, relative to that of the most probable one.
    pub min_p: f64,
}

impl Default for SamplingDefaults {
    fn default() -> Self {
        Self { repetition_penalty: 1.0, top_k: 50, top_p: 1.0, min_p: 0.0 }
    }
}

/// Unsupported keys of `generation_config.json`, with their neutral values.
const UNKNOWN: [(&str, f64); 7] = [
    ("no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
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
            repetition_penalty: number("repetition_penalty").unwrap_or(of.repetition_penalty),
            top_k: config.get("top_k").and_then(Value::as_u64).map_or(of.top_k, |k| k as usize),
            top_p: number("top_p").unwrap_or(of.top_p),
            min_p: number("min_p").unwrap_or(of.min_p),
        })
    }
}

impl SamplingDefaults {
    /// Returns the sampling parameters of a task's settings, completed by these defaults.
    pub fn params(&self, settings: &GenerationSettings) -> Result<SamplingParams> {
        let GenerationSettings { do_sample, temperature, top_p, top_k, .. } = settings;
        let greedy = SamplingParams { repetition_penalty: self.repetition_penalty, ..SamplingParams::GREEDY };
        if !do_sample {
            return Ok(greedy);
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
        let top_p = if *top_p < 1.0 { *top_p } else { self.top_p };
        let (top_k, min_p) = (top_k.unwrap_or(self.top_k), self.min_p);
        Ok(SamplingParams { temperature: *temperature, top_k, top_p, min_p, ..greedy })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn settings(temperature: f64, top_p: f64, top_k: Option<usize>) -> GenerationSettings {
        GenerationSettings { until: Vec::new(), max_gen_toks: None, do_sample: true, temperature, top_p, top_k }
    }

    #[test]
    fn defaults_complete_the_settings_of_a_task() {
        let defaults = SamplingDefaults { repetition_penalty: 1.5, top_k: 40, top_p: 0.9, min_p: 0.1 };
        let params = |settings: &GenerationSettings| defaults.params(settings).unwrap();
        let penalized = SamplingParams { repetition_penalty: 1.5, ..SamplingParams::GREEDY };
        let own = SamplingParams { temperature: 0.7, top_k: 3, top_p: 0.5, min_p: 0.1, ..penalized };
        assert_eq!(params(&settings(0.7, 0.5, Some(3))), own);
        assert_eq!(params(&settings(0.7, 1.0, None)), SamplingParams { top_k: 40, top_p: 0.9, ..own });
        let greedy = GenerationSettings { do_sample: false, ..settings(0.7, 0.5, Some(3)) };
        assert_eq!(params(&greedy), penalized);
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
        let error = SamplingDefaults::default().params(&settings(0.0, 1.0, None)).unwrap_err();
        assert!(format!("{error:#}").contains("temperature 0 and top_p 1: both must be greater than 0"));
    }
}
