//! Early exits, reports and sample generations.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use candlewick_text::conversation::{Conversation, Message, MessageError};

use super::resolver::Resolver;
use super::tracking;
use crate::metrics::{Console, LogPlan};
use crate::plan::{EvalPlan, ExitPlan, GeneratePlan, LoggerPlan, TasksPlan};
use crate::recipe::{DataType, HumanFloat, JsonMap, LogLevel, Origin, Prompt, ValueOrList};

const NOWHERE: &str = "/dev/null";

pub(super) fn resolve_exit(resolver: &mut Resolver) -> ExitPlan {
    let recipe = resolver.recipe();
    let at = resolver.count("exit_iteration", recipe.exit_iteration, 0);
    let after = resolver.count("exit_iteration_this_run", recipe.exit_iteration_this_run, 0);
    ExitPlan {
        iteration: (at > 0).then_some(at),
        iteration_this_run: (after > 0).then_some(after),
        kill_switch_path: kill_switch(resolver),
    }
}

fn kill_switch(resolver: &mut Resolver) -> Option<PathBuf> {
    const KEY: &str = "kill_switch_path";
    let path = match &resolver.recipe().kill_switch_path {
        Some(path) => resolver.pick(KEY, Some(PathBuf::from(path)), PathBuf::new()),
        None => resolver.record(KEY, run_folder(resolver)?.join("stop"), Origin::Derived),
    };
    if path.exists() {
        resolver.note(format!("{KEY}: {} exists, so the run would not start; remove the file", path.display()));
    }
    Some(path)
}

/// Returns the folder of a run, on every rank; `None` for `/dev/null`.
pub(super) fn run_folder(resolver: &Resolver) -> Option<PathBuf> {
    let stem = resolver.loaded.source().path.file_stem().unwrap_or(OsStr::new("run"));
    let default = || Path::new("runs").join(stem);
    let folder = resolver.recipe().output_dir.as_ref().map_or_else(default, PathBuf::from);
    (folder != Path::new(NOWHERE)).then_some(folder)
}

pub(super) fn resolve_log(resolver: &mut Resolver) -> LogPlan {
    let recipe = resolver.recipe();
    let folder = run_folder(resolver);
    let default = folder.as_ref().map(|folder| folder.display().to_string()).unwrap_or_default();
    resolver.pick("output_dir", recipe.output_dir.clone(), default);
    // Rank 0 reports for all ranks.
    let reports = resolver.env.world.rank == 0;
    let output_dir = folder.filter(|_| reports);
    let key = "train_log_metrics_path";
    let metrics_path = match (&recipe.train_log_metrics_path, &output_dir) {
        (Some(path), _) => Some(PathBuf::from(resolver.pick(key, Some(path.clone()), String::new()))),
        (None, Some(dir)) => Some(resolver.record(key, dir.join("metrics.jsonl"), Origin::Derived)),
        (None, None) => None,
    };
    let tracking = tracking::resolve(resolver, output_dir.as_deref());
    let generates = recipe.generate.as_ref().is_some_and(|generate| generate.on_evaluate == Some(true));
    let samples_path = output_dir.as_ref().filter(|_| generates).map(|dir| dir.join("samples.jsonl"));
    LogPlan {
        samples_path,
        metrics_path: metrics_path.filter(|path| path != Path::new(NOWHERE) && reports),
        output_dir,
        loss_log_interval: resolver.count("loss_log_interval", recipe.loss_log_interval, 1),
        train_log_iter_interval: resolver.count("train_log_iter_interval", recipe.train_log_iter_interval, 1),
        eval_log_iter_interval: resolver.count("eval_log_iter_interval", recipe.eval_log_iter_interval, 1),
        log_num_zeros_in_grad: resolver.pick("log_num_zeros_in_grad", recipe.log_num_zeros_in_grad, false),
        console: if prints(resolver) { resolver.env.console } else { Console::Quiet },
        tracking,
    }
}

/// Returns true if this rank prints log messages.
fn prints(resolver: &Resolver) -> bool {
    let rank = resolver.env.world.rank;
    resolver.recipe().logger.print_output_ranks.as_ref().map_or(rank == 0, |ranks| ranks.contains(rank))
}

pub(super) fn resolve_logger(resolver: &mut Resolver) -> LoggerPlan {
    let logger = &resolver.recipe().logger;
    let level = logger.level.map(|level| {
        resolver.pick("logger.level", Some(level), level);
        let name = match level {
            LogLevel::Debug => "debug",
            LogLevel::Info => "info",
            LogLevel::Warning => "warn",
            LogLevel::Error => "error",
        };
        name.to_owned()
    });
    let rank = resolver.env.world.rank;
    let writes = logger.file_output_ranks.as_ref().is_none_or(|ranks| ranks.contains(rank));
    let dir = logger.output_dir.clone().filter(|dir| dir != NOWHERE && writes);
    if let Some(dir) = &dir {
        resolver.pick("logger.output_dir", Some(dir), dir);
    }
    let file = dir.map(|dir| Path::new(&dir).join("logs").join(format!("rank_{rank}.log")));
    LoggerPlan { level, print: prints(resolver), file }
}

pub(super) fn resolve_generate(
    resolver: &mut Resolver,
    (eval_loss, tasks): (Option<&EvalPlan>, Option<&TasksPlan>),
) -> Option<GeneratePlan> {
    let recipe = resolver.recipe();
    let generate = recipe.generate.as_ref()?;
    if generate.on_evaluate == Some(true) && eval_loss.is_none() && tasks.is_none() {
        let advice = "set data.eval_sources, data.train_eval_split or eval.tasks, or remove generate.on_evaluate";
        let message = "generate.on_evaluate: the run has no evaluation";
        resolver.report_with_advice(&["generate.on_evaluate"], message, advice);
    }
    if generate.prompts.is_empty() && resolver.loaded.is_set("generate.prompts") {
        return None;
    }
    let problem = match generate.prompts.iter().find_map(|prompt| problem_of(prompt, recipe.kind)) {
        None if generate.prompts.is_empty() => Some("expected a list of texts or of messages, found none".to_owned()),
        problem => problem,
    };
    if let Some(problem) = problem {
        resolver.report(&["generate.prompts", "generate"], format!("generate.prompts: {problem}"));
    }
    resolver.pick("generate.prompts", Some(&generate.prompts), &generate.prompts);
    let top_p = resolver.number("generate.top_p", generate.top_p, 1.0, 0.0, 1.0);
    if top_p == 0.0 {
        resolver.report(&["generate.top_p"], "generate.top_p: expected above 0, found 0");
    }
    let temperatures = temperatures(resolver);
    let seed = generate.seed.or(recipe.seed).map_or(42, |seed| seed.0);
    Some(GeneratePlan {
        prompts: generate.prompts.clone(),
        max_new_tokens: resolver.positive("generate.max_new_tokens", generate.max_new_tokens, 64),
        temperatures,
        top_p,
        seed: seed as u64,
        on_evaluate: resolver.pick("generate.on_evaluate", generate.on_evaluate, false),
    })
}

/// Returns the sampling temperatures, with a reply for each.
fn temperatures(resolver: &mut Resolver) -> Vec<f64> {
    const KEY: &str = "generate.temperature";
    let given = resolver.recipe().generate.as_ref().and_then(|generate| generate.temperature.clone());
    let given = resolver.pick(KEY, given, ValueOrList::Value(HumanFloat(0.0)));
    let temperatures: Vec<f64> = given.values().iter().map(|temperature| temperature.0).collect();
    if temperatures.is_empty() {
        resolver.report(&[KEY], format!("{KEY}: expected a number or a list of numbers, found an empty list"));
    }
    if let Some(wrong) = temperatures.iter().find(|temperature| !(0.0..=f64::MAX).contains(*temperature)) {
        resolver.report(&[KEY], format!("{KEY}: expected at least 0, found {wrong}"));
    }
    temperatures
}

/// Returns the reason why a prompt cannot be answered, if there is one.
fn problem_of(prompt: &Prompt, kind: Option<DataType>) -> Option<String> {
    let messages = match prompt {
        Prompt::Text(text) => return text.is_empty().then(|| "expected a list of non-empty texts".to_owned()),
        Prompt::Messages(messages) => messages,
    };
    if kind == Some(DataType::Causal) {
        return Some("a list of messages needs type: sft; type: causal continues texts".to_owned());
    }
    match conversation(messages) {
        Err(error) => Some(format!("failed to {error}")),
        Ok(chat) if chat.messages.is_empty() => Some("a list of messages is empty".to_owned()),
        Ok(chat) if chat.messages.last().is_some_and(Message::is_assistant) => {
            Some("a list of messages ends with an assistant message; end it with a user message".to_owned())
        }
        Ok(_) => None,
    }
}

/// Returns the messages of a prompt as a conversation.
pub(crate) fn conversation(messages: &[JsonMap]) -> Result<Conversation, MessageError> {
    let messages = messages.iter().map(|fields| Message::from_fields(fields.clone())).collect::<Result<Vec<_>, _>>()?;
    Ok(Conversation::new(messages))
}
