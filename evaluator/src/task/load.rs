//! Loading of task files: resolves `include` and distinguishes tasks, groups and tags.
//!
//! A file holds one task or group, as in lm-eval, or a list of them, an extension of lm-eval's format.

use std::path::{Path, PathBuf};

use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_regular_text_file};

use super::error::{ConfigError, TaskError};
use super::keys::type_error;
use super::yaml::{TaskEntry, TaskNode, TaskValue, parse};

/// Built-in task files, embedded in the program.
static BUILT_IN: include_dir::Dir<'static> = include_dir::include_dir!("$CARGO_MANIFEST_DIR/tasks");

/// Maximum depth of folders and of includes.
const MAX_DEPTH: usize = 16;

/// Returns all built-in configurations.
pub(super) fn built_in() -> Result<Vec<TaskNode>, ConfigError> {
    let mut files: Vec<_> = BUILT_IN.files().collect();
    files.sort_by_key(|file| file.path());
    let mut all = Vec::new();
    for file in files {
        let text = file.contents_utf8().unwrap_or_default();
        all.extend(documents(parse(file.path(), text)?));
    }
    Ok(all)
}

/// Configurations in a file or folder, and the errors of unreadable files.
#[derive(Default)]
pub(super) struct LoadedConfigs {
    pub(super) nodes: Vec<TaskNode>,
    pub(super) load_errors: Vec<TaskError>,
}

/// Loads the configurations of a file, or of all `.yaml` files in a folder and its subfolders. In a folder,
/// unreadable files are skipped and reported in `load_errors`.
pub(super) fn from_path(path: &Path) -> Result<LoadedConfigs, TaskError> {
    if !path.is_dir() {
        return Ok(LoadedConfigs { nodes: from_file(path, MAX_DEPTH)?, load_errors: Vec::new() });
    }
    let mut files = Vec::new();
    collect(path, MAX_DEPTH, &mut files)?;
    files.sort();
    let mut loaded = LoadedConfigs::default();
    for file in &files {
        match from_file(file, MAX_DEPTH) {
            Ok(nodes) => loaded.nodes.extend(nodes),
            Err(error) => loaded.load_errors.push(error),
        }
    }
    Ok(loaded)
}

fn collect(folder: &Path, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), TaskError> {
    let failed = |source| TaskError::Io { path: folder.to_owned(), source };
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if depth > 0 && !["__pycache__", ".ipynb_checkpoints"].contains(&name.as_str()) {
                collect(&path, depth - 1, files)?;
            }
        } else if name.ends_with(".yaml") {
            files.push(path);
        }
    }
    Ok(())
}

/// Loads the configurations of a file, with includes merged.
fn from_file(path: &Path, depth: usize) -> Result<Vec<TaskNode>, TaskError> {
    let text = read_regular_text_file(path, MAX_CONFIG_FILE_BYTES)
        .map_err(|source| TaskError::Io { path: path.to_owned(), source })?;
    let whole = parse(path, &text)?;
    documents(whole).into_iter().map(|node| merge_includes(node, depth)).collect()
}

fn documents(node: TaskNode) -> Vec<TaskNode> {
    match node.value {
        TaskValue::List(items) => items,
        _ => vec![node],
    }
}

/// Merges included files into a configuration, whose own keys override theirs.
fn merge_includes(node: TaskNode, depth: usize) -> Result<TaskNode, TaskError> {
    let TaskValue::Map(own) = &node.value else {
        return Err(ConfigError::at(
            node.place.clone(),
            format!("a task file must be a map of keys, found {}", node.describe()),
        )
        .into());
    };
    let Some(entry) = own.iter().find(|entry| entry.key == "include") else { return Ok(node) };
    if depth == 0 {
        return Err(ConfigError::at(
            entry.place.clone(),
            "include: the files include each other in a cycle, or the chain is too long",
        )
        .into());
    }
    let mut merged: Vec<TaskEntry> = Vec::new();
    for name in names(entry)? {
        let path = node.place.file.parent().unwrap_or(Path::new("")).join(name);
        let mut parts = from_file(&path, depth - 1).map_err(|error| at_include(entry, error))?;
        let [part] = parts.as_mut_slice() else {
            return Err(ConfigError::at(
                entry.place.clone(),
                "include: a file with a list of tasks cannot be included",
            )
            .into());
        };
        if let TaskValue::Map(entries) = std::mem::replace(&mut part.value, TaskValue::Null) {
            entries.into_iter().filter(|entry| entry.key != "task_list").for_each(|entry| set_key(&mut merged, entry));
        }
    }
    own.iter().filter(|entry| entry.key != "include").cloned().for_each(|entry| set_key(&mut merged, entry));
    Ok(TaskNode { value: TaskValue::Map(merged), place: node.place })
}

fn names(entry: &TaskEntry) -> Result<Vec<&str>, ConfigError> {
    let text = |node: &TaskNode| match &node.value {
        TaskValue::Text(_) => Ok(()),
        _ => Err(type_error(entry, "a file name or a list of them")),
    };
    let nodes = match &entry.node.value {
        TaskValue::List(items) => items.iter().collect(),
        _ => vec![&entry.node],
    };
    nodes.into_iter().map(|node| text(node).map(|()| node.text_or_empty())).collect()
}

/// Adds the location of the `include` key to an I/O error.
fn at_include(entry: &TaskEntry, error: TaskError) -> TaskError {
    match error {
        TaskError::Io { path, source } => {
            ConfigError::at(entry.place.clone(), format!("include: cannot read {}: {source}", path.display())).into()
        }
        other => other,
    }
}

/// Replaces the entry of a key in place, or appends it.
pub(super) fn set_key(entries: &mut Vec<TaskEntry>, new: TaskEntry) {
    match entries.iter_mut().find(|entry| entry.key == new.key) {
        Some(entry) => *entry = new,
        None => entries.push(new),
    }
}
