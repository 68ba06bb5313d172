//! A key that the user named, with its documentation and its settings in a recipe.

use super::settings::{ResolvedSettings, WordedSetting};
use crate::recipe::{KeyDoc, NamedKey, numbered};

/// The documentation that explains a key.
pub(super) struct ExplainedKey<'a> {
    /// The key as the user typed it.
    pub(super) key: &'a str,
    /// Path of the documentation.
    pub(super) path: String,
    /// Reason why the documentation is of another key.
    pub(super) note: Option<String>,
    /// Key whose value a recipe may have.
    pub(super) value_of: String,
    /// Documentation of the key, or of the map that holds it.
    pub(super) doc: Option<&'a KeyDoc>,
}

impl<'a> ExplainedKey<'a> {
    /// Finds the documentation of a key that the user named.
    pub(super) fn new(docs: &'a [KeyDoc], key: &'a str, named: &NamedKey) -> Self {
        let (path, note, value_of) = match named {
            NamedKey::InMap(map) => {
                let note = format!("{key} is a key of the map {map}, which has no fixed keys.");
                (map.clone(), Some(note), key.to_owned())
            }
            NamedKey::Foreign(path, advice) => {
                (path.clone(), Some(format!("{key} is a key of another toolkit: {advice}.")), path.clone())
            }
            NamedKey::Documented(path) => (path.clone(), None, key.to_owned()),
            NamedKey::Unknown(_) => (key.to_owned(), None, key.to_owned()),
        };
        // A counterpart may be a key of a map, such as `model.peft_config.r`.
        let doc = docs.iter().rfind(|doc| doc.path == path || path.starts_with(&format!("{}.", doc.path)));
        Self { key, path, note, value_of, doc }
    }

    /// Returns the section, if the key is one.
    pub(super) fn section(&self) -> Option<&'a KeyDoc> {
        self.doc.filter(|doc| doc.is_section() && doc.path == self.path)
    }

    /// Returns the settings of the key, or those below the section.
    pub(super) fn settings<'s>(&self, settings: &'s ResolvedSettings) -> Vec<&'s WordedSetting> {
        match (self.section(), self.doc) {
            (Some(section), _) => settings_of_section(settings, section),
            (None, Some(doc)) => settings_of_key(settings, &self.value_of, doc),
            (None, None) => Vec::new(),
        }
    }
}

/// Returns the keys below a section.
pub(super) fn keys_below<'a>(docs: &'a [KeyDoc], section: &KeyDoc) -> impl Iterator<Item = &'a KeyDoc> {
    let prefix = format!("{}.", section.path);
    docs.iter().filter(move |doc| doc.path.starts_with(&prefix))
}

/// Returns the settings of a section and of the keys below it.
pub(super) fn settings_of_section<'s>(settings: &'s ResolvedSettings, section: &KeyDoc) -> Vec<&'s WordedSetting> {
    let prefix = format!("{}.", section.path);
    let is_below =
        |setting: &&WordedSetting| setting.key == section.path || numbered(&setting.key).starts_with(&prefix);
    settings.all().filter(is_below).collect()
}

/// Returns the settings of a key. A key of a list has one for each item, unless `key` has an index.
pub(super) fn settings_of_key<'s>(settings: &'s ResolvedSettings, key: &str, doc: &KeyDoc) -> Vec<&'s WordedSetting> {
    let has_index = key.split('.').any(|part| part.parse::<usize>().is_ok());
    let path = if key.starts_with(&format!("{}.", doc.path)) { key.to_owned() } else { doc.path.clone() };
    let is_meant =
        |setting: &&WordedSetting| if has_index { setting.key == key } else { numbered(&setting.key) == path };
    settings.all().filter(is_meant).collect()
}
