//! Candidates of shell completion: names of shipped recipes, recipe files, recipe keys and their values.

use std::ffi::OsStr;

use candlewick_command_line::{CompletionCandidate, PathCompleter, ValueCompleter};

use crate::recipe::shipped::SHIPPED;
use crate::recipe::{KeyDoc, key_docs};

/// Returns the shipped recipes whose names begin with a word.
pub(super) fn recipe_names(word: &OsStr) -> Vec<CompletionCandidate> {
    let word = word.to_string_lossy();
    let named = SHIPPED.iter().filter(|recipe| !recipe.is_base() && recipe.name.starts_with(&*word));
    named.map(|recipe| CompletionCandidate::new(recipe.name).help(Some(recipe.description().into()))).collect()
}

/// Returns the shipped recipes, the YAML files and the folders whose names begin with a word.
pub(super) fn recipes_and_files(word: &OsStr) -> Vec<CompletionCandidate> {
    let is_yaml = |path: &std::path::Path| path.extension().is_some_and(|it| it == "yaml" || it == "yml");
    let mut candidates = recipe_names(word);
    candidates.extend(PathCompleter::any().filter(move |path| path.is_dir() || is_yaml(path)).complete(word));
    candidates
}

/// Returns the recipe keys that begin with a word, or for `KEY=` the values of the key.
pub(super) fn overrides(word: &OsStr) -> Vec<CompletionCandidate> {
    let word = word.to_string_lossy();
    let docs = key_docs();
    match word.split_once('=') {
        Some((key, value)) => values(&docs, key, value),
        None => keys(&docs).filter(|(path, _)| path.starts_with(&*word)).map(key_candidate).collect(),
    }
}

/// Returns the keys that begin with a word.
pub(super) fn key_names(word: &OsStr) -> Vec<CompletionCandidate> {
    let word = word.to_string_lossy();
    let docs = key_docs();
    let names = docs.iter().filter(|doc| doc.path.starts_with(&*word));
    names.map(|doc| CompletionCandidate::new(&doc.path).help(Some(doc.meaning.clone().into()))).collect()
}

/// Returns each key that has a value, with 0 as the index of a list.
fn keys(docs: &[KeyDoc]) -> impl Iterator<Item = (String, &KeyDoc)> {
    let is_section = |doc: &KeyDoc| docs.iter().any(|other| other.path.starts_with(&format!("{}.", doc.path)));
    docs.iter().filter(move |doc| !is_section(doc)).map(|doc| (doc.path.replace(".N", ".0"), doc))
}

fn key_candidate((path, doc): (String, &KeyDoc)) -> CompletionCandidate {
    CompletionCandidate::new(format!("{path}=")).help(Some(doc.meaning.clone().into()))
}

fn values(docs: &[KeyDoc], key: &str, value: &str) -> Vec<CompletionCandidate> {
    let Some((_, doc)) = keys(docs).find(|(path, _)| path == key) else { return Vec::new() };
    let named = doc.values.iter().map(|it| (it.name.as_str(), it.meaning.as_str()));
    let switch = [("true", ""), ("false", "")].into_iter().filter(|_| doc.value_type.contains("true or false"));
    let matching = named.chain(switch).filter(|(name, _)| name.starts_with(value));
    let candidate = |(name, meaning): (&str, &str)| {
        CompletionCandidate::new(format!("{key}={name}")).help(Some(meaning.to_owned().into()))
    };
    matching.map(candidate).collect()
}
