//! Evaluation of a model on tasks: requests, responses, scores and results. Used by `evaluator run` and by the
//! trainer.

use std::borrow::Cow;
use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use candlewick_text::quantity::counted;
use serde_json::{Value as Json, json};

use crate::results::{Results, TaskRun, assemble_results};
use crate::task::{Instance, OutputType, PromptOptions, Task, TaskGroup};
use candlewick_inference::answer::{LmBackend, RequestOutput, UnscorableRequests};
use candlewick_inference::request::{Request, Response};

/// Tasks with their instances, ready to be evaluated by a model.
pub struct Evaluation<'a> {
    tasks: Vec<Task>,
    groups: Vec<TaskGroup>,
    /// One entry for each task.
    options: Vec<PromptOptions<'a>>,
    /// One entry for each task.
    instances: Vec<Vec<Instance>>,
}

impl<'a> Evaluation<'a> {
    /// Builds all instances. `options` holds one entry for each task; `groups` are the scored groups.
    pub fn new(tasks: Vec<Task>, groups: Vec<TaskGroup>, options: Vec<PromptOptions<'a>>) -> Result<Self> {
        let instances = tasks.iter().zip(&options).map(|(task, options)| Ok(task.instances(options)?));
        let instances = instances.collect::<Result<Vec<Vec<Instance>>>>()?;
        Ok(Self { tasks, groups, options, instances })
    }

    /// Returns a warning for each key of `generation_kwargs` that has no effect.
    pub fn ignored_kwargs_warnings(&self) -> Vec<String> {
        let of_task = |(task, options): (&Task, &PromptOptions)| {
            let name = task.config().task.clone();
            let said = crate::task::ignored_kwargs(&task.generation_kwargs(options));
            said.into_iter().map(move |said| format!("{name}: generation_kwargs: {said}"))
        };
        let generates = |(task, _): &(&Task, &PromptOptions)| task.config().output_type == OutputType::GenerateUntil;
        self.tasks.iter().zip(&self.options).filter(generates).flat_map(of_task).collect()
    }

    /// Describes the data of each task, as `arc_easy: test = data/arc_easy_test.jsonl (2376 documents)`.
    pub fn data_descriptions(&self) -> impl Iterator<Item = String> {
        self.tasks.iter().map(|task| format!("{}: {}", task.config().task, task.data()))
    }

    /// Returns a note for each task whose few-shot examples come from the evaluated split.
    pub fn fewshot_notes(&self) -> impl Iterator<Item = String> {
        let note = |task: &Task| Some(format!("{}: {}", task.config().task, task.data().fewshot_note()?));
        self.tasks.iter().filter_map(note)
    }

    /// Returns the prompt and target of each task's first document, for `--write-out`.
    pub fn first_prompts(&self) -> impl Iterator<Item = String> {
        self.tasks.iter().zip(&self.instances).filter_map(|(task, instances)| {
            let Instance { doc_id, request, .. } = instances.first()?;
            let name = &task.config().task;
            let target = task.target(*doc_id).ok()?;
            Some(format!("{name}: document {doc_id}; prompt:\n{}\n{name}: target: {target}", request.context()))
        })
    }

    /// Returns all requests, task by task.
    pub fn requests(&self) -> Vec<Request> {
        self.instances.iter().flatten().map(|instance| instance.request.clone()).collect()
    }

    /// Sends [`Evaluation::requests`] to the model and returns one response each. A document without tokens to score
    /// is skipped: its responses are `None`. With `compat` such a document is an error, as in lm-eval.
    pub fn run_requests(&self, answers: &mut dyn LmBackend) -> Result<Vec<Option<RequestOutput>>> {
        let requests = self.requests();
        let unscorable = match answers.answer(&requests) {
            Ok(answered) => return Ok(answered.into_iter().map(Some).collect()),
            Err(error) => error.downcast::<UnscorableRequests>()?,
        };
        let is_skipped = self.skipped_requests(&unscorable)?;
        let open = requests.into_iter().zip(&is_skipped).filter(|(_, is_skipped)| !**is_skipped);
        let mut answered = answers.answer(&open.map(|(request, _)| request).collect::<Vec<_>>())?.into_iter();
        Ok(is_skipped.into_iter().map(|is_skipped| if is_skipped { None } else { answered.next() }).collect())
    }

    /// Returns true for each request whose document is skipped.
    fn skipped_requests(&self, unscorable: &UnscorableRequests) -> Result<Vec<bool>> {
        let (mut all, mut n_before) = (Vec::new(), 0);
        for ((task, options), instances) in self.tasks.iter().zip(&self.options).zip(&self.instances) {
            let own = unscorable.requests.iter().filter_map(|request| instances.get(request.checked_sub(n_before)?));
            let docs: BTreeSet<usize> = own.map(|instance| instance.doc_id).collect();
            if let Some(first) = docs.first().filter(|_| options.compat) {
                return Err(task.document_error(*first, unscorable.why.to_string()).into());
            }
            all.extend(instances.iter().map(|instance| docs.contains(&instance.doc_id)));
            n_before += instances.len();
        }
        Ok(all)
    }

    /// Scores the responses of [`Evaluation::run_requests`] and calls `scored` after each task. Standard errors
    /// without a formula come from `n_resamples` bootstrap resamples.
    pub fn score(
        &self,
        answered: &[Option<RequestOutput>],
        n_resamples: usize,
        mut scored: impl FnMut(&TaskRun) -> Result<()>,
    ) -> Result<Vec<TaskRun>> {
        let mut runs = Vec::new();
        for (task, options, instances, own) in self.by_task(answered)? {
            let responses: Vec<Response> = own.iter().map(|answered| answered.response.clone()).collect();
            let scores = task.score(options, &instances, &responses, n_resamples)?;
            let run = TaskRun {
                config: task.config().clone(),
                num_fewshot: task.num_fewshot(options),
                generation_kwargs: task.generation_kwargs(options),
                scores,
            };
            scored(&run)?;
            runs.push(run);
        }
        Ok(runs)
    }

    /// Assembles the results and counts the documents with a truncated request.
    pub fn results(&self, runs: &[TaskRun], answered: &[Option<RequestOutput>]) -> Result<Results> {
        let mut results = assemble_results(runs, &self.groups);
        for (task, _, instances, own) in self.by_task(answered)? {
            let (name, n) = (&task.config().task, n_truncated(&instances, &own));
            results.data.insert(name.clone(), json!(task.data()));
            if n > 0 {
                let were = if n == 1 { "was" } else { "were" };
                tracing::warn!("{name}: {} {were} truncated to the model's context length", counted(n, "document"));
            }
            if let Some(Json::Object(counts)) = results.n_samples.get_mut(name) {
                counts.insert("truncated".into(), json!(n));
            }
        }
        Ok(results)
    }

    /// Returns each task with its options, its instances that have a response, and these responses.
    #[allow(clippy::type_complexity, reason = "the caller destructures the tuple")]
    fn by_task<'s>(
        &'s self,
        mut answered: &'s [Option<RequestOutput>],
    ) -> Result<Vec<(&'s Task, &'s PromptOptions<'a>, Cow<'s, [Instance]>, Vec<&'s RequestOutput>)>> {
        let n_asked: usize = self.instances.iter().map(Vec::len).sum();
        ensure!(answered.len() == n_asked, "failed to score: {} responses to {n_asked} requests", answered.len());
        let each = self.tasks.iter().zip(&self.options).zip(&self.instances).map(|((task, options), instances)| {
            let (own, others) = answered.split_at(instances.len());
            answered = others;
            let answers: Vec<&RequestOutput> = own.iter().flatten().collect();
            let with_answer = || instances.iter().zip(own).filter(|(_, own)| own.is_some());
            let instances = match answers.len() == instances.len() {
                true => Cow::Borrowed(instances.as_slice()),
                false => with_answer().map(|(instance, _)| instance.clone()).collect(),
            };
            (task, options, instances, answers)
        });
        Ok(each.collect())
    }
}

/// Counts the documents with a truncated request.
fn n_truncated(instances: &[Instance], answered: &[&RequestOutput]) -> usize {
    let cut = instances.iter().zip(answered).filter(|(_, answered)| answered.n_truncated > 0);
    let mut docs: Vec<usize> = cut.map(|(instance, _)| instance.doc_id).collect();
    docs.dedup();
    docs.len()
}
