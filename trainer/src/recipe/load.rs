//! Loading of a [`Recipe`] from a file and arguments, with the location of every key.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candlewick_text::files::is_present;
use candlewick_text::suggestion::nearest;

use super::decode::decode;
use super::deprecated::rename_all;
use super::dialect::{RecipeDialect, detect};
use super::error::{Fault, RecipeError, RecipeSource};
use super::missing_features::missing_feature_advice;
use super::node::{RecipeLocation, RecipeNode, RecipeValue, quoted};
use super::shipped_data::{ShippedDataFiles, use_cached_files};
use super::{Recipe, base, overrides, shipped, tilde};

/// A recipe with the location of each key.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The recipe as written.
    pub recipe: Recipe,
    tree: RecipeNode,
    source: Arc<RecipeSource>,
    notes: Vec<String>,
    dialect: RecipeDialect,
    cached_files: Vec<ShippedDataFiles>,
}

/// The origin of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of the recipe.
    Line(usize),
    /// A line of a recipe that `base` includes.
    Base(PathBuf, usize),
    /// An argument.
    Argument,
    /// The built-in default.
    Default,
    /// Another setting or the model's config.
    Derived,
    /// The free memory, by this key with the value `auto`.
    Memory(&'static str),
    /// An environment variable.
    Variable(&'static str),
}

impl Loaded {
    /// Reads a recipe file and applies `key=value` arguments. If there is no such file, `path` may be the name of a shipped
    /// recipe.
    pub fn read(path: &Path, arguments: &[String]) -> Result<Self, RecipeError> {
        let is_file = is_present(path) && !path.is_dir();
        if !is_file && let Some(recipe) = path.to_str().and_then(shipped::find) {
            return Self::parse(&recipe.path(), recipe.text.to_owned(), arguments);
        }
        let text = base::read_text(path).map_err(|message| {
            let source = RecipeSource { path: path.to_owned(), ..RecipeSource::default() };
            let fault = Fault::new(None, message);
            let near = path.to_str().and_then(shipped::nearest_name);
            let fault = match near {
                _ if is_file => fault,
                Some(near) => fault.note(format!("did you mean the shipped recipe `{near}`?")),
                None => fault.note("`trainer recipes ls` lists the recipes inside the program"),
            };
            RecipeError::new(Arc::new(source), vec![fault])
        })?;
        Self::parse(path, text, arguments)
    }

    /// Reads the text of a recipe, and the recipes that its key `base` includes.
    pub fn parse(path: &Path, text: String, arguments: &[String]) -> Result<Self, RecipeError> {
        let mut source = RecipeSource { path: path.to_owned(), text, bases: Vec::new(), arguments: arguments.to_vec() };
        let merged = base::read_merged(&mut source);
        let source = Arc::new(source);
        let fail = |fault: Fault| RecipeError::new(source.clone(), vec![fault]);
        let (mut tree, mut old_names) = merged.map_err(&fail)?;
        let dialect = detect(&tree);
        old_names.extend(overrides::apply_all(&mut tree, arguments).map_err(&fail)?);
        // The value of an argument may be a map that has deprecated keys.
        old_names.extend(rename_all(&mut tree).map_err(&fail)?);
        tilde::expand_home(&mut tree);
        let cached_files = use_cached_files(&mut tree, &source);
        check_type(&tree).map_err(&fail)?;
        let recipe = decode(&tree).map_err(&fail)?;
        let notes = old_names.iter().map(|name| name.note(&source)).collect();
        Ok(Self { recipe, tree, source: source.clone(), notes, dialect, cached_files })
    }

    /// Returns the file and the arguments.
    pub fn source(&self) -> &RecipeSource {
        &self.source
    }

    /// Writes the shipped data files that the recipe reads from the cache folder.
    pub fn write_cached_files(&self) -> Result<(), RecipeError> {
        self.cached_files.iter().try_for_each(ShippedDataFiles::write).map_err(|fault| self.error(vec![fault]))
    }

    /// Returns one line for each deprecated key, with its file and line.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the dialect of the recipe file.
    pub fn dialect(&self) -> &RecipeDialect {
        &self.dialect
    }

    /// Returns the origin of the first of these keys that is set.
    pub fn origin(&self, keys: &[&str]) -> Origin {
        self.location(keys).map_or(Origin::Default, |location| self.origin_at(location))
    }

    fn origin_at(&self, location: RecipeLocation) -> Origin {
        match location {
            RecipeLocation::File { file: 0, line, .. } => Origin::Line(line),
            RecipeLocation::File { file, line, .. } => Origin::Base(self.source.file(file).0.to_owned(), line),
            RecipeLocation::Argument(_) => Origin::Argument,
        }
    }

    /// Returns true if a key is set, even to its default value.
    pub fn is_set(&self, key: &str) -> bool {
        self.tree.at(key).is_some()
    }

    /// Returns every key that is set, with its value as written and its origin. Names are canonical: an alias is replaced,
    /// and a single checkpoint has an index.
    pub(crate) fn written_keys(&self) -> Vec<(String, serde_json::Value, Origin)> {
        let mut keys = Vec::new();
        leaves(&self.tree, self.tree.place, "", &mut keys);
        let canonical = |path: &String| overrides::canonical(&path.split('.').collect::<Vec<_>>()).join(".");
        let value = |node: &RecipeNode| decode(node).unwrap_or(serde_json::Value::Null);
        keys.iter().map(|(path, node, location)| (canonical(path), value(node), self.origin_at(*location))).collect()
    }

    /// Returns the recipe with its bases and arguments, without the key `base`.
    pub(crate) fn merged(&self) -> serde_json::Value {
        let mut merged: serde_json::Value = decode(&self.tree).unwrap_or_default();
        if let Some(keys) = merged.as_object_mut() {
            keys.remove("base");
        }
        merged
    }

    /// Returns the value of a key as text, if it is a short scalar.
    pub(crate) fn scalar(&self, key: &str) -> Option<String> {
        match &self.tree.at(key)?.0.value {
            RecipeValue::Bool(value) => Some(value.to_string()),
            RecipeValue::Int(value) => Some(value.to_string()),
            RecipeValue::Float(value) => Some(value.to_string()),
            RecipeValue::Text(text) if text.len() <= 40 => Some(text.clone()),
            _ => None,
        }
    }

    /// Creates a fault at the first of these keys that is set. If none is, its location is the enclosing map, or none.
    pub fn fault_at(&self, keys: &[&str], message: impl Into<String>) -> Fault {
        Fault::new(self.location(keys).or_else(|| self.enclosing_location(keys.first()?)), message)
    }

    /// Joins faults into an error of this recipe.
    pub fn error(&self, faults: Vec<Fault>) -> RecipeError {
        RecipeError::new(self.source.clone(), faults)
    }

    fn location(&self, keys: &[&str]) -> Option<RecipeLocation> {
        keys.iter().find_map(|key| self.tree.at(key)).map(|(_, location)| location)
    }

    fn enclosing_location(&self, key: &str) -> Option<RecipeLocation> {
        let parent = key.rsplit_once('.')?.0;
        self.location(&[parent]).or_else(|| self.enclosing_location(parent))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line(line) => write!(f, "line {line}"),
            Origin::Base(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Argument => f.write_str("argument"),
            Origin::Default => f.write_str("default"),
            Origin::Derived => f.write_str("derived"),
            Origin::Memory(key) => write!(f, "{key}: auto"),
            Origin::Variable(name) => write!(f, "environment variable {name}"),
        }
    }
}

/// A value with its path and the location of its key.
type Leaf<'a> = (String, &'a RecipeNode, RecipeLocation);

/// Collects the values that are no maps and contain none.
fn leaves<'a>(node: &'a RecipeNode, location: RecipeLocation, path: &str, keys: &mut Vec<Leaf<'a>>) {
    let at = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match &node.value {
        RecipeValue::Map(entries) if !entries.is_empty() => {
            entries.iter().for_each(|entry| leaves(&entry.node, entry.place, &at(&entry.key), keys));
        }
        RecipeValue::List(items) if items.iter().any(|item| matches!(item.value, RecipeValue::Map(_))) => {
            items.iter().enumerate().for_each(|(idx, item)| leaves(item, item.place, &at(&idx.to_string()), keys));
        }
        RecipeValue::Map(_) | RecipeValue::Null => {}
        _ => keys.push((path.to_owned(), node, location)),
    }
}

/// Refuses an unsupported `type` before decoding, which would report its keys as unknown.
fn check_type(tree: &RecipeNode) -> Result<(), Fault> {
    const TYPES: [&str; 2] = ["sft", "causal"];
    let Some(entry) = tree.get("type") else { return Ok(()) };
    match &entry.node.value {
        RecipeValue::Text(name) if TYPES.contains(&name.as_str()) => Ok(()),
        RecipeValue::Text(name) => {
            let fault = Fault::new(Some(entry.node.place), format!("type: unknown value {}", quoted(name)));
            let fault = match (missing_feature_advice(name), nearest(name, TYPES)) {
                (Some(advice), _) => fault.note(advice),
                (None, Some(near)) => fault.note(format!("did you mean `{near}`?")),
                (None, None) => fault.note("types registered by Python code of a recipe are not supported"),
            };
            Err(fault.note("values: sft, causal"))
        }
        _ => Ok(()),
    }
}
