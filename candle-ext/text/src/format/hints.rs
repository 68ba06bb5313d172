//! Suggested `role_mapping` entries for lists of messages with unknown keys or roles.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::chat::role_of_alias;
use crate::source::Row;

/// Keys that hold the speaker, most common first.
const ROLE_KEYS: [&str; 7] = ["role", "from", "speaker", "author", "sender", "user", "name"];

/// Suggests the `role_mapping` for the items of a list: "role_mapping: {user: ...}".
///
/// The first speaker other than the system becomes the user and the next one the assistant, unless their names are
/// known.
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

/// Suggests the mapping of the row's first list column whose items have roles.
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

/// Returns the key with the longest strings, except the role's key.
fn text_key<'a>(items: &[&'a Map<String, Value>], role_key: &str) -> Option<&'a str> {
    let n_bytes = |key: &str| -> usize { items.iter().filter_map(|item| Some(item.get(key)?.as_str()?.len())).sum() };
    let keys = items.first()?.keys().map(String::as_str).filter(|key| *key != role_key && n_bytes(key) > 0);
    keys.max_by_key(|key| n_bytes(key))
}

/// Number of messages per role, over some rows.
#[derive(Debug, Default)]
pub struct RoleCounts {
    counts: Vec<(String, usize)>,
    paste: Option<String>,
}

impl RoleCounts {
    /// Counts the roles of a row's messages, as spelled in the row.
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

    /// Returns true if one of the roles means `assistant`.
    pub fn has_assistant(&self) -> bool {
        self.counts.iter().any(|(role, _)| role_of_alias(role) == Some("assistant"))
    }

    /// Returns the suggested `role_mapping` with a user and an assistant, if there is one.
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
