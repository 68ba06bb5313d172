//! Chat messages from arbitrary columns, by the recipe's `role_mapping`.
//!
//! A path is a column (`question`), or `list.field.value` (`messages.role.user`): the items of a list whose field
//! has that value. Items of one list keep the list's order. An item that no path matches keeps its own role.
//! Standard speaker names are converted to chat roles.

use serde_json::{Map, Value};

use super::chat::{calls_in_text, conversation, message, object, role_of_alias};
use super::error::{RowProblem, type_name};
use super::sharegpt::CALLS;
use super::{Document, FormatError};
use crate::conversation::{Conversation, Message};
use crate::source::Row;
use crate::template::python::number_text;

/// The recipe's `role_mapping`: a column path for each chat role, in message order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleMapping {
    roles: Vec<(String, RolePath)>,
    content_key: Option<String>,
}

/// Column path of one chat role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolePath {
    /// A column that holds the text.
    Column(String),
    /// The items of a list whose `field` equals `value`.
    Items {
        /// The column of the list.
        list: String,
        /// The item's key that holds the role.
        field: String,
        /// The value of `field` for this role.
        value: String,
    },
}

/// Default keys of an item's text, if `content_key` is not set.
const CONTENT_KEYS: [&str; 4] = ["content", "text", "message", "value"];

impl RoleMapping {
    /// Parses the recipe's `role_mapping` and `content_key`.
    pub fn new(roles: &[(String, String)], content_key: Option<&str>) -> Result<Self, FormatError> {
        if roles.is_empty() {
            let problem = "it maps no role; write {user: question, assistant: response}".to_owned();
            return Err(FormatError::InvalidOption { key: "role_mapping", problem });
        }
        let roles = roles
            .iter()
            .map(|(role, path)| Ok((role.clone(), RolePath::parse(role, path)?)))
            .collect::<Result<_, FormatError>>()?;
        Ok(Self { roles, content_key: content_key.map(str::to_owned) })
    }

    pub(crate) fn describe(&self) -> Vec<String> {
        self.roles.iter().map(|(role, path)| format!("{role} = {path}")).collect()
    }

    /// Returns the columns that the mapping reads.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &str> {
        self.roles.iter().map(|(_, path)| match path {
            RolePath::Column(column) => column.as_str(),
            RolePath::Items { list, .. } => list.as_str(),
        })
    }

    /// Returns true if the mapping names this role.
    pub(crate) fn has_role(&self, role: &str) -> bool {
        self.roles.iter().any(|(own, _)| own == role)
    }

    /// Returns the mapped values that no item of these rows has, each with the values found.
    pub(crate) fn unused(&self, rows: &[Row]) -> Vec<(String, Vec<String>)> {
        let items = self.roles.iter().filter_map(|(role, path)| match path {
            // A standard name for its own role is valid although no item has it.
            RolePath::Items { list, field, value } if role_of_alias(value) != Some(role) => {
                Some((path, list, field, value))
            }
            _ => None,
        });
        let unused = items.filter_map(|(path, list, field, value)| {
            let found = names(rows, list, field);
            (!found.is_empty() && !found.contains(value)).then(|| (path.to_string(), found))
        });
        unused.collect()
    }

    pub(crate) fn parse(&self, row: &Row) -> Result<Document, RowProblem> {
        let mut messages = Vec::new();
        let mut read: Vec<&str> = Vec::new();
        for (role, path) in &self.roles {
            match path {
                RolePath::Column(column) => messages.extend(self.turn_in(row, role, column)?),
                RolePath::Items { list, .. } if read.contains(&list.as_str()) => {}
                RolePath::Items { list, .. } => {
                    read.push(list);
                    messages.extend(self.turns_in(row, list)?);
                }
            }
        }
        if messages.is_empty() {
            let problem = format!("no message at {}", self.describe().join(", "));
            return Err(RowProblem::new(problem, format!("the row holds {}", shape(row))));
        }
        Ok(Document::Conversation(match read.is_empty() {
            true => Conversation::new(messages),
            false => conversation(row, messages)?,
        }))
    }

    fn turn_in(&self, row: &Row, role: &str, column: &str) -> Result<Option<Message>, RowProblem> {
        let text = plain(row.get(column)).map_err(|found| RowProblem::type_of(column, Some(found), "a string"))?;
        Ok(text.map(|text| Message::new(role, text)))
    }

    fn turns_in(&self, row: &Row, list: &str) -> Result<Vec<Message>, RowProblem> {
        let items = match row.get(list) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            other => return Err(RowProblem::type_of(list, other, "a list of objects")),
        };
        let is_known =
            |item: &Value| self.role_of(list, item).is_some() || self.name_of(list, item).is_some_and(is_standard);
        if !items.iter().any(is_known) {
            return Ok(Vec::new());
        }
        items.iter().enumerate().map(|(idx, item)| self.turn(list, idx, item)).collect()
    }

    /// Converts one item to a message. Keeps all keys except the role's and the text's.
    fn turn(&self, list: &str, idx: usize, item: &Value) -> Result<Message, RowProblem> {
        let mut rest = object(list, idx, item.clone())?;
        let Some(name) = self.name_of(list, item) else {
            let fields: Vec<&str> = self.fields_of(list).collect();
            let problem = format!("column `{list}`, item {idx}: there is no text under {}", fields.join(" or "));
            return Err(RowProblem::new(problem, "correct the row, or name the key of the speaker in role_mapping"));
        };
        let content = match self.content_key_of(item) {
            Some(key) => rest.shift_remove(key).unwrap_or_default(),
            None => Value::Null,
        };
        let content = match content {
            content @ (Value::Null | Value::String(_) | Value::Array(_)) => content,
            found => Value::String(number_text(&found).ok_or_else(|| {
                let problem = format!("column `{list}`, item {idx}: the content is {}", type_name(&found));
                RowProblem::new(problem, "name the text's key with content_key")
            })?),
        };
        rest.retain(|key, _| !CONTENT_KEYS.contains(&key.as_str()) && self.fields_of(list).all(|field| field != key));
        let calls = content.as_str().filter(|_| CALLS.contains(&name)).and_then(calls_in_text);
        let mut turn = Map::new();
        match (self.role_of(list, item), calls) {
            (None, Some(calls)) => {
                turn.insert("role".into(), "assistant".into());
                turn.insert("content".into(), "".into());
                turn.insert("tool_calls".into(), calls);
            }
            (role, _) => {
                turn.insert("role".into(), role.or(role_of_alias(name)).unwrap_or(name).into());
                turn.insert("content".into(), content);
            }
        }
        for (key, value) in rest {
            turn.entry(key).or_insert(value);
        }
        message(list, idx, turn)
    }

    /// Returns the fields that hold the role, by the paths into this list.
    fn fields_of<'a>(&'a self, list: &'a str) -> impl Iterator<Item = &'a str> {
        self.roles.iter().filter_map(move |(_, path)| match path {
            RolePath::Items { list: own, field, .. } if own == list => Some(field.as_str()),
            _ => None,
        })
    }

    /// Returns the role value of an item, as spelled in the row.
    fn name_of<'a>(&self, list: &str, item: &'a Value) -> Option<&'a str> {
        self.fields_of(list).find_map(|field| item.get(field)?.as_str())
    }

    fn role_of(&self, list: &str, item: &Value) -> Option<&str> {
        let is_at = |path: &RolePath| match path {
            RolePath::Items { list: own, field, value } => {
                own == list && item.get(field).and_then(Value::as_str) == Some(value)
            }
            RolePath::Column(_) => false,
        };
        self.roles.iter().find(|(_, path)| is_at(path)).map(|(role, _)| role.as_str())
    }

    fn content_key_of(&self, item: &Value) -> Option<&str> {
        let has_text = |key: &&&str| item.get(**key).is_some_and(|content| !content.is_null());
        match &self.content_key {
            Some(key) => Some(key),
            None => CONTENT_KEYS.iter().find(has_text).copied(),
        }
    }
}

impl RolePath {
    fn parse(role: &str, path: &str) -> Result<Self, FormatError> {
        let parts: Vec<&str> = path.split('.').collect();
        match parts.as_slice() {
            [column] if !column.is_empty() => Ok(Self::Column((*column).to_owned())),
            [list, field, value] if parts.iter().all(|part| !part.is_empty()) => {
                Ok(Self::Items { list: (*list).to_owned(), field: (*field).to_owned(), value: (*value).to_owned() })
            }
            _ => Err(FormatError::InvalidOption {
                key: "role_mapping",
                problem: format!(
                    "role {role:?} is at {path:?}, which is neither a column nor list.field.value, \
                     such as messages.role.user"
                ),
            }),
        }
    }
}

impl std::fmt::Display for RolePath {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Self::Column(column) => f.write_str(column),
            Self::Items { list, field, value } => write!(f, "{list}.{field}.{value}"),
        }
    }
}

/// Returns true for a speaker name that has a role without a mapping.
fn is_standard(name: &str) -> bool {
    role_of_alias(name).is_some() || CALLS.contains(&name)
}

/// Returns the distinct values of `field` in the items of `list`.
fn names(rows: &[Row], list: &str, field: &str) -> Vec<String> {
    let items = rows.iter().filter_map(|row| row.get(list)?.as_array()).flatten();
    let mut names: Vec<String> = Vec::new();
    for name in items.filter_map(|item| item.get(field)?.as_str()) {
        if !names.iter().any(|own| own == name) {
            names.push(name.to_owned());
        }
    }
    names
}

/// Converts a string or a number to a string. `None` if missing, null or empty; the value itself if of another type.
fn plain(value: Option<&Value>) -> Result<Option<String>, &Value> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
        Some(other) => number_text(other).map(Some).ok_or(other),
    }
}

/// Lists the row's columns, and the keys of the first item of each list.
fn shape(row: &Row) -> String {
    let columns = row.iter().map(|(column, value)| {
        match value.as_array().and_then(|items| items.first()).and_then(Value::as_object) {
            Some(item) => {
                let keys: Vec<_> = item.keys().map(String::as_str).collect();
                format!("{column} (a list of {{{}}})", keys.join(", "))
            }
            None => column.clone(),
        }
    });
    columns.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_mapped_name_that_no_message_has_is_found() {
        let row = json!({"c": [{"role": "anna", "content": "hi"}, {"role": "assistant", "content": "yo"}]});
        let rows = [row.as_object().unwrap().clone()];
        let roles = [("user", "c.role.ana"), ("system", "c.role.system"), ("assistant", "c.role.assistant")];
        let roles = roles.map(|(role, path)| (role.to_owned(), path.to_owned()));
        let unused = RoleMapping::new(&roles, None).unwrap().unused(&rows);
        assert_eq!(unused, [("c.role.ana".to_owned(), vec!["anna".to_owned(), "assistant".to_owned()])]);
    }
}
