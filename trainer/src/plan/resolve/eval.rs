//! Evaluation during training: the evaluation loss, tasks, and the metric of the best checkpoint.

use std::path::PathBuf;

use super::resolver::Resolver;
use crate::data::DataPlan;
use crate::plan::{BestPlan, EVAL_LOSS, EvalPlan, TasksPlan};
use crate::recipe::{HumanInt, Origin};

const INTERVAL: &str = "eval_interval";
const TASKS: &str = "eval.tasks";
const METRIC: &str = "metric_for_best_model";

pub(super) fn resolve_eval_loss(resolver: &mut Resolver, data: &DataPlan) -> Option<EvalPlan> {
    let has_data = !data.eval_sources.is_empty() || data.eval_fraction > 0.0;
    let has_tasks = !resolver.recipe().eval.tasks.is_empty();
    let interval = interval(resolver, INTERVAL, resolver.recipe().eval_interval);
    if interval.is_some() && !has_data && !has_tasks {
        let advice = "set data.eval_sources, data.train_eval_split or eval.tasks";
        resolver.note(format!("{INTERVAL} has no effect without evaluation data; {advice}"));
    }
    let on_start = resolver.pick("eval_on_start", resolver.recipe().eval_on_start, false);
    if on_start && !has_data && !has_tasks {
        let advice = "set data.eval_sources, data.train_eval_split or eval.tasks, or remove eval_on_start";
        resolver.report_with_advice(&["eval_on_start"], "eval_on_start: no evaluation data are set", advice);
    }
    has_data.then_some(EvalPlan { interval, on_start })
}

/// Returns the steps between evaluations; `None` (or 0 in the recipe) is after each epoch.
fn interval(resolver: &mut Resolver, key: &str, given: Option<HumanInt>) -> Option<usize> {
    let interval = given.map(|n| n.0).filter(|n| *n > 0);
    let origin = if given.is_some() { resolver.loaded.origin(&[key, INTERVAL]) } else { Origin::Default };
    match interval {
        Some(steps) => _ = resolver.record(key, steps, origin),
        None => _ = resolver.record(key, "each epoch", origin),
    }
    interval
}

pub(super) fn resolve_tasks(resolver: &mut Resolver) -> Option<TasksPlan> {
    let recipe = resolver.recipe();
    let given = &recipe.eval;
    if given.tasks.is_empty() {
        if resolver.loaded.is_set("eval") {
            resolver.report_with_advice(&["eval"], "eval: no tasks are set", "set eval.tasks, or remove eval");
        }
        return None;
    }
    resolver.pick(TASKS, Some(&given.tasks), &given.tasks);
    let interval = interval(resolver, "eval.interval", given.interval.or(recipe.eval_interval));
    let limit = given.limit.map(|limit| resolver.number("eval.limit", Some(limit), limit.0, 0.0, f64::MAX));
    let chat = resolver.pick("eval.apply_chat_template", given.apply_chat_template, false);
    let fewshot_as_multiturn = resolver.pick("eval.fewshot_as_multiturn", given.fewshot_as_multiturn, chat);
    if fewshot_as_multiturn && !chat {
        let message = "eval.fewshot_as_multiturn needs prompts that are chats";
        resolver.report_with_advice(&["eval.fewshot_as_multiturn"], message, "set eval.apply_chat_template: true");
    }
    let mut at_least_one = |key: &str, given: Option<HumanInt>| given.map(|n| resolver.positive(key, Some(n), n.0));
    let batch_size = at_least_one("eval.batch_size", given.batch_size);
    let max_length = at_least_one("eval.max_length", given.max_length);
    Some(TasksPlan {
        when: EvalPlan { interval, on_start: recipe.eval_on_start == Some(true) },
        tasks: given.tasks.clone(),
        generates: resolver.env.tasks_generate,
        include_path: given.include_path.iter().map(PathBuf::from).collect(),
        data: given.data.iter().map(|(task, path)| format!("{task}={path}")).collect(),
        limit,
        num_fewshot: given.num_fewshot.map(|n| resolver.count("eval.num_fewshot", Some(n), n.0)),
        fewshot_seed: resolver.count("eval.fewshot_seed", given.fewshot_seed, 1234) as u64,
        chat,
        fewshot_as_multiturn,
        system_instruction: given.system_instruction.clone(),
        gen_kwargs: given.gen_kwargs.clone(),
        batch_size,
        max_length,
        max_gen_toks: resolver.count("eval.max_gen_toks", given.max_gen_toks, 256),
        bootstrap_iters: resolver.count("eval.bootstrap_iters", given.bootstrap_iters, 100_000),
        confirm_run_unsafe_code: resolver.pick("eval.confirm_run_unsafe_code", given.confirm_run_unsafe_code, false),
    })
}

/// Returns the metric of the best checkpoint: the recipe's, or a metric of the tasks; `None` without both.
pub(super) fn resolve_best(
    resolver: &mut Resolver,
    eval_loss: Option<&EvalPlan>,
    tasks: Option<&TasksPlan>,
) -> Option<BestPlan> {
    let recipe = resolver.recipe();
    let given = recipe.metric_for_best_model.as_deref();
    let metric = given.map(|name| match name.strip_prefix("eval/").or(name.strip_prefix("eval_")).unwrap_or(name) {
        "loss" | EVAL_LOSS => EVAL_LOSS.to_owned(),
        other => other.to_owned(),
    });
    if let Some(metric) = &metric {
        resolver.record(METRIC, metric.clone(), resolver.loaded.origin(&[METRIC]));
    }
    match metric.as_deref() {
        Some(EVAL_LOSS) if eval_loss.is_none() => {
            let advice = "set data.eval_sources or data.train_eval_split";
            resolver.report_with_advice(&[METRIC], "metric_for_best_model: no evaluation data are set", advice);
        }
        Some(EVAL_LOSS) | None => {}
        Some(name) if tasks.is_none() || !name.contains('/') => {
            let message = format!("metric_for_best_model: this run does not measure `{name}`");
            let advice = "write `loss`, or `TASK/METRIC` with the task in eval.tasks, such as `arc_easy/acc_norm`";
            resolver.report_with_advice(&[METRIC], message, advice);
        }
        Some(_) => {}
    }
    if metric.is_none() && tasks.is_none() {
        if recipe.greater_is_better.is_some() {
            let message = "greater_is_better needs metric_for_best_model or tasks";
            resolver.report_with_advice(&["greater_is_better"], message, "set metric_for_best_model");
        }
        return None;
    }
    let greater_is_better = recipe.greater_is_better.or((metric.as_deref() == Some(EVAL_LOSS)).then_some(false));
    if let Some(greater) = greater_is_better {
        let key = "greater_is_better";
        let origin = if recipe.greater_is_better.is_some() { resolver.loaded.origin(&[key]) } else { Origin::Default };
        resolver.record(key, greater, origin);
    }
    Some(BestPlan { metric, greater_is_better })
}
