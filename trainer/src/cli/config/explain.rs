//! `trainer config explain`: the documentation of a recipe key, and its value in a recipe.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use candlewick_command_line::ArgValueCompleter;
use candlewick_text::printable::shortened;
use clap::Args;

use super::explain_json::as_json;
use super::explained_key::{ExplainedKey, keys_below, settings_of_key, settings_of_section};
use super::settings::{ResolvedSettings, WordedSetting};
use crate::cli::Ui;
use crate::cli::completion::{key_names, overrides, recipes_and_files};
use crate::cli::options::{Verbosity, key_value};
use crate::exit::ExitCode;
use crate::plan::value_in_words;
use crate::recipe::{KeyDoc, NamedKey, ValueDoc, find_key, key_docs};

#[derive(Debug, Args)]
pub(in crate::cli) struct ExplainArgs {
    /// Key or section: `data.max_length`, `checkpoint.0.save_total_limit`, `optimizer`, or a key of another toolkit
    #[arg(add = ArgValueCompleter::new(key_names))]
    key: String,
    /// Path to a recipe, whose value of the key is printed
    #[arg(value_name = "RECIPE", add = ArgValueCompleter::new(recipes_and_files))]
    recipe: Option<PathBuf>,
    /// Overrides of recipe keys
    #[arg(value_name = "KEY=VALUE", value_parser = key_value, add = ArgValueCompleter::new(overrides))]
    overrides: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
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
        false => ui.print(text(&explained, &docs, settings.as_ref()).trim_end()),
        true => {
            let json = as_json(&explained, &docs, settings.as_ref());
            ui.print(&serde_json::to_string_pretty(&json).context("failed to write the explanation as JSON")?)
        }
    }
}

/// Explains a key in words.
fn text(explained: &ExplainedKey, docs: &[KeyDoc], settings: Option<&ResolvedSettings>) -> String {
    let note = explained.note.as_ref().map_or_else(String::new, |note| format!("{note}\n\n"));
    let Some(doc) = explained.doc else { return note };
    let mut text = note + &describe(doc);
    if let Some(section) = explained.section() {
        text += &keys_of_section(docs, section, settings);
    } else if let Some(settings) = settings {
        text += &values(settings, &explained.value_of, doc);
    }
    text
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

/// Width of a default in the table of keys.
const MAX_DEFAULT_CHARS: usize = 24;

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
                [doc.path.clone(), shortened(&default, MAX_DEFAULT_CHARS).into_owned(), first_sentence(&doc.meaning)]
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
