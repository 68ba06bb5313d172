//! A key of another toolkit's file with its value.

use serde_json::Value as Json;

use crate::recipe::{RecipeLocation, RecipeNode, RecipeValue};

/// A key with its value, in the file that is converted.
#[derive(Clone, Debug)]
pub(super) struct ForeignItem<'s> {
    /// Path of the key, such as `optimizer.lr`.
    pub(super) key: String,
    /// Location of the key.
    pub(super) place: RecipeLocation,
    /// The value.
    pub(super) node: &'s RecipeNode,
}

impl<'s> ForeignItem<'s> {
    /// Returns the entries of a map.
    pub(super) fn entries(&self) -> Vec<ForeignItem<'s>> {
        let RecipeValue::Map(entries) = &self.node.value else { return Vec::new() };
        let at = |key: &str| if self.key.is_empty() { key.to_owned() } else { format!("{}.{key}", self.key) };
        entries.iter().map(|entry| ForeignItem { key: at(&entry.key), place: entry.place, node: &entry.node }).collect()
    }

    /// Returns the items of a list. A single value is a list of one.
    pub(super) fn items(&self) -> Vec<ForeignItem<'s>> {
        match &self.node.value {
            RecipeValue::List(items) => {
                let item = |(idx, node): (usize, &'s RecipeNode)| ForeignItem {
                    key: format!("{}.{idx}", self.key),
                    place: node.place,
                    node,
                };
                items.iter().enumerate().map(item).collect()
            }
            _ => vec![self.clone()],
        }
    }

    /// Returns the value of a key of this map, unless it is null.
    pub(super) fn get(&self, key: &str) -> Option<ForeignItem<'s>> {
        let found = self.entries().into_iter().find(|entry| entry.name() == key)?;
        (!found.is_null()).then_some(found)
    }

    /// Returns the last part of the key.
    pub(super) fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    /// Returns the line of the key.
    pub(super) fn line(&self) -> usize {
        match self.place {
            RecipeLocation::File { line, .. } => line,
            RecipeLocation::Argument(_) => 0,
        }
    }

    pub(super) fn is_null(&self) -> bool {
        self.node.value == RecipeValue::Null
    }

    /// Returns true for a map with at least one key.
    pub(super) fn is_section(&self) -> bool {
        matches!(&self.node.value, RecipeValue::Map(entries) if !entries.is_empty())
    }

    pub(super) fn json(&self) -> Json {
        self.node.json()
    }

    pub(super) fn text(&self) -> Option<&'s str> {
        match &self.node.value {
            RecipeValue::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns a number. Python's YAML reads `1e-5` as text, and the toolkits convert it.
    pub(super) fn number(&self) -> Option<f64> {
        match &self.node.value {
            RecipeValue::Int(value) => Some(*value as f64),
            RecipeValue::Float(value) => Some(*value),
            RecipeValue::Text(text) => text.replace('_', "").parse().ok().filter(|number: &f64| number.is_finite()),
            _ => None,
        }
    }

    /// Returns a whole number of at least 0.
    pub(super) fn whole(&self) -> Option<u64> {
        self.number().filter(|number| *number >= 0.0 && number.fract() == 0.0 && *number < 1e15).map(|n| n as u64)
    }

    /// Returns a boolean. Python's YAML reads yes, no, on and off as booleans.
    pub(super) fn flag(&self) -> Option<bool> {
        match &self.node.value {
            RecipeValue::Bool(value) => Some(*value),
            RecipeValue::Text(text) => match text.to_lowercase().as_str() {
                "true" | "yes" | "on" => Some(true),
                "false" | "no" | "off" => Some(false),
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the texts of a list, or of a text with commas.
    pub(super) fn texts(&self) -> Option<Vec<String>> {
        match &self.node.value {
            RecipeValue::List(_) => self.items().iter().map(|item| item.text().map(str::to_owned)).collect(),
            RecipeValue::Text(text) => {
                Some(text.split(',').map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect())
            }
            _ => None,
        }
    }

    /// Returns the value as JSON: a number if it is one, else as written.
    pub(super) fn scalar(&self) -> Json {
        let number = |number: f64| match number.fract() == 0.0 && number.abs() < 1e15 {
            true => Json::from(number as i64),
            false => Json::from(number),
        };
        match (&self.node.value, self.number()) {
            (RecipeValue::Text(_), Some(value)) => number(value),
            _ => self.json(),
        }
    }
}
