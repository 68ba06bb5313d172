//! The plan as a table for people: key, value, where it came from.

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

/// The settings of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Every one.
    All,
    /// Settings that the recipe, an argument or the memory has set.
    Set,
}

impl Plan {
    /// Writes the table of settings, the derived numbers and the notes.
    pub fn table(&self, shown: Shown) -> String {
        let is_set = |setting: &Setting| !matches!(setting.origin, Origin::Default | Origin::Derived);
        let settings: Vec<&Setting> = self.settings.iter().filter(|it| shown == Shown::All || is_set(it)).collect();
        let width = |of: fn(&Setting) -> usize| settings.iter().map(|setting| of(setting)).max().unwrap_or(0);
        let keys = width(|s| s.key.chars().count());
        let values = width(|s| s.shown().chars().count()).min(40);
        let mut text = format!("plan of {}\n", self.recipe.display());
        for setting in &settings {
            text += &format!("  {:keys$}  {:values$}  {}\n", setting.key, setting.shown(), setting.origin);
        }
        let n_hidden = self.settings.len() - settings.len();
        if n_hidden > 0 {
            text += &format!("  and {n_hidden} settings with their defaults: --all shows them\n");
        }
        self.facts().iter().for_each(|(name, fact)| text += &format!("{name}: {fact}\n"));
        self.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        text
    }
}

fn in_words<S: Serializer>(origin: &Origin, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(origin)
}
