//! Roles taken from columns as the recipe's `role_mapping` says.
//!
//! A path is a column (`question`), or `list.field.value` (`messages.role.user`): the items of a
//! list whose field has that value. Items of one list keep the list's order; a role with more
//! turns than another loses none of them.

use serde_json::Value;

use super::error::{Fault, type_name};
use super::{Document, FormatError};
use crate::conversation::{Conversation, Message};
use crate::source::Row;

/// Where each role's text stands, in the order the roles speak.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleMapping {
    roles: Vec<(String, RolePath)>,
    content_key: Option<String>,
}

/// Where one role's text stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RolePath {
    /// In a column of its own.
    Column(String),
    /// In the items of a list that carry a mark.
    Items {
        /// The list's column.
        list: String,
        /// The item's key that tells the role.
        field: String,
        /// The value it has for this role.
        value: String,
    },
}

/// Keys that hold an item's text when `content_key` does not say.
const CONTENT_KEYS: [&str; 4] = ["content", "text", "message", "value"];

impl RoleMapping {
    /// Reads the recipe's `role_mapping` and `content_key`.
    pub fn new(roles: &[(String, String)], content_key: Option<&str>) -> Result<Self, FormatError> {
        if roles.is_empty() {
            let problem = "it maps no role; write {user: question, assistant: response}".to_owned();
            return Err(FormatError::Request { key: "role_mapping", problem });
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

    /// The columns it reads, for a check against what is there.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &str> {
        self.roles.iter().map(|(_, path)| match path {
            RolePath::Column(column) => column.as_str(),
            RolePath::Items { list, .. } => list.as_str(),
        })
    }

    pub(crate) fn parse(&self, row: &Row) -> Result<Document, Fault> {
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
            return Err(Fault::new(problem, format!("the row holds {}", shape(row))));
        }
        Ok(Document::Conversation(Conversation::new(messages)))
    }

    fn turn_in(&self, row: &Row, role: &str, column: &str) -> Result<Option<Message>, Fault> {
        let text = plain(row.get(column)).map_err(|found| Fault::type_of(column, Some(found), "a text"))?;
        Ok(text.map(|text| Message::new(role, text)))
    }

    fn turns_in(&self, row: &Row, list: &str) -> Result<Vec<Message>, Fault> {
        let items = match row.get(list) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(Value::Array(items)) => items,
            other => return Err(Fault::type_of(list, other, "a list of objects")),
        };
        let mut messages = Vec::new();
        for (idx, item) in items.iter().enumerate() {
            let Some(role) = self.role_of(list, item) else { continue };
            let text = plain(self.content(item)).map_err(|found| {
                let found = type_name(found);
                let problem = format!("column `{list}`, item {idx}: the content is {found}");
                Fault::new(problem, "name the text's key with content_key")
            })?;
            messages.extend(text.map(|text| Message::new(role, text)));
        }
        Ok(messages)
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

    fn content<'a>(&self, item: &'a Value) -> Option<&'a Value> {
        match &self.content_key {
            Some(key) => item.get(key),
            None => CONTENT_KEYS.iter().find_map(|key| item.get(*key).filter(|content| !content.is_null())),
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
            _ => Err(FormatError::Request {
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

/// A text or a number as text; `None` for nothing; the value itself if it is neither.
fn plain(value: Option<&Value>) -> Result<Option<String>, &Value> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
        Some(Value::Number(number)) => Ok(Some(number.to_string())),
        Some(other) => Err(other),
    }
}

/// The row's columns with what the first item of a list holds.
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
