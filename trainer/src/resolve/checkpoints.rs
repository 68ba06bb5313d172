//! Checkpoints: types, intervals, folders, and protection of the model folder.

use std::path::{Component, Path, PathBuf};

use candlewick_text::files::without_links;

use super::autocast;
use super::intervals::{of_epoch, steps_or_fraction};
use super::output::run_folder;
use super::resolver::Resolver;
use crate::checkpoint::{CheckpointFormat, CheckpointPlan};
use crate::recipe::{CheckpointSection, CheckpointType, FloatDtype, Origin};
use crate::step_fraction::FractionalInterval;

pub(super) fn resolve(resolver: &mut Resolver) -> Vec<CheckpointPlan> {
    check_save_name(resolver);
    if resolver.recipe().moe.benchmark.is_on() {
        return refuse_benchmark(resolver);
    }
    if !resolver.loaded.is_set("checkpoint") {
        return default_checkpoint(resolver).into_iter().collect();
    }
    let given = &resolver.recipe().checkpoint;
    let mut plans: Vec<CheckpointPlan> = Vec::new();
    let mut resumes = None;
    for (idx, checkpoint) in given.iter().enumerate() {
        // A single entry may be written without a list.
        let list = format!("checkpoint.{idx}");
        let path = if resolver.loaded.is_set(&list) { list } else { "checkpoint".to_owned() };
        let plan = checkpoint_plan(resolver, &path, checkpoint);
        if plan.auto_resume
            && let Some(other) = resumes.replace(path.clone())
        {
            let message = format!("{path}.auto_resume: {other} resumes already; only one entry may");
            resolver.report(&[&format!("{path}.auto_resume")], message);
        }
        if checkpoint.enabled == Some(false) {
            resolver.note(format!("{path} is disabled"));
            continue;
        }
        let folder = resolved(&plan.output_dir);
        if plans.iter().any(|other| other.format == plan.format && resolved(&other.output_dir) == folder) {
            let (key, shown) = (format!("{path}.output_dir"), plan.output_dir.display());
            let message = format!("{key}: another checkpoint of the same type uses this folder, {shown}");
            resolver.report_with_advice(&[&key, &path], message, format!("give {key} another folder"));
        }
        refuse_model_in_use(resolver, &format!("{path}.output_dir"), &plan);
        let origin = resolver.loaded.origin(&[&path]);
        resolver.record(&path, plan.to_string(), origin);
        plans.push(plan);
    }
    if plans.is_empty() {
        resolver.record("checkpoint", "none", resolver.loaded.origin(&["checkpoint"]));
        resolver.note("nothing will be saved: the recipe has no enabled checkpoint");
    }
    plans
}

/// Checks the name of the saved model, which becomes a folder.
fn check_save_name(resolver: &mut Resolver) {
    const KEY: &str = "model.save_name";
    let Some(name) = &resolver.recipe().model.save_name else { return };
    resolver.pick(KEY, Some(name), name);
    let is_folder_name = matches!(Path::new(name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
    if !is_folder_name || name.contains('/') {
        let message = format!("{KEY}: expected the name of a folder, found {name:?}");
        resolver.report_with_advice(&[KEY], message, "set checkpoint.output_dir to a path");
    }
}

/// Returns the folder of exported models: the entry's, or the folder `model.save_name` in it.
fn named(resolver: &Resolver, output_dir: PathBuf) -> PathBuf {
    resolver.recipe().model.save_name.as_ref().map_or_else(|| output_dir.clone(), |name| output_dir.join(name))
}

/// Returns the dtype of exported weights. Under autocast they are f32, as in the model.
fn export_dtype(resolver: &Resolver, given: Option<FloatDtype>) -> Option<FloatDtype> {
    given.or_else(|| autocast::has_f32_weights(resolver).then_some(FloatDtype::F32))
}

/// Saves nothing: a benchmark with forced loads of experts trains no useful model.
fn refuse_benchmark(resolver: &mut Resolver) -> Vec<CheckpointPlan> {
    if !resolver.recipe().checkpoint.is_empty() {
        let message = "checkpoint: the routers of moe.benchmark are forced, so the model is not for use";
        resolver.report_with_advice(&["checkpoint"], message, "remove the key, or moe.benchmark");
    }
    resolver.note(
        "BENCHMARK: moe.benchmark forces the load of the experts. The model learns nothing useful, and is not saved",
    );
    Vec::new()
}

/// Returns the checkpoint of a recipe without any: an export of the model at the end.
fn default_checkpoint(resolver: &mut Resolver) -> Option<CheckpointPlan> {
    let Some(folder) = run_folder(resolver) else {
        resolver.note("nothing will be saved: output_dir is /dev/null, and the recipe has no checkpoint");
        return None;
    };
    let plan = CheckpointPlan {
        format: CheckpointFormat::HuggingFace,
        output_dir: named(resolver, folder.join(subfolder(CheckpointFormat::HuggingFace))),
        auto_resume: false,
        save_every_n_steps: 0,
        save_every_n_epochs: 0,
        save_fraction: None,
        save_end_of_training: true,
        save_total_limit: None,
        save_retain_interval: None,
        async_save: false,
        dtype: export_dtype(resolver, None),
    };
    refuse_model_in_use(resolver, "output_dir", &plan);
    resolver.record("checkpoint", plan.to_string(), Origin::Default);
    let output_dir = plan.output_dir.display();
    resolver.note(format!("the model will be saved in {output_dir} at the end; `checkpoint: none` saves nothing"));
    Some(plan)
}

/// Returns the checkpoint of a stopped run. A run that saves nothing has none.
///
/// A run with an `auto_resume` entry writes none, but resumes from it: an earlier recipe may have had no such entry.
pub(super) fn resolve_stop(resolver: &mut Resolver, checkpoints: &[CheckpointPlan]) -> Option<CheckpointPlan> {
    let is_sharded = |plan: &CheckpointPlan| plan.format == CheckpointFormat::Sharded;
    let (writes, resumes) = (!checkpoints.iter().any(is_sharded), checkpoints.iter().any(|plan| plan.auto_resume));
    let folder = run_folder(resolver).filter(|_| !checkpoints.is_empty() && (writes || resumes))?;
    let folder = folder.join("stop_checkpoint");
    if let Some(entry) = checkpoints.iter().find(|entry| resolved(&entry.output_dir) == resolved(&folder)) {
        let shown = entry.output_dir.display();
        let message =
            format!("checkpoint: {shown} is for the checkpoint of a stopped run, which the end of the run deletes");
        resolver.report_with_advice(&["checkpoint"], message, "give the entry another output_dir");
        return None;
    }
    if writes {
        let note = "a signal saves a checkpoint from which the same command continues; the end of the run deletes it";
        resolver.note(format!("{}: {note}", folder.display()));
    }
    Some(CheckpointPlan::of_stopped_run(folder))
}

/// Returns the folder of the checkpoint that a new run starts from.
pub(super) fn resolve_resume(resolver: &mut Resolver) -> Option<PathBuf> {
    const KEY: &str = "resume_from_checkpoint";
    let given = resolver.recipe().resume_from_checkpoint.clone()?;
    Some(PathBuf::from(resolver.pick(KEY, Some(given), String::new())))
}

/// Refuses a checkpoint folder that contains the run's model, adapter or tokenizer: a checkpoint could replace or delete
/// it.
fn refuse_model_in_use(resolver: &mut Resolver, key: &str, plan: &CheckpointPlan) {
    let recipe = resolver.recipe();
    let in_use = [
        ("model.name_or_path", &recipe.model.name_or_path),
        ("model.adapter_name_or_path", &recipe.model.adapter_name_or_path),
        ("tokenizer.name_or_path", &recipe.tokenizer.name_or_path),
    ];
    for (used, path) in in_use.into_iter().filter_map(|(used, path)| Some((used, path.as_deref()?))) {
        if plan.format.checkpoint_in_use(&resolved(&plan.output_dir), Path::new(path)).is_some() {
            let message = format!("{key}: this run's checkpoints could replace {used}, {path}");
            resolver.report_with_advice(&[key, used], message, format!("give {key} another folder"));
        }
    }
}

/// Returns the path without symlinks and `..`, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut resolved = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => _ = resolved.pop(),
            part => resolved.push(part),
        }
        resolved = without_links(&resolved);
    }
    resolved
}

/// Returns the folder of checkpoints within that of the run.
fn subfolder(format: CheckpointFormat) -> &'static str {
    match format {
        CheckpointFormat::Sharded => "checkpoints",
        CheckpointFormat::HuggingFace => "model",
    }
}

/// Returns the folder of an entry: the given one, or one within that of the run.
fn output_dir(
    resolver: &mut Resolver,
    path: &str,
    checkpoint: &CheckpointSection,
    format: CheckpointFormat,
) -> PathBuf {
    match (&checkpoint.output_dir, run_folder(resolver)) {
        (Some(given), _) => PathBuf::from(given),
        (None, Some(folder)) => folder.join(subfolder(format)),
        (None, None) => {
            let key = format!("{path}.output_dir");
            let message = format!("{key}: the checkpoint has no folder, because output_dir is /dev/null");
            resolver.report_with_advice(&[&key, path], message, format!("set output_dir or {key}"));
            PathBuf::new()
        }
    }
}

fn checkpoint_plan(resolver: &mut Resolver, path: &str, checkpoint: &CheckpointSection) -> CheckpointPlan {
    let format = match checkpoint.kind {
        None | Some(CheckpointType::Sharded) => CheckpointFormat::Sharded,
        Some(CheckpointType::Huggingface) => CheckpointFormat::HuggingFace,
    };
    refuse_other_format(resolver, path, checkpoint, format);
    let output_dir = output_dir(resolver, path, checkpoint, format);
    let (output_dir, dtype) = match format {
        CheckpointFormat::Sharded => (output_dir, None),
        CheckpointFormat::HuggingFace => (named(resolver, output_dir), export_dtype(resolver, checkpoint.dtype)),
    };
    let (save_every_n_steps, save_fraction) = save_interval(resolver, path, checkpoint);
    let plan = CheckpointPlan {
        format,
        output_dir,
        auto_resume: checkpoint.auto_resume == Some(true),
        save_every_n_steps,
        save_every_n_epochs: match checkpoint.saves_per_epoch {
            Some(n) if n.0 == 1 => 1,
            _ => checkpoint.save_every_n_epochs.map_or(0, |n| n.0),
        },
        save_fraction,
        save_end_of_training: checkpoint.save_end_of_training == Some(true),
        save_total_limit: checkpoint.save_total_limit.map(|n| n.0),
        save_retain_interval: checkpoint.save_retain_interval.map(|n| n.0),
        async_save: checkpoint.async_save == Some(true),
        dtype,
    };
    if plan.save_total_limit == Some(0) {
        let key = format!("{path}.save_total_limit");
        resolver.report(&[&key], format!("{key}: expected at least 1, found 0"));
    }
    check_retained(resolver, path, &plan);
    if !plan.has_interval() && !plan.save_end_of_training {
        resolver.note(format!(
            "{path} has no save_* key: it is written when the run is stopped, and at the end if nothing else was saved"
        ));
    }
    plan
}

/// Returns the interval in steps, 0 if there is none, or as a fraction.
fn save_interval(
    resolver: &mut Resolver,
    path: &str,
    checkpoint: &CheckpointSection,
) -> (usize, Option<FractionalInterval>) {
    let [steps_key, per_epoch_key] = ["save_every_n_steps", "saves_per_epoch"].map(|key| format!("{path}.{key}"));
    let (steps, fraction) = steps_or_fraction(resolver, &steps_key, checkpoint.save_every_n_steps);
    let Some(per_epoch) = checkpoint.saves_per_epoch.filter(|n| n.0 > 0) else { return (steps, fraction) };
    let others = [steps > 0 || fraction.is_some(), checkpoint.save_every_n_epochs.is_some_and(|n| n.0 > 0)];
    if others.contains(&true) {
        let message = format!("{per_epoch_key} excludes save_every_n_steps and save_every_n_epochs");
        resolver.report_with_advice(&[&per_epoch_key], message, "keep one of them");
    }
    (0, of_epoch(per_epoch.0))
}

/// Checks `save_retain_interval`, which keeps some checkpoints that `save_total_limit` would delete.
fn check_retained(resolver: &mut Resolver, path: &str, plan: &CheckpointPlan) {
    let Some(interval) = plan.save_retain_interval else { return };
    let key = format!("{path}.save_retain_interval");
    if interval == 0 {
        resolver.report(&[&key], format!("{key}: expected at least 1, found 0"));
        return;
    }
    if plan.save_total_limit.is_none() {
        let message = format!("{key} needs save_total_limit: without it every checkpoint is kept");
        resolver.report_with_advice(&[&key], message, "set save_total_limit, or remove save_retain_interval");
    }
    let every = plan.save_every_n_steps;
    if every > 0 && plan.save_every_n_epochs == 0 && !interval.is_multiple_of(every) {
        let message = format!("{key}: {interval} is not a multiple of save_every_n_steps, {every}");
        resolver.note(format!("{message}; it keeps only the checkpoints at multiples of both"));
    }
}

/// Refuses keys of the other checkpoint type.
fn refuse_other_format(resolver: &mut Resolver, path: &str, checkpoint: &CheckpointSection, format: CheckpointFormat) {
    let of_sharded = "remove it, or set type: sharded";
    let keys = [
        (
            checkpoint.auto_resume == Some(true) && format == CheckpointFormat::HuggingFace,
            "auto_resume",
            "a huggingface checkpoint has only the weights and cannot resume a run",
            "add a checkpoint of type sharded with auto_resume",
        ),
        (
            checkpoint.async_save == Some(true) && format == CheckpointFormat::HuggingFace,
            "async_save",
            "only sharded checkpoints are written asynchronously",
            of_sharded,
        ),
        (
            checkpoint.dtype.is_some() && format == CheckpointFormat::Sharded,
            "dtype",
            "a sharded checkpoint has the master weights in f32",
            "remove it, or set type: huggingface",
        ),
    ];
    for (_, key, problem, advice) in keys.into_iter().filter(|(is_wrong, ..)| *is_wrong) {
        let key = format!("{path}.{key}");
        resolver.report_with_advice(&[&key], format!("{key}: {problem}"), advice);
    }
}
