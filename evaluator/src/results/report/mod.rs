//! HTML report of a run: one self-contained page with scores, confidence intervals, histograms and sample records.
//!
//! `summary` builds the rows of the score table, [`histogram`] and [`interval`] compute positions, and `samples`
//! serializes the documents. `page.html` is the template; `script.js` shows the documents. The frame, the style of
//! text and tables, and their macros are those of the crate `html`.

mod comparison;
mod histogram;
mod interval;
mod samples;
mod summary;

use anyhow::{Context, Result};
use candlewick_html::Page;
use candlewick_text::template::Clock;
use minijinja::value::Serde;
use minijinja::{Value, context};
use serde::Serialize;
use serde_json::Value as Json;

use super::schema::{Results, TaskRun};
use super::table::plain;
use histogram::Histogram;

pub use comparison::comparison_page;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
const TEMPLATES: [(&str, &str); 3] = [
    ("parts.html", include_str!("parts.html")),
    ("page.html", include_str!("page.html")),
    ("comparison.html", include_str!("comparison.html")),
];

/// Contents of the HTML report.
pub struct HtmlReport<'a> {
    /// Results of the run.
    pub results: &'a Results,
    /// Tasks with their scores and sample records.
    pub runs: &'a [TaskRun],
    /// Command line of the run, quoted for a shell.
    pub command: &'a str,
    /// Maximum size of all embedded samples, in bytes, shared fairly among the tasks.
    pub sample_bytes: usize,
}

/// One task's section of the report.
#[derive(Serialize)]
struct Section {
    /// Task name, encoded for a URL fragment.
    name: String,
    alias: String,
    config: String,
    histogram: Option<Histogram>,
    n_docs: usize,
    /// Number of documents omitted because of the size limit.
    n_left_out: usize,
    /// Documents as JSON, escaped for a `<script>` element.
    docs: String,
}

impl HtmlReport<'_> {
    /// Renders the report as HTML.
    pub fn html(&self) -> Result<String> {
        let head = ReportHead::of(self.results, self.command);
        let (rows, unit_axis) = summary::rows(self.results);
        let sections = self.sections()?;
        let is_open = sections.len() <= 3;
        render(
            "page.html",
            SCRIPT,
            context! {
                unit_axis, is_open, head => Serde(head), rows => Serde(rows), sections => Serde(sections),
            },
        )
    }

    fn sections(&self) -> Result<Vec<Section>> {
        let docs: Vec<Vec<String>> = self.runs.iter().map(|run| samples::documents(&run.scores.samples)).collect();
        let sizes: Vec<usize> = docs.iter().map(|docs| docs.iter().map(String::len).sum()).collect();
        let shares = samples::byte_budgets(&sizes, self.sample_bytes);
        let section = |((run, docs), share): ((&TaskRun, &Vec<String>), usize)| {
            let config = serde_json::to_string_pretty(&run.config())?;
            let n_shown = samples::n_fitting(docs, share);
            Ok(Section {
                name: run.config.task.clone(),
                alias: run.config.alias.clone().unwrap_or_else(|| run.config.task.clone()),
                config,
                histogram: Histogram::of(&run.scores),
                n_docs: docs.len(),
                n_left_out: docs.len() - n_shown,
                docs: format!("[{}]", docs[..n_shown].join(",\n")),
            })
        };
        self.runs.iter().zip(&docs).zip(shares).map(section).collect()
    }
}

/// Head of the report.
#[derive(Serialize)]
struct ReportHead {
    model: String,
    /// Label and value of each fact, such as the date.
    facts: Vec<(&'static str, String)>,
    command: String,
    /// Name and value of every setting of the run.
    settings: Vec<(String, String)>,
}

impl ReportHead {
    fn of(results: &Results, command: &str) -> Self {
        let run = |key: &str| results.run.get(key).filter(|value| !value.is_null());
        let config = run("config").and_then(Json::as_object);
        let setting = |key: &str| config.and_then(|config| config.get(key)).filter(|value| !value.is_null());
        let date = run("date").and_then(Json::as_f64).and_then(|date| Clock::Fixed(date as i64).format(DATE).ok());
        let seconds = run("total_evaluation_time_seconds").and_then(Json::as_str).and_then(|text| text.parse().ok());
        let adapter = setting("model_args").and_then(|args| args.get("peft")).and_then(Json::as_str);
        let facts = [
            ("date", date),
            ("adapter", adapter.map(str::to_owned)),
            ("revision", setting("model_sha").or(setting("model_revision")).map(plain)),
            ("parameters", setting("model_num_parameters").map(plain)),
            ("dtype", setting("model_dtype").map(plain)),
            ("context", run("max_length").map(|length| format!("{} tokens", plain(length)))),
            ("evaluator", run("candlewick_version").map(plain)),
            ("took", seconds.map(|seconds: f64| format!("{seconds:.1} s"))),
        ];
        let mut settings: Vec<(String, String)> =
            config.into_iter().flatten().map(|(key, value)| (key.clone(), plain(value))).collect();
        let of_run = ["system_instruction", "fewshot_as_multiturn", "chat_template_sha", "chat_template"];
        settings.extend(of_run.into_iter().filter_map(|key| Some((key.to_owned(), plain(run(key)?)))));
        Self {
            model: run("model_name").map(plain).unwrap_or_default(),
            facts: facts.into_iter().filter_map(|(name, fact)| Some((name, fact.filter(|f| !f.is_empty())?))).collect(),
            command: command.to_owned(),
            settings,
        }
    }
}

const DATE: &str = "%Y-%m-%d %H:%M:%S UTC";

/// Renders one of the templates.
fn render(name: &str, script: &str, values: Value) -> Result<String> {
    let page = Page { name, templates: &TEMPLATES, style: STYLE, script };
    page.render(values).with_context(|| format!("failed to render the template {name}"))
}
