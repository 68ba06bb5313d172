//! Requests of `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::http::StatusCode;
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::format::message_from_fields;
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate, check_variable};
use candlewick_text::tokenizer::SpecialTokens;
use serde_json::{Map, Value as Json};

use super::api_error::ApiError;
use super::fields::Fields;
use super::generation_fields::{GenerationFields, JobSettings, TokenizedPrompt, checked_top, max_tokens, object_of};
use super::job::LogprobOptions;
use super::reply_parser::ReplyParser;
use super::response::{ParsedRequest, ResponseFormat, ResponseKind};
use super::response_format::RESPONSE_FORMAT;
use super::server_state::{ServedModel, ServerState};
use super::tool_choice::{RequestTools, TOOLS};
use crate::lm::with_variables;
use crate::reasoning::{ReasoningFormat, ReasoningParser};

/// Parses a request and renders its prompt.
pub(super) fn parse(mut fields: Fields, state: &ServerState) -> Result<ParsedRequest, ApiError> {
    let generation = GenerationFields::take(&mut fields, state)?;
    let model = &state.models[generation.model];
    let template = template(&mut fields, model)?;
    let tools = RequestTools::take(&mut fields)?;
    let chat = conversation(&mut fields, &tools)?;
    let logprobs = logprobs(&mut fields)?;
    let max_tokens = max_tokens(&mut fields)?;
    for (name, default) in [
        ("echo", false),
        ("add_special_tokens", false),
        ("add_generation_prompt", true),
        ("continue_final_message", false),
        ("include_reasoning", true),
    ] {
        fields.refuse(name, &Json::Bool(default), "remove it")?;
    }
    fields.finish()?;
    let chat = template.with_complete_arguments(template.adapt(&chat));
    refuse_unrendered_parts(&template, &chat)?;
    let text = template.render(&chat, AddGenerationPrompt::Yes);
    let text = text.map_err(|error| ApiError::field("messages", format!("failed to {error}")))?;
    state.check_length(model, &text)?;
    let ids = model.tokenizer.encode(&text, SpecialTokens::Exclude);
    let ids = ids.map_err(|error| ApiError::field("messages", format!("failed to {error}")))?;
    if ids.is_empty() {
        return Err(ApiError::field("messages", "the chat template renders the messages as an empty prompt"));
    }
    let reasoning = match state.reasoning_format {
        ReasoningFormat::Auto => ReasoningParser::for_prompt(&model.tokenizer, &template, &ids)
            .map_err(|error| ApiError::internal(&error.into()))?,
        ReasoningFormat::None => ReasoningParser::default(),
    };
    let (n_prompt, n_max) = (ids.len(), state.n_max(ids.len(), max_tokens)?);
    let prompts = vec![TokenizedPrompt { ids, n_max }];
    let content = generation.response_format.as_ref();
    let reply = tools.reply(model.tool_calls.as_ref(), content, &model.tokenizer)?;
    let field = if content.is_some() && !tools.is_forced() { RESPONSE_FORMAT } else { TOOLS };
    let grammar = reply.map(|reply| model.requested(field, reply.grammar(reasoning.start())));
    let visible = if tools.tools.is_some() { Arc::clone(&model.tool_call_tokens) } else { Arc::default() };
    let settings = JobSettings { visible, logprobs, stop_ids: &model.chat_stop_ids };
    let (jobs, events) = generation.jobs(prompts, settings, state);
    let format = ResponseFormat::new(ResponseKind::Chat, &model.name, logprobs.is_some());
    let parser = ReplyParser { reasoning, tool_calls: tools.parser(model.tool_calls.as_ref()) };
    let (stream, echoes) = (generation.stream, Vec::new());
    Ok(ParsedRequest { jobs, events, format, stream, n_prompt, echoes, parser, grammar })
}

/// Returns the chat template with the request's variables.
fn template(fields: &mut Fields, model: &ServedModel) -> Result<ChatTemplate, ApiError> {
    let variables = fields.object("chat_template_kwargs")?.unwrap_or_default();
    let Some(template) = &model.template else {
        let problem = "the model has no chat template; use /v1/completions, or serve the chat version of the model";
        return Err(ApiError::new(StatusCode::BAD_REQUEST, problem));
    };
    if let Some(problem) = variables.keys().find_map(|name| check_variable(name).err()) {
        return Err(ApiError::field("chat_template_kwargs", problem));
    }
    // A template that has exceeded a limit fails from then on, so each request has its own.
    Ok(with_variables(ChatTemplate::clone(template), &variables))
}

fn conversation(fields: &mut Fields, tools: &RequestTools) -> Result<Conversation, ApiError> {
    let messages = fields.array("messages")?.unwrap_or_default();
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages is missing or empty, expected an array of messages"));
    }
    let messages = messages.into_iter().enumerate().map(|(i, value)| message(i, value));
    let chat = Conversation::new(messages.collect::<Result<Vec<_>, _>>()?);
    if chat.messages.last().is_some_and(Message::is_assistant) {
        let problem = "messages end with the assistant's message, so there is nothing to answer; remove that message";
        return Err(ApiError::field("messages", problem));
    }
    Ok(match &tools.tools {
        Some(tools) => chat.with_tools(Json::Array(tools.clone())),
        None => chat,
    })
}

fn message(i: usize, value: Json) -> Result<Message, ApiError> {
    let fields: Map<String, Json> = object_of("messages", i, value)?;
    message_from_fields(fields).map_err(|problem| ApiError::field("messages", format!("messages[{i}]: {problem}")))
}

/// Refuses a conversation of which the template renders only a part, except for reasoning and texts of earlier answers.
///
/// Some templates omit the text next to a tool call, and clients send it back with each request.
fn refuse_unrendered_parts(template: &ChatTemplate, chat: &Conversation) -> Result<(), ApiError> {
    let mut parts = template.unrendered_parts(chat, AddGenerationPrompt::Yes);
    parts.contents.retain(|idx| !chat.messages[*idx].is_assistant());
    if parts.tools {
        return Err(ApiError::field("tools", "the model's chat template does not render tools; remove them"));
    }
    match parts.describe(chat).first() {
        Some(part) => {
            let problem = format!("the model's chat template does not render {part}; remove it, or change the role");
            Err(ApiError::field("messages", problem))
        }
        None => Ok(()),
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<LogprobOptions>, ApiError> {
    let n_top = fields.count("top_logprobs")?;
    match (fields.boolean("logprobs")?.unwrap_or(false), n_top) {
        (false, Some(1..)) => Err(ApiError::field("top_logprobs", "top_logprobs needs logprobs: true")),
        (false, _) => Ok(None),
        (true, n_top) => {
            let n_top = checked_top("top_logprobs", n_top.unwrap_or(0))?;
            Ok(Some(LogprobOptions { n_top, of_prompt: false }))
        }
    }
}
