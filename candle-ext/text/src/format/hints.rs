//! Mappings to paste: what a list of messages with keys or roles of its own would need in a recipe.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::chat::role_of_alias;
use crate::source::Row;

/// Keys that name who speaks, the most usual first.
const ROLE_KEYS: [&str; 7] = ["role", "from", "speaker", "author", "sender", "user", "name"];

/// The `role_mapping` that reads the items of a list, ready for a recipe: "role_mapping: {user: ...}".
///
/// The user is the first to speak that is no system, the assistant the next one, unless their names say otherwise.
pub(super) fn mapping(column: &str, items: &[Value]) -> Option<String> {
    let items: Vec<&Map<String, Value>> = items.iter().map(Value::as_object).collect::<Option<_>>()?;
    let role_key = role_key(&items)?;
    let mut names: Vec<&str> = Vec::new();
    for name in items.iter().filter_map(|item| item.get(role_key)?.as_str()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let called = |role: &str| names.iter().copied().find(|name| role_of_alias(name) == Some(role));
    let unnamed: Vec<&str> = names.iter().copied().filter(|name| role_of_alias(name).is_none()).collect();
    let mut unnamed = unnamed.into_iter();
    let system = called("system");
    let user = called("user").or_else(|| unnamed.next())?;
    let assistant = called("assistant").or_else(|| unnamed.next())?;
    let path = |role: &str, name: &str| format!("{role}: {column}.{role_key}.{name}");
    let system = system.map(|name| path("system", name) + ", ").unwrap_or_default();
    let mapping = format!("role_mapping: {{{system}{}, {}}}", path("user", user), path("assistant", assistant));
    let text_key = text_key(&items, role_key)?;
    let is_usual = ["content", "text", "message", "value"].contains(&text_key);
    Some(if is_usual { mapping } else { format!("{mapping}, content_key: {text_key}") })
}

/// The mapping of the first list among a row's columns that has items with roles.
pub(super) fn mapping_of_row(row: &Row) -> Option<String> {
    row.iter().find_map(|(column, value)| mapping(column, value.as_array()?))
}

fn role_key<'a>(items: &[&'a Map<String, Value>]) -> Option<&'a str> {
    let values = |key: &str| items.iter().map(|item| item.get(key)?.as_str()).collect::<Option<Vec<&str>>>();
    if let Some(known) = ROLE_KEYS.iter().find(|key| values(key).is_some()) {
        return Some(known);
    }
    let n_distinct = |key: &str| values(key).map(|values| values.into_iter().collect::<HashSet<_>>().len());
    let keys = items.first()?.keys().filter_map(|key| Some((n_distinct(key)?, key.as_str())));
    keys.filter(|(n, _)| (2..=4).contains(n) && *n < items.len()).min().map(|(_, key)| key)
}

/// The key with the longest texts, apart from the role's.
fn text_key<'a>(items: &[&'a Map<String, Value>], role_key: &str) -> Option<&'a str> {
    let n_bytes = |key: &str| -> usize { items.iter().filter_map(|item| Some(item.get(key)?.as_str()?.len())).sum() };
    let keys = items.first()?.keys().map(String::as_str).filter(|key| *key != role_key && n_bytes(key) > 0);
    keys.max_by_key(|key| n_bytes(key))
}

/// The roles of some rows with their counts.
#[derive(Debug, Default)]
pub struct RoleCounts {
    counts: Vec<(String, usize)>,
    paste: Option<String>,
}

impl RoleCounts {
    /// Counts the roles of a row's messages as they are written.
    pub fn count(&mut self, row: &Row) {
        for (column, value) in row {
            let has_key =
                |key: &&&str| value.as_array().is_some_and(|items| items.iter().all(|item| item.get(**key).is_some()));
            let (Some(items), Some(key)) = (value.as_array(), ROLE_KEYS[..2].iter().find(has_key)) else { continue };
            for role in items.iter().filter_map(|item| item[*key].as_str()) {
                match self.counts.iter_mut().find(|(own, _)| own == role) {
                    Some((_, n)) => *n += 1,
                    None => self.counts.push((role.to_owned(), 1)),
                }
            }
            self.paste = self.paste.take().or_else(|| mapping(column, items));
        }
    }

    /// Returns true if there are no roles.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// Returns true if one of them is the assistant's.
    pub fn has_assistant(&self) -> bool {
        self.counts.iter().any(|(role, _)| role_of_alias(role) == Some("assistant"))
    }

    /// The mapping that names a user and an assistant, ready for a recipe.
    pub fn mapping(&self) -> Option<&str> {
        self.paste.as_deref()
    }
}

impl std::fmt::Display for RoleCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts: Vec<String> = self.counts.iter().map(|(role, n)| format!("{role} {n}")).collect();
        f.write_str(&counts.join(", "))
    }
}
