//! `trainer recipes`: lists, prints and copies the recipes inside the program.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_command_line::ArgValueCompleter;
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, is_present, read_regular_file, write_atomically};
use clap::{Args, Subcommand};

use super::Ui;
use super::completion::recipe_names;
use crate::exit::ExitCode;
use crate::recipe::shipped::{SHIPPED, ShippedRecipe, find, nearest_name};
use crate::recipe::shipped_data::files_of;

#[derive(Debug, Subcommand)]
pub(super) enum RecipesCommand {
    /// List the recipes, each with its devices, the memory of each device, and a description
    Ls,
    /// Print a recipe
    Show {
        /// Name of the recipe
        #[arg(add = ArgValueCompleter::new(recipe_names))]
        name: String,
    },
    /// Copy a recipe, the recipes that it includes, and the data inside the program that it reads
    Cp(CopyArgs),
}

#[derive(Debug, Args)]
pub(super) struct CopyArgs {
    /// Name of the recipe
    #[arg(add = ArgValueCompleter::new(recipe_names))]
    name: String,
    /// File or folder [default: NAME.yaml in the current folder]. The data get the paths that the recipe names
    dest: Option<PathBuf>,
    /// Replace existing files
    #[arg(long)]
    force: bool,
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
        RecipesCommand::Cp(args) => copy(named(&args.name)?, args, ui),
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

/// One file of a copied recipe.
struct RecipeCopy {
    path: PathBuf,
    bytes: &'static [u8],
    role: CopyRole,
}

/// The part that a copied file has in the recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyRole {
    Recipe,
    Base,
    /// The user may have data of their own under this name, which the recipe then reads.
    Data,
}

/// The file at the destination of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyState {
    Missing,
    Equal,
    Different,
}

impl RecipeCopy {
    fn state(&self) -> CopyState {
        match read_regular_file(&self.path, MAX_GENERATED_FILE_BYTES) {
            Ok(found) if found == self.bytes => CopyState::Equal,
            Err(error) if error.kind() == ErrorKind::NotFound && !is_present(&self.path) => CopyState::Missing,
            _ => CopyState::Different,
        }
    }

    /// Writes the file unless it exists, and returns a description. `--force` replaces another file.
    fn write(&self, args: &CopyArgs) -> Result<String> {
        let path = self.path.display();
        let done = match (self.state(), args.force) {
            (CopyState::Equal, _) => "kept the equal file",
            (CopyState::Different, false) => "kept your own file",
            (CopyState::Missing, _) => "wrote",
            (CopyState::Different, true) => "replaced",
        };
        if !done.starts_with("kept") {
            let written = write_atomically(&self.path, |file| file.write_all(self.bytes));
            written.with_context(|| format!("failed to write {path}"))?;
        }
        let role = match self.role {
            CopyRole::Recipe => "",
            CopyRole::Base => ", which the recipe includes",
            CopyRole::Data => ", which the recipe reads",
        };
        Ok(format!("{done} {path}{role}"))
    }
}

/// Copies a recipe, its bases and its data. Without `force` it replaces no file: another recipe at a destination is an
/// error, before any file is written, and other data stay.
fn copy(recipe: &'static ShippedRecipe, args: &CopyArgs, ui: &Ui) -> Result<ExitCode> {
    let copies = copies(recipe, args.dest.as_deref());
    let conflict = |copy: &&RecipeCopy| copy.role != CopyRole::Data && copy.state() == CopyState::Different;
    if let Some(copy) = copies.iter().find(conflict).filter(|_| !args.force) {
        let path = copy.path.display();
        let advice = "give another destination, remove it, or replace it with --force";
        return Err(anyhow!("failed to write {path}: the file exists; {advice}").context(ExitCode::Usage));
    }
    for copy in &copies {
        ui.note(&copy.write(args)?);
    }
    if copies.iter().any(|copy| copy.role == CopyRole::Data) {
        ui.note("note: relative paths of a recipe start at the current folder: use the recipe in this folder");
    }
    Ok(ExitCode::Ok)
}

/// Returns the files of a recipe's copy. The paths of the recipes relative to each other stay the same. The data have the
/// paths that the recipes name, from the current folder.
fn copies(recipe: &'static ShippedRecipe, dest: Option<&Path>) -> Vec<RecipeCopy> {
    let file_name = PathBuf::from(recipe.path().file_name().unwrap_or_default());
    let dest = match dest {
        Some(dest) if dest.is_dir() || dest.as_os_str().as_encoded_bytes().ends_with(b"/") => dest.join(file_name),
        Some(dest) => dest.to_owned(),
        None => file_name,
    };
    let shipped_folder = recipe.path().parent().map(Path::to_owned).unwrap_or_default();
    let bases = std::iter::successors(recipe.base(), |base| base.base()).map(|base| {
        let path = base.path();
        let path = dest.with_file_name(path.strip_prefix(&shipped_folder).unwrap_or(&path));
        RecipeCopy { path, bytes: base.text.as_bytes(), role: CopyRole::Base }
    });
    let data = files_of(recipe).into_iter().map(|file| RecipeCopy {
        path: file.path.into(),
        bytes: file.bytes,
        role: CopyRole::Data,
    });
    let own = RecipeCopy { path: dest.clone(), bytes: recipe.text.as_bytes(), role: CopyRole::Recipe };
    bases.chain(data).chain([own]).collect()
}
