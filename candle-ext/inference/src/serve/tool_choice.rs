//! The fields `tools`, `tool_choice` and `parallel_tool_calls`, and the grammar of a forced call.

use std::sync::Arc;

use candlewick_text::template::ToolCallFormat;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use serde_json::{Value as Json, json};

use super::api_error::ApiError;
use super::fields::{Fields, shown};
use super::json_schema::constraining;
use super::reply_grammar::ReplyPart;
use crate::tool_calls::{OfferedFunction, ToolCallParser};

/// Names of the fields.
pub(super) const TOOLS: &str = "tools";
const TOOL_CHOICE: &str = "tool_choice";

/// Tools of a request.
#[derive(Clone, Debug, Default)]
pub(super) struct RequestTools {
    /// Tools for the chat template, if the model may call them.
    pub(super) tools: Option<Vec<Json>>,
    choice: ToolChoice,
    parallel: CallCount,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// The model calls at least one tool.
    Required,
    /// The model calls this function.
    Named(String),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CallCount {
    One,
    #[default]
    Many,
}

/// Largest number of tools of which a call is forced, OpenAI's.
const MAX_TOOLS: usize = 128;

impl RequestTools {
    /// Takes the fields of a request.
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let tools = fields.array(TOOLS)?.filter(|tools| !tools.is_empty());
        let parallel = match fields.boolean("parallel_tool_calls")? {
            Some(false) => CallCount::One,
            _ => CallCount::Many,
        };
        let refused = |problem: String| Err(ApiError::field(TOOL_CHOICE, problem));
        let choice = match fields.take(TOOL_CHOICE) {
            None => ToolChoice::Auto,
            Some(Json::String(choice)) if choice == "auto" => ToolChoice::Auto,
            Some(Json::String(choice)) if choice == "none" => return Ok(Self::default()),
            Some(Json::String(choice)) if choice == "required" => ToolChoice::Required,
            Some(choice) => match choice.pointer("/function/name").and_then(Json::as_str) {
                Some(name) => ToolChoice::Named(name.to_owned()),
                None => {
                    return refused(format!(
                        "tool_choice is {}, expected \"auto\", \"none\", \"required\", or an object with function.name",
                        shown(&choice)
                    ));
                }
            },
        };
        match (&choice, &tools) {
            (ToolChoice::Auto, _) | (ToolChoice::Required, Some(_)) => {}
            (ToolChoice::Named(name), Some(tools)) => {
                if !tools.iter().any(|tool| name_of(tool) == Some(name)) {
                    return refused(format!("tool_choice names the function {name:.80}, which is not in tools"));
                }
            }
            (_, None) => return refused("tool_choice needs tools".to_owned()),
        }
        Ok(Self { tools, choice, parallel })
    }

    /// Returns true if the reply must call a tool.
    pub(super) fn is_forced(&self) -> bool {
        self.choice != ToolChoice::Auto
    }

    /// Returns the parser of a reply in the model's format.
    pub(super) fn parser(&self, format: Option<&Arc<ToolCallFormat>>) -> ToolCallParser {
        let (Some(tools), Some(format)) = (&self.tools, format) else { return ToolCallParser::default() };
        let function = |tool: &Json| {
            let parameters = tool.get("function").unwrap_or(tool).get("parameters").cloned().unwrap_or_default();
            Some(OfferedFunction { name: name_of(tool)?.to_owned(), parameters })
        };
        ToolCallParser::new(Arc::clone(format), tools.iter().filter_map(function).collect())
    }

    /// Returns the grammar of a reply that calls a tool or, if that is not forced, has the format `content`. `None` if any
    /// text is possible.
    pub(super) fn reply(
        &self,
        format: Option<&Arc<ToolCallFormat>>,
        content: Option<&ReplyPart>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<ReplyPart>, ApiError> {
        let Some(tools) = &self.tools else { return Ok(content.cloned()) };
        let is_forced = self.is_forced();
        let Some(format) = format.filter(|format| format.parameters.is_none()) else {
            let problem = "the model's chat template does not show JSON tool calls, which can be forced; use \"auto\"";
            return if is_forced { Err(ApiError::field(TOOL_CHOICE, problem)) } else { Ok(content.cloned()) };
        };
        if !is_forced && content.is_none() {
            return Ok(None);
        }
        if tools.len() > MAX_TOOLS {
            let problem =
                format!("tools has {} tools, at most {MAX_TOOLS} are possible with this request", tools.len());
            return Err(ApiError::field(TOOLS, problem));
        }
        let is_chosen = |tool: &&Json| match &self.choice {
            ToolChoice::Named(name) => name_of(tool) == Some(name),
            _ => true,
        };
        let calls =
            tools.iter().filter(is_chosen).map(|tool| call(tool, format, tokenizer)).collect::<Result<_, _>>()?;
        let calls = self.calls(format, &ReplyPart::OneOf(calls), tokenizer);
        Ok(Some(match content {
            Some(content) if !is_forced => ReplyPart::OneOf(vec![calls, content.clone()]),
            _ => calls,
        }))
    }

    /// Returns the grammar of one call, or of several.
    fn calls(&self, format: &ToolCallFormat, call: &ReplyPart, tokenizer: &Tokenizer) -> ReplyPart {
        let mut parts = vec![literal(&format.opening, tokenizer), call.clone()];
        if let (Some(separator), CallCount::Many, ToolChoice::Auto | ToolChoice::Required) =
            (&format.separator, self.parallel, &self.choice)
        {
            let next = vec![literal(separator, tokenizer), call.clone()];
            parts.push(ReplyPart::Repeated(Box::new(ReplyPart::Sequence(next))));
        }
        parts.push(literal(&format.closing, tokenizer));
        ReplyPart::Sequence(parts)
    }
}

/// Returns the special tokens that a format of tool calls has.
pub(super) fn special_tokens(format: &ToolCallFormat, tokenizer: &Tokenizer) -> Vec<u32> {
    let ToolCallFormat { opening, before_name, between, after_arguments, separator, closing, parameters, .. } = format;
    let of_parameters = parameters.iter().flat_map(|it| [&it.before_name, &it.between, &it.after_value]);
    let texts = [opening, before_name, between, after_arguments, closing].into_iter();
    let texts = texts.chain(separator).chain(of_parameters);
    let ids = texts.flat_map(|text| tokenizer.encode(text, SpecialTokens::Exclude).unwrap_or_default());
    let mut ids: Vec<u32> = ids.filter(|id| tokenizer.is_special(*id)).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Returns the grammar of a call, from its name to its arguments.
fn call(tool: &Json, format: &ToolCallFormat, tokenizer: &Tokenizer) -> Result<ReplyPart, ApiError> {
    let refused = |problem: String| ApiError::field(TOOLS, format!("tools: {problem}"));
    let function = tool.get("function").unwrap_or(tool);
    let Some(name) = name_of(tool) else { return Err(refused("a tool has no function.name".to_owned())) };
    let parameters = function.get("parameters").filter(|value| !value.is_null()).cloned();
    let parameters = constraining(parameters.unwrap_or_else(|| json!({"type": "object", "properties": {}})));
    let parameters = parameters.map_err(|problem| refused(format!("{name:.80}: {problem}")))?;
    let quoted = Json::from(name).to_string();
    let name = if format.keys.is_some() { &quoted[1..quoted.len() - 1] } else { name };
    Ok(ReplyPart::Sequence(vec![
        literal(&format!("{}{name}{}", format.before_name, format.between), tokenizer),
        ReplyPart::Json(parameters),
        literal(&format.after_arguments, tokenizer),
    ]))
}

/// Returns a text with its special tokens.
fn literal(text: &str, tokenizer: &Tokenizer) -> ReplyPart {
    let ids = tokenizer.encode(text, SpecialTokens::Exclude).unwrap_or_default();
    let (mut parts, mut rest) = (Vec::new(), text);
    for id in ids.into_iter().filter(|id| tokenizer.is_special(*id)) {
        let token = tokenizer.id_to_token(id).unwrap_or_default();
        if let Some((before, after)) = rest.split_once(&token) {
            parts.extend([ReplyPart::Text(before.to_owned()), ReplyPart::Token(id)]);
            rest = after;
        }
    }
    parts.push(ReplyPart::Text(rest.to_owned()));
    ReplyPart::Sequence(parts)
}

fn name_of(tool: &Json) -> Option<&str> {
    tool.get("function").unwrap_or(tool).get("name")?.as_str()
}
