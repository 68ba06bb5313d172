//! Task configuration in YAML. Each key of lm-evaluation-harness is supported or rejected by name; any other key is
//! an error. Reading it loads no data.

use candlewick_text::suggestion::did_you_mean;
use serde_json::{Map, Value as Json, json};

use super::error::{ConfigError, SourceLocation, TaskError};
use super::filter::{FilterConfig, filter_list};
use super::function::{PythonFunction, as_function};
use super::keys::{YamlMap, type_error};
use super::metric::{Metric, MetricConfig, metric_list};
use super::output_type::OutputType;
use super::unsafe_code::UnsafeCodePolicy;
use super::yaml::{TaskNode, TaskValue};

/// Value of `doc_to_text` and similar keys: a column or Jinja template, a constant, or a function with a built-in
/// implementation.
#[derive(Clone, Debug)]
pub(crate) enum PromptField {
    Template(String, SourceLocation),
    Constant(Json),
    Function(PythonFunction),
}

/// Data set of a task: `dataset_path`, `dataset_name` and `dataset_kwargs`.
#[derive(Clone, Debug, Default)]
pub(crate) struct DatasetConfig {
    pub(crate) path: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) kwargs: Map<String, Json>,
    pub(crate) kwargs_place: Option<SourceLocation>,
}

/// Selection and format of few-shot examples.
#[derive(Clone, Debug)]
pub(crate) struct FewshotConfig {
    pub(crate) is_first_n: bool,
    pub(crate) split: Option<String>,
    pub(crate) process_docs: Option<PythonFunction>,
    pub(crate) indices: Option<Vec<usize>>,
    pub(crate) samples: Option<FewshotSamples>,
    pub(crate) doc_to_text: Option<PromptField>,
    pub(crate) doc_to_choice: Option<PromptField>,
    pub(crate) doc_to_target: Option<PromptField>,
    pub(crate) gen_prefix: Option<PromptField>,
    pub(crate) fewshot_delimiter: String,
    pub(crate) target_delimiter: String,
}

/// Few-shot examples in the task file: a list, or a Python function that returns one.
#[derive(Clone, Debug)]
pub(crate) enum FewshotSamples {
    Listed(Vec<Map<String, Json>>),
    Function(PythonFunction),
}

/// Configuration of a task, as read from YAML.
#[derive(Clone, Debug)]
pub struct TaskConfig {
    /// Task name.
    pub task: String,
    /// Display name in tables, if it differs from the name.
    pub alias: Option<String>,
    /// Tags that select the task.
    pub tags: Vec<String>,
    /// Output type of the task (`output_type`).
    pub output_type: OutputType,
    /// `metadata.version`; null if there is none.
    pub version: Json,
    /// Number of few-shot examples, if the task sets it.
    pub num_fewshot: Option<usize>,
    /// True if scoring runs model-written code.
    pub unsafe_code: bool,
    /// Number of responses to each request (lm-eval's `repeats`).
    pub repeats: usize,
    pub(crate) dataset: DatasetConfig,
    pub(crate) training_split: Option<String>,
    pub(crate) validation_split: Option<String>,
    pub(crate) test_split: Option<String>,
    pub(crate) process_docs: Option<PythonFunction>,
    pub(crate) doc_to_text: Option<PromptField>,
    pub(crate) doc_to_target: Option<PromptField>,
    pub(crate) doc_to_choice: Option<PromptField>,
    pub(crate) process_results: Option<PythonFunction>,
    pub(crate) description: Option<PromptField>,
    pub(crate) target_delimiter: String,
    fewshot_delimiter: String,
    pub(crate) gen_prefix: Option<PromptField>,
    pub(crate) fewshot: FewshotConfig,
    pub(crate) metrics: Vec<MetricConfig>,
    pub(crate) filters: Vec<FilterConfig>,
    pub(crate) generation_kwargs: Map<String, Json>,
    pub(crate) place: SourceLocation,
    pub(crate) written: Map<String, Json>,
}

const TASK_KEYS: [&str; 37] = [
    "task",
    "task_alias",
    "tag",
    "group",
    "task_list",
    "class",
    "custom_dataset",
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
    "fewshot_split",
    "process_docs",
    "doc_to_text",
    "doc_to_target",
    "doc_to_image",
    "doc_to_audio",
    "unsafe_code",
    "doc_to_choice",
    "process_results",
    "use_prompt",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
    "fewshot_config",
    "num_fewshot",
    "metric_list",
    "output_type",
    "generation_kwargs",
    "repeats",
    "filter_list",
    "should_decontaminate",
    "doc_to_decontamination_query",
    "gen_prefix",
    "metadata",
];

/// Unsupported lm-eval keys, with the reason.
const REFUSED: [(&str, &str); 5] = [
    ("class", "tasks written as Python classes are not run; write the task as YAML"),
    ("custom_dataset", "data sets made by Python code are not run; name files with dataset_path and data_files"),
    ("doc_to_image", "no supported model family reads images"),
    ("doc_to_audio", "no supported model family reads audio"),
    ("use_prompt", "prompts of promptsource are Python code; write doc_to_text and doc_to_target"),
];

const FEWSHOT_KEYS: [&str; 11] = [
    "sampler",
    "split",
    "process_docs",
    "fewshot_indices",
    "samples",
    "doc_to_text",
    "doc_to_choice",
    "doc_to_target",
    "gen_prefix",
    "fewshot_delimiter",
    "target_delimiter",
];

impl TaskConfig {
    /// Reads a task after its includes were merged.
    pub(crate) fn read(node: &TaskNode) -> Result<Self, ConfigError> {
        let keys = YamlMap::new(node, "a task", &TASK_KEYS)?;
        refuse(&keys)?;
        let output_type = OutputType::read(&keys)?;
        let fewshot_delimiter = keys.text("fewshot_delimiter")?.unwrap_or_else(|| "\n\n".into());
        let process_results = function(&keys, "process_results")?;
        let field = |key| field(&keys, key);
        let config = Self {
            task: task_name(&keys)?,
            alias: keys.text("task_alias")?,
            tags: keys.texts("tag")?.unwrap_or_default(),
            output_type,
            version: keys.map("metadata")?.and_then(|m| m.get("version").cloned()).unwrap_or(Json::Null),
            num_fewshot: keys.count("num_fewshot")?,
            unsafe_code: keys.flag("unsafe_code", false)?,
            repeats: keys.count_up_to("repeats", MAX_REPEATS)?.unwrap_or(1).max(1),
            dataset: DatasetConfig {
                path: keys.text("dataset_path")?,
                name: keys.text("dataset_name")?,
                kwargs: keys.map("dataset_kwargs")?.unwrap_or_default(),
                kwargs_place: keys.get("dataset_kwargs").map(|entry| entry.place.clone()),
            },
            training_split: keys.text("training_split")?,
            validation_split: keys.text("validation_split")?,
            test_split: keys.text("test_split")?,
            process_docs: function(&keys, "process_docs")?,
            doc_to_text: field("doc_to_text")?,
            doc_to_target: field("doc_to_target")?,
            doc_to_choice: field("doc_to_choice")?,
            description: field("description")?,
            target_delimiter: keys.text("target_delimiter")?.unwrap_or_else(|| " ".into()),
            gen_prefix: field("gen_prefix")?,
            fewshot: FewshotConfig::read(&keys, &fewshot_delimiter)?,
            metrics: metric_list(keys.get("metric_list"), output_type, process_results.is_some())?,
            filters: filter_list(keys.get("filter_list"))?,
            generation_kwargs: generation_kwargs(&keys, output_type, &fewshot_delimiter)?,
            process_results,
            fewshot_delimiter,
            place: node.place.clone(),
            written: written(&keys),
        };
        config.check_fields(&keys)?;
        Ok(config)
    }

    /// Returns an error for a task that runs model-written code, unless `policy` allows it.
    pub fn check_unsafe_code(&self, policy: UnsafeCodePolicy) -> Result<(), TaskError> {
        match policy {
            UnsafeCodePolicy::Refuse if self.unsafe_code || self.runs_programs() => {
                Err(self.refused(UnsafeCodePolicy::REFUSED.to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Returns an error for a task that runs model-written code, unless it can run on this machine as `policy` demands.
    /// Starts Python.
    pub fn check_sandbox(&self, policy: UnsafeCodePolicy) -> Result<(), TaskError> {
        match self.runs_programs() {
            true => super::builtin::check_sandbox(policy).map_err(|problem| self.refused(problem)),
            false => Ok(()),
        }
    }

    fn refused(&self, problem: String) -> TaskError {
        TaskError::Refused { task: self.task.clone(), problem }
    }

    fn runs_programs(&self) -> bool {
        self.metrics.iter().any(|metric| matches!(metric.kind, Metric::BuiltIn(_)))
    }

    /// Returns the name of the evaluated split.
    pub(crate) fn eval_split(&self) -> Result<&str, ConfigError> {
        self.test_split.as_deref().or(self.validation_split.as_deref()).ok_or_else(|| {
            let message = format!("task {} has no split to evaluate; set test_split or validation_split", self.task);
            ConfigError::at(self.place.clone(), message)
        })
    }

    /// Returns `higher_is_better` of each metric.
    pub fn higher_is_better(&self) -> Map<String, Json> {
        self.metrics.iter().map(|metric| (metric.name.clone(), json!(metric.higher_is_better))).collect()
    }

    /// Returns each score's name and `higher_is_better`. The name is `METRIC`, or `METRIC,FILTER` unless the filter
    /// is `none`.
    pub fn score_names(&self) -> Vec<(String, bool)> {
        let named = |metric: &MetricConfig, filter: &FilterConfig| match filter.name.as_str() {
            "none" => metric.name.clone(),
            filter => format!("{},{filter}", metric.name),
        };
        let of_metric =
            |metric| self.filters.iter().map(move |filter| (named(metric, filter), metric.higher_is_better));
        self.metrics.iter().flat_map(of_metric).collect()
    }

    /// Returns true if the metric names are known only after scoring, because a function computes the metrics.
    pub fn has_dynamic_metric_names(&self) -> bool {
        self.process_results.is_some() || self.runs_programs()
    }

    /// Returns the delimiter between few-shot examples.
    pub(crate) fn fewshot_delimiter(&self) -> &str {
        &self.fewshot_delimiter
    }

    /// Returns the template of `gen_prefix`.
    pub(crate) fn gen_prefix_template(&self) -> &str {
        match &self.gen_prefix {
            Some(PromptField::Template(text, _)) => text,
            _ => "",
        }
    }

    /// Returns true if the fields of a multiple-choice task use a column as a list: `choices[0]` or the bare column
    /// name.
    pub(crate) fn uses_column_as_list(&self, column: &str) -> bool {
        let fewshot = &self.fewshot;
        let texts = [&self.doc_to_text, &fewshot.doc_to_text].into_iter().flatten();
        let choices = [&self.doc_to_choice, &fewshot.doc_to_choice].into_iter().flatten();
        let indexes = |field: &PromptField| matches!(field, PromptField::Template(text, _) if text.contains(&format!("{column}[")));
        let names = |field: &PromptField| matches!(field, PromptField::Template(text, _) if text.trim() == column);
        self.output_type == OutputType::MultipleChoice
            && (texts.chain(choices.clone()).any(indexes) || choices.into_iter().any(names))
    }

    /// Returns the effective configuration for the results file: the task file's keys, lm-eval's defaults and the
    /// run's overrides.
    pub fn dump(&self, num_fewshot: usize, generation_kwargs: &Map<String, Json>) -> Map<String, Json> {
        let mut dump = self.written.clone();
        dump.insert("fewshot_config".into(), Json::Object(self.dump_fewshot()));
        let mut default = |key: &str, value: Json| {
            dump.entry(key).or_insert(value);
        };
        default("unsafe_code", json!(false));
        default("description", json!(""));
        default("target_delimiter", json!(" "));
        default("fewshot_delimiter", json!("\n\n"));
        default("output_type", json!(self.output_type.name()));
        default("repeats", json!(1));
        default("should_decontaminate", json!(false));
        default("metadata", json!({}));
        dump.insert("num_fewshot".into(), json!(num_fewshot));
        if self.output_type == OutputType::GenerateUntil {
            dump.insert("generation_kwargs".into(), json!(generation_kwargs));
        }
        if let Some(Json::Object(metadata)) = dump.get_mut("metadata") {
            metadata.insert("config_source".into(), json!(self.place.file.display().to_string()));
        }
        dump
    }

    /// Returns the effective `fewshot_config`. Missing keys are the task's.
    fn dump_fewshot(&self) -> Map<String, Json> {
        let own = self.written.get("fewshot_config");
        let value = |key: &str| own?.get(key).filter(|value| !value.is_null()).cloned();
        let of_task = |key: &str| match key {
            "sampler" => Some(json!("default")),
            "split" => self.written.get("fewshot_split").cloned(),
            "fewshot_delimiter" => Some(json!(self.fewshot_delimiter)),
            "target_delimiter" => Some(json!(self.target_delimiter)),
            "fewshot_indices" | "samples" => None,
            key => self.written.get(key).cloned(),
        };
        FEWSHOT_KEYS
            .iter()
            .map(|key| ((*key).to_owned(), value(key).or_else(|| of_task(key)).unwrap_or(Json::Null)))
            .collect()
    }

    fn check_fields(&self, keys: &YamlMap) -> Result<(), ConfigError> {
        let needs = |field: &Option<PromptField>, key: &str| match field {
            Some(_) => Ok(()),
            None => Err(keys.error(format!("task {} needs the key `{key}`", self.task))),
        };
        needs(&self.doc_to_text, "doc_to_text")?;
        needs(&self.doc_to_target, "doc_to_target")?;
        if self.output_type == OutputType::MultipleChoice {
            needs(&self.doc_to_choice, "doc_to_choice")?;
        }
        if self.dataset.path.is_none() {
            return Err(keys.error(format!("task {} needs the key `dataset_path`", self.task)));
        }
        self.eval_split().map(|_| ())
    }
}

impl FewshotConfig {
    fn read(task: &YamlMap, fewshot_delimiter: &str) -> Result<Self, ConfigError> {
        let empty = TaskNode { value: TaskValue::Map(Vec::new()), place: SourceLocation::default() };
        let entry = task.get("fewshot_config");
        let keys = YamlMap::new(entry.map_or(&empty, |entry| &entry.node), "fewshot_config", &FEWSHOT_KEYS)?;
        let own = |key| field(&keys, key).and_then(|own| own.map_or_else(|| field(task, key), |own| Ok(Some(own))));
        let text = |key: &str, default: &str| -> Result<String, ConfigError> {
            Ok(keys.text(key)?.or(task.text(key)?).unwrap_or_else(|| default.to_owned()))
        };
        Ok(Self {
            is_first_n: sampler(&keys)?,
            split: keys.text("split")?.or(task.text("fewshot_split")?),
            process_docs: function(&keys, "process_docs")?.or(function(task, "process_docs")?),
            indices: indices(&keys)?,
            samples: samples(&keys)?,
            doc_to_text: own("doc_to_text")?,
            doc_to_choice: own("doc_to_choice")?,
            doc_to_target: own("doc_to_target")?,
            gen_prefix: own("gen_prefix")?,
            fewshot_delimiter: text("fewshot_delimiter", fewshot_delimiter)?,
            target_delimiter: text("target_delimiter", " ")?,
        })
    }
}

fn refuse(keys: &YamlMap) -> Result<(), ConfigError> {
    let refused = REFUSED.iter().find_map(|(key, why)| Some((keys.get(key)?, key, why)));
    refused.map_or(Ok(()), |(entry, key, why)| Err(ConfigError::at(entry.place.clone(), format!("{key}: {why}"))))
}

fn sampler(keys: &YamlMap) -> Result<bool, ConfigError> {
    match keys.text("sampler")?.as_deref() {
        None | Some("default") => Ok(false),
        Some("first_n") => Ok(true),
        Some(other) => {
            let near = did_you_mean(other, ["default", "first_n"]);
            Err(keys.error(format!("sampler: unknown value {other:?}{near}; values are default, first_n")))
        }
    }
}

fn indices(keys: &YamlMap) -> Result<Option<Vec<usize>>, ConfigError> {
    let Some(entry) = keys.get("fewshot_indices") else { return Ok(None) };
    serde_json::from_value(entry.node.json()).map(Some).map_err(|_| type_error(entry, "a list of document numbers"))
}

fn samples(keys: &YamlMap) -> Result<Option<FewshotSamples>, ConfigError> {
    let Some(entry) = keys.get("samples") else { return Ok(None) };
    if let Some(function) = as_function(entry) {
        return Ok(Some(FewshotSamples::Function(function)));
    }
    let listed = serde_json::from_value(entry.node.json()).map_err(|_| type_error(entry, "a list of documents"))?;
    Ok(Some(FewshotSamples::Listed(listed)))
}

fn field(keys: &YamlMap, key: &str) -> Result<Option<PromptField>, ConfigError> {
    let Some(entry) = keys.get(key) else { return Ok(None) };
    let template = |text: &str| PromptField::Template(text.to_owned(), entry.node.place.clone());
    Ok(Some(match &entry.node.value {
        TaskValue::Text(text) => template(text),
        TaskValue::Tagged(..) => as_function(entry).map(PromptField::Function).expect("the value is a function"),
        TaskValue::Int(_) | TaskValue::Float(_) | TaskValue::List(_) | TaskValue::Bool(_) => {
            PromptField::Constant(entry.node.json())
        }
        TaskValue::Map(entries) if key == "doc_to_choice" => {
            PromptField::Constant(entries.iter().map(|entry| entry.node.json()).collect())
        }
        _ => return Err(type_error(entry, "a column, a template, a constant or a !function")),
    }))
}

/// Maximum of `repeats`. All requests of a run are held in memory.
const MAX_REPEATS: usize = 10_000;

/// Maximum length of a task name in bytes, because it becomes part of file names.
const MAX_NAME: usize = 180;

fn task_name(keys: &YamlMap) -> Result<String, ConfigError> {
    let name = keys.required_text("task")?;
    let problem = match name.len() {
        0 => "task: the name is empty; write one".to_owned(),
        1..=MAX_NAME => return Ok(name),
        n => format!("task: the name has {n} bytes; the maximum is {MAX_NAME}, as file names contain it"),
    };
    Err(keys
        .get("task")
        .map_or_else(|| keys.error(&problem), |entry| ConfigError::at(entry.node.place.clone(), &problem)))
}

fn function(keys: &YamlMap, key: &str) -> Result<Option<PythonFunction>, ConfigError> {
    let Some(entry) = keys.get(key) else { return Ok(None) };
    as_function(entry).map(Some).ok_or_else(|| type_error(entry, "a !function"))
}

/// Reads `generation_kwargs`; empty for a task that does not generate.
fn generation_kwargs(keys: &YamlMap, output: OutputType, delimiter: &str) -> Result<Map<String, Json>, ConfigError> {
    let given = keys.map("generation_kwargs")?;
    let Some(mut kwargs) = given else {
        let default = json!({"temperature": 0.0, "do_sample": false, "max_gen_toks": 256, "until": [delimiter]});
        return Ok(if output == OutputType::GenerateUntil { as_object(default) } else { Map::new() });
    };
    if let Some(entry) = keys.get("generation_kwargs") {
        super::generation::check(&kwargs, entry)?;
    }
    if let Some(temperature) = kwargs.get("temperature").and_then(super::generation::number) {
        kwargs.insert("temperature".into(), json!(temperature));
    }
    kwargs.entry("until").or_insert_with(|| json!([delimiter]));
    Ok(kwargs)
}

fn as_object(value: Json) -> Map<String, Json> {
    match value {
        Json::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Returns the task file's keys that the results file lists: all except the registry's.
fn written(keys: &YamlMap) -> Map<String, Json> {
    let shown = keys.entries().iter().filter(|entry| !["tag", "group", "task_list"].contains(&entry.key.as_str()));
    shown.map(|e| (e.key.clone(), e.node.json())).filter(|(_, value)| !value.is_null()).collect()
}
