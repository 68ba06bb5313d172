//! axolotl's data sets.

use serde_json::{Map, Value as Json, json};

use crate::convert::converter::Converter;
use crate::convert::item::ForeignItem;
use crate::convert::report::FindingKind;

/// Names of loaders of `datasets`, whose files are in `data_files`.
const LOADERS: [&str; 4] = ["json", "csv", "parquet", "text"];

/// Data of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowsKind {
    Conversations,
    Text,
}

pub(super) fn training(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let kinds: Vec<RowsKind> = item.items().iter().map(kind).collect();
    let Some(first) = kinds.first().copied() else { return converter.fail(item, "at least one data set") };
    if kinds.iter().any(|kind| *kind != first) {
        return converter.refuse(item, "a run has conversations or plain text (completion), not both");
    }
    let run = if first == RowsKind::Text { "causal" } else { "sft" };
    sources(converter, item, "data.sources", ("type", run));
}

pub(super) fn evaluation(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    let run = if is_text(converter) { "causal" } else { "sft" };
    sources(converter, item, "data.eval_sources", ("type", run));
}

/// Returns true if the run trains on plain text.
pub(super) fn is_text(converter: &Converter<'_>) -> bool {
    let has_text = |sets: ForeignItem<'_>| sets.items().iter().any(|set| kind(set) == RowsKind::Text);
    converter.get("pretraining_dataset").is_some() || converter.get("datasets").is_some_and(has_text)
}

pub(super) fn pretraining(converter: &mut Converter<'_>, item: &ForeignItem<'_>) {
    sources(converter, item, "data.sources", ("type", "causal"));
}

fn kind(set: &ForeignItem<'_>) -> RowsKind {
    match set.get("type").and_then(|kind| kind.text().map(str::to_owned)).as_deref() {
        Some("completion" | "pretrain") => RowsKind::Text,
        _ => RowsKind::Conversations,
    }
}

/// Converts a list of data sets. Each set becomes a source, and each of its keys a finding.
fn sources(converter: &mut Converter<'_>, item: &ForeignItem<'_>, path: &str, run: (&str, &str)) {
    let (mut list, mut findings, mut settings) = (Vec::new(), Vec::new(), Vec::new());
    for set in item.items() {
        let mut source = Source::default();
        match set.text() {
            Some(name) => source.add("name_or_path", name.into()),
            None => {
                for entry in set.entries().into_iter().filter(|entry| !entry.is_null()) {
                    if let Some(converted) = loss_setting(item, &entry) {
                        let (kind, note, setting) = converted;
                        let added = setting.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
                        findings.push((entry, kind, note, added));
                        settings.extend(setting);
                        continue;
                    }
                    let before = source.keys.clone();
                    let (kind, note) = key(&mut source, &set, &entry);
                    let added = source.keys.iter().filter(|(key, value)| before.get(*key) != Some(value));
                    let added: Vec<(String, Json)> =
                        added.map(|(k, v)| (format!("{path}.{}.{k}", list.len()), v.clone())).collect();
                    findings.push((entry, kind, note, added));
                }
            }
        }
        if !source.keys.contains_key("name_or_path") {
            converter.fail(&set, "a data set with `path`");
        }
        list.push(Json::Object(source.ordered()));
    }
    let changes: Vec<&str> = findings.iter().filter(|f| f.1 == FindingKind::Changed).map(|f| f.2.as_str()).collect();
    settings.extend([(path, Json::Array(list)), (run.0, run.1.into())]);
    let plain = item.items().iter().all(|set| set.text().is_some());
    match (changes.is_empty(), plain) {
        (false, _) => converter.record(FindingKind::Changed, item, settings, &changes.join("; ")),
        (true, _) => converter.record(FindingKind::Mapped, item, settings, ""),
    }
    for (entry, kind, note, added) in findings {
        converter.note(kind, &entry, added, &note);
    }
}

/// A source of the recipe in progress.
#[derive(Default)]
struct Source {
    keys: Map<String, Json>,
}

impl Source {
    fn add(&mut self, key: &str, value: Json) {
        self.keys.insert(key.to_owned(), value);
    }

    /// Returns the keys with the name first.
    fn ordered(mut self) -> Map<String, Json> {
        let name = self.keys.remove("name_or_path");
        name.map(|name| ("name_or_path".to_owned(), name)).into_iter().chain(self.keys).collect()
    }
}

/// A setting of the recipe, with its key.
type Setting = (&'static str, Json);

/// Converts a key about the tokens with loss. axolotl has it for each data set, a recipe for all of them.
fn loss_setting(sets: &ForeignItem<'_>, entry: &ForeignItem<'_>) -> Option<(FindingKind, String, Option<Setting>)> {
    let name = entry.name();
    let mapped = |setting| Some((FindingKind::Mapped, String::new(), setting));
    let nothing = |why: &str| Some((FindingKind::NoCounterpart, why.to_owned(), None));
    let setting = match name {
        "roles_to_train" => match roles_with_loss(entry) {
            Some(roles) => (roles != ["assistant"]).then(|| ("data.roles_to_train", json!(roles))),
            None => return nothing("the roles are system, user, assistant and tool"),
        },
        "train_on_eos" | "train_on_eot" => match entry.text() {
            Some("turn") => None,
            Some(tokens @ ("all" | "last" | "none")) => Some(("data.train_on_eos", tokens.into())),
            _ => return nothing("the values are turn, all, last and none"),
        },
        _ => return None,
    };
    let is_equal = |set: &ForeignItem<'_>| set.get(name).is_some_and(|other| other.json() == entry.json());
    if setting.is_some() && !sets.items().iter().all(is_equal) {
        return nothing("the data sets have different values, and the recipe has one for all");
    }
    mapped(setting)
}

/// Returns the roles of `roles_to_train` with the names of a recipe; `None` for another role.
fn roles_with_loss(entry: &ForeignItem<'_>) -> Option<Vec<&'static str>> {
    let role = |name: &String| match name.as_str() {
        "assistant" | "gpt" | "model" => Some("assistant"),
        "user" | "human" => Some("user"),
        "system" => Some("system"),
        "tool" | "function" => Some("tool"),
        _ => None,
    };
    entry.texts()?.iter().map(role).collect()
}

/// Converts a key of a data set.
fn key(source: &mut Source, set: &ForeignItem<'_>, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let mapped = |note: &str| (FindingKind::Mapped, note.to_owned());
    match entry.name() {
        "path" => path(source, set, entry),
        "name" => {
            source.add("subset", entry.json());
            mapped("")
        }
        "split" | "revision" => {
            source.add(entry.name(), entry.json());
            mapped("")
        }
        "data_files" => data_files(source, set, entry),
        "ds_type" => mapped("the file's ending has the type"),
        "type" => rows_type(source, entry),
        "field" | "text_column" => {
            source.add("column", entry.json());
            mapped("")
        }
        "shards" => shard(source, set, entry),
        "shards_idx" => mapped("read with shards"),
        "trust_remote_code" => mapped("loading scripts are never executed"),
        "preprocess_shards" => mapped("tokenization needs no shards"),
        "skip" if entry.number() == Some(0.0) => mapped("no rows are skipped"),
        _ => message_key(source, set, entry),
    }
}

/// Converts a key of a data set of conversations.
fn message_key(source: &mut Source, set: &ForeignItem<'_>, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let mapped = |note: &str| (FindingKind::Mapped, note.to_owned());
    let changed = |note: &str| (FindingKind::Changed, note.to_owned());
    let nothing = |note: &str| (FindingKind::NoCounterpart, note.to_owned());
    match entry.name() {
        "field_messages" | "message_property_mappings" | "message_field_role" | "message_field_content" | "roles" => {
            roles(source, set);
            mapped("roles and contents of messages")
        }
        "message_field_training" => match entry.text() {
            Some("train" | "weight") => mapped("`train: false` and `weight: 0` mask a message"),
            _ => nothing("rename the key in the rows to `train`"),
        },
        "chat_template" => match entry.text() {
            Some("tokenizer_default") => mapped("the tokenizer's own chat template is the default"),
            _ => changed("one template applies to all data: tokenizer.chat_template, or the tokenizer's own"),
        },
        "chat_template_jinja" => nothing("one template applies to all data: tokenizer.chat_template"),
        "conversation" => changed("the tokenizer's own chat template applies"),
        "field_tools" if entry.text() == Some("tools") => mapped("the column `tools` is read"),
        "field_thinking" if entry.text() == Some("reasoning_content") => mapped("`reasoning_content` is read"),
        _ => nothing("not a key of a source"),
    }
}

/// Converts the path. A folder, a file and a Hub id stay; `json` with files are these files.
fn path(source: &mut Source, set: &ForeignItem<'_>, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let name = entry.text().unwrap_or_default();
    if LOADERS.contains(&name) && set.get("data_files").is_some() {
        return (FindingKind::Mapped, "data_files has the files".to_owned());
    }
    source.add("name_or_path", entry.json());
    let is_remote =
        ["s3://", "gs://", "gcs://", "az://", "abfs://", "oci://", "https://"].iter().any(|s| name.starts_with(s));
    match is_remote {
        true => {
            (FindingKind::NoCounterpart, "sources are local files, folders and Hub ids; copy the data first".to_owned())
        }
        false => (FindingKind::Mapped, String::new()),
    }
}

fn data_files(source: &mut Source, set: &ForeignItem<'_>, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let path = set.get("path").and_then(|path| path.text().map(str::to_owned)).unwrap_or_default();
    let files = entry.texts().unwrap_or_default();
    let is_loader = LOADERS.contains(&path.as_str());
    if let (true, [one]) = (is_loader, files.as_slice()) {
        source.add("name_or_path", one.as_str().into());
        return (FindingKind::Mapped, "the file itself is the source".to_owned());
    }
    if is_loader {
        source.add("name_or_path", path.into());
    }
    source.add("kwargs", json!({"data_files": entry.json()}));
    (FindingKind::Mapped, String::new())
}

/// Converts the type of a data set, which is a prompt strategy.
fn rows_type(source: &mut Source, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let mapped = |note: &str| (FindingKind::Mapped, note.to_owned());
    if entry.is_section() {
        return user_defined(source, entry);
    }
    let name = entry.text().unwrap_or_default();
    match name.split('.').next().unwrap_or(name) {
        "chat_template" => mapped("the chat template renders the rows"),
        "completion" | "pretrain" => mapped("every token is a target"),
        "sharegpt" => {
            source.add("format", "sharegpt".into());
            mapped("the chat template renders the rows")
        }
        "alpaca" | "alpaca_chat" => {
            source.add("format", "alpaca".into());
            let note = "the model's chat template renders instruction, input and output, not Alpaca's prompt";
            (FindingKind::Changed, note.to_owned())
        }
        "input_output" => {
            (FindingKind::NoCounterpart, "segments with masks are not a row format; use messages".to_owned())
        }
        _ => {
            let note =
                format!("the chat template renders the rows instead of the prompt {name}; set role_mapping if needed");
            (FindingKind::Changed, note)
        }
    }
}

/// Converts a prompt that the file defines: its columns become roles.
fn user_defined(source: &mut Source, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let column = |key: &str| entry.get(key).and_then(|item| item.text().map(str::to_owned));
    let mut roles = Map::new();
    for (role, key) in [("system", "field_system"), ("user", "field_instruction"), ("assistant", "field_output")] {
        if let Some(column) = column(key) {
            roles.insert(role.to_owned(), column.into());
        }
    }
    if !roles.contains_key("user") || !roles.contains_key("assistant") {
        roles.entry("user").or_insert("instruction".into());
        roles.entry("assistant").or_insert("output".into());
    }
    source.add("role_mapping", Json::Object(roles));
    let input =
        if column("field_input").is_some() { "; field_input is not read, so join it to the instruction" } else { "" };
    (FindingKind::Changed, format!("columns become messages, and the chat template replaces `format`{input}"))
}

/// Converts the keys that name roles and contents of messages.
fn roles(source: &mut Source, set: &ForeignItem<'_>) {
    let text = |key: &str| set.get(key).and_then(|item| item.text().map(str::to_owned));
    let property = |name: &str| {
        let mapping = set.get("message_property_mappings")?;
        mapping.get(name)?.text().map(str::to_owned)
    };
    let column = text("field_messages").unwrap_or_else(|| "messages".to_owned());
    let role = text("message_field_role").or_else(|| property("role")).unwrap_or_else(|| "role".to_owned());
    let content = text("message_field_content").or_else(|| property("content")).unwrap_or_else(|| "content".to_owned());
    let names = |target: &str| set.get("roles").and_then(|roles| roles.get(target)).and_then(|names| names.texts());
    let custom = names("user").or_else(|| names("assistant")).or_else(|| names("system")).is_some();
    if (column.as_str(), role.as_str(), content.as_str(), custom) == ("messages", "role", "content", false) {
        source.add("format", "messages".into());
        return;
    }
    if (column.as_str(), role.as_str(), content.as_str(), custom) == ("conversations", "from", "value", false) {
        source.add("format", "sharegpt".into());
        return;
    }
    let name = |target: &str, default: &str| {
        let first = names(target).and_then(|names| names.into_iter().next());
        first.unwrap_or_else(|| default.to_owned())
    };
    let path = |name: String| Json::from(format!("{column}.{role}.{name}"));
    let is_sharegpt = role == "from";
    let mapping = json!({
        "system": path(name("system", "system")),
        "user": path(name("user", if is_sharegpt { "human" } else { "user" })),
        "assistant": path(name("assistant", if is_sharegpt { "gpt" } else { "assistant" })),
    });
    source.add("role_mapping", mapping);
    if content != "content" {
        source.add("content_key", content.into());
    }
}

/// Converts shards. Shard i of n has every n-th row; a slice has as many rows, other ones.
fn shard(source: &mut Source, set: &ForeignItem<'_>, entry: &ForeignItem<'_>) -> (FindingKind, String) {
    let Some(n) = entry.whole().filter(|n| *n > 0) else {
        return (FindingKind::NoCounterpart, "expected a number of shards".to_owned());
    };
    let idx = set.get("shards_idx").and_then(|idx| idx.whole()).unwrap_or(0);
    source.add("sample_ratio", json!(1.0 / n as f64));
    (FindingKind::Changed, format!("a random part of 1/{n} of the rows, not shard {idx}"))
}
