//! `trainer config explain`: the documentation of a recipe key, and its value in a recipe.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use clap::Args;

use super::explain_json::as_json;
use super::settings::{ResolvedSettings, WordedSetting};
use crate::cli::Ui;
use crate::cli::options::{Verbosity, key_value};
use crate::exit::ExitCode;
use crate::plan::value_in_words;
use crate::recipe::{KeyDoc, NamedKey, ValueDoc, find_key, key_docs, numbered};

#[derive(Debug, Args)]
pub(in crate::cli) struct ExplainArgs {
    /// Key or section: `data.max_length`, `checkpoint.0.save_total_limit`, `optimizer`, or a key of another toolkit
    key: String,
    /// Path to a recipe, whose value of the key is printed
    #[arg(value_name = "RECIPE")]
    recipe: Option<PathBuf>,
    /// Overrides of recipe keys
    #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
    overrides: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The documentation that explains a key.
pub(super) struct ExplainedKey<'a> {
    /// The key as the user typed it.
    pub(super) key: &'a str,
    /// Path of the documentation.
    pub(super) path: String,
    /// Reason why the documentation is of another key.
    pub(super) note: Option<String>,
    /// Key whose value a recipe may have.
    pub(super) value_of: String,
    /// Documentation of the key, or of the map that holds it.
    pub(super) doc: Option<&'a KeyDoc>,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer config explain data.max_length
  trainer config explain optimizer
  trainer config explain per_device_train_batch_size
  trainer config explain optimizer.lr recipe.yaml optimizer.lr=1e-4
  trainer config explain optimizer --json";

pub(super) fn run(args: &ExplainArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let docs = key_docs();
    let named = find_key(&docs, &args.key);
    if let NamedKey::Unknown(advice) = &named {
        let advice = advice.as_ref().map_or_else(String::new, |advice| format!("\n   = {advice}"));
        let list = "\n   = docs/reference/recipe-keys.md and `trainer schema` have all keys";
        return Err(anyhow!("unknown key `{}`{advice}{list}", args.key).context(ExitCode::Usage));
    }
    let settings = match &args.recipe {
        Some(path) => Some(ResolvedSettings::of_recipe(path, &args.overrides, verbosity)?),
        None => None,
    };
    let explained = ExplainedKey::new(&docs, &args.key, &named);
    match args.json {
        false => ui.print(explained.text(&docs, settings.as_ref()).trim_end()),
        true => {
            let json = as_json(&explained, &docs, settings.as_ref());
            ui.print(&serde_json::to_string_pretty(&json).context("failed to write the explanation as JSON")?)
        }
    }
}

impl<'a> ExplainedKey<'a> {
    fn new(docs: &'a [KeyDoc], key: &'a str, named: &NamedKey) -> Self {
        let (path, note, value_of) = match named {
            NamedKey::InMap(map) => {
                let note = format!("{key} is a key of the map {map}, which has no fixed keys.");
                (map.clone(), Some(note), key.to_owned())
            }
            NamedKey::Foreign(path, advice) => {
                (path.clone(), Some(format!("{key} is a key of another toolkit: {advice}.")), path.clone())
            }
            NamedKey::Documented(path) => (path.clone(), None, key.to_owned()),
            NamedKey::Unknown(_) => (key.to_owned(), None, key.to_owned()),
        };
        // A counterpart may be a key of a map, such as `model.peft_config.r`.
        let doc = docs.iter().rfind(|doc| doc.path == path || path.starts_with(&format!("{}.", doc.path)));
        Self { key, path, note, value_of, doc }
    }

    /// Returns the section, if the key is one.
    pub(super) fn section(&self) -> Option<&'a KeyDoc> {
        self.doc.filter(|doc| doc.is_section() && doc.path == self.path)
    }

    /// Returns the settings of the key, or those below the section.
    pub(super) fn settings<'s>(&self, settings: &'s ResolvedSettings) -> Vec<&'s WordedSetting> {
        match (self.section(), self.doc) {
            (Some(section), _) => settings_of_section(settings, section),
            (None, Some(doc)) => settings_of_key(settings, &self.value_of, doc),
            (None, None) => Vec::new(),
        }
    }

    fn text(&self, docs: &[KeyDoc], settings: Option<&ResolvedSettings>) -> String {
        let note = self.note.as_ref().map_or_else(String::new, |note| format!("{note}\n\n"));
        let Some(doc) = self.doc else { return note };
        let mut text = note + &describe(doc);
        if let Some(section) = self.section() {
            text += &keys_of_section(docs, section, settings);
        } else if let Some(settings) = settings {
            text += &values(settings, &self.value_of, doc);
        }
        text
    }
}

/// Describes a key: meaning, type, default, values and other names.
fn describe(doc: &KeyDoc) -> String {
    let mut text = format!("{}\n{}", doc.path, wrapped(&doc.meaning, 2));
    let mut add = |title: &str, lines: Vec<String>| {
        for (idx, line) in lines.iter().enumerate() {
            let title = if idx == 0 { title } else { "" };
            text += format!("  {title:11}{}", wrapped(line, 13).trim_start()).trim_end();
            text.push('\n');
        }
    };
    add("type", vec![doc.value_type.clone()]);
    add("default", doc.default.iter().cloned().collect());
    let value = |value: &ValueDoc| match value.meaning.as_str() {
        "" => value.name.clone(),
        meaning => format!("{}: {meaning}", value.name),
    };
    add("values", doc.values.iter().map(value).collect());
    add("also", if doc.value_aliases.is_empty() { Vec::new() } else { vec![doc.value_aliases.join(", ")] });
    add("alias", doc.aliases.clone());
    add("elsewhere", other_names(doc));
    text
}

/// Returns a line for each remark with the names that have it.
fn other_names(doc: &KeyDoc) -> Vec<String> {
    let mut by_remark: Vec<(&str, Vec<&str>)> = Vec::new();
    for (name, remark) in &doc.other_names {
        match by_remark.iter_mut().find(|(of, _)| of == remark) {
            Some((_, names)) => names.push(name),
            None => by_remark.push((remark, vec![name])),
        }
    }
    let line = |(remark, names): &(&str, Vec<&str>)| match *remark {
        "" => names.join(", "),
        remark => format!("{} ({remark})", names.join(", ")),
    };
    by_remark.iter().map(line).collect()
}

/// Lists the keys below a section: with defaults, or with the values of a recipe.
fn keys_of_section(docs: &[KeyDoc], section: &KeyDoc, settings: Option<&ResolvedSettings>) -> String {
    let rows: Vec<[String; 3]> = match settings {
        Some(settings) => {
            let row = |s: &WordedSetting| [s.key.clone(), value_in_words(&s.value), s.origin.clone()];
            settings_of_section(settings, section).into_iter().map(row).collect()
        }
        None => {
            let first_sentence = |text: &str| text.split(". ").next().unwrap_or(text).trim_end_matches('.').to_owned();
            let row = |doc: &KeyDoc| {
                let default = doc.default.clone().unwrap_or_default();
                [doc.path.clone(), shortened(&default), first_sentence(&doc.meaning)]
            };
            keys_below(docs, section).map(row).collect()
        }
    };
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let (keys, values) = (width(0), width(1).min(40));
    let titles = if settings.is_some() { ["key", "value", "set by"] } else { ["key", "default", "meaning"] };
    let mut text = String::from("\n");
    for [key, value, last] in std::iter::once(&titles.map(str::to_owned)).chain(&rows) {
        let _ = writeln!(text, "{}", format!("  {key:keys$}  {value:values$}  {last}").trim_end());
    }
    text
}

/// Returns the keys below a section.
pub(super) fn keys_below<'a>(docs: &'a [KeyDoc], section: &KeyDoc) -> impl Iterator<Item = &'a KeyDoc> {
    let prefix = format!("{}.", section.path);
    docs.iter().filter(move |doc| doc.path.starts_with(&prefix))
}

/// Returns the settings of a section and of the keys below it.
fn settings_of_section<'s>(settings: &'s ResolvedSettings, section: &KeyDoc) -> Vec<&'s WordedSetting> {
    let prefix = format!("{}.", section.path);
    let is_below =
        |setting: &&WordedSetting| setting.key == section.path || numbered(&setting.key).starts_with(&prefix);
    settings.all().filter(is_below).collect()
}

/// Returns the settings of a key. A key of a list has one for each item, unless `key` has an index.
fn settings_of_key<'s>(settings: &'s ResolvedSettings, key: &str, doc: &KeyDoc) -> Vec<&'s WordedSetting> {
    let has_index = key.split('.').any(|part| part.parse::<usize>().is_ok());
    let path = if key.starts_with(&format!("{}.", doc.path)) { key.to_owned() } else { doc.path.clone() };
    let is_meant =
        |setting: &&WordedSetting| if has_index { setting.key == key } else { numbered(&setting.key) == path };
    settings.all().filter(is_meant).collect()
}

/// Cuts a long default for a table.
fn shortened(text: &str) -> String {
    const WIDTH: usize = 24;
    match text.chars().count() > WIDTH {
        true => text.chars().take(WIDTH - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

/// Lists the values of a key in a recipe.
fn values(settings: &ResolvedSettings, key: &str, doc: &KeyDoc) -> String {
    let found = settings_of_key(settings, key, doc);
    if found.is_empty() {
        return format!("  {:11}not set in {}\n", "value", settings.path.display());
    }
    let mut text = String::new();
    for setting in found {
        let key = if setting.key == doc.path { String::new() } else { format!("{} = ", setting.key) };
        let _ = writeln!(text, "  {:11}{key}{}", "value", value_in_words(&setting.value));
        let _ = writeln!(text, "  {:11}{}", "set by", setting.origin);
    }
    text
}

/// Breaks text into indented lines of at most 100 characters.
fn wrapped(text: &str, indent: usize) -> String {
    const WIDTH: usize = 100;
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a line");
        if !line.is_empty() && indent + line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(word.to_owned());
        } else {
            line.push_str(if line.is_empty() { "" } else { " " });
            line.push_str(word);
        }
    }
    lines.iter().map(|line| format!("{:indent$}{line}\n", "")).collect()
}
