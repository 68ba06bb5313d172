//! torchtune's data sets.

use serde_json::{Map, Value as Json, json};

use super::components::component;
use crate::convert::converter::Converter;
use crate::convert::item::ForeignItem;
use crate::convert::report::FindingKind;

/// A data set builder of torchtune.
struct Builder {
    name: &'static str,
    /// Hub id, if the builder has one.
    source: Option<&'static str>,
    kind: RowsKind,
    /// True if the loss covers the prompt by default.
    trains_on_input: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RowsKind {
    Alpaca,
    Chat,
    Instruct,
    ShareGpt,
    Text,
}

const BUILDERS: [Builder; 10] = [
    builder("alpaca_dataset", Some("tatsu-lab/alpaca"), RowsKind::Alpaca, true),
    builder("alpaca_cleaned_dataset", Some("yahma/alpaca-cleaned"), RowsKind::Alpaca, true),
    builder("chat_dataset", None, RowsKind::Chat, false),
    builder("instruct_dataset", None, RowsKind::Instruct, false),
    builder("slimorca_dataset", Some("Open-Orca/SlimOrca-Dedup"), RowsKind::ShareGpt, false),
    builder("samsum_dataset", Some("Samsung/samsum"), RowsKind::Instruct, false),
    builder("grammar_dataset", Some("liweili/c4_200m"), RowsKind::Instruct, false),
    builder("text_completion_dataset", None, RowsKind::Text, true),
    builder("wikitext_dataset", Some("EleutherAI/wikitext_document_level"), RowsKind::Text, true),
    builder("cnn_dailymail_articles_dataset", Some("ccdv/cnn_dailymail"), RowsKind::Text, true),
];

const fn builder(name: &'static str, source: Option<&'static str>, kind: RowsKind, trains_on_input: bool) -> Builder {
    Builder { name, source, kind, trains_on_input }
}

pub(super) fn training(converter: &mut Converter<'_>, section: &ForeignItem<'_>) {
    convert(converter, section, "data.sources");
}

pub(super) fn validation(converter: &mut Converter<'_>, section: &ForeignItem<'_>) {
    // torchtune evaluates only if this key has a number of steps.
    match converter.get("run_val_every_n_steps") {
        Some(_) => convert(converter, section, "data.eval_sources"),
        None => converter.built_in(section, "not evaluated without run_val_every_n_steps"),
    }
}

fn convert(converter: &mut Converter<'_>, section: &ForeignItem<'_>, path: &str) {
    let sets = section.items();
    let name = sets.first().map(component).unwrap_or_default();
    let Some(builder) = BUILDERS.iter().find(|builder| builder.name == name) else {
        let known = BUILDERS.iter().map(|builder| builder.name).collect::<Vec<_>>().join(", ");
        return converter.refuse(section, &format!("the builder `{name}` is not known; known: {known}"));
    };
    let mut list = Vec::new();
    for set in &sets {
        list.push(source(converter, set, builder));
    }
    let is_text = builder.kind == RowsKind::Text;
    let settings = vec![(path, json!(list)), ("type", if is_text { "causal" } else { "sft" }.into())];
    let note = match builder.kind {
        RowsKind::Alpaca => "the model's chat template renders instruction, input and output, not Alpaca's prompt",
        RowsKind::Instruct => "columns become messages, and the chat template renders them",
        RowsKind::Chat | RowsKind::ShareGpt | RowsKind::Text => "",
    };
    let kind = if note.is_empty() { FindingKind::Mapped } else { FindingKind::Changed };
    converter.record(kind, section, settings, note);
    if path == "data.sources" {
        options(converter, &sets[0], builder);
    }
}

/// Converts the keys of the run's data: packing, and the tokens of the loss.
fn options(converter: &mut Converter<'_>, set: &ForeignItem<'_>, builder: &Builder) {
    match set.get("packed") {
        Some(item) if builder.kind == RowsKind::Text && item.flag() == Some(true) => {
            converter.built_in(&item, "plain text is packed by default");
        }
        Some(item) => converter.map(&item, [("data.pack_samples", item.scalar())]),
        None => converter.default("dataset.packed", "data.pack_samples", false.into()),
    }
    if builder.kind == RowsKind::Text {
        if let Some(item) = set.get("add_eos") {
            converter.map(&item, [("data.add_eos_token", item.scalar())]);
        }
        return;
    }
    if let Some(item) = set.get("masking_strategy") {
        return converter.map(&item, [("data.masking_strategy", item.json())]);
    }
    match set.get("train_on_input") {
        Some(item) => converter.map(&item, [("data.mask_inputs", (item.flag() != Some(true)).into())]),
        None => converter.default("dataset.train_on_input", "data.mask_inputs", (!builder.trains_on_input).into()),
    }
}

/// Returns a source, and reports keys without a counterpart.
fn source(converter: &mut Converter<'_>, set: &ForeignItem<'_>, builder: &Builder) -> Json {
    let text = |key: &str| set.get(key).and_then(|item| item.text().map(str::to_owned));
    let files = set.get("data_files").and_then(|item| item.texts()).unwrap_or_default();
    let given = text("source").or_else(|| builder.source.map(str::to_owned)).unwrap_or_default();
    let is_loader = ["json", "csv", "parquet", "text"].contains(&given.as_str());
    let mut source = Map::new();
    let name = match files.as_slice() {
        [one] if is_loader => one.clone(),
        files => {
            if !files.is_empty() {
                source.insert("kwargs".to_owned(), json!({"data_files": files}));
            }
            given
        }
    };
    source.insert("name_or_path".to_owned(), name.into());
    for (key, target) in [("split", "split"), ("name", "subset"), ("subset", "subset"), ("column", "column")] {
        source.extend(text(key).map(|value| (target.to_owned(), value.into())));
    }
    rows(set, builder, &mut source);
    for item in set.entries().into_iter().filter(|item| !item.is_null()) {
        match item.name() {
            "new_system_prompt" => {
                converter.nothing(&item, "put the system message into the rows or the chat template")
            }
            "filter_fn" => converter.nothing(&item, "a filter is Python code; filter the file first"),
            "max_seq_len" => converter.nothing(&item, "set data.max_length"),
            "split_across_pack" if item.flag() == Some(false) => {
                converter.map(&item, [("data.always_max_length", false.into())]);
            }
            "_component_"
            | "source"
            | "data_files"
            | "split"
            | "name"
            | "subset"
            | "column"
            | "packed"
            | "train_on_input"
            | "masking_strategy"
            | "column_map"
            | "conversation_column"
            | "conversation_style"
            | "add_eos"
            | "split_across_pack"
            | "trust_remote_code" => {}
            _ => converter.nothing(&item, "not a key of a source"),
        }
    }
    Json::Object(source)
}

/// Adds the row format or the mapping of columns.
fn rows(set: &ForeignItem<'_>, builder: &Builder, source: &mut Map<String, Json>) {
    let text = |key: &str| set.get(key).and_then(|item| item.text().map(str::to_owned));
    let column = |key: &str| set.get("column_map")?.get(key)?.text().map(str::to_owned);
    let has_map = set.get("column_map").is_some();
    match builder.kind {
        RowsKind::Alpaca if !has_map => _ = source.insert("format".to_owned(), "alpaca".into()),
        RowsKind::Alpaca | RowsKind::Instruct => {
            let (input, output) = match builder.name {
                "samsum_dataset" => ("dialogue", "summary"),
                _ if builder.kind == RowsKind::Alpaca => ("instruction", "output"),
                _ => ("input", "output"),
            };
            let user = column("input").or_else(|| column("instruction")).unwrap_or_else(|| input.to_owned());
            let assistant = column("output").unwrap_or_else(|| output.to_owned());
            source.insert("role_mapping".to_owned(), json!({"user": user, "assistant": assistant}));
        }
        RowsKind::ShareGpt => _ = source.insert("format".to_owned(), "sharegpt".into()),
        RowsKind::Chat => {
            let is_openai = text("conversation_style").as_deref() == Some("openai");
            let default = if is_openai { "messages" } else { "conversations" };
            let list = text("conversation_column").unwrap_or_else(|| default.to_owned());
            if list == default {
                let format = if is_openai { "messages" } else { "sharegpt" };
                source.insert("format".to_owned(), format.into());
                return;
            }
            let mapping = match is_openai {
                true => json!({"user": format!("{list}.role.user"), "assistant": format!("{list}.role.assistant")}),
                false => json!({"user": format!("{list}.from.human"), "assistant": format!("{list}.from.gpt")}),
            };
            source.insert("role_mapping".to_owned(), mapping);
        }
        RowsKind::Text => {}
    }
}
