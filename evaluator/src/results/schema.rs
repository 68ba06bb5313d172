//! The results as lm-eval writes them: `results_*.json`, key by key.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use crate::task::{DocCounts, TaskConfig, TaskScores};

/// Evaluated task.
pub struct TaskRun {
    /// Its configuration.
    pub config: TaskConfig,
    /// Number of few-shot examples.
    pub num_fewshot: usize,
    /// Its `generation_kwargs` as they were asked for.
    pub generation_kwargs: Map<String, Json>,
    /// Scores.
    pub scores: TaskScores,
}

/// All results of a run. Keys of the run itself (`config`, `date`, `model_name`, ...) go into `run`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Results {
    /// The scores of each task and group.
    pub results: Map<String, Json>,
    /// The scores of those groups that have any.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub groups: Map<String, Json>,
    /// The files and the number of documents of each task, which lm-eval does not list.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub data: Map<String, Json>,
    /// Members of each group.
    pub group_subtasks: Map<String, Json>,
    /// The configuration of each task.
    pub configs: Map<String, Json>,
    /// The version of each task and group.
    pub versions: Map<String, Json>,
    /// Number of few-shot examples of each task.
    #[serde(rename = "n-shot")]
    pub n_shot: Map<String, Json>,
    /// For each task whether a higher value of its metrics is better.
    pub higher_is_better: Map<String, Json>,
    /// How many documents there are, how many were scored, and how many have nothing to score or no right choice.
    #[serde(rename = "n-samples")]
    pub n_samples: Map<String, Json>,
    /// One hash for all records of a task.
    pub task_hashes: Map<String, Json>,
    /// Metadata of the run.
    #[serde(flatten)]
    pub run: Map<String, Json>,
}

impl TaskRun {
    /// The configuration as the run had it.
    pub fn config(&self) -> Json {
        Json::Object(self.config.dump(self.num_fewshot, &self.generation_kwargs))
    }
}

impl Results {
    /// Every finite score and error as `TASK/METRIC`, with the filter behind a comma unless it is `none`.
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

/// The scores of a task or a group as one JSON object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResultEntry {
    /// Name.
    pub name: String,
    /// Its name in tables.
    pub alias: String,
    /// Number of scored documents.
    pub sample_len: usize,
    /// The values: metric, filter, value, error.
    pub values: Vec<(String, String, f64, Option<f64>)>,
}

impl ResultEntry {
    /// The scores of a task.
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

    /// Value and error of a metric with a filter.
    pub(crate) fn get(&self, metric: &str, filter: &str) -> Option<(f64, Option<f64>)> {
        let found = self.values.iter().find(|(m, f, ..)| m == metric && f == filter);
        found.map(|(_, _, value, stderr)| (*value, *stderr))
    }

    /// As lm-eval writes it.
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

/// How many documents a task has, and what became of them.
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
