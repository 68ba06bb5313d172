//! References to Python functions in task files.

use super::error::SourceLocation;
use super::yaml::{TaskEntry, TaskValue};

/// Python function that a `!function` tag refers to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PythonFunction {
    /// Full name, as `folder/module.name`.
    pub(crate) name: String,
    pub(crate) place: SourceLocation,
}

impl PythonFunction {
    /// Resolves `utils.f` in `tasks/hellaswag/x.yaml` to `tasks/hellaswag/utils.f`.
    fn new(name: &str, place: &SourceLocation) -> Self {
        let folder = place.file.parent().map(|folder| folder.to_string_lossy().replace('\\', "/")).unwrap_or_default();
        let name = if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
        Self { name, place: place.clone() }
    }
}

/// Returns the function that an entry refers to, if its value has the tag `!function`.
pub(crate) fn as_function(entry: &TaskEntry) -> Option<PythonFunction> {
    match &entry.node.value {
        TaskValue::Tagged(_, name) => Some(PythonFunction::new(name.text_or_empty().trim(), &entry.node.place)),
        _ => None,
    }
}
