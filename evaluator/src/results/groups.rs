//! From the scores of tasks to those of groups, and all of it together.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::schema::{ResultEntry, Results, TaskRun, sample_counts};
use crate::task::{GroupAggregate, TaskGroup, pooled, task_hash, unweighted};

/// Puts the results of a run together.
pub fn assemble(runs: &[TaskRun], groups: &[TaskGroup]) -> Results {
    let scores: Vec<ResultEntry> = runs.iter().map(ResultEntry::of).collect();
    let mut results = Results::default();
    for (run, score) in runs.iter().zip(&scores) {
        results.results.insert(score.name.clone(), score.json());
        results.n_samples.insert(score.name.clone(), sample_counts(&run.scores));
    }
    for group in bottom_up(groups) {
        let fields = Json::Object(aggregate(group, &scores));
        if !group.aggregates.is_empty() {
            results.groups.insert(group.name.clone(), fields.clone());
        }
        results.results.insert(group.name.clone(), fields);
    }
    results.group_subtasks = groups.iter().map(|group| (group.name.clone(), json!(group.children))).collect();
    results.configs = sorted(runs.iter().map(|run| (run.config.task.clone(), run.config())));
    results.versions = versions(runs, groups);
    results.n_shot = n_shot(runs, groups);
    results.higher_is_better = higher_is_better(runs, groups);
    let hash = |run: &TaskRun| (run.config.task.clone(), json!(task_hash(&run.scores.samples)));
    results.task_hashes = runs.iter().map(hash).collect();
    results
}

/// Groups that lie in others before those.
fn bottom_up(groups: &[TaskGroup]) -> Vec<&TaskGroup> {
    let mut ordered: Vec<&TaskGroup> = Vec::new();
    fn visit<'a>(group: &'a TaskGroup, groups: &'a [TaskGroup], ordered: &mut Vec<&'a TaskGroup>) {
        if ordered.iter().any(|other| other.name == group.name) {
            return;
        }
        let inner = group.children.iter().filter_map(|name| groups.iter().find(|group| group.name == *name));
        inner.for_each(|inner| visit(inner, groups, ordered));
        ordered.push(group);
    }
    let is_inner = |group: &TaskGroup| groups.iter().any(|other| other.children.contains(&group.name));
    groups.iter().filter(|group| !is_inner(group)).for_each(|group| visit(group, groups, &mut ordered));
    ordered
}

fn aggregate(group: &TaskGroup, scores: &[ResultEntry]) -> Map<String, Json> {
    let mut fields = Map::new();
    fields.insert("alias".into(), json!(group.alias.as_ref().unwrap_or(&group.name)));
    fields.insert("name".into(), json!(group.name));
    if group.aggregates.is_empty() {
        return fields;
    }
    let tasks: Vec<&ResultEntry> =
        group.tasks.iter().filter_map(|name| scores.iter().find(|score| score.name == *name)).collect();
    fields.insert("sample_len".into(), json!(tasks.iter().map(|task| task.sample_len).sum::<usize>()));
    let mut counts = Map::new();
    for aggregate in &group.aggregates {
        for filter in filters(aggregate, &tasks) {
            let Some((value, stderr, n)) = over_tasks(aggregate, &filter, &tasks) else {
                tracing::warn!("group {}: no task has the metric {},{filter}", group.name, aggregate.metric);
                continue;
            };
            counts.insert(format!("{},{filter}", aggregate.metric), json!(n));
            let score = ResultEntry {
                values: vec![(aggregate.metric.clone(), filter, value, stderr)],
                ..ResultEntry::default()
            };
            score.write_values(&mut fields);
        }
    }
    if !counts.is_empty() {
        fields.insert("sample_count".into(), Json::Object(counts));
    }
    fields
}

/// The filters that are named, or all that the tasks have for the metric.
fn filters(aggregate: &GroupAggregate, tasks: &[&ResultEntry]) -> Vec<String> {
    if let Some(filters) = &aggregate.filters {
        return filters.clone();
    }
    let values = tasks.iter().flat_map(|task| &task.values).filter(|(metric, ..)| *metric == aggregate.metric);
    let mut filters: Vec<String> = values.map(|(_, filter, ..)| filter.clone()).collect();
    filters.sort();
    filters.dedup();
    filters
}

/// The mean over those tasks that have the metric, its error, and how many documents it stands on.
fn over_tasks(aggregate: &GroupAggregate, filter: &str, tasks: &[&ResultEntry]) -> Option<(f64, Option<f64>, usize)> {
    let found: Vec<(f64, Option<f64>, usize)> = tasks
        .iter()
        .filter_map(|task| task.get(&aggregate.metric, filter).map(|(value, stderr)| (value, stderr, task.sample_len)))
        .collect();
    if found.is_empty() {
        return None;
    }
    let sizes: Vec<usize> = found.iter().map(|(.., size)| *size).collect();
    let weight = |size: usize| if aggregate.weight_by_size { size as f64 } else { 1.0 };
    let weights: f64 = sizes.iter().map(|size| weight(*size)).sum();
    let value = found.iter().map(|(value, _, size)| value * weight(*size)).sum::<f64>() / weights;
    let stderrs: Option<Vec<f64>> = found.iter().map(|(_, stderr, _)| *stderr).collect();
    let of_mean =
        |stderrs: Vec<f64>| if aggregate.weight_by_size { pooled(&stderrs, &sizes) } else { unweighted(&stderrs) };
    Some((value, stderrs.map(of_mean), sizes.iter().sum()))
}

fn sorted(pairs: impl Iterator<Item = (String, Json)>) -> Map<String, Json> {
    pairs.collect::<BTreeMap<_, _>>().into_iter().collect()
}

fn versions(runs: &[TaskRun], groups: &[TaskGroup]) -> Map<String, Json> {
    let of_task = |run: &TaskRun| {
        let version = if run.config.version.is_null() { json!("Yaml") } else { run.config.version.clone() };
        (run.config.task.clone(), version)
    };
    let of_group = |group: &TaskGroup| (group.name.clone(), json!(group.version));
    sorted(runs.iter().map(of_task).chain(groups.iter().map(of_group)))
}

/// A group has the number that all its members share.
fn n_shot(runs: &[TaskRun], groups: &[TaskGroup]) -> Map<String, Json> {
    let mut all: BTreeMap<String, Json> =
        runs.iter().map(|run| (run.config.task.clone(), json!(run.num_fewshot))).collect();
    for group in groups {
        let mut shared: Vec<Json> = group.children.iter().filter_map(|child| all.get(child).cloned()).collect();
        shared.dedup();
        if let [one] = shared.as_slice() {
            all.insert(group.name.clone(), one.clone());
        }
    }
    all.into_iter().collect()
}

/// A group has its members' directions; where they disagree there is none.
fn higher_is_better(runs: &[TaskRun], groups: &[TaskGroup]) -> Map<String, Json> {
    let mut all: BTreeMap<String, Map<String, Json>> =
        runs.iter().map(|run| (run.config.task.clone(), run.config.higher_is_better())).collect();
    for group in groups {
        let mut shared: Map<String, Json> = Map::new();
        for (metric, higher) in group.children.iter().filter_map(|child| all.get(child)).flatten() {
            match shared.get_mut(metric) {
                Some(known) if known != higher => *known = Json::Null,
                Some(_) => {}
                None => drop(shared.insert(metric.clone(), higher.clone())),
            }
        }
        if !shared.is_empty() {
            all.insert(group.name.clone(), shared);
        }
    }
    all.into_iter().map(|(name, metrics)| (name, Json::Object(metrics))).collect()
}
