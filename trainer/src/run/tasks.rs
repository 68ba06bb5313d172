//! The tasks of a plan: found and checked before anything is built, asked of the weights as they are, scored once.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, ensure};
use candlewick_inference::answer::{BackendSettings, EngineBackend, RequestProgress, RequestsInterrupted};
use candlewick_inference::lm::LmHandle;
use candlewick_inference::parallel_config::InferenceGroup;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::progress::ProgressLines;
use candlewick_text::hub::Hub;
use evaluator::chat::ChatTemplateFormatter;
use evaluator::evaluation::Evaluation;
use evaluator::task::{ChatFormatter, DataOverrides, PromptOptions, Task, TaskConfig, TaskRegistry, TaskSelection};

use super::RankContext;
use super::assets::Assets;
use crate::checkpoint::Scores;
use crate::plan::{BestPlan, EVAL_LOSS, Plan, TasksPlan};
use crate::signals::StopSignals;

/// What tasks came to: `TASK/METRIC` and its value. Errors are among them as `TASK/METRIC_stderr`.
pub(super) type TaskScores = BTreeMap<String, f64>;

/// The tasks of a run with their prompts.
pub(super) struct Tasks<'a> {
    plan: &'a TasksPlan,
    /// Whether no rank has all weights (ZeRO stage 3).
    zero3: bool,
    evaluation: Evaluation<'a>,
}

/// The template that prompts are printed with, if they are chats.
pub(super) fn chat(plan: &Plan, assets: &Assets) -> Result<Option<ChatTemplateFormatter>> {
    if !plan.tasks.as_ref().is_some_and(|tasks| tasks.chat) {
        return Ok(None);
    }
    let missing =
        "failed to start: eval.apply_chat_template needs a tokenizer with a chat template, or tokenizer.chat_template";
    let template = assets.template()?.ok_or_else(|| anyhow!(missing).context(ExitCode::Usage))?;
    Ok(Some(ChatTemplateFormatter::new(template)))
}

/// Finds what the plan names. No data are read.
pub(super) fn select(plan: &Plan) -> Result<Option<TaskSelection>> {
    let Some(tasks) = &plan.tasks else { return Ok(None) };
    let selection = TaskRegistry::load(&tasks.include_path)?.select(&tasks.tasks.join(","))?;
    data_paths(tasks, &selection)?;
    let runs_code = selection.tasks.iter().find(|task| task.unsafe_code).filter(|_| !tasks.confirm_run_unsafe_code);
    match runs_code {
        None => Ok(Some(selection)),
        Some(task) => {
            let problem = "runs code that the model writes; allow it with eval.confirm_run_unsafe_code: true";
            Err(anyhow!("failed to start: {} {problem}", task.task).context(ExitCode::Usage))
        }
    }
}

fn data_paths(plan: &TasksPlan, selection: &TaskSelection) -> Result<DataOverrides> {
    Ok(DataOverrides::read("eval.data", &plan.data, &selection.tasks)?)
}

/// Fails if the tasks of a plan, or the metric that says which save is the best, are unknown. No data are read.
pub fn check_tasks(plan: &Plan) -> Result<()> {
    scores(plan, select(plan)?.as_ref()).map(drop)
}

/// What says which save is the best, with no values yet.
pub(super) fn scores(plan: &Plan, selection: Option<&TaskSelection>) -> Result<Scores> {
    let Some(BestPlan { metric, greater_is_better }) = &plan.best else { return Ok(Scores::default()) };
    let (metric, of_task) = match (metric.as_deref(), selection) {
        (Some(EVAL_LOSS), _) | (_, None) => (EVAL_LOSS.to_owned(), Some(false)),
        (Some(name), Some(selection)) => (name.to_owned(), direction(name, selection)?),
        (None, Some(selection)) => first_score(selection)?,
    };
    Ok(Scores::of(metric, greater_is_better.or(of_task).unwrap_or(true)))
}

/// The first score of the first task.
fn first_score(selection: &TaskSelection) -> Result<(String, Option<bool>)> {
    let first = selection.tasks.first().context("failed to start: eval.tasks selects no task")?;
    let (name, greater) =
        first.score_names().into_iter().next().context("failed to start: the first task has no metric")?;
    Ok((format!("{}/{name}", first.task), Some(greater)))
}

/// Whether more of `TASK/METRIC` is better, as far as its task says. It must be a task or a group that is selected.
fn direction(name: &str, selection: &TaskSelection) -> Result<Option<bool>> {
    let usage = |problem: String| anyhow!("failed to start: metric_for_best_model: {problem}").context(ExitCode::Usage);
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
        None if meant.iter().any(|config| config.has_custom_metric_names()) => Ok(None),
        None => {
            names.dedup();
            let names: Vec<String> = names.into_iter().map(|(name, _)| name).collect();
            Err(usage(format!("{task} has no metric `{metric}`; it has {}", names.join(", "))))
        }
    }
}

impl<'a> Tasks<'a> {
    /// Reads the documents and writes the prompts.
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
            confirm_run_unsafe_code: plan.confirm_run_unsafe_code,
            ..PromptOptions::default()
        };
        let paths = data_paths(plan, &selection)?;
        let open = |config| Ok(Task::open(hub, config, &paths, &options)?);
        let tasks = selection.tasks.into_iter().map(open).collect::<Result<Vec<Task>>>()?;
        let options = vec![options; tasks.len()];
        Ok(Self { plan, zero3, evaluation: Evaluation::new(tasks, selection.groups, options)? })
    }

    /// Describes the data of each task, and names those whose examples come from the evaluated split.
    pub(super) fn notes(&self) -> Vec<String> {
        self.evaluation.data().chain(self.evaluation.fewshot_notes()).collect()
    }

    fn inference_group(&self, ranks: &RankContext) -> InferenceGroup {
        InferenceGroup::from_groups(ranks.process.group(), &ranks.groups, self.zero3)
            .with_keep_alive(ranks.process.keep_alive())
    }

    /// Asks the model, each copy of it its share, and returns what the first rank makes of the answers; `None` if a stop
    /// is requested in between. `progress` shows how many requests are answered. All ranks call it.
    pub(super) fn evaluate(
        &self,
        lm_handle: LmHandle,
        ranks: &RankContext,
        stop: &StopSignals,
        progress: Option<&ProgressLines>,
    ) -> Result<Option<TaskScores>> {
        let settings = BackendSettings {
            max_length: self.plan.max_length,
            max_gen_toks: self.plan.max_gen_toks,
            batch_size: self.plan.batch_size,
            ..BackendSettings::default()
        };
        let show = |shown: RequestProgress| progress.iter().for_each(|lines| lines.set(shown.n_done, shown.n_all));
        let answers =
            EngineBackend::for_training(lm_handle, settings, self.inference_group(ranks))?.with_progress(show);
        let mut answers = answers.with_stop(|| stop.poll().is_some());
        let answered = match self.evaluation.run_requests(&mut answers) {
            Err(error) if error.is::<RequestsInterrupted>() => return Ok(None),
            answered => answered?,
        };
        let score = || -> Result<TaskScores> {
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
