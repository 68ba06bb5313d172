//! References to Python functions in task files.

use super::error::SourceLocation;
use super::yaml::{Entry, Value};

/// `!function`, by the name of its built-in implementation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PythonFunction {
    /// `folder/module.name`.
    pub(crate) name: String,
    pub(crate) place: SourceLocation,
}

impl PythonFunction {
    /// `utils.f` in `tasks/hellaswag/x.yaml` is `tasks/hellaswag/utils.f`.
    fn new(name: &str, place: &SourceLocation) -> Self {
        let folder = place.file.parent().map(|folder| folder.to_string_lossy().replace('\\', "/")).unwrap_or_default();
        let name = if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
        Self { name, place: place.clone() }
    }
}

/// Returns the value as a function, by its full name.
pub(crate) fn as_function(entry: &Entry) -> Option<PythonFunction> {
    match &entry.node.value {
        Value::Tagged(_, name) => Some(PythonFunction::new(name.text_or_empty().trim(), &entry.node.place)),
        _ => None,
    }
}
