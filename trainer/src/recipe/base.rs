//! `base`: a recipe includes another one, whose keys apply unless the including file sets them.

use std::path::{Path, PathBuf};

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, is_present, read_file_or_pipe};

use super::deprecated::{OldName, rename_all};
use super::error::{BaseRecipe, Fault, RecipeSource};
use super::node::{self, RecipeLocation, RecipeNode, RecipeValue};
use super::overrides::{alias_of, null_removes};
use super::{shipped, tilde};

/// Maps that are one value: the including recipe replaces them.
const REPLACED_MAPS: [&[&str]; 1] = [&["model", "activation_checkpoint"]];

/// The largest number of bases of a recipe, one included by the other.
const MAX_BASES: usize = 32;

/// Parses the recipe and its bases, and merges them. Adds the bases to `source`.
pub(super) fn read_merged(source: &mut RecipeSource) -> Result<(RecipeNode, Vec<OldName>), Fault> {
    let (mut trees, mut old_names) = (Vec::new(), Vec::new());
    loop {
        let mut tree = parse(source, trees.len())?;
        old_names.extend(rename_all(&mut tree)?);
        let base = find_base(&tree, source)?;
        trees.push(tree);
        match base {
            Some(base) => source.bases.push(base),
            None => break,
        }
    }
    let outermost_base = trees.pop().unwrap_or(RecipeNode { value: RecipeValue::Map(Vec::new()), place: START });
    let merged = trees.into_iter().rev().fold(outermost_base, |mut base, tree| {
        merge(&mut base, tree, &mut Vec::new());
        base
    });
    Ok((merged, old_names))
}

const START: RecipeLocation = RecipeLocation::File { file: 0, line: 1, column: 1, len: 0 };

/// Reads a recipe file. The error is a sentence without the path.
pub(super) fn read_text(path: &Path) -> Result<String, String> {
    let bytes = read_file_or_pipe(path, MAX_CONFIG_FILE_BYTES);
    let bytes = bytes.map_err(|error| format!("cannot read the recipe: {error}"))?;
    String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
        format!("the recipe is not UTF-8: line {line} has an invalid byte")
    })
}

fn parse(source: &RecipeSource, file: usize) -> Result<RecipeNode, Fault> {
    let mut tree = node::parse(source.file(file).1, file).map_err(|error| {
        let location = error.at.map(|(line, column)| RecipeLocation::File { file, line, column, len: 1 });
        Fault::new(location, error.message)
    })?;
    match tree.value {
        RecipeValue::Null => tree.value = RecipeValue::Map(Vec::new()),
        RecipeValue::Map(_) => tilde::expand_home(&mut tree),
        _ if file > 0 => {
            return Err(Fault::new(Some(tree.place), format!("expected a map of keys, found {}", tree.describe())));
        }
        _ => {}
    }
    Ok(tree)
}

/// Reads the recipe that the last parsed file includes, if it has the key `base`.
fn find_base(tree: &RecipeNode, source: &RecipeSource) -> Result<Option<BaseRecipe>, Fault> {
    let Some(entry) = tree.get("base") else { return Ok(None) };
    let fault = |message: String| Fault::new(Some(entry.node.place), format!("base: {message}"));
    let name = match &entry.node.value {
        RecipeValue::Null => return Ok(None),
        RecipeValue::Text(name) => name,
        _ => return Err(fault(format!("expected the path or name of a recipe, found {}", entry.node.describe()))),
    };
    let (path, text) = open(name, source.file(source.bases.len()).0).map_err(|problem| {
        let near = shipped::nearest_name(name);
        let advice = match near {
            Some(near) => format!("did you mean the shipped recipe `{near}`?"),
            None => "a path starts at the folder of this file; `trainer recipes ls` lists the shipped recipes".into(),
        };
        fault(problem).note(advice)
    })?;
    let included: Vec<&Path> = (0..=source.bases.len()).map(|file| source.file(file).0).collect();
    if included.iter().any(|earlier| is_same(earlier, &path)) {
        let chain: Vec<String> = included.iter().map(|path| path.display().to_string()).collect();
        let message = format!("a recipe cannot include itself: {} -> {}", chain.join(" -> "), path.display());
        return Err(fault(message));
    }
    if source.bases.len() == MAX_BASES {
        let chain: Vec<String> = included.iter().map(|path| path.display().to_string()).collect();
        let message = format!("a recipe has at most {MAX_BASES} bases: {} -> {}", chain.join(" -> "), path.display());
        return Err(fault(message));
    }
    let RecipeLocation::File { line: included_at, .. } = entry.place else { return Ok(None) };
    Ok(Some(BaseRecipe { path, text, included_at }))
}

/// Returns the path and the text of the recipe that `including` names: a file, else a shipped recipe.
fn open(name: &str, including: &Path) -> Result<(PathBuf, String), String> {
    let path = including.with_file_name(name);
    if is_present(&path) && !path.is_dir() {
        return read_text(&path).map(|text| (path, text));
    }
    // A shipped recipe names others by their paths in the shipped folder.
    match shipped::at(&path).or_else(|| shipped::find(name)) {
        Some(recipe) => Ok((recipe.path(), recipe.text.to_owned())),
        None => Err(format!("neither {} nor a shipped recipe of this name exists", path.display())),
    }
}

/// Returns true if both paths are the same file, or name the same shipped recipe.
fn is_same(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        (Err(_), Err(_)) => a == b,
        _ => false,
    }
}

/// Writes the keys of `own` over those of `base`, or removes those that are null. `path` is the path of both nodes.
fn merge(base: &mut RecipeNode, own: RecipeNode, path: &mut Vec<String>) {
    let is_replaced = REPLACED_MAPS.iter().any(|map| path.iter().eq(map.iter()));
    match (&mut base.value, own.value) {
        (RecipeValue::Map(entries), RecipeValue::Map(own_entries)) if !is_replaced => {
            for entry in own_entries {
                path.push(entry.key.clone());
                let segments: Vec<&str> = path.iter().map(String::as_str).collect();
                let alias = alias_of(&segments, segments.len() - 1);
                let removes = entry.node.value == RecipeValue::Null && null_removes(&path.join("."));
                match entries.iter().position(|it| it.key == entry.key || alias == Some(it.key.as_str())) {
                    Some(idx) if removes => drop(entries.remove(idx)),
                    Some(idx) => {
                        let found = &mut entries[idx];
                        (found.key, found.place) = (entry.key, entry.place);
                        merge(&mut found.node, entry.node, path);
                    }
                    None => entries.push(entry),
                }
                path.pop();
            }
        }
        (value, own_value) => *value = own_value,
    }
    base.place = own.place;
}
