//! The data sets of training and evaluation.

use candlewick_text::source::SampleBy;
use serde_json::Value;

use super::resolver::Resolver;
use super::snowflake;
use crate::data::{DataKind, Sampling, SourcePlan, TOKEN_IDS};
use crate::recipe::{DataSource, HumanFloat, JsonMap, SourceOptions, SourceType};

/// Returns the training sources, the evaluation sources, and the held-out fraction of the training data.
pub(super) fn resolve(resolver: &mut Resolver, kind: DataKind) -> (Vec<SourcePlan>, Vec<SourcePlan>, f64) {
    let data = &resolver.recipe().data;
    if data.sources.is_empty() {
        let advice = "set data.sources: a list of files, folders or Hub ids";
        resolver.report_with_advice(&["data.sources", "data"], "data.sources: no training data are set", advice);
    }
    let sources = list(resolver, "data.sources", &data.sources, kind);
    let eval_sources = list(resolver, "data.eval_sources", &data.eval_sources, kind);
    let fraction = eval_fraction(resolver, !eval_sources.is_empty());
    (sources, eval_sources, fraction)
}

fn list(resolver: &mut Resolver, key: &str, given: &[DataSource], kind: DataKind) -> Vec<SourcePlan> {
    let mut plans = Vec::with_capacity(given.len());
    for (idx, source) in given.iter().enumerate() {
        // A single source may be written without a list.
        let item = format!("{key}.{idx}");
        let path = if resolver.loaded.is_set(&item) { item } else { key.to_owned() };
        let plan = one(resolver, &path, &source.0, kind);
        let origin = resolver.loaded.origin(&[&path]);
        resolver.record(&path, plan.name_or_path.clone(), origin);
        plans.push(plan);
    }
    plans
}

fn one(resolver: &mut Resolver, path: &str, source: &SourceOptions, kind: DataKind) -> SourcePlan {
    check_kind(resolver, path, source, kind);
    if source.name_or_path.is_none() && source.kind != Some(SourceType::Snowflake) {
        resolver.report(&[path], format!("the key `{path}.name_or_path` is missing"));
    }
    let subset = match (&source.subset, source.kwargs.get("name").and_then(serde_json::Value::as_str)) {
        (Some(subset), Some(name)) if subset != name => {
            resolver.report(&[&format!("{path}.subset")], format!("{path}.subset contradicts {path}.kwargs.name"));
            None
        }
        (subset, name) => subset.clone().or_else(|| name.map(str::to_owned)),
    };
    let LoadArguments { data_files, field, sample_by, delimiter } =
        load_arguments(resolver, &format!("{path}.kwargs"), &source.kwargs);
    let snowflake = snowflake::resolve(resolver, path, source);
    let query_name = snowflake.as_ref().map(|query| format!("snowflake: {}", query.statement));
    SourcePlan {
        name_or_path: query_name.or_else(|| source.name_or_path.clone()).unwrap_or_default(),
        revision: source.revision.clone(),
        split: source.split.clone(),
        split_mapping: source.split_mapping.0.clone(),
        subset,
        data_files,
        field,
        sample_by,
        delimiter,
        format: format(resolver, path, source),
        role_mapping: source.role_mapping.0.clone(),
        content_key: source.content_key.clone(),
        column: source.column.clone(),
        apply_chat_template: source.apply_chat_template.unwrap_or(true),
        remove_none_values: source.remove_none_values,
        sampling: sampling(resolver, path, source),
        sample_seed: source.sample_seed.map_or(42, |seed| seed.0 as u64),
        snowflake,
    }
}

/// The arguments of `datasets.load_dataset` that describe files.
#[derive(Default)]
struct LoadArguments {
    data_files: Vec<(Option<String>, String)>,
    field: Option<String>,
    sample_by: Option<String>,
    delimiter: Option<u8>,
}

fn load_arguments(resolver: &mut Resolver, path: &str, kwargs: &JsonMap) -> LoadArguments {
    /// Keys that change the behaviour of `datasets`, but not the rows.
    const INERT: [&str; 4] = ["verification_mode", "trust_remote_code", "num_proc", "keep_in_memory"];
    const READ: [&str; 6] = ["name", "data_files", "field", "sample_by", "delimiter", "sep"];
    let mut loading = LoadArguments::default();
    for (key, value) in kwargs.iter().filter(|(key, value)| !INERT.contains(&key.as_str()) && !value.is_null()) {
        let text = value.as_str().map(str::to_owned);
        let (want, is_right) = match key.as_str() {
            "name" => ("the name of a configuration", text.is_some()),
            "field" => {
                loading.field = text;
                ("the name of a key", loading.field.is_some())
            }
            "sample_by" => {
                loading.sample_by = text.filter(|text| text.parse::<SampleBy>().is_ok());
                ("line, paragraph or document", loading.sample_by.is_some())
            }
            "delimiter" | "sep" => {
                loading.delimiter = text.filter(|text| text.len() == 1).map(|text| text.as_bytes()[0]);
                ("one ASCII character", loading.delimiter.is_some())
            }
            "data_files" => match data_files(value) {
                Some(files) => {
                    loading.data_files = files;
                    ("", true)
                }
                None => ("a path or pattern, a list of them, or a map from splits to them", false),
            },
            _ => {
                let at = format!("{path}.{key}");
                let advice = match key.as_str() {
                    "streaming" => "remove the key, and set data.streaming: true".to_owned(),
                    _ => format!("remove the key; supported keys: {}", READ.join(", ")),
                };
                resolver.report_missing(&[&at], &at, advice);
                continue;
            }
        };
        if !is_right {
            resolver.report(&[&format!("{path}.{key}")], format!("{path}.{key}: expected {want}, found {value}"));
        }
    }
    loading
}

/// Returns every file pattern with its split, if it has one.
fn data_files(value: &Value) -> Option<Vec<(Option<String>, String)>> {
    let patterns = |value: &Value| match value {
        Value::String(one) => Some(vec![one.clone()]),
        Value::Array(list) if !list.is_empty() => list.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
        _ => None,
    };
    let Value::Object(by_split) = value else {
        return Some(patterns(value)?.into_iter().map(|pattern| (None, pattern)).collect());
    };
    let mut files = Vec::new();
    for (split, value) in by_split {
        files.extend(patterns(value)?.into_iter().map(|pattern| (Some(split.clone()), pattern)));
    }
    (!files.is_empty()).then_some(files)
}

fn check_kind(resolver: &mut Resolver, path: &str, source: &SourceOptions, kind: DataKind) {
    let (run, excluded) = match kind {
        DataKind::Sft => ("sft", SourceType::HuggingfaceCausal),
        DataKind::Causal => ("causal", SourceType::HuggingfaceInstruct),
    };
    if source.kind == Some(excluded) {
        let message = format!("{path}.type: this source type does not support `type: {run}`");
        resolver.report_with_advice(&[&format!("{path}.type")], message, "remove the key");
    }
    let has_roles = !source.role_mapping.0.is_empty();
    if has_roles && (kind == DataKind::Causal || source.kind == Some(SourceType::HuggingfaceCausal)) {
        let message = format!("{path}.role_mapping: plain text has no roles");
        resolver.report(&[&format!("{path}.role_mapping")], message);
    }
    for (role, column) in &source.role_mapping.0 {
        if !matches!(column.split('.').count(), 1 | 3) {
            let key = format!("{path}.role_mapping.{role}");
            let message = format!("{key}: expected a column, or array.field.value, found `{column}`");
            resolver.report(&[&key], message);
        }
    }
    if let Some(format) = &source.format {
        check_format(resolver, &format!("{path}.format"), format);
    }
}

/// Returns the name of the row format. `process: false` is ArcticTraining's name of `token_ids`.
fn format(resolver: &mut Resolver, path: &str, source: &SourceOptions) -> Option<String> {
    if source.process != Some(false) {
        return source.format.clone();
    }
    let contradictions = [
        (source.format.as_deref().is_some_and(|format| format != TOKEN_IDS), "format"),
        (!source.role_mapping.0.is_empty(), "role_mapping"),
        (source.content_key.is_some(), "content_key"),
        (source.column.is_some(), "column"),
    ];
    for (_, key) in contradictions.into_iter().filter(|(is_set, _)| *is_set) {
        let key = format!("{path}.{key}");
        let message = format!("{key} contradicts process: false: tokenized rows have the columns input_ids and labels");
        resolver.report_with_advice(&[&key], message, "remove one of the two keys");
    }
    Some(TOKEN_IDS.to_owned())
}

fn check_format(resolver: &mut Resolver, key: &str, format: &str) {
    const FORMATS: [&str; 6] = ["messages", "sharegpt", "alpaca", "prompt_completion", "text", TOKEN_IDS];
    if FORMATS.contains(&format) || ["openai", "chatml"].contains(&format) {
        return;
    }
    let advice = format!("values: {}", FORMATS.join(", "));
    resolver.report_with_advice(&[key], format!("{key}: unknown value {format:?}"), advice);
}

fn sampling(resolver: &mut Resolver, path: &str, source: &SourceOptions) -> Sampling {
    let (ratio_key, count_key) = (format!("{path}.sample_ratio"), format!("{path}.sample_count"));
    match (source.sample_ratio, source.sample_count) {
        (Some(_), Some(_)) => {
            resolver.report(&[&count_key], format!("{count_key} and sample_ratio exclude each other"));
            Sampling::All
        }
        (Some(HumanFloat(ratio)), None) => {
            if !(ratio > 0.0 && ratio <= 1.0) {
                resolver.report(&[&ratio_key], format!("{ratio_key}: expected above 0 and at most 1, found {ratio}"));
            }
            Sampling::Ratio(ratio)
        }
        (None, Some(count)) => {
            if count.0 == 0 {
                resolver.report(&[&count_key], format!("{count_key}: expected at least 1, found 0"));
            }
            Sampling::Count(count.0)
        }
        (None, None) => Sampling::All,
    }
}

fn eval_fraction(resolver: &mut Resolver, has_eval_sources: bool) -> f64 {
    const KEY: &str = "data.train_eval_split";
    let given = resolver.recipe().data.train_eval_split;
    let (train, eval) = given.map_or((1.0, 0.0), |(train, eval)| (train.0, eval.0));
    resolver.pick(KEY, given.map(|_| (train, eval)), (train, eval));
    if train <= 0.0 || eval < 0.0 || (train + eval - 1.0).abs() > 1e-9 {
        let message = format!("{KEY}: expected two fractions that sum to 1, found [{train}, {eval}]");
        resolver.report_with_advice(&[KEY], message, "for example [0.9, 0.1]");
    } else if eval > 0.0 && has_eval_sources {
        let message = format!("{KEY} and data.eval_sources exclude each other");
        resolver.report_with_advice(&[KEY], message, "keep one of them as the evaluation data");
    }
    eval
}
