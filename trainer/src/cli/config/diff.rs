//! `trainer config diff`: the resolved settings that differ between two recipes or runs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_command_line::ArgValueCompleter;
use clap::Args;
use serde_json::{Value, json};

use super::settings::{ResolvedSettings, WordedSetting};
use crate::cli::Ui;
use crate::cli::completion::{overrides, recipes_and_files};
use crate::cli::options::{OutputFormat, Verbosity, key_value};
use crate::exit::ExitCode;
use crate::plan::value_in_words;

#[derive(Debug, Args)]
pub(in crate::cli) struct DiffArgs {
    /// Recipe, or output folder of a run
    #[arg(value_name = "A", add = ArgValueCompleter::new(recipes_and_files))]
    first: PathBuf,
    /// Recipe, or output folder of a run
    #[arg(value_name = "B", add = ArgValueCompleter::new(recipes_and_files))]
    second: PathBuf,
    /// Overrides of keys of the recipe B
    #[arg(value_name = "KEY=VALUE", value_parser = key_value, add = ArgValueCompleter::new(overrides))]
    overrides: Vec<String>,
    /// Output format
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    output_format: OutputFormat,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer config diff a.yaml b.yaml
  trainer config diff runs/first runs/second --output-format json
  trainer config diff recipe.yaml recipe.yaml optimizer.lr=1e-4 memory=auto
  trainer config diff runs/first recipe.yaml

Exit codes:
  0      the settings are equal
  1      settings differ
  2      a recipe is invalid, or a folder has no run.json";

/// A key with its setting in each recipe or run; `None` if it is not set.
type Difference<'a> = (&'a str, Vec<Option<&'a WordedSetting>>);

pub(super) fn run(args: &DiffArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let settings = [read(&args.first, &[], verbosity)?, read(&args.second, &args.overrides, verbosity)?];
    let differences = differences(&settings.each_ref());
    let text = match args.output_format {
        OutputFormat::Text => text(&settings, &differences),
        OutputFormat::Json => serde_json::to_string_pretty(&as_json(&settings, &differences))
            .context("failed to write the differences as JSON")?,
    };
    ui.print(text.trim_end())?;
    Ok(if differences.is_empty() { ExitCode::Ok } else { ExitCode::Failed })
}

fn read(path: &Path, overrides: &[String], verbosity: Verbosity) -> Result<ResolvedSettings> {
    let is_run = path.is_dir() || path.extension().is_some_and(|extension| extension == "json");
    if !is_run {
        return ResolvedSettings::of_recipe(path, overrides, verbosity);
    }
    if let Some(argument) = overrides.first() {
        let problem = format!("{argument}: an override needs a recipe, and {} is a run", path.display());
        return Err(anyhow!("failed to compare: {problem}").context(ExitCode::Usage));
    }
    ResolvedSettings::of_run(path)
}

/// Returns the keys whose values differ between two or more, in the order of the plan. A summary is left out if one of
/// its keys differs, and a path below the output folder if only the folder differs.
pub(in crate::cli) fn differences<'a>(settings: &[&'a ResolvedSettings]) -> Vec<Difference<'a>> {
    let has_written = settings.iter().all(|of| of.written.is_some());
    let listed = settings.iter().map(|of| if has_written { of.all().collect() } else { of.settings.iter().collect() });
    let lists: Vec<Vec<&WordedSetting>> = listed.collect();
    let mut keys: Vec<&str> = Vec::new();
    for setting in lists.iter().flatten() {
        if !keys.contains(&setting.key.as_str()) {
            keys.push(&setting.key);
        }
    }
    let of = |key: &str| -> Vec<Option<&WordedSetting>> {
        lists.iter().map(|list| list.iter().find(|setting| setting.key == key).copied()).collect()
    };
    let folders: Vec<Option<String>> =
        of(OUTPUT_DIR).iter().map(|setting| setting.and_then(|of| of.value.as_str().map(str::to_owned))).collect();
    let differs = |of: &[Option<&WordedSetting>]| {
        let value = |idx: usize| of[idx].map(|setting| below_output_dir(setting, folders[idx].as_deref()));
        (1..of.len()).any(|idx| value(idx - 1) != value(idx))
    };
    let mut found: Vec<Difference> = keys.into_iter().map(|key| (key, of(key))).filter(|(_, of)| differs(of)).collect();
    let keys: Vec<String> = found.iter().map(|(key, _)| (*key).to_owned()).collect();
    found.retain(|(key, _)| !keys.iter().any(|other| other.starts_with(&format!("{key}."))));
    found
}

const OUTPUT_DIR: &str = "output_dir";

/// Returns a value as JSON in which paths below the output folder are relative to it: they differ between runs only because the
/// folder does.
fn below_output_dir(setting: &WordedSetting, output_dir: Option<&str>) -> String {
    let value = setting.value.to_string();
    match output_dir.filter(|dir| !dir.is_empty() && setting.key != OUTPUT_DIR) {
        Some(dir) => {
            let dir = dir.trim_end_matches('/');
            value.replace(&format!("\"{dir}/"), "\"OUTPUT_DIR/").replace(&format!("in {dir}/"), "in OUTPUT_DIR/")
        }
        None => value,
    }
}

fn text(settings: &[ResolvedSettings; 2], differences: &[Difference]) -> String {
    if differences.is_empty() {
        return format!("the {} settings are equal", settings[0].settings.len());
    }
    let [first, second] = settings.each_ref().map(|of| of.path.display());
    let mut text = format!("- {first}\n+ {second}\n");
    let in_words = |setting: Option<&WordedSetting>| {
        setting.map_or_else(|| ("not set".to_owned(), String::new()), |s| (value_in_words(&s.value), s.origin.clone()))
    };
    let pairs = differences.iter().flat_map(|(_, pair)| pair.iter().copied().map(in_words));
    let width = pairs.map(|(value, _)| value.chars().count()).max().unwrap_or(0).min(40);
    for (key, pair) in differences {
        text += &format!("\n{key}\n");
        for (sign, setting) in ["-", "+"].into_iter().zip(pair) {
            let (value, origin) = in_words(*setting);
            text += format!("  {sign} {value:width$}  {origin}").trim_end();
            text.push('\n');
        }
    }
    text
}

fn as_json(settings: &[ResolvedSettings; 2], differences: &[Difference]) -> Value {
    let one = |setting: Option<&WordedSetting>| setting.map(|s| json!({ "value": s.value, "origin": s.origin }));
    let entry = |(key, pair): &Difference| json!({ "key": key, "a": one(pair[0]), "b": one(pair[1]) });
    let differences: Vec<Value> = differences.iter().map(entry).collect();
    json!({ "a": settings[0].path, "b": settings[1].path, "differences": differences })
}
