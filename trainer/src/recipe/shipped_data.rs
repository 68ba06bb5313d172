//! The data files of shipped recipes, inside the program.
//!
//! Shipped recipes name them as paths of the repository, such as `recipes/chats/chats.jsonl`. Outside of the repository
//! no such file exists, and the recipe reads a copy in the cache folder.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use candlewick_runtime::cores::cache_folder;
use candlewick_text::files::{is_present, read_regular_file, write_atomically};
use sha2::{Digest, Sha256};

use super::error::{Fault, RecipeSource};
use super::node::{RecipeLocation, RecipeNode, RecipeValue, parse};
use super::shipped::{self, SHIPPED, ShippedRecipe};

/// A data file inside the program.
#[derive(Clone, Copy, Debug)]
pub struct ShippedFile {
    /// The path from the root of the repository, such as `recipes/chats/chats.jsonl`.
    pub path: &'static str,
    /// The content.
    pub bytes: &'static [u8],
}

macro_rules! files {
    ($($name:literal)*) => {
        [$(ShippedFile {
            path: concat!("recipes/", $name),
            bytes: include_bytes!(concat!("../../../recipes/", $name)),
        }),*]
    };
}

static FILES: &[ShippedFile] = &files![
    "chats/chats.jsonl"
    "chats/eval.jsonl"
    "quickstart/train.jsonl"
    "quickstart/eval.jsonl"
    "quickstart/tokenizer/tokenizer.json"
    "quickstart/tokenizer/tokenizer_config.json"
];

/// The files of a path in a shipped recipe, which the run reads from the cache folder.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShippedDataFiles {
    path: &'static str,
    location: RecipeLocation,
}

impl ShippedDataFiles {
    /// Writes the files that the cache folder lacks.
    pub(super) fn write(&self) -> Result<(), Fault> {
        files_at(self.path).try_for_each(|file| {
            let path = cached(file.path);
            write_if_changed(&path, file.bytes).map_err(|error| {
                let problem = format!("{}: failed to write the shipped file {}: {error}", self.path, path.display());
                Fault::new(Some(self.location), problem)
                    .note("set XDG_CACHE_HOME to a writable folder, or copy the files: `trainer recipes cp NAME`")
            })
        })
    }
}

/// Replaces paths of shipped data in the values that shipped recipes set, if no such file exists here. The new path is in
/// the cache folder. Returns the replaced ones.
pub(super) fn use_cached_files(tree: &mut RecipeNode, source: &RecipeSource) -> Vec<ShippedDataFiles> {
    let mut replaced = Vec::new();
    for_each_text(tree, &mut |text, location| {
        let RecipeLocation::File { file, .. } = location else { return };
        let path = shipped::at(source.file(file).0).and_then(|_| shipped_path(text));
        if let Some(path) = path.filter(|path| !is_present(Path::new(path))) {
            *text = cached(path).to_string_lossy().into_owned();
            replaced.push(ShippedDataFiles { path, location });
        }
    });
    replaced
}

/// Returns the data files that a shipped recipe and its bases name.
pub fn files_of(recipe: &'static ShippedRecipe) -> Vec<&'static ShippedFile> {
    let mut paths = Vec::new();
    for recipe in std::iter::successors(Some(recipe), |recipe| recipe.base()) {
        let Ok(mut tree) = parse(recipe.text, 0) else { continue };
        for_each_text(&mut tree, &mut |text, _| paths.extend(shipped_path(text)));
    }
    FILES.iter().filter(|file| paths.iter().any(|path| is_at(file, path))).collect()
}

/// Returns the problem of a path that does not exist: the folder at which it starts, and the command that copies a shipped
/// file.
pub(crate) fn missing_path_advice(path: &str) -> String {
    missing_shipped_file(path).unwrap_or_else(start_of_relative_paths)
}

/// Returns the problem of a path that does not exist, if the program has a file of this path.
pub(crate) fn missing_shipped_file(path: &str) -> Option<String> {
    let path = shipped_path(path).filter(|path| !is_present(Path::new(path)))?;
    let recipe = SHIPPED.iter().find(|recipe| files_of(recipe).iter().any(|file| is_at(file, path)))?;
    let copy = format!("`trainer recipes cp {} NEW.yaml` copies this file, with the recipe", recipe.name);
    Some(format!("{}; {copy}", start_of_relative_paths()))
}

fn start_of_relative_paths() -> String {
    let here = std::env::current_dir().unwrap_or_default();
    format!("relative paths start at the current folder, {}", here.display())
}

/// Returns the static form of a path at which there are shipped files.
fn shipped_path(text: &str) -> Option<&'static str> {
    files_at(text).next().map(|file| &file.path[..text.len()])
}

fn files_at(path: &str) -> impl Iterator<Item = &'static ShippedFile> {
    FILES.iter().filter(move |file| is_at(file, path))
}

/// Returns true if `path` is the file or a folder of it.
fn is_at(file: &ShippedFile, path: &str) -> bool {
    path != "recipes" && file.path.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Returns the path of a shipped file or folder in the cache folder. Other contents have another path.
fn cached(path: &str) -> PathBuf {
    static DIGEST: LazyLock<String> = LazyLock::new(|| {
        let mut hash = Sha256::new();
        FILES.iter().for_each(|file| hash.update(file.bytes));
        hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    });
    shipped_cache_dir().join(&*DIGEST).join(path.strip_prefix("recipes/").unwrap_or(path))
}

/// Returns the folder of copies of shipped data: `recipes` in the cache folder.
fn shipped_cache_dir() -> PathBuf {
    cache_folder().join("recipes")
}

fn write_if_changed(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match read_regular_file(path, bytes.len() as u64 + 1) {
        Ok(found) if found == bytes => Ok(()),
        _ => write_atomically(path, |file| file.write_all(bytes)),
    }
}

fn for_each_text(node: &mut RecipeNode, visit: &mut impl FnMut(&mut String, RecipeLocation)) {
    let location = node.place;
    match &mut node.value {
        RecipeValue::Text(text) => visit(text, location),
        RecipeValue::List(items) => items.iter_mut().for_each(|item| for_each_text(item, visit)),
        RecipeValue::Map(entries) => entries.iter_mut().for_each(|entry| for_each_text(&mut entry.node, visit)),
        _ => {}
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_repository_path_in_a_shipped_recipe_has_shipped_files() {
        for recipe in SHIPPED {
            for_each_text(&mut parse(recipe.text, 0).unwrap(), &mut |text, _| {
                assert!(!text.starts_with("recipes/") || shipped_path(text).is_some(), "{}: {text}", recipe.name);
            });
        }
    }

    #[test]
    fn a_path_is_that_of_a_file_or_of_a_folder() {
        for (path, n_files) in [
            ("recipes/quickstart/train.jsonl", 1),
            ("recipes/quickstart/tokenizer", 2),
            ("recipes/quickstart/tok", 0),
            ("recipes", 0),
            ("", 0),
        ] {
            assert_eq!(files_at(path).count(), n_files, "{path}");
        }
    }

    #[test]
    fn a_damaged_copy_is_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.jsonl");
        for content in [None, Some(&b"{"[..]), Some(b"{}x")] {
            content.iter().for_each(|content| std::fs::write(&path, content).unwrap());
            write_if_changed(&path, b"{}").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"{}");
        }
    }
}
