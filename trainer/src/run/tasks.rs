//! The tasks of a plan: selected before the model is built, then evaluated with the current weights.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use candlewick_inference::answer::{BackendSettings, EngineBackend, RequestProgress, RequestsInterrupted};
use candlewick_inference::lm::LmHandle;
use candlewick_inference::parallel_config::InferenceGroup;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::progress::WorkProgress;
use candlewick_text::hub::Hub;
use evaluator::chat::ChatTemplateFormatter;
use evaluator::evaluation::Evaluation;
use evaluator::task::{
    ChatFormatter, DataOverrides, PromptOptions, Task, TaskConfig, TaskRegistry, TaskSelection, UnsafeCodeOptions,
    UnsafeCodePolicy,
};

use super::RankContext;
use super::assets::Assets;
use crate::checkpoint::{EarlyStoppingState, Scores};
use crate::plan::{BestPlan, EVAL_LOSS, Plan, TasksPlan};
use crate::signals::StopSignals;

/// The scores of tasks as `TASK/METRIC`. Standard errors are `TASK/METRIC_stderr`.
pub(super) type ScoresByMetric = BTreeMap<String, f64>;

/// The tasks of a run with their instances.
pub(super) struct Tasks<'a> {
    plan: &'a TasksPlan,
    /// True if every rank holds only a shard of the weights (ZeRO stage 3).
    zero3: bool,
    evaluation: Evaluation<'a>,
}

/// Returns the chat template of the prompts, if the plan applies one.
pub(super) fn chat(plan: &Plan, assets: &Assets) -> Result<Option<ChatTemplateFormatter>> {
    if !plan.tasks.as_ref().is_some_and(|tasks| tasks.chat) {
        return Ok(None);
    }
    let missing =
        "failed to start: eval.apply_chat_template needs a tokenizer with a chat template, or tokenizer.chat_template";
    let template = assets.template()?.ok_or_else(|| anyhow!(missing).context(ExitCode::Usage))?;
    Ok(Some(ChatTemplateFormatter::new(template)))
}

/// Selects the tasks of the plan. Reads no data.
pub(super) fn select(plan: &Plan) -> Result<Option<TaskSelection>> {
    let Some(tasks) = &plan.tasks else { return Ok(None) };
    let selection = TaskRegistry::load(&tasks.include_path)?.select(&tasks.tasks.join(","))?;
    data_paths(tasks, &selection)?;
    selection.tasks.iter().try_for_each(|task| task.check_unsafe_code(unsafe_code_policy(tasks)))?;
    Ok(Some(selection))
}

/// Returns an error if this machine cannot run the programs of a task.
pub(super) fn check_sandbox(plan: &Plan, selection: Option<&TaskSelection>) -> Result<()> {
    let (Some(tasks), Some(selection)) = (&plan.tasks, selection) else { return Ok(()) };
    Ok(selection.tasks.iter().try_for_each(|task| task.check_sandbox(unsafe_code_policy(tasks)))?)
}

fn unsafe_code_policy(tasks: &TasksPlan) -> UnsafeCodePolicy {
    let TasksPlan { confirm_run_unsafe_code, allow_unconfined_code, .. } = *tasks;
    UnsafeCodeOptions { confirm_run_unsafe_code, allow_unconfined_code }.into()
}

fn data_paths(plan: &TasksPlan, selection: &TaskSelection) -> Result<DataOverrides> {
    Ok(DataOverrides::read("eval.data", &plan.data, &selection.tasks)?)
}

/// Loads the documents of the selected tasks, and returns the names of their files.
pub(super) fn open_tasks_data(plan: &TasksPlan, selection: TaskSelection, hub: &Hub) -> Result<Vec<String>> {
    let options = PromptOptions { num_fewshot: plan.num_fewshot, ..PromptOptions::default() };
    let tasks = open_all(plan, &selection, &options, hub)?;
    Ok(tasks.iter().flat_map(|task| task.data().files()).collect())
}

fn open_all(plan: &TasksPlan, selection: &TaskSelection, options: &PromptOptions, hub: &Hub) -> Result<Vec<Task>> {
    let paths = data_paths(plan, selection)?;
    selection.tasks.iter().cloned().map(|config| Ok(Task::open(hub, config, &paths, options)?)).collect()
}

/// Fails if a task or the `metric_for_best_model` is unknown. Reads no data.
pub fn check_tasks(plan: &Plan) -> Result<()> {
    let selection = select(plan)?;
    scores(plan, selection.as_ref())?;
    early_stopping(plan, selection.as_ref()).map(drop)
}

/// Returns the metric that selects the best checkpoint, without values.
pub(super) fn scores(plan: &Plan, selection: Option<&TaskSelection>) -> Result<Scores> {
    let Some(best) = &plan.best else { return Ok(Scores::default()) };
    let (metric, greater_is_better) = watched_metric("metric_for_best_model", best, selection)?;
    Ok(Scores::of(metric, greater_is_better))
}

/// Returns the state of early stopping before the first evaluation.
pub(super) fn early_stopping(plan: &Plan, selection: Option<&TaskSelection>) -> Result<EarlyStoppingState> {
    let Some(stopping) = &plan.early_stopping else { return Ok(EarlyStoppingState::default()) };
    let (metric, greater_is_better) = watched_metric("early_stopping.metric", &stopping.watched, selection)?;
    Ok(EarlyStoppingState::of(metric, greater_is_better))
}

/// Returns the name and the direction of the metric of a recipe key.
fn watched_metric(key: &str, watched: &BestPlan, selection: Option<&TaskSelection>) -> Result<(String, bool)> {
    let (metric, of_task) = match (watched.metric.as_deref(), selection) {
        (Some(EVAL_LOSS), _) | (_, None) => (EVAL_LOSS.to_owned(), Some(false)),
        (Some(name), Some(selection)) => (name.to_owned(), direction(key, name, selection)?),
        (None, Some(selection)) => first_score(selection)?,
    };
    Ok((metric, watched.greater_is_better.or(of_task).unwrap_or(true)))
}

/// Returns the first metric of the first task.
fn first_score(selection: &TaskSelection) -> Result<(String, Option<bool>)> {
    let first = selection.tasks.first().context("failed to start: eval.tasks selects no task")?;
    let (name, greater) =
        first.score_names().into_iter().next().context("failed to start: the first task has no metric")?;
    Ok((format!("{}/{name}", first.task), Some(greater)))
}

/// Returns true if a greater `TASK/METRIC` is better, and `None` if the task does not define it. Fails if the task or
/// group is not selected.
fn direction(key: &str, name: &str, selection: &TaskSelection) -> Result<Option<bool>> {
    let usage = |problem: String| anyhow!("failed to start: {key}: {problem}").context(ExitCode::Usage);
    let (task, metric) = name.split_once('/').unwrap_or((name, ""));
    let in_group = selection.groups.iter().find(|group| group.name == task).map(|group| &group.tasks);
    let is_meant = |config: &&TaskConfig| match in_group {
        Some(tasks) => tasks.contains(&config.task),
        None => config.task == task,
    };
    let meant: Vec<&TaskConfig> = selection.tasks.iter().filter(is_meant).collect();
    ensure!(!meant.is_empty(), usage(format!("eval.tasks has no task `{task}`")));
    let mut names: Vec<(String, bool)> = meant.iter().flat_map(|config| config.score_names()).collect();
    match names.iter().find(|(known, _)| known == metric) {
        Some((_, greater)) => Ok(Some(*greater)),
        None if meant.iter().any(|config| config.has_dynamic_metric_names()) => Ok(None),
        None => {
            names.dedup();
            let names: Vec<String> = names.into_iter().map(|(name, _)| name).collect();
            Err(usage(format!("{task} has no metric `{metric}`; it has {}", names.join(", "))))
        }
    }
}

impl<'a> Tasks<'a> {
    /// Loads the documents and builds the instances.
    pub(super) fn open(
        plan: &'a Plan,
        selection: TaskSelection,
        chat: Option<&'a ChatTemplateFormatter>,
        hub: &Hub,
    ) -> Result<Self> {
        let zero3 = plan.ranks.zero_stage == 3;
        let plan = plan.tasks.as_ref().context("failed to start: eval.tasks selects no task")?;
        let options = PromptOptions {
            num_fewshot: plan.num_fewshot,
            fewshot_seed: plan.fewshot_seed,
            chat: chat.map(|chat| chat as &dyn ChatFormatter),
            system_instruction: plan.system_instruction.clone(),
            fewshot_as_multiturn: plan.fewshot_as_multiturn,
            limit: plan.limit,
            gen_kwargs: plan.gen_kwargs.clone(),
            unsafe_code: unsafe_code_policy(plan),
            ..PromptOptions::default()
        };
        let tasks = open_all(plan, &selection, &options, hub)?;
        let options = vec![options; tasks.len()];
        Ok(Self { plan, zero3, evaluation: Evaluation::new(tasks, selection.groups, options)? })
    }

    /// Describes the data of each task, and names tasks whose few-shot examples come from the evaluated split.
    pub(super) fn notes(&self) -> Vec<String> {
        self.evaluation.data_descriptions().chain(self.evaluation.fewshot_notes()).collect()
    }

    fn inference_group(&self, ranks: &RankContext) -> InferenceGroup {
        InferenceGroup::from_groups(ranks.process.group(), &ranks.groups, self.zero3)
            .with_keep_alive(ranks.process.keep_alive())
    }

    /// Evaluates the tasks: each model replica runs a part of the requests, and the first rank scores the responses.
    /// Returns `None` if a stop is requested. `progress` shows the number of finished requests. All ranks call this.
    pub(super) fn evaluate(
        &self,
        lm_handle: LmHandle,
        ranks: &RankContext,
        stop: &StopSignals,
        progress: &WorkProgress,
    ) -> Result<Option<ScoresByMetric>> {
        let settings = BackendSettings {
            max_length: self.plan.max_length,
            max_gen_toks: self.plan.max_gen_toks,
            batch_size: self.plan.batch_size,
            ..BackendSettings::default()
        };
        let show = |shown: RequestProgress| progress.set(shown.n_done, shown.n_all);
        let answers =
            EngineBackend::for_training(lm_handle, settings, self.inference_group(ranks))?.with_progress(show);
        let mut answers = answers.with_stop(|| stop.poll().is_some());
        let answered = match self.evaluation.run_requests(&mut answers) {
            Err(error) if error.is::<RequestsInterrupted>() => return Ok(None),
            answered => answered?,
        };
        let score = || -> Result<ScoresByMetric> {
            let runs = self.evaluation.score(&answered, self.plan.bootstrap_iters, |_| Ok(()))?;
            Ok(self.evaluation.results(&runs, &answered)?.values())
        };
        let own = match ranks.process.is_first() {
            true => ranks.process.keep_alive().during(score).and_then(|values| Ok(serde_json::to_vec(&values)?)),
            false => Ok(Vec::new()),
        };
        let all = ranks.process.exchange(own)?;
        Ok(Some(serde_json::from_slice(&all[0]).context("failed to read the first rank's scores")?))
    }
}
