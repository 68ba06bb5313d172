//! Early exits, checkpoints, reports and sample generations.

use std::path::{Path, PathBuf};

use candlewick_text::conversation::{Conversation, Message, MessageError};

use super::resolver::Resolver;
use super::{ExitPlan, GeneratePlan, LoggerPlan};
use crate::checkpoint::{CheckpointPlan, Kind};
use crate::metrics::{Console, LogPlan};
use crate::recipe::{Checkpoint, CheckpointType, DataType, Free, LogLevel, Origin, Prompt};

const NOWHERE: &str = "/dev/null";

pub(super) fn resolve_exit(resolver: &mut Resolver) -> ExitPlan {
    let recipe = resolver.recipe();
    let at = resolver.count("exit_iteration", recipe.exit_iteration, 0);
    let after = resolver.count("exit_iteration_this_run", recipe.exit_iteration_this_run, 0);
    let path = resolver.pick("kill_switch_path", recipe.kill_switch_path.clone(), "/tmp/at_kill_switch".into());
    ExitPlan {
        iteration: (at > 0).then_some(at),
        iteration_this_run: (after > 0).then_some(after),
        kill_switch_path: PathBuf::from(path),
    }
}

pub(super) fn resolve_checkpoints(resolver: &mut Resolver) -> Vec<CheckpointPlan> {
    let given = &resolver.recipe().checkpoint;
    let mut plans: Vec<CheckpointPlan> = Vec::new();
    let mut resumes = None;
    for (idx, checkpoint) in given.iter().enumerate() {
        // A single entry may stand without a list around it.
        let list = format!("checkpoint.{idx}");
        let path = if resolver.loaded.is_set(&list) { list } else { "checkpoint".to_owned() };
        let plan = checkpoint_plan(resolver, &path, checkpoint);
        if plan.auto_resume
            && let Some(other) = resumes.replace(path.clone())
        {
            let message = format!("{path}.auto_resume: {other} resumes already; only one may");
            resolver.wrong(&[&format!("{path}.auto_resume")], message);
        }
        if checkpoint.enabled == Some(false) {
            resolver.note(format!("{path} is not enabled"));
            continue;
        }
        if plans.iter().any(|other| other.kind == plan.kind && other.output_dir == plan.output_dir) {
            let message = format!("{path}.output_dir: another checkpoint of the same type is saved there");
            resolver.wrong(&[&format!("{path}.output_dir")], message);
        }
        let origin = resolver.loaded.origin(&[&path]);
        resolver.record(&path, summary(&plan), origin);
        plans.push(plan);
    }
    plans
}

fn checkpoint_plan(resolver: &mut Resolver, path: &str, checkpoint: &Checkpoint) -> CheckpointPlan {
    let kind = match checkpoint.kind {
        None | Some(CheckpointType::Sharded) => Kind::Sharded,
        Some(CheckpointType::Huggingface) => Kind::HuggingFace,
    };
    let auto_resume = checkpoint.auto_resume == Some(true);
    if auto_resume && kind == Kind::HuggingFace {
        let key = format!("{path}.auto_resume");
        let message = format!("{key}: a huggingface checkpoint holds the weights alone; it cannot resume a run");
        resolver.wrong_because(&[&key], message, "add a checkpoint of type sharded and let that one resume");
    }
    let async_save = checkpoint.async_save == Some(true);
    if async_save && kind == Kind::HuggingFace {
        let key = format!("{path}.async_save");
        let message = format!("{key}: only sharded checkpoints are written while training goes on");
        resolver.wrong_because(&[&key], message, "remove it, or set type: sharded");
    }
    let keep = checkpoint.keep.map(|n| n.0);
    if keep == Some(0) {
        let key = format!("{path}.keep");
        resolver.wrong(&[&key], format!("{key}: expected at least 1, found 0"));
    }
    let plan = CheckpointPlan {
        kind,
        output_dir: PathBuf::from(&checkpoint.output_dir),
        auto_resume,
        save_every_n_steps: checkpoint.save_every_n_steps.map_or(0, |n| n.0),
        save_every_n_epochs: checkpoint.save_every_n_epochs.map_or(0, |n| n.0),
        save_end_of_training: checkpoint.save_end_of_training == Some(true),
        keep,
        async_save,
    };
    if plan.save_every_n_steps == 0 && plan.save_every_n_epochs == 0 && !plan.save_end_of_training {
        resolver.note(format!("{path} saves only when the run is asked to stop: no save_* key is set"));
    }
    plan
}

fn summary(plan: &CheckpointPlan) -> String {
    let mut text = match plan.kind {
        Kind::Sharded => format!("sharded in {}", plan.output_dir.display()),
        Kind::HuggingFace => format!("huggingface in {}", plan.output_dir.display()),
    };
    let every = [(plan.save_every_n_steps, "steps"), (plan.save_every_n_epochs, "epochs")];
    for (n, unit) in every.into_iter().filter(|(n, _)| *n > 0) {
        text += &format!(", every {n} {unit}");
    }
    let flags = [
        (plan.save_end_of_training, ", at the end"),
        (plan.auto_resume, ", auto_resume"),
        (plan.async_save, ", in the background"),
    ];
    for (is_so, words) in flags {
        text += if is_so { words } else { "" };
    }
    text
}

pub(super) fn resolve_log(resolver: &mut Resolver) -> LogPlan {
    let recipe = resolver.recipe();
    let stem = Path::new(&resolver.loaded.source().path).file_stem().map_or("run".into(), |s| s.to_string_lossy());
    let output_dir = resolver.pick("output_dir", recipe.output_dir.clone(), format!("runs/{stem}"));
    // The first rank reports for all.
    let reports = resolver.known.seat.rank == 0;
    let output_dir = (output_dir != NOWHERE && reports).then(|| PathBuf::from(output_dir));
    let key = "train_log_metrics_path";
    let metrics_path = match (&recipe.train_log_metrics_path, &output_dir) {
        (Some(path), _) => Some(PathBuf::from(resolver.pick(key, Some(path.clone()), String::new()))),
        (None, Some(dir)) => Some(resolver.record(key, dir.join("metrics.jsonl"), Origin::Derived)),
        (None, None) => None,
    };
    LogPlan {
        metrics_path: metrics_path.filter(|path| path != Path::new(NOWHERE) && reports),
        output_dir,
        loss_log_interval: resolver.count("loss_log_interval", recipe.loss_log_interval, 1),
        train_log_iter_interval: resolver.count("train_log_iter_interval", recipe.train_log_iter_interval, 1),
        eval_log_iter_interval: resolver.count("eval_log_iter_interval", recipe.eval_log_iter_interval, 1),
        console: if prints(resolver) { resolver.known.console } else { Console::Quiet },
    }
}

/// Whether this rank is among those that print.
fn prints(resolver: &Resolver) -> bool {
    let rank = resolver.known.seat.rank;
    resolver.recipe().logger.print_output_ranks.as_ref().map_or(rank == 0, |ranks| ranks.has(rank))
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
    let rank = resolver.known.seat.rank;
    let writes = logger.file_output_ranks.as_ref().is_none_or(|ranks| ranks.has(rank));
    let dir = logger.output_dir.clone().filter(|dir| dir != NOWHERE && writes);
    if let Some(dir) = &dir {
        resolver.pick("logger.output_dir", Some(dir), dir);
    }
    let file = dir.map(|dir| Path::new(&dir).join("logs").join(format!("rank_{rank}.log")));
    LoggerPlan { level, print: prints(resolver), file }
}

pub(super) fn resolve_generate(resolver: &mut Resolver) -> Option<GeneratePlan> {
    let recipe = resolver.recipe();
    let generate = recipe.generate.as_ref()?;
    let problem = match generate.prompts.iter().find_map(|prompt| problem_of(prompt, recipe.kind)) {
        None if generate.prompts.is_empty() => Some("expected a list of texts or of messages, found none".to_owned()),
        problem => problem,
    };
    if let Some(problem) = problem {
        resolver.wrong(&["generate.prompts", "generate"], format!("generate.prompts: {problem}"));
    }
    resolver.pick("generate.prompts", Some(&generate.prompts), &generate.prompts);
    let top_p = resolver.number("generate.top_p", generate.top_p, 1.0, 0.0, 1.0);
    if top_p == 0.0 {
        resolver.wrong(&["generate.top_p"], "generate.top_p: expected above 0, found 0");
    }
    let seed = generate.seed.or(recipe.seed).map_or(42, |seed| seed.0);
    Some(GeneratePlan {
        prompts: generate.prompts.clone(),
        max_new_tokens: resolver.positive("generate.max_new_tokens", generate.max_new_tokens, 64),
        temperature: resolver.number("generate.temperature", generate.temperature, 0.0, 0.0, f64::MAX),
        top_p,
        seed: seed as u64,
    })
}

/// The reason why a prompt cannot be answered, if there is one.
fn problem_of(prompt: &Prompt, kind: Option<DataType>) -> Option<String> {
    let messages = match prompt {
        Prompt::Text(text) => return text.is_empty().then(|| "expected a list of texts that are not empty".to_owned()),
        Prompt::Messages(messages) => messages,
    };
    if kind == Some(DataType::Causal) {
        return Some("a list of messages needs type: sft; type: causal continues texts".to_owned());
    }
    match conversation(messages) {
        Err(error) => Some(format!("failed to {error}")),
        Ok(chat) if chat.messages.is_empty() => Some("a list of messages is empty".to_owned()),
        Ok(chat) if chat.messages.last().is_some_and(Message::is_assistant) => {
            Some("a list of messages ends with the assistant's, so there is nothing to answer".to_owned())
        }
        Ok(_) => None,
    }
}

/// Returns the messages of a prompt as a conversation.
pub(crate) fn conversation(messages: &[Free]) -> Result<Conversation, MessageError> {
    let messages = messages.iter().map(|fields| Message::from_fields(fields.clone())).collect::<Result<Vec<_>, _>>()?;
    Ok(Conversation::new(messages))
}
