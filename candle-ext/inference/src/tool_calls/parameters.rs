//! Parameters of a call as texts between tags, which become a JSON object.
//!
//! The format is that of Qwen3-Coder: `<parameter=city>`, a line break, the value, a line break and `</parameter>`.

use candlewick_text::long_integer;
use candlewick_text::template::{ToolCallFormat, ToolCallParameters};
use serde_json::{Map, Value as Json};

/// Function that a request offers.
#[derive(Clone, Debug, PartialEq)]
pub struct OfferedFunction {
    /// Name.
    pub name: String,
    /// JSON schema of the arguments.
    pub parameters: Json,
}

/// Reader of the parameters of one call.
#[derive(Clone, Debug)]
pub(super) struct ParameterReader {
    /// Schemas of the parameters by name.
    schemas: Map<String, Json>,
    n_read: usize,
    state: ReaderState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ReaderState {
    /// Text between parameters.
    Between,
    /// Value of a parameter with this name, of which nothing is returned yet.
    Value(String),
    /// Rest of a string.
    Text,
}

/// Progress of the reader.
pub(super) enum ParameterStep {
    /// The next step may read more of the text.
    Continue,
    /// More text is needed.
    Wait,
    /// The call has ended.
    End,
}

/// Beginning of a text compared with a part.
enum PartMatch {
    Whole,
    /// The text is a beginning of the part.
    Partial,
    None,
}

impl ParameterReader {
    /// Creates the reader of a call of a function.
    pub(super) fn new(functions: &[OfferedFunction], name: &str) -> Self {
        let function = functions.iter().find(|function| function.name == name);
        let properties = function.and_then(|function| function.parameters.get("properties")?.as_object());
        Self { schemas: properties.cloned().unwrap_or_default(), n_read: 0, state: ReaderState::Between }
    }

    /// Reads on in the held text, and adds to the JSON text of the arguments.
    pub(super) fn step(&mut self, format: &ToolCallFormat, held: &mut String, arguments: &mut String) -> ParameterStep {
        let Some(parameters) = &format.parameters else { return ParameterStep::End };
        let ends = [parameters.after_value.trim(), parameters.before_name.trim(), format.after_arguments.trim()];
        match std::mem::replace(&mut self.state, ReaderState::Between) {
            ReaderState::Between => self.read_tag(parameters, format.after_arguments.trim(), held, arguments),
            ReaderState::Value(name) => self.read_value(name, ends, held, arguments),
            ReaderState::Text => self.read_text(ends, held, arguments),
        }
    }

    /// Reads the tag of the next parameter, or the end of the call.
    fn read_tag(
        &mut self,
        parameters: &ToolCallParameters,
        end_of_call: &str,
        held: &mut String,
        arguments: &mut String,
    ) -> ParameterStep {
        *held = held.trim_start().to_owned();
        let opening = parameters.before_name.trim();
        let between = parameters.between.trim();
        match (part_at(held, opening), part_at(held, end_of_call)) {
            (PartMatch::Whole, _) => {
                let Some((name, rest)) = held[opening.len()..].split_once(between) else { return ParameterStep::Wait };
                self.state = ReaderState::Value(name.trim().to_owned());
                *held = rest.to_owned();
                ParameterStep::Continue
            }
            (_, PartMatch::Whole) => {
                held.drain(..end_of_call.len());
                self.end(arguments)
            }
            (PartMatch::Partial, _) | (_, PartMatch::Partial) => ParameterStep::Wait,
            // The model has omitted the end.
            (PartMatch::None, PartMatch::None) => self.end(arguments),
        }
    }

    fn end(&self, arguments: &mut String) -> ParameterStep {
        *arguments += if self.n_read == 0 { "{}" } else { "}" };
        ParameterStep::End
    }

    fn read_value(
        &mut self,
        name: String,
        ends: [&str; 3],
        held: &mut String,
        arguments: &mut String,
    ) -> ParameterStep {
        let is_text = is_text(self.schemas.get(&name));
        // The line break after the tag is not a part of the value.
        let value = held.strip_prefix('\n').unwrap_or(held);
        let end = end_of_value(value, ends);
        if held.is_empty() || (!is_text && end.is_none()) {
            self.state = ReaderState::Value(name);
            return ParameterStep::Wait;
        }
        *arguments += if self.n_read == 0 { "{" } else { ", " };
        *arguments += &format!("{}: ", Json::from(name.as_str()));
        self.n_read += 1;
        let value = value.to_owned();
        if is_text {
            arguments.push('"');
            (self.state, *held) = (ReaderState::Text, value);
            return ParameterStep::Continue;
        }
        let n_bytes = end.unwrap_or(value.len());
        let written = value[..n_bytes].strip_suffix('\n').unwrap_or(&value[..n_bytes]);
        *arguments += &long_integer::to_text(&typed_value(written, self.schemas.get(&name)).to_string());
        *held = after_value(&value[n_bytes..], ends[0]);
        ParameterStep::Continue
    }

    /// Returns the part of a string that is certain.
    fn read_text(&mut self, ends: [&str; 3], held: &mut String, arguments: &mut String) -> ParameterStep {
        let end = end_of_value(held, ends);
        let n_certain = end.unwrap_or_else(|| {
            let may_be_end = |at: &usize| {
                let rest = held[*at..].strip_prefix('\n').unwrap_or(&held[*at..]);
                ends.iter().any(|end| end.starts_with(rest))
            };
            held.char_indices().map(|(at, _)| at).find(may_be_end).unwrap_or(held.len())
        });
        let mut text = &held[..n_certain];
        if end.is_some() {
            text = text.strip_suffix('\n').unwrap_or(text);
        }
        let quoted = Json::from(text).to_string();
        *arguments += &quoted[1..quoted.len() - 1];
        if end.is_some() {
            arguments.push('"');
            *held = after_value(&held[n_certain..], ends[0]);
            return ParameterStep::Continue;
        }
        held.drain(..n_certain);
        self.state = ReaderState::Text;
        ParameterStep::Wait
    }
}

fn part_at(text: &str, part: &str) -> PartMatch {
    match (text.starts_with(part), part.starts_with(text)) {
        (true, _) => PartMatch::Whole,
        (false, true) => PartMatch::Partial,
        (false, false) => PartMatch::None,
    }
}

/// Returns the position of the first end in a text. A model may omit the end of a parameter.
fn end_of_value(text: &str, ends: [&str; 3]) -> Option<usize> {
    ends.iter().filter_map(|end| text.find(end)).min()
}

/// Returns a text without the end of a value.
fn after_value(text: &str, end: &str) -> String {
    text.strip_prefix(end).unwrap_or(text).to_owned()
}

/// Returns true if a value can only be a string. That is so without a schema, as in vLLM.
fn is_text(schema: Option<&Json>) -> bool {
    let types = types(schema);
    types.is_empty() || types == ["string"]
}

/// Returns the types that a schema lists, of alternatives and enumerated values too.
fn types(schema: Option<&Json>) -> Vec<&str> {
    let Some(schema) = schema else { return Vec::new() };
    let mut found: Vec<&str> = match schema.get("type") {
        Some(Json::String(name)) => vec![name],
        Some(Json::Array(names)) => names.iter().filter_map(Json::as_str).collect(),
        _ => schema.get("enum").and_then(Json::as_array).into_iter().flatten().map(type_of).collect(),
    };
    for key in ["anyOf", "oneOf"] {
        let schemas = schema.get(key).and_then(Json::as_array).into_iter().flatten();
        found.extend(schemas.flat_map(|schema| types(Some(schema))));
    }
    found.dedup();
    found
}

/// Returns the name of a value's type.
fn type_of(value: &Json) -> &'static str {
    match value {
        value if long_integer::digits(value).is_some() => "integer",
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(number) if number.is_f64() => "number",
        Json::Number(_) => "integer",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

/// Returns a value of one of the schema's types; else the text. Templates print `True` and `None` as Python does.
fn typed_value(text: &str, schema: Option<&Json>) -> Json {
    let types = types(schema);
    let word = text.trim();
    let lower = word.to_ascii_lowercase();
    let value = match lower.as_str() {
        "true" | "false" => Ok(Json::from(lower == "true")),
        "null" | "none" => Ok(Json::Null),
        _ => long_integer::parse(word),
    };
    let is_allowed = |value: &Json| {
        let name = type_of(value);
        types.contains(&name) || (name == "integer" && types.contains(&"number"))
    };
    value.ok().filter(|value| !value.is_string() && is_allowed(value)).unwrap_or_else(|| Json::from(text))
}
