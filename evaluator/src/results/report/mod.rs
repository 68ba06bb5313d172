//! The results of a run as one HTML page that needs nothing but a browser: scores with intervals, histograms, and each
//! document with what was asked and answered.
//!
//! `summary` makes the rows of the table, [`histogram`] and [`interval`] say where things are drawn, `samples` what the
//! page holds of the documents. `page.html` writes it down; `script.js` shows the documents.

mod comparison;
mod histogram;
mod interval;
mod samples;
mod summary;

use anyhow::{Context, Result};
use candlewick_text::template::Clock;
use minijinja::value::Serde;
use minijinja::{Environment, Value, context};
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
    /// The results.
    pub results: &'a Results,
    /// The tasks with their samples.
    pub runs: &'a [TaskRun],
    /// The command as it may be given again.
    pub command: &'a str,
    /// The most bytes of samples that the page holds. Each task has as much of them as the others, or as it needs.
    pub sample_bytes: usize,
}

/// A task's part of the page.
#[derive(Serialize)]
struct Section {
    /// The task, as the fragment of an address names it.
    name: String,
    alias: String,
    config: String,
    histogram: Option<Histogram>,
    n_docs: usize,
    /// Documents that were left out of the page, whose size is limited.
    n_left_out: usize,
    /// The documents as JSON that may stand in a script.
    docs: String,
}

impl HtmlReport<'_> {
    /// Writes the page.
    pub fn html(&self) -> Result<String> {
        let head = ReportHead::of(self.results, self.command);
        let (rows, unit_axis) = summary::rows(self.results);
        let sections = self.sections()?;
        let is_open = sections.len() <= 3;
        render(
            "page.html",
            context! {
                style => STYLE, script => SCRIPT, unit_axis, is_open, head => Serde(head), rows => Serde(rows),
                sections => Serde(sections),
            },
        )
    }

    fn sections(&self) -> Result<Vec<Section>> {
        let docs: Vec<Vec<String>> = self.runs.iter().map(|run| samples::documents(&run.scores.samples)).collect();
        let sizes: Vec<usize> = docs.iter().map(|docs| docs.iter().map(String::len).sum()).collect();
        let shares = samples::shares(&sizes, self.sample_bytes);
        let section = |((run, docs), share): ((&TaskRun, &Vec<String>), usize)| {
            let config = serde_json::to_string_pretty(&run.config())?;
            let n_shown = samples::n_within(docs, share);
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

/// What the page begins with.
#[derive(Serialize)]
struct ReportHead {
    model: String,
    /// Short facts with their names.
    facts: Vec<(&'static str, String)>,
    command: String,
    /// Every setting of the run.
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
            ("number format", setting("model_dtype").map(plain)),
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

/// Fills a template in. What is put into it is text, unless the template says otherwise.
fn render(name: &str, values: Value) -> Result<String> {
    let mut environment = Environment::new();
    for (name, source) in TEMPLATES {
        environment.add_template(name, source).with_context(|| format!("failed to read the template {name}"))?;
    }
    let page = environment.get_template(name).and_then(|template| template.render(values));
    page.with_context(|| format!("failed to fill in the template {name}"))
}
