//! A field of a task, ready to be read from documents: prompts, targets and choices by lm-eval's rules of resolution.

use serde_json::{Value as Json, json};

use super::builtin::{self, Doc, FieldFunction};
use super::config::Field;
use super::error::ConfigError;
use super::jinja::Template;
use super::python::literal::literal_eval;
use super::python::text::is_digit;

/// A field, compiled.
#[derive(Clone, Debug)]
pub(crate) enum CompiledField {
    Column(String),
    Template(Box<Template>),
    Constant(Json),
    Native(FieldFunction),
}

impl CompiledField {
    /// Compiles a field. A text that is the name of one of `columns` means the column.
    pub(crate) fn new(field: &Field, columns: &Doc) -> Result<Self, ConfigError> {
        Ok(match field {
            Field::Template(text, _) if columns.contains_key(text) => Self::Column(text.clone()),
            Field::Template(text, place) => {
                let template = Template::new(text).map_err(|problem| ConfigError::at(place.clone(), problem))?;
                Self::Template(Box::new(template))
            }
            Field::Constant(value) => Self::Constant(value.clone()),
            Field::Function(function) => Self::Native(builtin::field(function)?),
        })
    }

    /// The prompt: a text, or the number of the right choice where the choices are prompts.
    pub(crate) fn text(&self, doc: &Doc, has_choices: bool) -> Result<Json, String> {
        match self {
            Self::Template(template) => {
                let text = template.render(doc)?;
                Ok(if has_choices && is_digit(&text) { literal_eval(&text)? } else { json!(text) })
            }
            other => other.value(doc),
        }
    }

    /// The target: a text, the number of a choice, or a list of targets.
    pub(crate) fn target(&self, doc: &Doc, has_choices: bool) -> Result<Json, String> {
        let Self::Template(template) = self else { return self.value(doc) };
        let text = template.render(doc)?;
        if has_choices && is_digit(&text) {
            return literal_eval(&text);
        }
        let is_list = text.len() >= 2 && text.starts_with('[') && text.ends_with(']');
        Ok(match literal_eval(&text) {
            Ok(list) if is_list => list,
            _ => json!(text),
        })
    }

    /// The choices.
    pub(crate) fn choices(&self, doc: &Doc) -> Result<Vec<String>, String> {
        let value = match self {
            Self::Template(template) => literal_eval(&template.render(doc)?)?,
            other => other.value(doc)?,
        };
        let texts =
            value.as_array().and_then(|list| list.iter().map(|item| item.as_str().map(str::to_owned)).collect());
        texts.ok_or_else(|| format!("doc_to_choice gives {value}, which is not a list of texts"))
    }

    /// The text of a description or a prefix.
    pub(crate) fn plain(&self, doc: &Doc) -> Result<String, String> {
        match self {
            Self::Template(template) => template.render(doc),
            other => other.value(doc).map(|value| super::python::repr::str(&value)),
        }
    }

    fn value(&self, doc: &Doc) -> Result<Json, String> {
        match self {
            Self::Column(name) => doc.get(name).cloned().ok_or_else(|| format!("there is no column `{name}`")),
            Self::Template(template) => template.render(doc).map(Json::String),
            Self::Constant(value) => Ok(value.clone()),
            Self::Native(function) => function(doc),
        }
    }
}

/// The number of a choice that a target is; Python's truth values are numbers too.
pub(crate) fn as_index(target: &Json) -> Option<i64> {
    match target {
        Json::Bool(value) => Some(i64::from(*value)),
        other => other.as_i64(),
    }
}
