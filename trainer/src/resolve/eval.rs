//! Evaluation during training: the evaluation loss, tasks, and the metric of the best checkpoint.

use std::path::PathBuf;

use super::intervals::{of_epoch, steps_or_fraction};
use super::resolver::Resolver;
use crate::data::DataPlan;
use crate::plan::{BestPlan, EVAL_LOSS, EarlyStoppingPlan, EvalPlan, TasksPlan};
use crate::recipe::{EarlyStoppingMode, HumanInt, Origin, Recipe, StepInterval};

const INTERVAL: &str = "eval_interval";
const PER_EPOCH: &str = "evals_per_epoch";
const TASKS: &str = "eval.tasks";
const METRIC: &str = "metric_for_best_model";

pub(super) fn resolve_eval_loss(resolver: &mut Resolver, data: &DataPlan, when: &EvalPlan) -> Option<EvalPlan> {
    let has_data = !data.eval_sources.is_empty() || data.eval_fraction > 0.0;
    let has_tasks = !resolver.recipe().eval.tasks.is_empty();
    if let Some(key) = interval_key(resolver.recipe()).filter(|_| !has_data && !has_tasks) {
        let advice = "set data.eval_sources, data.train_eval_split or eval.tasks";
        resolver.note(format!("{key} has no effect without evaluation data; {advice}"));
    }
    let on_start = resolver.pick("eval_on_start", resolver.recipe().eval_on_start, false);
    if on_start && !has_data && !has_tasks {
        let advice = "set data.eval_sources, data.train_eval_split or eval.tasks, or remove eval_on_start";
        resolver.report_with_advice(&["eval_on_start"], "eval_on_start: no evaluation data are set", advice);
    }
    has_data.then(|| EvalPlan { on_start, ..when.clone() })
}

/// Returns the key that sets an interval.
fn interval_key(recipe: &Recipe) -> Option<&'static str> {
    let keys = [
        (recipe.evals_per_epoch.is_some_and(|n| n.0 > 0), PER_EPOCH),
        (recipe.eval_interval.is_some_and(|interval| interval.0 > 0.0), INTERVAL),
    ];
    keys.into_iter().find_map(|(is_set, key)| is_set.then_some(key))
}

/// Returns the interval of the loss, and of tasks without their own. Without a key (or with 0), evaluations follow each epoch.
pub(super) fn resolve_interval(resolver: &mut Resolver) -> EvalPlan {
    let recipe = resolver.recipe();
    let Some(per_epoch) = recipe.evals_per_epoch.filter(|n| n.0 > 0) else {
        return interval(resolver, INTERVAL, recipe.eval_interval);
    };
    if recipe.eval_interval.is_some_and(|interval| interval.0 > 0.0) {
        resolver.report_with_advice(&[PER_EPOCH], format!("{PER_EPOCH} excludes {INTERVAL}"), "keep one of them");
    }
    resolver.pick(PER_EPOCH, Some(per_epoch.0), 1);
    EvalPlan { interval: None, fraction: of_epoch(per_epoch.0), on_start: recipe.eval_on_start == Some(true) }
}

/// Returns the interval that a key sets in steps or as a fraction.
fn interval(resolver: &mut Resolver, key: &str, given: Option<StepInterval>) -> EvalPlan {
    let (steps, fraction) = steps_or_fraction(resolver, key, given);
    let interval = Some(steps).filter(|steps| *steps > 0);
    let when = EvalPlan { interval, fraction, on_start: resolver.recipe().eval_on_start == Some(true) };
    let origin = if given.is_some() { resolver.loaded.origin(&[key]) } else { Origin::Default };
    record(resolver, key, &when, origin);
    when
}

fn record(resolver: &mut Resolver, key: &str, when: &EvalPlan, origin: Origin) {
    match (when.interval, when.fraction) {
        (Some(steps), _) => _ = resolver.record(key, steps, origin),
        (None, Some(fraction)) => _ = resolver.record(key, fraction.to_string(), origin),
        (None, None) => _ = resolver.record(key, "each epoch", origin),
    }
}

pub(super) fn resolve_tasks(resolver: &mut Resolver, when: EvalPlan) -> Option<TasksPlan> {
    let recipe = resolver.recipe();
    let given = &recipe.eval;
    if given.tasks.is_empty() {
        if resolver.loaded.is_set("eval") {
            resolver.report_with_advice(&["eval"], "eval: no tasks are set", "set eval.tasks, or remove eval");
        }
        return None;
    }
    resolver.pick(TASKS, Some(&given.tasks), &given.tasks);
    let when = match given.interval {
        Some(_) => interval(resolver, "eval.interval", given.interval),
        None => {
            let is_set = interval_key(recipe).is_some();
            record(resolver, "eval.interval", &when, if is_set { Origin::Derived } else { Origin::Default });
            when
        }
    };
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
        when,
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
        allow_unconfined_code: resolver.pick("eval.allow_unconfined_code", given.allow_unconfined_code, false),
    })
}

/// Returns the metric of the best checkpoint: the recipe's, that of early stopping, or a metric of the tasks; `None`
/// without all of them.
pub(super) fn resolve_best(
    resolver: &mut Resolver,
    eval_loss: Option<&EvalPlan>,
    tasks: Option<&TasksPlan>,
    early_stopping: Option<&EarlyStoppingPlan>,
) -> Option<BestPlan> {
    let recipe = resolver.recipe();
    let metric = metric(resolver, METRIC, recipe.metric_for_best_model.as_deref(), (eval_loss, tasks));
    if metric.is_none()
        && let Some(stopping) = early_stopping
        && recipe.greater_is_better.is_none()
    {
        if let Some(metric) = &stopping.watched.metric {
            resolver.record(METRIC, metric.clone(), Origin::Derived);
        }
        return Some(stopping.watched.clone());
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

/// Returns the metric that `key` names, in the form `loss/eval` or `TASK/METRIC`, after a check that the run measures it.
fn metric(
    resolver: &mut Resolver,
    key: &str,
    given: Option<&str>,
    (eval_loss, tasks): (Option<&EvalPlan>, Option<&TasksPlan>),
) -> Option<String> {
    let given = given?;
    let metric = metric_name(given);
    resolver.record(key, metric.clone(), resolver.loaded.origin(&[key]));
    match metric.as_str() {
        EVAL_LOSS if eval_loss.is_none() => {
            let advice = "set data.eval_sources or data.train_eval_split";
            resolver.report_with_advice(&[key], format!("{key}: no evaluation data are set"), advice);
        }
        EVAL_LOSS => {}
        name if tasks.is_none() || !name.contains('/') => {
            let message = format!("{key}: this run does not measure `{name}`");
            let advice = "write `loss`, or `TASK/METRIC` with the task in eval.tasks, such as `arc_easy/acc_norm`";
            resolver.report_with_advice(&[key], message, advice);
        }
        _ => {}
    }
    Some(metric)
}

/// Returns a metric in the form `loss/eval` or `TASK/METRIC`.
fn metric_name(given: &str) -> String {
    let name = given.strip_prefix("eval/").or(given.strip_prefix("eval_")).unwrap_or(given);
    if name == "loss" { EVAL_LOSS.to_owned() } else { name.to_owned() }
}

/// Returns the plan of early stopping, whose metric is by default that of the best checkpoint, the eval loss, or the first
/// metric of the first task.
pub(super) fn resolve_early_stopping(
    resolver: &mut Resolver,
    eval_loss: Option<&EvalPlan>,
    tasks: Option<&TasksPlan>,
) -> Option<EarlyStoppingPlan> {
    const KEY: &str = "early_stopping.metric";
    let recipe = resolver.recipe();
    let given = recipe.early_stopping.as_ref()?;
    if eval_loss.is_none() && tasks.is_none() {
        let advice = "set data.eval_sources, data.train_eval_split or eval.tasks, or remove early_stopping";
        resolver.report_with_advice(&["early_stopping"], "early_stopping: the run has no evaluation", advice);
    }
    let measured = (eval_loss, tasks);
    let (metric, of_best) = match (&given.metric, &recipe.metric_for_best_model) {
        (Some(name), _) => (metric(resolver, KEY, Some(name), measured), None),
        // `resolve_best` checks the name.
        (None, Some(name)) => (Some(metric_name(name)), recipe.greater_is_better),
        (None, None) => (eval_loss.map(|_| EVAL_LOSS.to_owned()), None),
    };
    let of_mode = given.mode.map(|mode| mode == EarlyStoppingMode::Max);
    let of_loss = (metric.as_deref() == Some(EVAL_LOSS)).then_some(false);
    let watched = BestPlan { metric, greater_is_better: of_mode.or(of_best).or(of_loss) };
    if given.metric.is_none() {
        let name = watched.metric.as_deref().unwrap_or("the first metric of the first task");
        resolver.record(KEY, name.to_owned(), Origin::Derived);
    }
    if let Some(mode) = given.mode {
        resolver.pick("early_stopping.mode", Some(mode), mode);
    }
    let patience = resolver.positive("early_stopping.patience", given.patience, 3);
    let min_delta = resolver.number("early_stopping.min_delta", given.min_delta, 0.0, 0.0, f64::MAX);
    Some(EarlyStoppingPlan { watched, patience, min_delta })
}
