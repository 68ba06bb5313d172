//! Deprecated keys: the old name is still read, with a note.

use super::error::{Fault, RecipeSource};
use super::node::{RecipeEntry, RecipeLocation, RecipeNode, RecipeValue};

/// The renamed keys: section ("" for the top level), old name and new name.
const RENAMED: [(&str, &str, &str); 5] = [
    ("", "sequence_parallel_norms", "sequence_parallel"),
    ("", "pipeline_chunks", "virtual_pipeline_parallel_size"),
    ("checkpoint", "keep", "save_total_limit"),
    ("data", "overlong", "truncation"),
    ("data", "unrendered_tool_calls", "unrendered_messages"),
];

/// A use of a deprecated name.
#[derive(Clone, Debug)]
pub(super) struct OldName {
    section: &'static str,
    old: &'static str,
    new: &'static str,
    location: RecipeLocation,
}

impl OldName {
    /// Returns one line with the location, the old name and the new name.
    pub(super) fn note(&self, source: &RecipeSource) -> String {
        let place = match self.location {
            RecipeLocation::File { file, line, .. } => format!("{}:{line}", source.file(file).0.display()),
            RecipeLocation::Argument(idx) => {
                format!("argument `{}`", source.arguments.get(idx).map_or("", String::as_str))
            }
        };
        format!("{place}: {} is deprecated; write {}", self.key(self.old), self.key(self.new))
    }

    fn key(&self, name: &str) -> String {
        if self.section.is_empty() { name.to_owned() } else { format!("{}.{name}", self.section) }
    }
}

/// Renames every deprecated key of the tree. Returns the old names it found.
///
/// Fails if a map has both names.
pub(super) fn rename_all(root: &mut RecipeNode) -> Result<Vec<OldName>, Fault> {
    let mut found = Vec::new();
    for (section, old, new) in RENAMED {
        let sections = maps(root, section);
        for entries in sections {
            let Some(idx) = entries.iter().position(|entry| entry.key == old) else { continue };
            let name = OldName { section, old, new, location: entries[idx].place };
            if entries.iter().any(|entry| entry.key == new) {
                let message = format!("{} and {} are the same key", name.key(old), name.key(new));
                return Err(Fault::new(Some(name.location), message).note(format!("remove {old}, the deprecated name")));
            }
            entries[idx].key = new.to_owned();
            found.push(name);
        }
    }
    Ok(found)
}

/// Renames a deprecated part of an argument's key. Returns the old name, if there is one.
pub(super) fn rename_path(path: &mut [&str], location: RecipeLocation) -> Option<OldName> {
    let (section, key) = match path {
        [key, ..] if !is_section(key) => ("", key),
        [section, idx, key, ..] if *section == "checkpoint" && idx.parse::<usize>().is_ok() => (*section, key),
        [section, key, ..] => (*section, key),
        _ => return None,
    };
    let (section, old, new) = RENAMED.into_iter().find(|(of, old, _)| *of == section && old == key)?;
    *key = new;
    Some(OldName { section, old, new, location })
}

fn is_section(name: &str) -> bool {
    RENAMED.iter().any(|(section, ..)| *section == name)
}

/// Returns the maps of a section: the top level, one map, or each map of a list.
fn maps<'a>(root: &'a mut RecipeNode, section: &str) -> Vec<&'a mut Vec<RecipeEntry>> {
    let RecipeValue::Map(entries) = &mut root.value else { return Vec::new() };
    if section.is_empty() {
        return vec![entries];
    }
    let node = entries.iter_mut().find(|entry| entry.key == section).map(|entry| &mut entry.node.value);
    match node {
        Some(RecipeValue::Map(entries)) => vec![entries],
        Some(RecipeValue::List(items)) => items
            .iter_mut()
            .filter_map(|item| match &mut item.value {
                RecipeValue::Map(entries) => Some(entries),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}
