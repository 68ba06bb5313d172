//! LLaMA-Factory's data sets: names that `dataset_info.json` describes.

use std::path::{Path, PathBuf};

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};
use serde_json::{Map, Value as Json, json};

use crate::convert::converter::Converter;
use crate::convert::item::ForeignItem;
use crate::convert::report::FindingKind;

pub(super) fn training(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    convert(converter, item, "data.sources");
}

pub(super) fn evaluation(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    convert(converter, item, "data.eval_sources");
}

fn convert(converter: &mut Converter<'_>, item: &ForeignItem<'_>, path: &str) {
    let Some(names) = item.texts().filter(|names| !names.is_empty()) else {
        return converter.fail(item, "names of data sets");
    };
    let dir = converter.get("dataset_dir");
    let folder = dir.as_ref().and_then(ForeignItem::text).unwrap_or("data").to_owned();
    let is_online = folder == "ONLINE";
    let info = if is_online { None } else { find(converter.folder, &folder) };
    let limit = converter.get("max_samples").and_then(|item| item.whole());
    let mut notes = Vec::new();
    let mut list = Vec::new();
    for name in &names {
        let source = match &info {
            Some((folder, sets)) => match sets.get(name) {
                Some(set) => described(name, set, folder, &mut notes),
                None => {
                    let problem = format!("`{name}` is not in {}", folder.join(INFO).display());
                    return converter.refuse(item, &problem);
                }
            },
            None => named(name, &folder, is_online, &mut notes),
        };
        list.push(limited(source, limit));
    }
    if path == "data.sources" {
        add_weights(converter, &mut list);
    }
    let list = list.into_iter().map(Json::Object).collect();
    let settings = vec![(path, Json::Array(list))];
    match notes.is_empty() {
        true => converter.record(FindingKind::Mapped, item, settings.clone(), ""),
        false => converter.record(FindingKind::Changed, item, settings.clone(), &notes.join("; ")),
    }
    for key in ["dataset_dir", "max_samples"] {
        if let Some(item) = converter.get(key) {
            let recipe = settings.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
            converter.note(FindingKind::Mapped, &item, recipe, "");
        }
    }
}

/// Adds the weights of interleaved sources, a number for each of them.
fn add_weights(converter: &mut Converter<'_>, sources: &mut [Map<String, Json>]) {
    let Some(item) = converter.get("interleave_probs") else { return };
    if converter.get("mix_strategy").is_none_or(|mix| mix.text() == Some("concat")) {
        return converter.built_in(&item, "without an interleaving mix_strategy it has no effect");
    }
    // LLaMA-Factory reads one text with commas.
    let numbers: Option<Vec<f64>> = match item.text() {
        Some(text) => text.split(',').map(|number| number.trim().parse().ok()).collect(),
        None => item.items().iter().map(ForeignItem::number).collect(),
    };
    match numbers.filter(|numbers| numbers.len() == sources.len()) {
        None => converter.fail(&item, "a number for each data set"),
        Some(numbers) => {
            for (source, weight) in sources.iter_mut().zip(&numbers) {
                source.insert("weight".into(), json!(weight));
            }
            converter.note(FindingKind::Mapped, &item, vec![("data.sources.N.weight".to_owned(), json!(numbers))], "");
        }
    }
}

const INFO: &str = "dataset_info.json";

/// Finds `dataset_info.json`: in the folder, or in the folder below one that contains the converted file.
fn find(file_folder: &Path, folder: &str) -> Option<(PathBuf, Map<String, Json>)> {
    let here = PathBuf::from(folder);
    let above = file_folder.ancestors().map(|ancestor| ancestor.join(folder));
    let found = std::iter::once(here).chain(above).find(|folder| folder.join(INFO).is_file())?;
    let text = read_regular_text_file(&found.join(INFO), MAX_CONFIG_FILE_BYTES).ok()?;
    match serde_json::from_str(&text).ok()? {
        Json::Object(sets) => Some((found, sets)),
        _ => None,
    }
}

/// Returns the source of a name without a description.
fn named(name: &str, folder: &str, is_online: bool, notes: &mut Vec<String>) -> Map<String, Json> {
    let path = match is_online || name.contains('/') {
        true => name.to_owned(),
        false => {
            notes.push(format!("{folder}/{INFO} is not there, so {name} is taken for {folder}/{name}.json"));
            format!("{folder}/{name}.json")
        }
    };
    Map::from_iter([("name_or_path".to_owned(), path.into())])
}

/// Returns the source that a description gives.
fn described(name: &str, set: &Json, folder: &Path, notes: &mut Vec<String>) -> Map<String, Json> {
    let text = |key: &str| set[key].as_str().map(str::to_owned);
    let file = text("file_name").map(|file| folder.join(file).display().to_string());
    let mut source = Map::new();
    let place = text("hf_hub_url").or(file).unwrap_or_else(|| name.to_owned());
    source.insert("name_or_path".to_owned(), place.into());
    for key in ["subset", "split"] {
        source.extend(text(key).map(|value| (key.to_owned(), value.into())));
    }
    if let Some(count) = set["num_samples"].as_u64() {
        source.insert("sample_count".to_owned(), count.into());
    }
    if set["ranking"] == true {
        notes.push(format!("{name} has preferences, of which only conversations are trained"));
    }
    for key in ["ms_hub_url", "script_url", "cloud_file_name", "folder"] {
        if text(key).is_some() && !(key == "ms_hub_url" && text("hf_hub_url").is_some()) {
            notes.push(format!("{key} of {name} is not supported"));
        }
    }
    rows(name, set, &mut source, notes);
    source
}

/// Adds the row format or the mapping of roles.
fn rows(name: &str, set: &Json, source: &mut Map<String, Json>, notes: &mut Vec<String>) {
    let column = |key: &str| set["columns"][key].as_str();
    match set["formatting"].as_str().unwrap_or("alpaca") {
        "alpaca" => {
            let prompt = column("prompt").unwrap_or("instruction");
            let (query, response) = (column("query"), column("response"));
            if set["columns"].is_object() && response.is_none() {
                // Plain text of the stage pt.
                source.insert("column".to_owned(), prompt.into());
                return;
            }
            if (prompt, query.unwrap_or("input"), response.unwrap_or("output")) == ("instruction", "input", "output") {
                source.insert("format".to_owned(), "alpaca".into());
                return;
            }
            if let Some(query) = query {
                notes.push(format!("the column {query} of {name} is not read, so join it to {prompt}"));
            }
            let mut roles = Map::new();
            roles.extend(column("system").map(|system| ("system".to_owned(), system.into())));
            roles.insert("user".to_owned(), prompt.into());
            roles.insert("assistant".to_owned(), response.unwrap_or("output").into());
            source.insert("role_mapping".to_owned(), Json::Object(roles));
        }
        _ => messages(set, source),
    }
}

fn messages(set: &Json, source: &mut Map<String, Json>) {
    let tag = |key: &str, default: &'static str| set["tags"][key].as_str().unwrap_or(default).to_owned();
    let is_openai = set["formatting"] == "openai";
    let default = |sharegpt: &'static str, openai: &'static str| if is_openai { openai } else { sharegpt };
    let list = set["columns"]["messages"].as_str().unwrap_or(default("conversations", "messages")).to_owned();
    let (role, content) = (tag("role_tag", default("from", "role")), tag("content_tag", default("value", "content")));
    let names = [
        ("system", tag("system_tag", "system")),
        ("user", tag("user_tag", default("human", "user"))),
        ("assistant", tag("assistant_tag", default("gpt", "assistant"))),
    ];
    match (list.as_str(), role.as_str(), content.as_str()) {
        ("conversations", "from", "value") => _ = source.insert("format".to_owned(), "sharegpt".into()),
        ("messages", "role", "content") => _ = source.insert("format".to_owned(), "messages".into()),
        _ => {
            let paths = names.map(|(target, name)| (target.to_owned(), json!(format!("{list}.{role}.{name}"))));
            source.insert("role_mapping".to_owned(), Json::Object(Map::from_iter(paths)));
            source.insert("content_key".to_owned(), content.into());
        }
    }
}

/// Takes the first rows, as `max_samples` does.
fn limited(mut source: Map<String, Json>, limit: Option<u64>) -> Map<String, Json> {
    if let Some(limit) = limit {
        let split = source.get("split").and_then(Json::as_str).unwrap_or("train").to_owned();
        source.insert("split".to_owned(), format!("{split}[:{limit}]").into());
    }
    source
}
