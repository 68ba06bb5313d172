//! Two runs side by side: each sample with its own, the difference with its error, and which samples flipped.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::Z;

/// The records of one task of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleFile {
    /// The task.
    pub task: String,
    /// The file.
    pub path: PathBuf,
}

/// All that differs between two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// For each task, metric and filter the difference of the means.
    pub differences: Vec<MetricDifference>,
    /// Tasks that only one run has.
    pub unpaired: Vec<String>,
}

/// A metric of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricDifference {
    /// The task.
    pub task: String,
    /// The metric.
    pub metric: String,
    /// The filter.
    pub filter: String,
    /// How many samples both runs have.
    pub n: usize,
    /// How many samples only one run has, or asked otherwise.
    pub n_unpaired: usize,
    /// The mean of the first run over the samples of both.
    pub a: f64,
    /// The mean of the second.
    pub b: f64,
    /// b - a.
    pub difference: f64,
    /// Where the difference lies with 95 % confidence, by the normal distribution of paired differences.
    pub interval: [f64; 2],
    /// The samples that were right in one run and wrong in the other.
    pub flips: Vec<Flip>,
}

/// A sample that is right in one run and wrong in the other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flip {
    /// The document.
    pub doc_id: usize,
    /// Its value in the first run.
    pub a: f64,
    /// Its value in the second.
    pub b: f64,
}

/// One record: what identifies it, and its values.
struct Record {
    doc_id: usize,
    doc_hash: String,
    values: BTreeMap<String, f64>,
}

/// Compares two runs: folders with `samples_*.jsonl`, or two such files.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let (a, b) = (sample_files(a)?, sample_files(b)?);
    let is_pair = a.len() == 1 && b.len() == 1;
    let twin = |file: &SampleFile| b.iter().find(|other| is_pair || other.task == file.task);
    let mut comparison = Comparison { differences: Vec::new(), unpaired: Vec::new() };
    for file in &a {
        match twin(file) {
            Some(other) => comparison.differences.extend(compare_task(file, other)?),
            None => comparison.unpaired.push(file.task.clone()),
        }
    }
    let alone = b.iter().filter(|file| !is_pair && !a.iter().any(|other| other.task == file.task));
    comparison.unpaired.extend(alone.map(|file| file.task.clone()));
    ensure!(!comparison.differences.is_empty(), "failed to compare: the two runs have no task in common");
    Ok(comparison)
}

/// The newest records of each task below a folder, or the file itself.
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

/// `samples_TASK_TIME.jsonl` as task and time.
fn task_of(path: &Path) -> Option<(String, String)> {
    let name = path.file_name()?.to_str()?.strip_prefix("samples_")?.strip_suffix(".jsonl")?;
    let (task, time) = name.rsplit_once('_').unwrap_or((name, ""));
    Some((task.to_owned(), time.to_owned()))
}

fn compare_task(a: &SampleFile, b: &SampleFile) -> Result<Vec<MetricDifference>> {
    let (first, second) = (records(&a.path)?, records(&b.path)?);
    let mut differences = Vec::new();
    for (filter, ours) in &first {
        let Some(theirs) = second.get(filter) else { continue };
        let by_id: BTreeMap<usize, &Record> = theirs.iter().map(|record| (record.doc_id, record)).collect();
        let same =
            |record: &&Record| by_id.get(&record.doc_id).copied().filter(|other| other.doc_hash == record.doc_hash);
        let pairs: Vec<(&Record, &Record)> = ours.iter().filter_map(|record| Some((record, same(&record)?))).collect();
        let n_unpaired = ours.len() + theirs.len() - 2 * pairs.len();
        let mut metrics: Vec<&String> = ours.iter().flat_map(|record| record.values.keys()).collect();
        metrics.sort();
        metrics.dedup();
        for metric in metrics {
            let value = |(a, b): &(&Record, &Record)| Some((a.doc_id, *a.values.get(metric)?, *b.values.get(metric)?));
            let values: Vec<(usize, f64, f64)> = pairs.iter().filter_map(value).collect();
            if !values.is_empty() {
                differences.push(difference(&a.task, metric, filter, &values, n_unpaired));
            }
        }
    }
    Ok(differences)
}

fn difference(
    task: &str,
    metric: &str,
    filter: &str,
    values: &[(usize, f64, f64)],
    n_unpaired: usize,
) -> MetricDifference {
    let n = values.len() as f64;
    let mean = |pick: fn(&(usize, f64, f64)) -> f64| values.iter().map(pick).sum::<f64>() / n;
    let (a, b) = (mean(|v| v.1), mean(|v| v.2));
    let difference = mean(|v| v.2 - v.1);
    let squares: f64 = values.iter().map(|(_, a, b)| (b - a - difference).powi(2)).sum();
    let stderr = if values.len() < 2 { f64::NAN } else { (squares / (n - 1.0) / n).sqrt() };
    let is_truth = |value: f64| value == 0.0 || value == 1.0;
    let flipped = values.iter().filter(|(_, a, b)| a != b && is_truth(*a) && is_truth(*b));
    MetricDifference {
        task: task.to_owned(),
        metric: metric.to_owned(),
        filter: filter.to_owned(),
        n: values.len(),
        n_unpaired,
        a,
        b,
        difference,
        interval: [difference - Z * stderr, difference + Z * stderr],
        flips: flipped.map(|(doc_id, a, b)| Flip { doc_id: *doc_id, a: *a, b: *b }).collect(),
    }
}

/// The records of a file, by filter.
fn records(path: &Path) -> Result<BTreeMap<String, Vec<Record>>> {
    let text = fs::read_to_string(path).with_context(|| format!("failed to read {}", path.display()))?;
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
    let value = |name: &str| match fields.get(name)? {
        Json::Bool(value) => Some(f64::from(u8::from(*value))),
        other => other.as_f64(),
    };
    let values = names.iter().filter_map(Json::as_str).filter_map(|name| Some((name.to_owned(), value(name)?)));
    Ok(Record { doc_id: doc_id as usize, doc_hash: doc_hash.to_owned(), values: values.collect() })
}
