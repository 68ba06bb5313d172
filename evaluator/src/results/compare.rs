//! Paired comparison of two runs: metric differences with confidence intervals, and flipped samples.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_regular_file, read_regular_text_file};
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::paired::{IntervalMethod, paired};
use crate::output::sanitize_task_name;
use crate::task::{Aggregation, MetricValue, default_aggregation};

/// Sample records of one task in a run.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleFile {
    /// Task name.
    pub task: String,
    /// Path of `samples_TASK_TIME.jsonl`.
    pub path: PathBuf,
}

/// Comparison of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Difference of each metric, for each task and filter.
    pub differences: Vec<MetricDifference>,
    /// Metrics that cannot be compared, with the reason.
    pub left_out: Vec<SkippedMetric>,
    /// Tasks that are in one run only.
    pub unpaired: Vec<String>,
}

/// Metric that cannot be compared.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkippedMetric {
    /// Task name.
    pub task: String,
    /// Metric name.
    pub metric: String,
    /// Filter name.
    pub filter: String,
    /// Reason why the metric cannot be compared.
    pub why: String,
    /// True if only one run has the metric.
    pub in_one_run: bool,
}

/// Difference of one metric between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricDifference {
    /// Task name.
    pub task: String,
    /// Metric name.
    pub metric: String,
    /// Filter name.
    pub filter: String,
    /// Number of samples in both runs.
    pub n: usize,
    /// Number of samples in one run only, or with different prompts.
    pub n_unpaired: usize,
    /// Metric of the first run over the paired samples.
    pub a: f64,
    /// Metric of the second run over the paired samples.
    pub b: f64,
    /// Metric of the second run minus that of the first.
    pub difference: f64,
    /// 95 % confidence interval of the difference.
    pub interval: [f64; 2],
    /// Method of computing the confidence interval.
    pub interval_by: IntervalMethod,
    /// True if a higher value is better.
    pub higher_is_better: bool,
    /// Samples that are correct in one run and wrong in the other.
    pub flips: Vec<FlippedSample>,
}

/// Sample that is correct in one run and wrong in the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlippedSample {
    /// Index of the document.
    pub doc_id: usize,
    /// Value in the first run.
    pub a: f64,
    /// Value in the second run.
    pub b: f64,
}

/// Sample record: identification and metric values.
struct Record {
    doc_id: usize,
    doc_hash: String,
    values: BTreeMap<String, MetricValue>,
}

impl MetricDifference {
    /// Returns the improvement of the second run over the first; negative if it is worse.
    pub fn gain(&self) -> f64 {
        if self.higher_is_better { self.difference } else { -self.difference }
    }
}

/// Compares two runs: output folders with `samples_*.jsonl`, or two such files.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let (a, b) = (sample_files(a)?, sample_files(b)?);
    let is_pair = a.len() == 1 && b.len() == 1;
    let counterpart = |file: &SampleFile| b.iter().find(|other| is_pair || other.task == file.task);
    let mut comparison = Comparison { differences: Vec::new(), left_out: Vec::new(), unpaired: Vec::new() };
    for file in &a {
        match counterpart(file) {
            Some(other) => compare_task(file, other, &mut comparison)?,
            None => comparison.leave_out_task(file, "only the first run has the task")?,
        }
    }
    for file in b.iter().filter(|file| !is_pair && !a.iter().any(|other| other.task == file.task)) {
        comparison.leave_out_task(file, "only the second run has the task")?;
    }
    ensure!(comparison.unpaired.len() < a.len() + b.len(), "failed to compare: the two runs have no task in common");
    Ok(comparison)
}

impl Comparison {
    /// Adds a task that only one run has.
    fn leave_out_task(&mut self, file: &SampleFile, why: &str) -> Result<()> {
        for (filter, records) in &records(&file.path)? {
            self.left_out.extend(of_one_run(&file.task, filter, records, why));
        }
        self.unpaired.push(file.task.clone());
        Ok(())
    }
}

/// Returns the newest sample file of each task in a folder, or the file itself.
fn sample_files(path: &Path) -> Result<Vec<SampleFile>> {
    if path.is_file() {
        return Ok(vec![SampleFile { task: task_of(path).unwrap_or_default().0, path: path.to_owned() }]);
    }
    let mut newest: BTreeMap<String, (String, PathBuf)> = BTreeMap::new();
    collect(path, 3, &mut newest)?;
    if newest.is_empty() {
        bail!("failed to find samples_TASK_TIME.jsonl in {}: run with --log-samples", path.display());
    }
    Ok(newest.into_iter().map(|(task, (_, path))| SampleFile { task, path }).collect())
}

fn collect(folder: &Path, depth: usize, newest: &mut BTreeMap<String, (String, PathBuf)>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("failed to read {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("failed to read {}", folder.display()))?.path();
        if path.is_dir() && depth > 0 {
            collect(&path, depth - 1, newest)?;
        } else if let Some((task, time)) = task_of(&path)
            && newest.get(&task).is_none_or(|(known, _)| *known < time)
        {
            newest.insert(task, (time, path));
        }
    }
    Ok(())
}

/// Returns task and time of a file name `samples_TASK_TIME.jsonl`.
fn task_of(path: &Path) -> Option<(String, String)> {
    let name = path.file_name()?.to_str()?.strip_prefix("samples_")?.strip_suffix(".jsonl")?;
    let (task, time) = name.rsplit_once('_').unwrap_or((name, ""));
    Some((task.to_owned(), time.to_owned()))
}

fn compare_task(a: &SampleFile, b: &SampleFile, comparison: &mut Comparison) -> Result<()> {
    let (first, second) = (records(&a.path)?, records(&b.path)?);
    let metrics_of_task = MetricsOfTask::from_results_file(a);
    for (filter, ours) in &first {
        let Some(theirs) = second.get(filter) else {
            comparison.left_out.extend(of_one_run(&a.task, filter, ours, "only the first run has the filter"));
            continue;
        };
        let by_id: BTreeMap<usize, &Record> = theirs.iter().map(|record| (record.doc_id, record)).collect();
        let same =
            |record: &&Record| by_id.get(&record.doc_id).copied().filter(|other| other.doc_hash == record.doc_hash);
        let pairs: Vec<(&Record, &Record)> = ours.iter().filter_map(|record| Some((record, same(&record)?))).collect();
        let n_unpaired = ours.len() + theirs.len() - 2 * pairs.len();
        let mut metrics = metric_names(ours);
        metrics.extend(metric_names(theirs));
        metrics.sort();
        metrics.dedup();
        for metric in metrics {
            let names = [&a.task, &metric, filter];
            match difference(names, &metrics_of_task, &pairs, n_unpaired) {
                Ok(difference) => comparison.differences.push(difference),
                Err(why) => {
                    let in_one_run = has_values(ours, &metric) != has_values(theirs, &metric);
                    let [task, metric, filter] = names.map(String::clone);
                    comparison.left_out.push(SkippedMetric { task, metric, filter, why, in_one_run });
                }
            }
        }
    }
    for (filter, theirs) in second.iter().filter(|(filter, _)| !first.contains_key(*filter)) {
        comparison.left_out.extend(of_one_run(&a.task, filter, theirs, "only the second run has the filter"));
    }
    Ok(())
}

/// Returns one entry for each metric of a filter that only one run has.
fn of_one_run(task: &str, filter: &str, records: &[Record], why: &str) -> impl Iterator<Item = SkippedMetric> {
    let left_out = |metric| SkippedMetric {
        task: task.to_owned(),
        metric,
        filter: filter.to_owned(),
        why: why.to_owned(),
        in_one_run: true,
    };
    metric_names(records).into_iter().map(left_out)
}

/// Returns true if a record has a value of the metric.
fn has_values(records: &[Record], metric: &str) -> bool {
    records.iter().any(|record| record.values.get(metric).is_some_and(|value| *value != MetricValue::None))
}

/// Returns the metric names in the records.
fn metric_names(records: &[Record]) -> Vec<String> {
    let mut names: Vec<String> = records.iter().flat_map(|record| record.values.keys().cloned()).collect();
    names.sort();
    names.dedup();
    names
}

/// Computes the difference of one metric over the paired samples. `n_unpaired` samples are in one run only.
fn difference(
    names: [&String; 3],
    of_task: &MetricsOfTask,
    pairs: &[(&Record, &Record)],
    n_unpaired: usize,
) -> Result<MetricDifference, String> {
    let [task, metric, filter] = names.map(String::clone);
    let value =
        |(a, b): &(&Record, &Record)| Some((a.doc_id, a.values.get(&metric)?.clone(), b.values.get(&metric)?.clone()));
    let values: Vec<(usize, MetricValue, MetricValue)> =
        pairs.iter().filter_map(value).filter(|(_, a, b)| *a != MetricValue::None && *b != MetricValue::None).collect();
    if values.is_empty() {
        return Err(if pairs.is_empty() {
            "no document is in both runs"
        } else {
            "no document has the metric in both runs"
        }
        .into());
    }
    let (a, b): (Vec<MetricValue>, Vec<MetricValue>) = values.iter().map(|(_, a, b)| (a.clone(), b.clone())).unzip();
    let (aggregation, higher_is_better) = of_task.metric(&metric, &a)?;
    let found = paired(aggregation, &a, &b)?;
    let truth = |score: &MetricValue| score.number().filter(|value| *value == 0.0 || *value == 1.0);
    let flip = |(doc_id, a, b): &(usize, MetricValue, MetricValue)| {
        let (a, b) = (truth(a)?, truth(b)?);
        (a != b).then_some(FlippedSample { doc_id: *doc_id, a, b })
    };
    Ok(MetricDifference {
        task,
        metric,
        filter,
        n: values.len(),
        n_unpaired: n_unpaired + 2 * (pairs.len() - values.len()),
        a: found.a,
        b: found.b,
        difference: found.difference,
        interval: found.interval,
        interval_by: found.interval_by,
        higher_is_better,
        flips: values.iter().filter_map(flip).collect(),
    })
}

/// Metric settings of a task, from the results file of the same run.
#[derive(Default)]
struct MetricsOfTask {
    /// Entries of `metric_list`.
    listed: Vec<Json>,
    higher_is_better: Map<String, Json>,
}

impl MetricsOfTask {
    /// Reads `results_TIME.json` in the folder of `samples_TASK_TIME.jsonl`; empty if the file is missing.
    fn from_results_file(file: &SampleFile) -> Self {
        let Some((task, time)) = task_of(&file.path) else { return Self::default() };
        let results =
            read_regular_file(&file.path.with_file_name(format!("results_{time}.json")), MAX_GENERATED_FILE_BYTES).ok();
        let results: Option<Json> = results.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let is_it = |(name, _): &(&String, &Json)| sanitize_task_name(name) == task;
        let of = |key: &str| results.as_ref()?.get(key)?.as_object()?.iter().find(is_it).map(|(_, own)| own.clone());
        let listed = of("configs").and_then(|config| config.get("metric_list")?.as_array().cloned());
        let higher_is_better = of("higher_is_better").and_then(|directions| directions.as_object().cloned());
        Self { listed: listed.unwrap_or_default(), higher_is_better: higher_is_better.unwrap_or_default() }
    }

    /// Returns the aggregation and direction of a metric: from the task, else lm-eval's default, else inferred from
    /// the values.
    fn metric(&self, name: &str, values: &[MetricValue]) -> Result<(Aggregation, bool), String> {
        let listed = self.listed.iter().find(|entry| entry.get("metric").and_then(Json::as_str) == Some(name));
        let said = listed.and_then(|entry| Aggregation::from_name(entry.get("aggregation")?.as_str()?));
        let usual = default_aggregation(name);
        let fits = |aggregation: &Aggregation| aggregation.statistic(values).is_ok();
        let by_name = usual.map(|(aggregation, _)| aggregation).filter(fits);
        let aggregation = said.or(by_name).or_else(|| by_shape(values)).ok_or_else(|| match values.first() {
            Some(value) => format!("its values, such as {}, are aggregated by the task's own code", shown(value)),
            None => "it has no values".to_owned(),
        })?;
        if aggregation == Aggregation::Bypass {
            return Err("the metric bypass has no values".into());
        }
        let direction = |value: Option<&Json>| value.and_then(Json::as_bool);
        let said = direction(self.higher_is_better.get(name))
            .or_else(|| direction(listed.and_then(|entry| entry.get("higher_is_better"))));
        Ok((aggregation, said.or(usual.map(|(_, higher)| higher)).unwrap_or(true)))
    }
}

/// Infers the aggregation: the mean for numbers, the mean over all elements for lists of booleans.
fn by_shape(values: &[MetricValue]) -> Option<Aggregation> {
    let is_truths = |value: &MetricValue| match value {
        MetricValue::List(items) => items.iter().all(|item| matches!(item, MetricValue::Flag(_))),
        _ => false,
    };
    if values.iter().all(|value| value.number().is_some()) {
        return Some(Aggregation::Mean);
    }
    values.iter().all(is_truths).then_some(Aggregation::FlatMean)
}

/// Formats the beginning of a value, for a message.
fn shown(value: &MetricValue) -> String {
    let text = serde_json::to_string(value).unwrap_or_default();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// Reads the sample records of a file, grouped by filter.
fn records(path: &Path) -> Result<BTreeMap<String, Vec<Record>>> {
    let text = read_regular_text_file(path, MAX_GENERATED_FILE_BYTES);
    let text = text.with_context(|| format!("failed to read {}", path.display()))?;
    let mut records: BTreeMap<String, Vec<Record>> = BTreeMap::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("failed to read {}:{}", path.display(), i + 1);
        let fields: Map<String, Json> = serde_json::from_str(line).with_context(place)?;
        let record = record(&fields).with_context(place)?;
        let filter = fields.get("filter").and_then(Json::as_str).unwrap_or("none");
        records.entry(filter.to_owned()).or_default().push(record);
    }
    Ok(records)
}

fn record(fields: &Map<String, Json>) -> Result<Record> {
    let doc_id = fields.get("doc_id").and_then(Json::as_u64).context("the record has no number `doc_id`")?;
    let doc_hash = fields.get("doc_hash").and_then(Json::as_str).context("the record has no text `doc_hash`")?;
    let names = fields.get("metrics").and_then(Json::as_array).context("the record has no list `metrics`")?;
    let value = |name: &str| (name.to_owned(), fields.get(name).map_or(MetricValue::None, MetricValue::from));
    let values = names.iter().filter_map(Json::as_str).map(value);
    Ok(Record { doc_id: doc_id as usize, doc_hash: doc_hash.to_owned(), values: values.collect() })
}
