//! pass@k: the metric of HumanEval, computed by running all generated programs.

use super::sandbox;
use crate::task::error::ConfigError;
use crate::task::keys::{YamlMap, type_error};
use crate::task::metric::MetricValue;
use crate::task::response_value::ResponseValue;
use crate::task::unsafe_code::UnsafeCodePolicy;
use crate::task::yaml::TaskValue;

/// Metric pass@k: the probability that at least one of k programs passes, estimated from n ≥ k programs.
#[derive(Clone, Debug)]
pub(crate) struct GenerationMetric {
    ks: Vec<usize>,
}

impl GenerationMetric {
    /// Reads the keys of the metric.
    pub(super) fn read(keys: &YamlMap) -> Result<Self, ConfigError> {
        keys.deny_unknown(&["metric", "aggregation", "higher_is_better", "hf_evaluate", "k"])?;
        let entry = keys.get("k").ok_or_else(|| keys.error("pass_at_k needs the key `k`"))?;
        let ks = match &entry.node.value {
            TaskValue::List(_) => serde_json::from_value(entry.node.json()).ok(),
            _ => serde_json::from_value(entry.node.json()).ok().map(|k| vec![k]),
        };
        let ks = ks.filter(|ks: &Vec<usize>| ks.iter().all(|k| *k > 0));
        Ok(Self { ks: ks.ok_or_else(|| type_error(entry, "a number of programs, or a list of them"))? })
    }

    /// Returns `pass@k` of one document for each k.
    pub(crate) fn score(
        &self,
        tests: &str,
        programs: &ResponseValue,
        policy: UnsafeCodePolicy,
    ) -> Result<Vec<(String, MetricValue)>, String> {
        let ResponseValue::Many(programs) = programs else {
            return Err("pass_at_k needs all responses to a problem; remove take_first".into());
        };
        let mut n_passed = 0;
        for program in programs {
            n_passed += usize::from(sandbox::program_succeeds(&format!("{}\n{tests}", program.text()), policy)?);
        }
        let enough = self.ks.iter().filter(|k| **k <= programs.len());
        Ok(enough.map(|k| (format!("pass@{k}"), MetricValue::Number(pass_at(*k, n_passed, programs.len())))).collect())
    }
}

/// Computes 1 - C(n - c, k) / C(n, k), with c passed programs of n.
fn pass_at(k: usize, n_passed: usize, n: usize) -> f64 {
    if n - n_passed < k {
        return 1.0;
    }
    1.0 - (n - n_passed + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pass_at_k_is_the_unbiased_estimate() {
        assert_eq!(pass_at(1, 1, 4), 0.25);
        assert!((pass_at(2, 1, 4) - 0.5).abs() < 1e-12);
        assert_eq!(pass_at(2, 3, 4), 1.0);
        assert_eq!(pass_at(1, 0, 4), 0.0);
    }
}
