//! Compiled task fields (`doc_to_text`, `doc_to_target`, `doc_to_choice`), resolved by lm-eval's rules.

use serde_json::{Value as Json, json};

use super::builtin::{self, Doc, FieldFunction};
use super::config::PromptField;
use super::error::ConfigError;
use super::jinja::Template;
use super::python::literal::literal_eval;
use super::python::text::is_digit;

/// Compiled field of a task.
#[derive(Clone, Debug)]
pub(crate) enum CompiledField {
    Column(String),
    Template(Box<Template>),
    Constant(Json),
    Native(FieldFunction),
}

impl CompiledField {
    /// Compiles a field. A string equal to one of `columns` reads that column.
    pub(crate) fn new(field: &PromptField, columns: &Doc) -> Result<Self, ConfigError> {
        Ok(match field {
            PromptField::Template(text, _) if columns.contains_key(text) => Self::Column(text.clone()),
            PromptField::Template(text, place) => {
                let template = Template::new(text).map_err(|problem| ConfigError::at(place.clone(), problem))?;
                Self::Template(Box::new(template))
            }
            PromptField::Constant(value) => Self::Constant(value.clone()),
            PromptField::Function(function) => Self::Native(builtin::field(function)?),
        })
    }

    /// Returns `doc_to_text`: the prompt, or the index of the correct choice.
    pub(crate) fn text(&self, doc: &Doc, has_choices: bool) -> Result<Json, String> {
        match self {
            Self::Template(template) => {
                let text = template.render(doc)?;
                Ok(if has_choices && is_digit(&text) { literal_eval(&text)? } else { json!(text) })
            }
            other => other.value(doc),
        }
    }

    /// Returns `doc_to_target`: a text, a choice index, or a list of targets.
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

    /// Returns the choices of a document (`doc_to_choice`).
    pub(crate) fn choices(&self, doc: &Doc) -> Result<Vec<String>, String> {
        let value = match self {
            Self::Template(template) => literal_eval(&template.render(doc)?)?,
            other => other.value(doc)?,
        };
        let texts =
            value.as_array().and_then(|list| list.iter().map(|item| item.as_str().map(str::to_owned)).collect());
        texts.ok_or_else(|| format!("doc_to_choice gives {value}, which is not a list of texts"))
    }

    /// Renders the field as plain text.
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

/// Returns the choice index of a target. Python booleans count as 0 and 1.
pub(crate) fn as_index(target: &Json) -> Option<i64> {
    match target {
        Json::Bool(value) => Some(i64::from(*value)),
        other => other.as_i64(),
    }
}
