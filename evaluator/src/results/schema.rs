//! Results file `results_*.json`, with lm-eval's keys.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use crate::task::{DocCounts, TaskConfig, TaskScores};

/// Evaluated task.
pub struct TaskRun {
    /// Task configuration.
    pub config: TaskConfig,
    /// Number of few-shot examples.
    pub num_fewshot: usize,
    /// `generation_kwargs` after all overrides.
    pub generation_kwargs: Map<String, Json>,
    /// Scores and sample records of the task.
    pub scores: TaskScores,
}

/// All results of a run. `run` holds the metadata keys (`config`, `date`, `model_name`, ...).
#[derive(Clone, Debug, Default, Serialize)]
pub struct Results {
    /// Scores of each task and group.
    pub results: Map<String, Json>,
    /// Scores of the groups with an aggregate score.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub groups: Map<String, Json>,
    /// Data files and document counts of each task; an addition to lm-eval's keys.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub data: Map<String, Json>,
    /// Members of each group.
    pub group_subtasks: Map<String, Json>,
    /// Configuration of each task.
    pub configs: Map<String, Json>,
    /// Version of each task and group.
    pub versions: Map<String, Json>,
    /// Number of few-shot examples of each task.
    #[serde(rename = "n-shot")]
    pub n_shot: Map<String, Json>,
    /// `higher_is_better` of each metric, for each task.
    pub higher_is_better: Map<String, Json>,
    /// Document counts of each task: original, effective, skipped, empty, without a correct choice.
    #[serde(rename = "n-samples")]
    pub n_samples: Map<String, Json>,
    /// Task hash, computed over the hashes of all sample records.
    pub task_hashes: Map<String, Json>,
    /// Metadata of the run.
    #[serde(flatten)]
    pub run: Map<String, Json>,
}

impl TaskRun {
    /// Returns the effective configuration as JSON.
    pub fn config(&self) -> Json {
        Json::Object(self.config.dump(self.num_fewshot, &self.generation_kwargs))
    }
}

impl Results {
    /// Returns each finite score and standard error under `TASK/METRIC`, or `TASK/METRIC,FILTER` unless the filter is
    /// `none`.
    pub fn values(&self) -> BTreeMap<String, f64> {
        let mut values = BTreeMap::new();
        for (task, fields) in &self.results {
            for (key, value) in fields.as_object().into_iter().flatten() {
                let Some((metric, filter)) = key.split_once(',') else { continue };
                let name = if filter == "none" { metric } else { key };
                values.extend(value.as_f64().filter(|value| value.is_finite()).map(|v| (format!("{task}/{name}"), v)));
            }
        }
        values
    }
}

/// Scores of a task or group.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResultEntry {
    /// Name of the task or group.
    pub name: String,
    /// Display name in tables.
    pub alias: String,
    /// Number of scored documents.
    pub sample_len: usize,
    /// Metric, filter, value and standard error of each score.
    pub values: Vec<(String, String, f64, Option<f64>)>,
}

impl ResultEntry {
    /// Returns the scores of an evaluated task.
    pub(crate) fn of(run: &TaskRun) -> Self {
        let name = run.config.task.clone();
        let value = |m: &crate::task::MetricScore| (m.metric.clone(), m.filter.clone(), m.value, m.stderr);
        Self {
            alias: run.config.alias.clone().unwrap_or_else(|| name.clone()),
            name,
            sample_len: run.scores.sample_len,
            values: run.scores.metrics.iter().map(value).collect(),
        }
    }

    /// Returns value and standard error of a metric with a filter.
    pub(crate) fn get(&self, metric: &str, filter: &str) -> Option<(f64, Option<f64>)> {
        let found = self.values.iter().find(|(m, f, ..)| m == metric && f == filter);
        found.map(|(_, _, value, stderr)| (*value, *stderr))
    }

    /// Returns the entry as JSON with lm-eval's keys.
    pub(crate) fn json(&self) -> Json {
        let mut fields = Map::new();
        fields.insert("name".into(), json!(self.name));
        fields.insert("alias".into(), json!(self.alias));
        fields.insert("sample_len".into(), json!(self.sample_len));
        self.write_values(&mut fields);
        Json::Object(fields)
    }

    pub(crate) fn write_values(&self, fields: &mut Map<String, Json>) {
        for (metric, filter, value, stderr) in &self.values {
            fields.insert(format!("{metric},{filter}"), json!(value));
            let stderr = stderr.map_or_else(|| json!("N/A"), |stderr| json!(stderr));
            fields.insert(format!("{metric}_stderr,{filter}"), stderr);
        }
    }
}

impl Serialize for ResultEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json().serialize(serializer)
    }
}

/// Returns the document counts of a task for `n-samples`.
pub(crate) fn sample_counts(scores: &TaskScores) -> Json {
    let DocCounts { skipped, empty, no_target } = scores.counts;
    json!({
        "original": scores.original,
        "effective": scores.sample_len,
        "skipped": skipped,
        "empty": empty,
        "no_target": no_target,
    })
}
