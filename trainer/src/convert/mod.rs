//! Conversion of training files of other toolkits into recipes, with a report.
//!
//! A format is a table of rules by key. A key that no rule reads is reported, so that none is lost. The recipe is parsed
//! and resolved before it is returned, and errors have the line of the converted file.

mod axolotl;
mod chat_templates;
mod converter;
mod draft;
mod hugging_face;
mod item;
mod llama_factory;
mod optimizer_groups;
mod picotron;
mod report;
mod saving;
mod torchtune;
mod zero;

use std::path::Path;
use std::sync::Arc;

use candlewick_text::hub::{Hub, HubSettings};
use clap::ValueEnum;

use crate::metrics::Console;
use crate::plan::Plan;
use crate::recipe::{Fault, Loaded, RecipeError, RecipeLocation, RecipeNode, RecipeSource, parse_yaml};
use crate::resolve::{Environment, EnvironmentError, HubAccess, HubView, WorldInfo, is_path};
use converter::Converter;
use draft::DraftText;
pub use report::{ConversionFinding, ConversionReport, FindingKind};

/// A file format of another toolkit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ForeignFormat {
    /// axolotl's YAML
    Axolotl,
    /// torchtune's YAML
    Torchtune,
    /// LLaMA-Factory's YAML
    LlamaFactory,
    /// picotron's JSON
    Picotron,
}

/// A recipe made of another toolkit's file.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The format of the file.
    pub format: ForeignFormat,
    /// The recipe, in YAML with comments.
    pub recipe: String,
    /// The report.
    pub report: ConversionReport,
    /// Number of ranks that the recipe needs.
    pub n_ranks: usize,
    /// Notes of the plan.
    pub notes: Vec<String>,
}

impl ForeignFormat {
    const ALL: [Self; 4] = [Self::Axolotl, Self::Torchtune, Self::LlamaFactory, Self::Picotron];

    /// Returns the toolkit's name.
    pub fn toolkit(self) -> &'static str {
        match self {
            Self::Axolotl => "axolotl",
            Self::Torchtune => "torchtune",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Picotron => "picotron",
        }
    }

    /// Returns keys that a file of this format has. The last one alone is enough.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Axolotl => &["datasets", "sequence_len", "micro_batch_size", "base_model"],
            Self::Torchtune => &["checkpointer", "metric_logger", "optimizer._component_", "model._component_"],
            Self::LlamaFactory => &["template", "finetuning_type", "cutoff_len", "stage", "model_name_or_path"],
            Self::Picotron => &["checkpoint.save_dir", "training.total_train_steps", "distributed.tp_size"],
        }
    }

    /// Returns the format with most of its marks in the file.
    fn detect(root: &RecipeNode) -> Option<Self> {
        let n_marks = |format: &Self| format.marks().iter().filter(|mark| root.at(mark).is_some()).count();
        let best = Self::ALL.into_iter().max_by_key(n_marks)?;
        let has_last = best.marks().last().is_some_and(|mark| root.at(mark).is_some());
        (has_last || n_marks(&best) >= 2).then_some(best)
    }

    fn apply(self, converter: &mut Converter<'_>) {
        match self {
            Self::Axolotl => axolotl::convert(converter),
            Self::Torchtune => torchtune::convert(converter),
            Self::LlamaFactory => llama_factory::convert(converter),
            Self::Picotron => picotron::convert(converter),
        }
    }
}

/// Converts the text of a file. `from` is its format; `None` detects it.
///
/// # Errors
/// If the file is no YAML or JSON, if a value is wrong, or if the recipe does not resolve. Errors have lines of the file.
pub fn convert(path: &Path, text: String, from: Option<ForeignFormat>) -> Result<Conversion, RecipeError> {
    let parsed = parse_yaml(&text, 0);
    let source = Arc::new(RecipeSource { path: path.to_owned(), text, ..RecipeSource::default() });
    let fail = |faults: Vec<Fault>| RecipeError::new(Arc::clone(&source), faults);
    let root = parsed.map_err(|error| {
        let location = error.at.map(|(line, column)| RecipeLocation::File { file: 0, line, column, len: 0 });
        fail(vec![Fault::new(location, error.message)])
    })?;
    let format = from.or_else(|| ForeignFormat::detect(&root)).ok_or_else(|| fail(vec![unknown_format(&root)]))?;
    let root = if format == ForeignFormat::Torchtune { torchtune::interpolated(&root) } else { root };
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut converter = Converter::new(&root, format.toolkit(), folder);
    format.apply(&mut converter);
    converter.report_unread();
    if !converter.faults.is_empty() {
        return Err(fail(converter.faults));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let header = format!(
        "Converted from {name} ({}) by `trainer convert`. Comments mark values that differ from the file.",
        format.toolkit()
    );
    let draft = converter.draft.write(&header);
    let notes = resolve(&draft, converter.n_ranks).map_err(|error| fail(in_source(&error, &draft)))?;
    let mut findings = converter.findings;
    findings.sort_by_key(|finding| finding.line.unwrap_or(usize::MAX));
    let report = ConversionReport { findings };
    Ok(Conversion { format, recipe: draft.text, report, n_ranks: converter.n_ranks, notes })
}

fn unknown_format(root: &RecipeNode) -> Fault {
    let fault = Fault::new(Some(root.place), "the file is of no known format");
    let has_recipe_keys = root.at("model.name_or_path").is_some() || root.at("data.sources").is_some();
    let fault = match has_recipe_keys {
        true => fault.note("it is a recipe already: `trainer check` checks it"),
        false => fault,
    };
    fault.note("formats: axolotl, torchtune, LLaMA-Factory, picotron; `--from` sets the format")
}

/// Parses the recipe and makes a plan of it, on the ranks that it needs and without a network. Returns its notes.
fn resolve(draft: &DraftText, n_ranks: usize) -> Result<Vec<String>, RecipeError> {
    let loaded = Loaded::parse(Path::new("recipe.yaml"), draft.text.clone(), &[])?;
    let world = WorldInfo::first_of(n_ranks);
    let name = loaded.recipe.model.name_or_path.as_deref().unwrap_or_default();
    // The file may be converted on another machine than that of the run.
    let is_elsewhere = is_path(name) && !Path::new(name).exists();
    let environment = match is_elsewhere {
        true => Environment::with_config(None, &loaded, Console::Quiet, world),
        false => gather(&loaded, world).map_err(|error| unusable_model(&loaded, error))?,
    };
    let mut notes = Plan::resolve(&loaded, &environment)?.notes;
    if is_elsewhere {
        notes.push(format!("model.name_or_path: there is no folder {name} here, so its config was not checked"));
    }
    Ok(notes)
}

fn gather(loaded: &Loaded, world: WorldInfo) -> Result<Environment, EnvironmentError> {
    let hub = Hub::new(HubSettings::from_env())?;
    let view = HubView { hub: &hub, access: HubAccess::ThisMachine };
    Environment::gather(loaded, view, Console::Quiet, world)
}

fn unusable_model(loaded: &Loaded, error: EnvironmentError) -> RecipeError {
    match error {
        EnvironmentError::Recipe(error) => error,
        error => loaded.error(vec![loaded.fault_at(&["model.name_or_path"], format!("failed to {error}"))]),
    }
}

/// Returns the faults of the recipe at the lines of the converted file.
fn in_source(error: &RecipeError, draft: &DraftText) -> Vec<Fault> {
    let moved = |fault: &Fault| {
        let origin = match fault.location {
            Some(RecipeLocation::File { line, .. }) => draft.origin(line, &fault.message),
            _ => None,
        };
        let (message, location) = match origin {
            Some((key, place)) => (format!("{key}: in the recipe, {}", fault.message), Some(*place)),
            None => (format!("in the recipe, {}", fault.message), None),
        };
        Fault { location, message, notes: fault.notes.clone(), details: fault.details.clone() }
    };
    error.faults().iter().map(moved).collect()
}
