//! Tasks from their questions to their results, whoever answers: `evaluator run` and a run of the trainer ask alike.

use anyhow::{Result, ensure};
use serde_json::{Value as Json, json};

use crate::answer::Answered;
use crate::request::{Request, Response};
use crate::results::{Results, TaskRun, assemble};
use crate::task::{Group, Instance, PromptOptions, Task};

/// What tasks ask of a model.
pub struct Questions<'a> {
    tasks: Vec<Task>,
    groups: Vec<Group>,
    /// Of each task.
    options: Vec<PromptOptions<'a>>,
    /// Of each task.
    asked: Vec<Vec<Instance>>,
}

impl<'a> Questions<'a> {
    /// Writes all prompts. `options` are those of each task, `groups` those whose scores are wanted.
    pub fn new(tasks: Vec<Task>, groups: Vec<Group>, options: Vec<PromptOptions<'a>>) -> Result<Self> {
        let asked = tasks.iter().zip(&options).map(|(task, options)| Ok(task.instances(options)?));
        let asked = asked.collect::<Result<Vec<Vec<Instance>>>>()?;
        Ok(Self { tasks, groups, options, asked })
    }

    /// All requests, task by task.
    pub fn requests(&self) -> Vec<Request> {
        self.asked.iter().flatten().map(|instance| instance.request.clone()).collect()
    }

    /// Scores the answers to [`Questions::requests`] task by task, and hands each task over when it is scored. Errors are
    /// estimated from `n_resamples`.
    pub fn score(
        &self,
        answered: &[Answered],
        n_resamples: usize,
        mut scored: impl FnMut(&TaskRun) -> Result<()>,
    ) -> Result<Vec<TaskRun>> {
        let mut runs = Vec::new();
        for (task, options, instances, own) in self.each(answered)? {
            let responses: Vec<Response> = own.iter().map(|answered| answered.response.clone()).collect();
            let scores = task.score(options, instances, &responses, n_resamples)?;
            let run = TaskRun { config: task.config().clone(), num_fewshot: task.num_fewshot(options), scores };
            scored(&run)?;
            runs.push(run);
        }
        Ok(runs)
    }

    /// Puts the scores together, and counts the documents that did not fit into the model's context.
    pub fn results(&self, runs: &[TaskRun], answered: &[Answered]) -> Result<Results> {
        let mut results = assemble(runs, &self.groups);
        for (task, _, instances, own) in self.each(answered)? {
            let (name, n) = (&task.config().task, n_truncated(instances, own));
            if n > 0 {
                tracing::warn!("{name}: {n} documents were truncated: the model's context is shorter");
            }
            if let Some(Json::Object(counts)) = results.n_samples.get_mut(name) {
                counts.insert("truncated".into(), json!(n));
            }
        }
        Ok(results)
    }

    /// Each task with its options, its requests and the answers to them.
    #[allow(clippy::type_complexity, reason = "the parts are named where they are taken apart")]
    fn each<'s>(
        &'s self,
        mut answered: &'s [Answered],
    ) -> Result<Vec<(&'s Task, &'s PromptOptions<'a>, &'s [Instance], &'s [Answered])>> {
        let n_asked: usize = self.asked.iter().map(Vec::len).sum();
        ensure!(answered.len() == n_asked, "failed to score: {} answers to {n_asked} requests", answered.len());
        let each = self.tasks.iter().zip(&self.options).zip(&self.asked).map(|((task, options), instances)| {
            let (own, others) = answered.split_at(instances.len());
            answered = others;
            (task, options, instances.as_slice(), own)
        });
        Ok(each.collect())
    }
}

/// How many documents had a request that was cut.
fn n_truncated(instances: &[Instance], answered: &[Answered]) -> usize {
    let cut = instances.iter().zip(answered).filter(|(_, answered)| answered.n_cut > 0);
    let mut docs: Vec<usize> = cut.map(|(instance, _)| instance.doc_id).collect();
    docs.dedup();
    docs.len()
}
