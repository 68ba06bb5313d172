//! Evaluation intervals, checkpoints and trackers of toolkits on transformers' Trainer.

use serde_json::{Map, Value as Json, json};

use super::converter::Converter;
use super::item::ForeignItem;
use super::report::FindingKind;

/// The interval between checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SaveInterval {
    /// Steps, or below 1 a fraction of the run.
    Steps(Json),
    Epochs,
    PerEpoch(u64),
    Never,
}

impl SaveInterval {
    fn key(&self) -> Option<(&'static str, Json)> {
        match self {
            Self::Steps(steps) => Some(("save_every_n_steps", steps.clone())),
            Self::Epochs => Some(("save_every_n_epochs", 1.into())),
            Self::PerEpoch(n) => Some(("saves_per_epoch", (*n).into())),
            Self::Never => None,
        }
    }
}

/// Defaults of a toolkit.
pub(super) struct SavingDefaults {
    /// Folder of the results.
    pub(super) output_dir: &'static str,
    /// Interval between checkpoints.
    pub(super) interval: SaveInterval,
}

/// Converts the folder of the results and the checkpoints in it.
pub(super) fn checkpoints(converter: &mut Converter<'_>, defaults: SavingDefaults) {
    let output = converter.get("output_dir");
    let folder =
        output.as_ref().and_then(ForeignItem::text).unwrap_or(defaults.output_dir).trim_end_matches('/').to_owned();
    match &output {
        Some(item) => {
            let note =
                "the folder has metrics.jsonl, run.json, checkpoints and the exported model, in folders of their own";
            converter.change(item, [("output_dir", folder.into())], note);
        }
        None => converter.default("output_dir", "output_dir", folder.into()),
    }
    let interval = interval(converter, &defaults.interval);
    let limit = converter.get("save_total_limit");
    let only_model = converter.is_on("save_only_model");
    let mut exported = Map::from_iter([("type".to_owned(), "huggingface".into())]);
    exported.insert("save_end_of_training".to_owned(), true.into());
    let mut sharded = Map::from_iter([("type".to_owned(), "sharded".into())]);
    let resumes = resumes(converter);
    if resumes {
        sharded.insert("auto_resume".to_owned(), true.into());
    }
    let saved = if only_model { &mut exported } else { &mut sharded };
    saved.extend(interval.key().map(|(key, value)| (key.to_owned(), value)));
    saved.extend(limit.as_ref().map(|limit| ("save_total_limit".to_owned(), limit.scalar())));
    let list = match only_model || (interval == SaveInterval::Never && !resumes) {
        true => vec![Json::Object(exported)],
        false => vec![Json::Object(sharded), Json::Object(exported)],
    };
    report(converter, Json::Array(list));
}

/// Reports the keys of checkpoints with the resulting list.
fn report(converter: &mut Converter<'_>, list: Json) {
    let keys = ["save_steps", "saves_per_epoch", "save_strategy", "save_total_limit", "save_only_model"];
    let found: Vec<ForeignItem<'_>> = keys.iter().filter_map(|key| converter.get(key)).collect();
    if found.is_empty() {
        converter.default("save_strategy", "checkpoint", list.clone());
    }
    for item in found {
        let (kind, note) = match saving_note(&item) {
            Some(note) => (FindingKind::Changed, note),
            None => (FindingKind::Mapped, ""),
        };
        converter.record(kind, &item, vec![("checkpoint", list.clone())], note);
    }
}

/// Returns the difference of a key of checkpoints.
fn saving_note(item: &ForeignItem<'_>) -> Option<&'static str> {
    match (item.name(), item.text()) {
        ("save_strategy", Some("best")) => Some("checkpoints follow each epoch; metric_for_best_model keeps the best"),
        _ => None,
    }
}

fn interval(converter: &Converter<'_>, default: &SaveInterval) -> SaveInterval {
    let strategy = converter.get("save_strategy").and_then(|item| item.text().map(str::to_owned));
    // YAML 1.1 reads `no` as false.
    let is_off = converter.get("save_strategy").and_then(|item| item.flag()) == Some(false);
    let steps = converter.get("save_steps").and_then(|item| item.number());
    match (strategy.as_deref(), steps) {
        _ if is_off => SaveInterval::Never,
        (Some("epoch" | "best"), _) => SaveInterval::Epochs,
        (_, Some(steps)) if steps > 0.0 => SaveInterval::Steps(number(steps)),
        (_, Some(_)) => SaveInterval::Epochs,
        (None, None) => match converter.get("saves_per_epoch").and_then(|item| item.number()) {
            Some(n) if n > 1.0 => SaveInterval::PerEpoch(n as u64),
            Some(_) => SaveInterval::Epochs,
            None => default.clone(),
        },
        _ => default.clone(),
    }
}

/// Converts the keys that resume a run.
fn resumes(converter: &mut Converter<'_>) -> bool {
    let mut resumes = false;
    for key in ["resume_from_checkpoint", "auto_resume_from_checkpoints"] {
        let Some(item) = converter.get(key) else { continue };
        match item.flag() {
            Some(false) => converter.built_in(&item, "off"),
            Some(true) => {
                resumes = true;
                converter.built_in(&item, "checkpoint.0.auto_resume: true");
            }
            None => {
                converter.nothing(&item, "a checkpoint of another toolkit cannot be resumed; export its model first")
            }
        }
    }
    resumes
}

/// Returns a number, without a decimal point if it is whole.
pub(super) fn number(number: f64) -> Json {
    if number.fract() == 0.0 { Json::from(number as u64) } else { Json::from(number) }
}

/// Returns true if `eval_steps` has an effect: without a strategy, or with `steps`.
pub(super) fn has_eval_steps(converter: &Converter<'_>) -> bool {
    let mut strategies = ["eval_strategy", "evaluation_strategy"].iter().filter_map(|key| converter.get(key));
    strategies.all(|item| item.text() == Some("steps"))
}

/// Converts the interval between evaluations.
pub(super) fn evaluation(converter: &mut Converter<'_>) {
    let keys = ["eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"];
    for item in keys.iter().filter_map(|key| converter.get(key)).collect::<Vec<_>>() {
        let is_off = item.flag() == Some(false);
        match (item.name(), item.number(), item.text()) {
            ("eval_steps", ..) if !has_eval_steps(converter) => {
                converter.built_in(&item, "eval_strategy decides, also in transformers");
            }
            ("eval_steps", Some(steps), _) if steps > 0.0 => {
                converter.map(&item, [("eval_interval", number(steps))]);
            }
            ("evals_per_epoch", Some(n), _) if n > 1.0 => {
                converter.map(&item, [("evals_per_epoch", number(n))]);
            }
            ("evals_per_epoch", ..) => converter.built_in(&item, "evaluation follows each epoch"),
            _ if is_off => converter.change(&item, [], "evaluation data are evaluated; remove them to turn this off"),
            (_, _, Some("steps")) => converter.built_in(&item, "eval_interval has the steps"),
            (_, _, Some("epoch")) => converter.built_in(&item, "evaluation follows each epoch"),
            _ => converter.fail(&item, "steps, epoch or no"),
        }
    }
}

/// Converts the trackers: `report_to` and the keys of each.
pub(super) fn trackers(converter: &mut Converter<'_>) {
    const KNOWN: [&str; 3] = ["tensorboard", "wandb", "mlflow"];
    let mut names: Vec<String> = Vec::new();
    let mut add = |name: &str| {
        if !names.iter().any(|own| own == name) {
            names.push(name.to_owned());
        }
    };
    let report_to = converter.get("report_to");
    let asked = report_to.as_ref().and_then(ForeignItem::texts).unwrap_or_default();
    asked.iter().filter(|name| KNOWN.contains(&name.as_str())).for_each(|name| add(name));
    let switches = [("use_tensorboard", "tensorboard"), ("use_wandb", "wandb"), ("use_mlflow", "mlflow")];
    let on: Vec<_> = switches.iter().filter(|(key, _)| converter.is_on(key)).collect();
    on.iter().for_each(|(_, name)| add(name));
    for (key, name) in [("wandb_project", "wandb"), ("mlflow_tracking_uri", "mlflow")] {
        if converter.get(key).is_some_and(|item| item.text() != Some("")) && !names.iter().any(|own| own == name) {
            names.push(name.to_owned());
        }
    }
    let list = json!(names);
    for (key, _) in switches {
        let Some(item) = converter.get(key) else { continue };
        match item.flag() {
            Some(true) => converter.map(&item, [("report_to", list.clone())]),
            _ => converter.built_in(&item, "off"),
        }
    }
    if let Some(item) = report_to {
        let unknown: Vec<&String> =
            asked.iter().filter(|name| !KNOWN.contains(&name.as_str()) && *name != "none" && *name != "all").collect();
        match (names.is_empty(), unknown.first()) {
            (true, Some(name)) => converter.nothing(&item, &format!("{name} is not supported: {}", KNOWN.join(", "))),
            (false, Some(name)) => {
                let note = format!("{name} is not supported: {}", KNOWN.join(", "));
                converter.change(&item, [("report_to", list.clone())], &note);
            }
            (true, None) => converter.built_in(&item, "no tracker is the default"),
            (false, None) => converter.map(&item, [("report_to", list.clone())]),
        }
    }
    for (key, path) in [("wandb_project", "wandb.project"), ("mlflow_tracking_uri", "mlflow.tracking_uri")] {
        if let Some(item) = converter.get(key).filter(|item| item.text() != Some("")) {
            converter.map(&item, [(path, item.json()), ("report_to", list.clone())]);
        }
    }
}
