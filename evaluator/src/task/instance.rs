//! Loaded tasks, and the instances built from their documents.

use std::fmt;

use candlewick_text::hub::Hub;
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::builtin::{self, Doc};
use super::config::TaskConfig;
use super::data::{self, DatasetSplit, SplitInfo};
use super::data_override::DataOverrides;
use super::error::TaskError;
use super::fewshot::{EvalDoc, FewshotRng, FewshotSampler};
use super::fewshot_pool::{FewshotPool, FewshotSplit, load_fewshot_pool};
use super::field::{CompiledField, as_index};
use super::generation;
use super::metric::{self, Metric};
use super::output_type::OutputType;
use super::prompt::{PromptFormat, PromptOptions, PromptTurn, join_texts, question_turns};
use super::python::repr;
use super::python::text::ends_with_space;
use super::python_random::PythonRandom;
use candlewick_inference::request::Request;

/// Request about one document, as lm-eval's `Instance`.
#[derive(Clone, Debug, PartialEq)]
pub struct Instance {
    /// Index of the document in its split.
    pub doc_id: usize,
    /// Index of the request among the document's requests.
    pub idx: usize,
    /// Index of the repetition, below the task's `repeats`.
    pub repeat: usize,
    /// Request to the model.
    pub request: Request,
}

/// Task with its loaded documents.
pub struct Task {
    pub(crate) config: TaskConfig,
    pub(crate) eval: DatasetSplit,
    shots: FewshotPool,
    pub(crate) doc_to_text: CompiledField,
    pub(crate) doc_to_target: CompiledField,
    pub(crate) doc_to_choice: Option<CompiledField>,
    description: Option<CompiledField>,
    gen_prefix: Option<CompiledField>,
    shot: FewshotExample,
    /// True if each choice is a context and the target is the continuation of all.
    pub(crate) has_several_inputs: bool,
    /// True if a target is a list of accepted answers.
    pub(crate) has_several_targets: bool,
    pub(crate) process_results: Option<builtin::ProcessResults>,
}

/// Data files of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TaskDataFiles {
    /// Evaluated split.
    #[serde(flatten)]
    pub evaluated: SplitInfo,
    /// Split of the few-shot examples, if they come from a split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fewshot: Option<FewshotSplit>,
}

impl TaskDataFiles {
    /// Returns the files of both splits, as paths or below a Hub id.
    pub fn files(&self) -> Vec<String> {
        let fewshot = self.fewshot.iter().flat_map(|fewshot| &fewshot.of.files);
        self.evaluated.files.iter().chain(fewshot).cloned().collect()
    }

    /// Returns a note if few-shot examples come from the evaluated split.
    pub fn fewshot_note(&self) -> Option<String> {
        let split = &self.evaluated.split;
        let is_evaluated_split = self.fewshot.as_ref().is_some_and(|fewshot| fewshot.is_evaluated_split);
        is_evaluated_split.then(|| format!("its few-shot examples come from the evaluated split ({split})"))
    }
}

impl fmt::Display for TaskDataFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.evaluated)?;
        match &self.fewshot {
            Some(fewshot) => write!(f, ", examples: {}", fewshot.of),
            None => Ok(()),
        }
    }
}

/// Rendered few-shot example.
struct FewshotExample {
    text: CompiledField,
    choice: Option<CompiledField>,
    target: CompiledField,
    prefix: Option<CompiledField>,
}

impl Task {
    /// Loads a task's documents and its few-shot pool.
    pub fn open(
        hub: &Hub,
        config: TaskConfig,
        paths: &DataOverrides,
        options: &PromptOptions,
    ) -> Result<Self, TaskError> {
        let process = config.process_docs.as_ref().map(builtin::process_docs).transpose()?;
        let eval = data::open(hub, &config, config.eval_split()?, paths, process)?;
        let first = eval.docs().first().cloned().ok_or_else(|| TaskError::Document {
            task: config.task.clone(),
            place: format!("split {}", config.eval_split().unwrap_or_default()),
            problem: "there are no documents".into(),
        })?;
        let reader = |field: &Option<_>| field.as_ref().map(|field| CompiledField::new(field, &first)).transpose();
        let missing = || TaskError::from(super::error::ConfigError::at(config.place.clone(), "a field is missing"));
        let fewshot = &config.fewshot;
        let shot = FewshotExample {
            text: reader(&fewshot.doc_to_text)?.ok_or_else(missing)?,
            choice: reader(&fewshot.doc_to_choice)?,
            target: reader(&fewshot.doc_to_target)?.ok_or_else(missing)?,
            prefix: reader(&fewshot.gen_prefix)?,
        };
        let mut task = Self {
            shots: load_fewshot_pool(hub, &config, &eval, paths, options)?,
            doc_to_text: reader(&config.doc_to_text)?.ok_or_else(missing)?,
            doc_to_target: reader(&config.doc_to_target)?.ok_or_else(missing)?,
            doc_to_choice: reader(&config.doc_to_choice)?,
            description: reader(&config.description)?,
            gen_prefix: reader(&config.gen_prefix)?,
            shot,
            has_several_inputs: false,
            has_several_targets: false,
            process_results: config.process_results.as_ref().map(builtin::process_results).transpose()?,
            eval,
            config,
        };
        task.try_first(&first)?;
        Ok(task)
    }

    /// Returns the task's configuration.
    pub fn config(&self) -> &TaskConfig {
        &self.config
    }

    /// Returns the documents of the evaluated split.
    pub fn docs(&self) -> &[Doc] {
        self.eval.docs()
    }

    /// Returns the data files of the evaluated split and of the few-shot split.
    pub fn data(&self) -> TaskDataFiles {
        TaskDataFiles { evaluated: self.eval.data(), fewshot: self.shots.data.clone() }
    }

    /// Returns the number of few-shot examples: `options.num_fewshot`, unless the task requires zero.
    pub fn num_fewshot(&self, options: &PromptOptions) -> usize {
        match (self.config.num_fewshot, options.num_fewshot) {
            (Some(0), _) => 0,
            (own, wanted) => wanted.or(own).unwrap_or(0),
        }
    }

    /// Returns the task with the metric `bypass`, for `--predict-only`.
    #[must_use]
    pub fn predict_only(mut self) -> Self {
        self.config.metrics = vec![metric::bypass()];
        self.process_results = None;
        self
    }

    /// Returns the target of a document as JSON for sample records.
    pub fn target(&self, doc_id: usize) -> Result<Json, TaskError> {
        let target = self.doc_to_target.target(&self.docs()[doc_id], self.doc_to_choice.is_some());
        target.map_err(|problem| self.document_error(doc_id, problem))
    }

    /// Returns the choices of a document, if the task has any.
    pub fn choices(&self, doc_id: usize) -> Result<Option<Vec<String>>, TaskError> {
        let choices = self.doc_to_choice.as_ref().map(|reader| reader.choices(&self.docs()[doc_id]));
        choices.transpose().map_err(|problem| self.document_error(doc_id, problem))
    }

    /// Returns the indices of the evaluated documents.
    pub fn doc_ids(&self, options: &PromptOptions) -> Result<Vec<usize>, TaskError> {
        let n = self.docs().len();
        if let Some(samples) = &options.samples {
            if let Some(beyond) = samples.iter().find(|doc_id| **doc_id >= n) {
                let task = &self.config.task;
                return Err(TaskError::Selection(format!(
                    "{task} has no document {beyond}; it has {n} documents, numbered from 0"
                )));
            }
            // Documents keep the split's order, as in lm-eval.
            return Ok((0..n).filter(|doc_id| samples.contains(doc_id)).collect());
        }
        let most = match options.limit {
            None | Some(0.0) => n,
            Some(share) if share < 1.0 => (n as f64 * share).ceil() as usize,
            Some(count) => count as usize,
        };
        Ok((0..n.min(most)).collect())
    }

    /// Builds all instances, document by document. A document without text to score has none, except with `compat`.
    pub fn instances(&self, options: &PromptOptions) -> Result<Vec<Instance>, TaskError> {
        let mut draws = match options.compat {
            true => FewshotRng::Stream(Box::new(PythonRandom::new(options.fewshot_seed))),
            false => FewshotRng::PerDocument { seed: options.fewshot_seed, task: &self.config.task },
        };
        let mut all = Vec::new();
        for doc_id in self.doc_ids(options)? {
            let requests = self.requests(options, &mut draws, doc_id)?;
            if !options.compat && requests.iter().all(is_empty) {
                continue;
            }
            for (idx, request) in requests.into_iter().enumerate() {
                let repeat = |repeat| Instance { doc_id, idx, repeat, request: request.clone() };
                all.extend((0..self.config.repeats).map(repeat));
            }
        }
        Ok(all)
    }

    /// Returns the effective `generation_kwargs`.
    pub fn generation_kwargs(&self, options: &PromptOptions) -> Map<String, Json> {
        let mut kwargs = self.config.generation_kwargs.clone();
        kwargs.extend(options.gen_kwargs.clone());
        kwargs
    }

    pub(crate) fn document_error(&self, doc_id: usize, problem: String) -> TaskError {
        TaskError::Document { task: self.config.task.clone(), place: self.eval.locate(doc_id), problem }
    }

    /// Determines from the first document whether choices are contexts and targets are lists.
    fn try_first(&mut self, doc: &Doc) -> Result<(), TaskError> {
        let has_choices = self.doc_to_choice.is_some();
        let text = self.doc_to_text.text(doc, has_choices).map_err(|problem| self.document_error(0, problem))?;
        let target = self.doc_to_target.target(doc, has_choices).map_err(|problem| self.document_error(0, problem))?;
        self.has_several_inputs = has_choices && as_index(&text).is_some();
        self.has_several_targets = target.as_array().is_some_and(|list| !list.is_empty());
        let of_one = |name: &str| ["brier_score", "f1", "mcc"].contains(&name);
        match self.config.metrics.iter().find(|metric| of_one(&metric.name) && matches!(metric.kind, Metric::ByName)) {
            Some(metric) if self.has_several_targets => {
                let problem =
                    format!("the metric {} needs one correct choice, but the target is {target}", metric.name);
                Err(self.document_error(0, problem))
            }
            _ => Ok(()),
        }
    }

    fn requests(
        &self,
        options: &PromptOptions,
        draws: &mut FewshotRng,
        doc_id: usize,
    ) -> Result<Vec<Request>, TaskError> {
        let doc = &self.docs()[doc_id];
        let fail = |problem| self.document_error(doc_id, problem);
        let prefix = self.gen_prefix.as_ref().map(|prefix| prefix.plain(doc)).transpose().map_err(fail)?;
        let before = self.before(options, draws, doc_id).map_err(fail)?;
        let style = PromptFormat { chat: options.chat, as_multiturn: options.fewshot_as_multiturn };
        let has_prefix = prefix.as_ref().is_some_and(|prefix| !prefix.is_empty());
        let print = |question: &str, target_delimiter: &str| {
            let mut all = before.clone();
            all.extend(question_turns(question, None, prefix.as_deref(), (target_delimiter, "")));
            style.print(&all, has_prefix).map_err(|source| TaskError::Chat { task: self.config.task.clone(), source })
        };
        let choices = self.choices(doc_id)?.unwrap_or_default();
        let contexts = if self.has_several_inputs {
            choices.iter().map(|choice| print(choice, "")).collect::<Result<Vec<_>, _>>()?
        } else {
            let question = self.doc_to_text.text(doc, self.doc_to_choice.is_some()).and_then(as_text).map_err(fail)?;
            vec![print(&question, &self.config.target_delimiter)?]
        };
        self.ask(options, doc_id, contexts, &choices)
    }

    /// Returns the system turn and the few-shot examples.
    fn before(
        &self,
        options: &PromptOptions,
        draws: &mut FewshotRng,
        doc_id: usize,
    ) -> Result<Vec<PromptTurn>, String> {
        let doc = &self.docs()[doc_id];
        let config = &self.config.fewshot;
        let description = self.description.as_ref().map(|text| text.plain(doc)).transpose()?.unwrap_or_default();
        let instruction = options.system_instruction.as_deref().unwrap_or_default();
        let system = join_texts(instruction, &description, self.config.fewshot_delimiter());
        let mut before = Vec::new();
        if !system.is_empty() {
            before.push(PromptTurn::new("system", system, ""));
        }
        let n = self.num_fewshot(options);
        if n == 0 {
            return Ok(before);
        }
        let FewshotPool { docs, rows, exclude_eval_doc, .. } = &self.shots;
        let sampler = FewshotSampler { docs, is_first_n: config.is_first_n, exclude_eval_doc: *exclude_eval_doc, rows };
        for shot in sampler.sample(draws, n, EvalDoc { doc_id, row: self.eval.row_index(doc_id), doc })? {
            before.extend(self.example(shot)?);
        }
        Ok(before)
    }

    fn example(&self, doc: &Doc) -> Result<Vec<PromptTurn>, String> {
        let has_choices = self.doc_to_choice.is_some();
        let choices = self.shot.choice.as_ref().map(|reader| reader.choices(doc)).transpose()?;
        let prefix = self.shot.prefix.as_ref().map(|prefix| prefix.plain(doc)).transpose()?;
        let target = self.shot.target.target(doc, has_choices)?;
        let question = self.shot.text.text(doc, has_choices)?;
        let nth = |choices: &[String], at: i64| {
            let choice = usize::try_from(at).ok().and_then(|at| choices.get(at).cloned());
            choice.ok_or_else(|| format!("choice {at} is out of range: there are {} choices", choices.len()))
        };
        let (question, answer) = match (choices, as_index(&question)) {
            (Some(choices), Some(at)) if self.has_several_inputs => (nth(&choices, at)?, as_text(target)?),
            (Some(choices), _) if as_index(&target).is_some() => {
                (as_text(question)?, nth(&choices, as_index(&target).unwrap_or(0))?)
            }
            _ => (as_text(question)?, first_text(target)?),
        };
        let delimiters =
            (self.config.fewshot.target_delimiter.as_str(), self.config.fewshot.fewshot_delimiter.as_str());
        Ok(question_turns(&question, Some(&answer), prefix.as_deref(), delimiters))
    }

    /// Builds the requests of the task's output type.
    fn ask(
        &self,
        options: &PromptOptions,
        doc_id: usize,
        contexts: Vec<String>,
        choices: &[String],
    ) -> Result<Vec<Request>, TaskError> {
        let target = || self.target(doc_id).map(|target| repr::str(&target));
        let context = || contexts.first().cloned().unwrap_or_default();
        Ok(match self.config.output_type {
            OutputType::Loglikelihood => vec![Request::Loglikelihood { context: context(), continuation: target()? }],
            OutputType::LoglikelihoodRolling => vec![Request::LoglikelihoodRolling { text: target()? }],
            OutputType::GenerateUntil => {
                let settings = generation::settings(&self.generation_kwargs(options));
                let fail =
                    |problem| TaskError::Selection(format!("generation_kwargs of {}: {problem}", self.config.task));
                vec![Request::GenerateUntil { context: context(), settings: settings.map_err(fail)? }]
            }
            OutputType::MultipleChoice => {
                let delimiter = self.choice_delimiter(options);
                let request = |context: &String, text: &str| Request::Loglikelihood {
                    context: context.clone(),
                    continuation: format!("{delimiter}{text}"),
                };
                let mut requests: Vec<Request> = match self.has_several_inputs {
                    true => {
                        let target = target()?;
                        contexts.iter().map(|context| request(context, &target)).collect()
                    }
                    false => choices.iter().map(|choice| request(&contexts[0], choice)).collect(),
                };
                if self.config.metrics.iter().any(|metric| metric.name == "acc_mutual_info") {
                    requests.extend(choices.iter().map(|choice| request(&String::new(), choice)));
                }
                requests
            }
        })
    }

    /// Returns the delimiter before a choice; empty in a chat without `gen_prefix`.
    fn choice_delimiter(&self, options: &PromptOptions) -> &str {
        let written = self.config.gen_prefix_template();
        let goes_on = !written.is_empty() && !ends_with_space(written);
        if options.chat.is_some() && !goes_on { "" } else { &self.config.target_delimiter }
    }
}

pub(crate) fn is_empty(request: &Request) -> bool {
    match request {
        Request::Loglikelihood { continuation, .. } => continuation.is_empty(),
        Request::LoglikelihoodRolling { text } => text.is_empty(),
        Request::GenerateUntil { context, .. } => context.is_empty(),
    }
}

fn as_text(value: Json) -> Result<String, String> {
    match value {
        Json::String(text) => Ok(text),
        other => Err(format!("the prompt is {other}, not a string")),
    }
}

/// Returns the target of a few-shot example: a text, or the first of a list.
fn first_text(target: Json) -> Result<String, String> {
    match target {
        Json::String(text) => Ok(text),
        Json::Array(list) => match list.into_iter().next() {
            Some(Json::String(text)) => Ok(text),
            other => Err(format!("the target of a few-shot example is {other:?}, not a string")),
        },
        other => Err(format!("the target of a few-shot example is {other}, not a string")),
    }
}
