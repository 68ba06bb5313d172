//! Complaints about a recipe: each says what, where (file, line and column, or which argument) and how to fix it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use super::node::RecipeLocation;

/// What the user wrote: the recipe's text and the arguments after it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecipeSource {
    /// The recipe file.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
    /// The `key=value` arguments.
    pub arguments: Vec<String>,
}

/// Why a recipe cannot be used: one or more faults, all of them places that the user can edit.
#[derive(Clone, Debug)]
pub struct RecipeError {
    faults: Vec<Fault>,
    source: Arc<RecipeSource>,
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Where, if one place is to blame.
    pub location: Option<RecipeLocation>,
    /// What is wrong, with the key in it.
    pub message: String,
    /// How to fix it, and what else there is to know.
    pub notes: Vec<String>,
    /// Longer notes, which [`RecipeError::detailed`] shows.
    pub details: Vec<String>,
}

impl Fault {
    /// Describes a fault.
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
    /// Joins faults of one recipe. They are shown in the order of the file.
    pub fn new(source: Arc<RecipeSource>, mut faults: Vec<Fault>) -> Self {
        faults.sort_by_key(|fault| match fault.location {
            Some(RecipeLocation::File { line, column, .. }) => (0, line, column),
            Some(RecipeLocation::Argument(idx)) => (1, idx, 0),
            None => (2, 0, 0),
        });
        Self { faults, source }
    }

    /// Shows the longer notes, too.
    #[must_use]
    pub fn detailed(mut self) -> Self {
        self.faults.iter_mut().for_each(|fault| fault.notes.append(&mut fault.details));
        self
    }

    /// Returns what is wrong.
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
    let path = source.path.display();
    match fault.location {
        Some(RecipeLocation::File { line, column, len }) => {
            write!(f, "{path}:{line}:{column}: {}", fault.message)?;
            write_snippet(f, &source.text, line, column, len)?;
        }
        Some(RecipeLocation::Argument(idx)) => {
            let argument = source.arguments.get(idx).map_or("", String::as_str);
            write!(f, "argument `{argument}`: {}", fault.message)?;
        }
        None => write!(f, "{path}: {}", fault.message)?,
    }
    for note in &fault.notes {
        write!(f, "\n   = {note}")?;
    }
    Ok(())
}

/// Prints the line with carets under the blamed part. Very long lines are left out.
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
