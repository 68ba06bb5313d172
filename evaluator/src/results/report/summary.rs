//! Rows of the summary table: each task and group with its scores, confidence intervals and document counts.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value as Json;

use super::super::schema::Results;
use super::super::table::{ReportedScore, arrow, number, ordered, plain, values};
use super::interval::{Interval, Scale, confidence_interval};

/// Row of a task or group.
#[derive(Debug, Serialize)]
pub(super) struct SummaryRow {
    name: String,
    alias: String,
    depth: usize,
    is_task: bool,
    /// Name, encoded for a URL fragment.
    fragment: String,
    version: String,
    n_shot: String,
    scores: Vec<ScoreCells>,
    counts: Counts,
}

/// One score, formatted, with its position on the axis.
#[derive(Debug, Serialize)]
struct ScoreCells {
    metric: String,
    filter: String,
    arrow: &'static str,
    value: String,
    stderr: String,
    interval: String,
    plot: Option<Interval>,
    /// Labels of the axis ends, unless they are 0 and 1.
    ends: Option<[String; 2]>,
}

/// Document counts of a task, or their sums over a group's tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct Counts {
    documents: u64,
    scored: u64,
    truncated: u64,
    skipped: u64,
    empty: u64,
    no_target: u64,
}

/// Returns all rows, groups before their members, and true if any axis is 0 to 1.
pub(super) fn rows(results: &Results) -> (Vec<SummaryRow>, bool) {
    let scales = scales(results);
    let row = |(name, depth): (String, usize)| {
        let fields = results.results.get(&name).and_then(Json::as_object)?;
        Some(SummaryRow {
            alias: fields.get("alias").map_or_else(|| name.clone(), plain),
            depth,
            is_task: results.n_samples.contains_key(&name),
            fragment: in_address(&name),
            version: results.versions.get(&name).map_or_else(String::new, plain),
            n_shot: results.n_shot.get(&name).map_or_else(String::new, plain),
            scores: values(fields).iter().map(|value| cells(results, &name, value, &scales)).collect(),
            counts: Counts::of(results, &name),
            name,
        })
    };
    let rows = ordered(&results.results, results).into_iter().filter_map(row).collect();
    (rows, scales.values().any(|scale| *scale == Scale::UNIT))
}

/// Percent-encodes a name for a URL fragment.
fn in_address(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    name.bytes().map(|byte| if is_plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") }).collect()
}

/// Returns one scale for each metric, so that values of different tasks are comparable.
fn scales(results: &Results) -> BTreeMap<String, Scale> {
    let mut ends: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for value in results.results.values().filter_map(Json::as_object).flat_map(values) {
        let of_metric = ends.entry(value.metric.to_owned()).or_default();
        if let Some(at) = value.value.as_f64() {
            let within = confidence_interval(at, value.stderr.and_then(Json::as_f64));
            // The axis of a fraction stays 0 to 1, however wide the interval is.
            let is_share = (0.0..=1.0).contains(&at);
            of_metric.extend(if is_share { [at, at] } else { within });
        }
    }
    ends.into_iter().map(|(metric, ends)| (metric, Scale::covering(ends.into_iter()))).collect()
}

fn cells(results: &Results, name: &str, found: &ReportedScore, scales: &BTreeMap<String, Scale>) -> ScoreCells {
    let ReportedScore { metric, filter, value, stderr } = *found;
    let (at, stderr) = (value.as_f64().filter(|at| at.is_finite()), stderr.and_then(Json::as_f64));
    let within = at.zip(stderr).map(|(at, stderr)| confidence_interval(at, Some(stderr)));
    let scale = scales.get(metric).copied().unwrap_or(Scale::UNIT);
    ScoreCells {
        metric: metric.to_owned(),
        filter: filter.to_owned(),
        arrow: arrow(results, name, metric),
        value: number(value),
        stderr: stderr.map_or_else(String::new, |stderr| format!("{stderr:.4}")),
        interval: within.map_or_else(String::new, |[low, high]| format!("{low:.4} … {high:.4}")),
        plot: at.map(|at| scale.interval(at, within.unwrap_or([at, at]))),
        ends: (scale != Scale::UNIT).then(|| [scale.from, scale.to].map(|end| end.to_string())),
    }
}

impl Counts {
    fn of(results: &Results, name: &str) -> Self {
        let mut tasks = Vec::new();
        collect_tasks(results, name, &mut tasks);
        tasks.into_iter().fold(Self::default(), |sum, task| sum.plus(results.n_samples.get(task)))
    }

    fn plus(self, counts: Option<&Json>) -> Self {
        let n = |key: &str| counts.and_then(|counts| counts.get(key)).and_then(Json::as_u64).unwrap_or(0);
        Self {
            documents: self.documents + n("original"),
            scored: self.scored + n("effective"),
            truncated: self.truncated + n("truncated"),
            skipped: self.skipped + n("skipped"),
            empty: self.empty + n("empty"),
            no_target: self.no_target + n("no_target"),
        }
    }
}

/// Collects the distinct tasks of a group and its subgroups, or the task itself.
fn collect_tasks<'r>(results: &'r Results, name: &'r str, tasks: &mut Vec<&'r str>) {
    match results.group_subtasks.get(name).and_then(Json::as_array) {
        Some(children) => {
            children.iter().filter_map(Json::as_str).for_each(|child| collect_tasks(results, child, tasks));
        }
        None if !tasks.contains(&name) => tasks.push(name),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn fields(value: Json) -> Map<String, Json> {
        value.as_object().cloned().unwrap_or_default()
    }

    #[test]
    fn a_group_counts_each_of_its_documents_once() {
        let counts = |n: u64| json!({"original": n, "effective": n - 1, "truncated": 1, "skipped": 1});
        let results = Results {
            results: fields(json!({
                "all": {"alias": "all"}, "inner": {"alias": "inner", "acc,none": 0.5, "acc_stderr,none": 0.1},
                "a": {"alias": "a", "acc,none": 0.98, "acc_stderr,none": 0.05},
                "b": {"alias": "b", "acc,none": 0.25, "acc_stderr,none": "N/A", "ppl,none": 30.0, "ppl_stderr,none": 2.0},
            })),
            group_subtasks: fields(json!({"all": ["inner", "a"], "inner": ["a", "b"]})),
            n_samples: fields(json!({"a": counts(10), "b": counts(5)})),
            ..Results::default()
        };
        let (rows, has_unit_axis) = rows(&results);
        assert!(has_unit_axis);
        assert_eq!(in_address("my task&é"), "my%20task%26%C3%A9");
        let want = Counts { documents: 15, scored: 13, truncated: 2, skipped: 2, empty: 0, no_target: 0 };
        assert_eq!((rows[0].name.as_str(), rows[0].counts), ("all", want));
        let b = rows.iter().find(|row| row.name == "b");
        let cells = &b.map(|row| &row.scores).into_iter().flatten().collect::<Vec<_>>();
        assert_eq!((cells[0].interval.as_str(), cells[0].ends.is_none()), ("", true));
        assert_eq!(cells[1].interval, "26.0801 … 33.9199");
        assert_eq!(cells[1].ends, Some(["0".to_owned(), "50".to_owned()]));
    }
}
