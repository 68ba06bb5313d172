//! `trainer recipes`: lists, prints and copies the recipes inside the program.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, write_new};
use clap::Subcommand;

use super::Ui;
use crate::exit::ExitCode;
use crate::recipe::shipped::{SHIPPED, ShippedRecipe, find, nearest_name};

#[derive(Debug, Subcommand)]
pub(super) enum RecipesCommand {
    /// List the recipes, each with its devices, the memory of each device, and a description
    Ls,
    /// Print a recipe
    Show {
        /// Name of the recipe
        name: String,
    },
    /// Copy a recipe, and the recipes that it includes
    Cp {
        /// Name of the recipe
        name: String,
        /// File or folder [default: NAME.yaml in the current folder]
        dest: Option<PathBuf>,
    },
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer recipes ls
  trainer recipes show quickstart
  trainer recipes cp qwen3-0.6b-lora mine.yaml
Every command that takes a recipe takes one of these names, too.";

pub(super) fn run(command: &RecipesCommand, ui: &Ui) -> Result<ExitCode> {
    match command {
        RecipesCommand::Ls => ui.print(&list()),
        RecipesCommand::Show { name } => ui.print(named(name)?.text.trim_end()),
        RecipesCommand::Cp { name, dest } => copy(named(name)?, dest.as_deref(), ui),
    }
}

fn named(name: &str) -> Result<&'static ShippedRecipe> {
    find(name).ok_or_else(|| {
        let advice = match nearest_name(name) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "`trainer recipes ls` lists them".to_owned(),
        };
        anyhow!("failed to find the shipped recipe `{name}`; {advice}").context(ExitCode::Usage)
    })
}

fn list() -> String {
    let rows: Vec<[String; 4]> = SHIPPED.iter().filter(|recipe| !recipe.is_base()).map(row).collect();
    let header = ["recipe", "devices", "memory of each", "description"].map(str::to_owned);
    let rows: Vec<[String; 4]> = [header].into_iter().chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [width(0), width(1), width(2)];
    let lines = rows.iter().map(|[name, devices, memory, description]| {
        let [w_name, w_devices, w_memory] = widths;
        format!("{name:w_name$}  {devices:w_devices$}  {memory:>w_memory$}  {description}")
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn row(recipe: &ShippedRecipe) -> [String; 4] {
    let (devices, memory) = match recipe.stated_memory() {
        Some(stated) => (format!("{} x {}", stated.n_ranks, stated.device), stated.device_memory.to_owned()),
        None => (String::new(), String::new()),
    };
    [recipe.name.to_owned(), devices, memory, recipe.description()]
}

/// Copies a recipe and its bases. Their paths relative to each other stay the same. Replaces no file.
fn copy(recipe: &'static ShippedRecipe, dest: Option<&Path>, ui: &Ui) -> Result<ExitCode> {
    let file_name = PathBuf::from(recipe.path().file_name().unwrap_or_default());
    let dest = match dest {
        Some(dest) if dest.is_dir() || dest.as_os_str().as_encoded_bytes().ends_with(b"/") => dest.join(file_name),
        Some(dest) => dest.to_owned(),
        None => file_name,
    };
    let bases = std::iter::successors(recipe.base(), |base| base.base());
    let shipped_folder = recipe.path().parent().map(Path::to_owned).unwrap_or_default();
    let of_base = |base: &'static ShippedRecipe| {
        let path = base.path();
        (dest.with_file_name(path.strip_prefix(&shipped_folder).unwrap_or(&path)), base.text)
    };
    for (path, text) in bases.map(of_base) {
        if read_regular_file(&path, MAX_CONFIG_FILE_BYTES).is_ok_and(|found| found == text.as_bytes()) {
            continue;
        }
        write_shipped(&path, text)?;
        ui.note(&format!("wrote {}, which the recipe includes", path.display()));
    }
    write_shipped(&dest, recipe.text)?;
    ui.note(&format!("wrote {}", dest.display()));
    Ok(ExitCode::Ok)
}

fn write_shipped(path: &Path, text: &str) -> Result<()> {
    let failed = || format!("failed to write {}", path.display());
    match write_new(path, text.as_bytes()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let problem = format!("{}: the file exists; give another destination or remove it", failed());
            Err(anyhow!(problem).context(ExitCode::Usage))
        }
        Err(error) => Err(error).with_context(failed),
    }
}
