//! The plan as a table for people: key, value, where it came from.

use std::fmt;

use serde::{Serialize, Serializer};

use super::Plan;
use crate::recipe::Origin;

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// The recipe's key.
    pub key: String,
    /// Its value.
    pub value: serde_json::Value,
    /// Where the value came from.
    #[serde(serialize_with = "in_words")]
    pub origin: Origin,
}

impl Setting {
    pub(super) fn new<T: Serialize>(key: &str, value: &T, origin: Origin) -> Self {
        let value = serde_json::to_value(value).unwrap_or(serde_json::Value::Null);
        Self { key: key.to_owned(), value, origin }
    }

    fn shown(&self) -> String {
        const WIDEST: usize = 72;
        let text = match &self.value {
            serde_json::Value::String(text) if !text.is_empty() && !text.contains('\n') => text.clone(),
            serde_json::Value::Null => "none".into(),
            other => other.to_string(),
        };
        if text.chars().count() <= WIDEST {
            return text;
        }
        text.chars().take(WIDEST - 1).chain(['…']).collect()
    }
}

/// Prints the table, then the notes.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |of: fn(&Setting) -> usize| self.settings.iter().map(of).max().unwrap_or(0);
        let keys = width(|s| s.key.chars().count());
        let values = width(|s| s.shown().chars().count()).min(40);
        writeln!(f, "plan of {}", self.recipe.display())?;
        for setting in &self.settings {
            writeln!(f, "  {:keys$}  {:values$}  {}", setting.key, setting.shown(), setting.origin)?;
        }
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        Ok(())
    }
}

fn in_words<S: Serializer>(origin: &Origin, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(origin)
}
