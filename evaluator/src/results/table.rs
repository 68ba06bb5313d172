//! Results table in Markdown, in lm-eval's layout.

use serde_json::{Map, Value as Json};

use super::schema::Results;

/// Formats the scores of all tasks and groups as a Markdown table.
pub fn results_table(results: &Results) -> String {
    print("Tasks", &results.results, results)
}

/// Formats the scores of groups only; empty if there are none.
pub fn groups_table(results: &Results) -> String {
    if results.groups.is_empty() { String::new() } else { print("Groups", &results.groups, results) }
}

/// Formats one line for each task with truncated, skipped or empty documents; a single line if there are none.
pub fn skipped_counts(results: &Results) -> String {
    const WHAT: [(&str, &str); 4] = [
        ("truncated", "truncated"),
        ("skipped", "skipped"),
        ("empty", "empty"),
        ("no_target", "without a correct choice"),
    ];
    let of_task = |(task, counts): (&String, &Json)| {
        let n = |key: &str| counts.get(key).and_then(Json::as_u64).filter(|n| *n > 0);
        let said: Vec<String> = WHAT.iter().filter_map(|(key, what)| Some(format!("{} {what}", n(key)?))).collect();
        let n_evaluated: u64 = ["effective", "skipped"].iter().filter_map(|key| counts.get(*key)?.as_u64()).sum();
        (!said.is_empty()).then(|| format!("{task}: of {n_evaluated} documents {}", said.join(", ")))
    };
    let said: Vec<String> = results.n_samples.iter().filter_map(of_task).collect();
    match said.is_empty() {
        true => "No document was truncated, skipped or empty.".into(),
        false => said.join("\n"),
    }
}

fn print(title: &str, scores: &Map<String, Json>, results: &Results) -> String {
    let headers = [title, "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"];
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (name, depth) in ordered(scores, results) {
        if let Some(Json::Object(fields)) = scores.get(&name) {
            rows.extend(rows_of(&name, depth, fields, results));
        }
    }
    let columns: Vec<Column> = (0..headers.len()).map(|i| Column::new(headers[i], &rows, i)).collect();
    let line = |cells: Vec<String>| format!("|{}|\n", cells.join("|"));
    let mut out = line(columns.iter().map(Column::header).collect());
    out += &line(columns.iter().map(Column::rule).collect());
    for (i, row) in rows.iter().enumerate() {
        out += &line(columns.iter().zip(row).map(|(column, cell)| column.cell(i, cell)).collect());
    }
    out
}

/// Returns names with nesting depths: each group followed by its members in alphabetical order, then tasks outside of
/// groups.
pub(super) fn ordered(scores: &Map<String, Json>, results: &Results) -> Vec<(String, usize)> {
    let children = |name: &str| -> Vec<String> {
        let list = results.group_subtasks.get(name).and_then(Json::as_array);
        let mut names: Vec<String> = list.into_iter().flatten().filter_map(Json::as_str).map(str::to_owned).collect();
        names.sort();
        names
    };
    fn visit(name: &str, depth: usize, children: &dyn Fn(&str) -> Vec<String>, out: &mut Vec<(String, usize)>) {
        out.push((name.to_owned(), depth));
        children(name).iter().for_each(|child| visit(child, depth + 1, children, out));
    }
    let mut groups: Vec<&String> = results.group_subtasks.keys().collect();
    groups.sort();
    let inner: Vec<String> = groups.iter().flat_map(|group| children(group)).collect();
    let mut out = Vec::new();
    groups.iter().filter(|group| !inner.contains(group)).for_each(|group| visit(group, 0, &children, &mut out));
    let mut others: Vec<&String> = scores.keys().filter(|name| !out.iter().any(|(known, _)| known == *name)).collect();
    others.sort();
    out.extend(others.into_iter().map(|name| (name.clone(), 0)));
    out
}

fn rows_of(name: &str, depth: usize, fields: &Map<String, Json>, results: &Results) -> Vec<Vec<String>> {
    let alias = fields.get("alias").and_then(Json::as_str).unwrap_or(name);
    let mut shown = if depth > 0 { format!("{}- {alias}", " ".repeat(depth)) } else { alias.to_owned() };
    let mut version = results.versions.get(name).map_or_else(|| "N/A".into(), plain);
    let n_shot = results.n_shot.get(name).map_or_else(String::new, plain);
    let mut rows = Vec::new();
    for ReportedScore { metric, filter, value, stderr } in values(fields) {
        let (sign, stderr) = match stderr {
            None => ("", String::new()),
            Some(Json::Number(stderr)) => ("±", format!("{:.4}", stderr.as_f64().unwrap_or(f64::NAN))),
            Some(_) => ("±", "   N/A".into()),
        };
        rows.push(vec![
            std::mem::take(&mut shown),
            std::mem::take(&mut version),
            filter.to_owned(),
            n_shot.clone(),
            metric.to_owned(),
            arrow(results, name, metric).to_owned(),
            number(value),
            sign.to_owned(),
            stderr,
        ]);
    }
    rows
}

/// One score in the fields of a task or group.
pub(super) struct ReportedScore<'a> {
    pub(super) metric: &'a str,
    pub(super) filter: &'a str,
    pub(super) value: &'a Json,
    pub(super) stderr: Option<&'a Json>,
}

/// Returns all scores of a task or group, ordered by metric name.
pub(super) fn values(fields: &Map<String, Json>) -> Vec<ReportedScore<'_>> {
    let mut keys: Vec<&String> = fields.keys().filter(|key| key.contains(',')).collect();
    keys.sort();
    let split = keys.into_iter().filter_map(|key| Some((key.split_once(',')?, &fields[key])));
    let split = split.filter(|((metric, _), _)| !metric.ends_with("_stderr"));
    let stderr = |metric: &str, filter: &str| fields.get(&format!("{metric}_stderr,{filter}"));
    split
        .map(|((metric, filter), value)| ReportedScore { metric, filter, value, stderr: stderr(metric, filter) })
        .collect()
}

/// Returns the arrow for a metric's `higher_is_better`.
pub(super) fn arrow(results: &Results, name: &str, metric: &str) -> &'static str {
    match results.higher_is_better.get(name).and_then(|arrows| arrows.get(metric)) {
        Some(Json::Bool(true)) => "↑",
        Some(Json::Bool(false)) => "↓",
        _ => "",
    }
}

/// Formats a score with four decimals, an integer without decimals, and null (a value that is not finite) as NaN.
pub(super) fn number(value: &Json) -> String {
    match value {
        Json::Number(number) if number.is_f64() => format!("{:.4}", number.as_f64().unwrap_or(f64::NAN)),
        Json::Null => "NaN".into(),
        other => plain(other),
    }
}

pub(super) fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Table column, formatted as pytablewriter infers its type.
struct Column {
    title: String,
    width: usize,
    kind: ColumnKind,
    /// For each row, true if the cell is left-aligned text: not a number, or after a majority of text cells.
    is_text: Vec<bool>,
    n_decimals: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ColumnKind {
    /// Numeric column: all cells have the same number of decimals.
    Numbers,
    /// Mixed column: integers have no decimals.
    Mixed,
}

impl Column {
    fn new(title: &str, rows: &[Vec<String>], at: usize) -> Self {
        let all: Vec<&str> = rows.iter().map(|row| row[at].as_str()).collect();
        let is_text = texts(&all);
        let numbers = || all.iter().zip(&is_text).filter(|(cell, is_text)| !**is_text && !cell.trim().is_empty());
        let is_numbers = !is_text.contains(&true) && numbers().next().is_some();
        let kind = if is_numbers { ColumnKind::Numbers } else { ColumnKind::Mixed };
        let n_decimals = numbers().map(|(cell, _)| n_decimals(cell)).max().unwrap_or(0);
        let column = Self { title: title.to_owned(), width: 0, kind, is_text, n_decimals };
        let widest =
            all.iter().enumerate().map(|(row, cell)| column.text(row, cell).chars().count()).max().unwrap_or(0);
        Self { width: widest.max(title.chars().count()).max(3), ..column }
    }

    fn header(&self) -> String {
        format!("{:^width$}", self.title, width = self.width)
    }

    fn rule(&self) -> String {
        match self.kind {
            ColumnKind::Numbers => "-".repeat(self.width - 1) + ":",
            ColumnKind::Mixed => "-".repeat(self.width),
        }
    }

    fn cell(&self, row: usize, cell: &str) -> String {
        let (text, width) = (self.text(row, cell), self.width);
        let is_right = !self.is_text[row] && value_of(cell).is_some();
        if is_right { format!("{text:>width$}") } else { format!("{text:<width$}") }
    }

    fn text(&self, row: usize, cell: &str) -> String {
        match (value_of(cell).filter(|_| !self.is_text[row]), self.kind) {
            (Some(value), ColumnKind::Mixed) if value.fract() == 0.0 => format!("{value}"),
            (Some(value), _) => format!("{value:.*}", self.n_decimals),
            (None, _) => cell.to_owned(),
        }
    }
}

/// Returns true for each text cell. A number after a majority of text cells counts as text, as in pytablewriter.
fn texts(cells: &[&str]) -> Vec<bool> {
    let (mut n_texts, mut n_others) = (0, 0);
    let is_text = |cell: &&str| {
        let is_blank = cell.trim().is_empty();
        let is_text = !is_blank && (value_of(cell).is_none() || n_texts > n_others);
        (n_texts, n_others) = (n_texts + usize::from(is_text), n_others + usize::from(!is_text));
        is_text
    };
    cells.iter().map(is_text).collect()
}

fn value_of(cell: &str) -> Option<f64> {
    cell.trim().parse().ok().filter(|value: &f64| value.is_finite())
}

/// Returns the number of decimals without trailing zeros.
fn n_decimals(cell: &str) -> usize {
    match cell.trim().split_once('.') {
        Some((_, decimals)) if value_of(cell).is_some() => decimals.trim_end_matches('0').len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Json) -> Map<String, Json> {
        value.as_object().cloned().unwrap_or_default()
    }

    // lm-eval 0.4.13 prints this table for the same results.
    #[test]
    fn a_table_is_lm_evals() {
        let results = Results {
            results: fields(json!({
                "wikitext": {"alias": "wikitext", "word_perplexity,none": 12.3456, "word_perplexity_stderr,none": "N/A"},
                "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": 0.0123,
                          "exact_match,flexible-extract": 0.2, "exact_match_stderr,flexible-extract": 0.0123},
            })),
            versions: fields(json!({"wikitext": 2.0, "gsm8k": 3.0})),
            n_shot: fields(json!({"wikitext": 0, "gsm8k": 5})),
            higher_is_better: fields(json!({"wikitext": {"word_perplexity": false}, "gsm8k": {"exact_match": true}})),
            ..Results::default()
        };
        let want = "\
| Tasks  |Version|     Filter     |n-shot|    Metric     |   | Value |   |Stderr|
|--------|------:|----------------|-----:|---------------|---|------:|---|------|
|gsm8k   |      3|flexible-extract|     5|exact_match    |↑  | 0.2000|±  |0.0123|
|        |       |strict-match    |     5|exact_match    |↑  | 0.1000|±  |0.0123|
|wikitext|      2|none            |     0|word_perplexity|↓  |12.3456|±  |   N/A|
";
        assert_eq!(results_table(&results), want);
    }

    #[track_caller]
    fn column(cells: &[&str], want: &[&str]) {
        let rows: Vec<Vec<String>> = cells.iter().map(|cell| vec![(*cell).to_owned()]).collect();
        let column = Column::new("b", &rows, 0);
        let found: Vec<String> = rows.iter().enumerate().map(|(i, row)| column.cell(i, &row[0])).collect();
        assert_eq!(found, want);
    }

    // pytablewriter 1.2.1 prints these cells.
    #[test]
    fn a_column_prints_by_what_is_in_it() {
        column(&["1.0000", "0.2500"], &["1.00", "0.25"]);
        column(&["100.0000", "12.5000", "33.3333"], &["100.0000", " 12.5000", " 33.3333"]);
        column(&["0.0000", "   N/A"], &["     0", "   N/A"]);
        column(&["   N/A", "0.0000"], &["   N/A", "0.0000"]);
        column(&["N/A", "7", "0.2500"], &["N/A   ", "7     ", "0.2500"]);
        column(&["", "N/A", "0.2500", "1.0000"], &["    ", "N/A ", "0.25", "   1"]);
        column(&["0.1000", "1.0000", "N/A", "0.0010"], &["0.100", "    1", "N/A  ", "0.001"]);
        column(&["0.2449", "N/A", "N/A", "0.0000", "1.0000"], &["0.2449", "N/A   ", "N/A   ", "0.0000", "1.0000"]);
        column(&["0.5", "0.25", "N/A", "N/A", "0.0000"], &["0.50", "0.25", "N/A ", "N/A ", "   0"]);
        column(&["0.5000", "a text", "b", "0.1239", "3.0000"], &["   0.5", "a text", "b     ", "0.1239", "3.0000"]);
        column(&["1.0000", "a longer", "b", "2.0000"], &["       1", "a longer", "b       ", "2.0000  "]);
    }

    #[test]
    fn counts_are_of_the_evaluated_documents() {
        let counts = json!({"original": 60, "effective": 38, "truncated": 7, "skipped": 2});
        let results = Results { n_samples: fields(json!({"x": counts})), ..Results::default() };
        assert_eq!(skipped_counts(&results), "x: of 40 documents 7 truncated, 2 skipped");
    }

    #[test]
    fn members_of_groups_are_indented() {
        let score = |alias: &str| json!({"alias": alias, "acc,none": 0.25, "acc_stderr,none": 0.003});
        let results = Results {
            results: fields(json!({"mmlu": score("mmlu"), "mmlu_stem": score("stem"), "mmlu_a": score("a")})),
            group_subtasks: fields(json!({"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_a"]})),
            versions: fields(json!({"mmlu": "2", "mmlu_stem": "2", "mmlu_a": 1.0})),
            n_shot: fields(json!({"mmlu": 0, "mmlu_stem": 0, "mmlu_a": 0})),
            ..Results::default()
        };
        let want = "\
| Tasks |Version|Filter|n-shot|Metric|   |Value|   |Stderr|
|-------|------:|------|-----:|------|---|----:|---|-----:|
|mmlu   |      2|none  |     0|acc   |   | 0.25|±  | 0.003|
| - stem|      2|none  |     0|acc   |   | 0.25|±  | 0.003|
|  - a  |      1|none  |     0|acc   |   | 0.25|±  | 0.003|
";
        assert_eq!(results_table(&results), want);
    }
}
