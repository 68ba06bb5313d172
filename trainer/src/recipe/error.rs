//! Errors in a recipe. Each has a message, a location (file, line and column, or an argument) and advice.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::node::RecipeLocation;

/// The recipe's text, its bases, and the command-line arguments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecipeSource {
    /// The recipe file.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
    /// The recipes that `base` includes: that of the recipe, then that of each base.
    pub bases: Vec<BaseRecipe>,
    /// The `key=value` arguments.
    pub arguments: Vec<String>,
}

/// A recipe that another one includes by its key `base`.
#[derive(Clone, Debug, PartialEq)]
pub struct BaseRecipe {
    /// The file, or the name of a shipped recipe.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
    /// The line of `base` in the including file.
    pub included_at: usize,
}

impl RecipeSource {
    /// Returns the path and the text of a file: 0 is the recipe, 1 its base.
    pub(super) fn file(&self, file: usize) -> (&Path, &str) {
        match file.checked_sub(1).and_then(|idx| self.bases.get(idx)) {
            Some(base) => (&base.path, &base.text),
            None => (&self.path, &self.text),
        }
    }
}

/// An invalid recipe: one or more faults that the user can fix.
#[derive(Clone, Debug)]
pub struct RecipeError {
    faults: Vec<Fault>,
    source: Arc<RecipeSource>,
}

/// One error in a recipe.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The location, if the fault has one.
    pub location: Option<RecipeLocation>,
    /// The problem, including the key.
    pub message: String,
    /// Advice and further facts, one line each.
    pub notes: Vec<String>,
    /// Longer notes, which [`RecipeError::detailed`] shows.
    pub details: Vec<String>,
}

impl Fault {
    /// Creates a fault without notes.
    pub fn new(location: Option<RecipeLocation>, message: impl Into<String>) -> Self {
        Self { location, message: message.into(), notes: Vec::new(), details: Vec::new() }
    }

    /// Adds a line of advice.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Adds a line that only [`RecipeError::detailed`] shows.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.details.push(detail.into());
        self
    }
}

impl RecipeError {
    /// Joins the faults of one recipe, sorted by location.
    pub fn new(source: Arc<RecipeSource>, mut faults: Vec<Fault>) -> Self {
        faults.sort_by_key(|fault| match fault.location {
            Some(RecipeLocation::File { file, line, column, .. }) => (0, file, line, column),
            Some(RecipeLocation::Argument(idx)) => (1, idx, 0, 0),
            None => (2, 0, 0, 0),
        });
        Self { faults, source }
    }

    /// Appends the longer notes.
    #[must_use]
    pub fn detailed(mut self) -> Self {
        self.faults.iter_mut().for_each(|fault| fault.notes.append(&mut fault.details));
        self
    }

    /// Returns the faults.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }
}

impl std::error::Error for RecipeError {}

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        for (idx, fault) in self.faults.iter().take(SHOWN).enumerate() {
            if idx > 0 {
                f.write_str("\n\n")?;
            }
            write_fault(f, fault, &self.source)?;
        }
        match self.faults.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n\n… and {more} more"),
        }
    }
}

fn write_fault(f: &mut fmt::Formatter<'_>, fault: &Fault, source: &RecipeSource) -> fmt::Result {
    match fault.location {
        Some(RecipeLocation::File { file, line, column, len }) => {
            let (path, text) = source.file(file);
            write!(f, "{}:{line}:{column}: {}", path.display(), fault.message)?;
            write_snippet(f, text, line, column, len)?;
        }
        Some(RecipeLocation::Argument(idx)) => {
            let argument = source.arguments.get(idx).map_or("", String::as_str);
            write!(f, "argument `{argument}`: {}", fault.message)?;
        }
        None => write!(f, "{}: {}", source.path.display(), fault.message)?,
    }
    if let Some(RecipeLocation::File { file, .. }) = fault.location
        && let Some(base) = file.checked_sub(1).and_then(|idx| source.bases.get(idx))
    {
        let (including, _) = source.file(file - 1);
        write!(f, "\n   = included by {}:{}", including.display(), base.included_at)?;
    }
    for note in &fault.notes {
        write!(f, "\n   = {note}")?;
    }
    Ok(())
}

/// Prints the source line with carets under the faulty part, unless the line is very long.
fn write_snippet(f: &mut fmt::Formatter<'_>, text: &str, line: usize, column: usize, len: usize) -> fmt::Result {
    const WIDEST: usize = 160;
    let Some(shown) = line.checked_sub(1).and_then(|idx| text.lines().nth(idx)) else { return Ok(()) };
    let n_chars = shown.chars().count();
    if n_chars > WIDEST || column == 0 || column > n_chars + 1 {
        return Ok(());
    }
    let number = line.to_string();
    let margin = " ".repeat(number.len());
    let lead: String = shown.chars().take(column - 1).map(|c| if c == '\t' { '\t' } else { ' ' }).collect();
    let carets = "^".repeat(len.clamp(1, (n_chars + 1 - column).max(1)));
    write!(f, "\n {margin} |\n {number} | {shown}\n {margin} | {lead}{carets}")
}
