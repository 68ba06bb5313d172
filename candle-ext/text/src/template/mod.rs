//! Chat templates: Jinja programs that render a conversation in the format that a model was trained on.
//!
//! Training also needs the spans of the assistant's text, to set the loss mask. A template with `{% generation %}`
//! blocks marks them itself. For all others they are derived from the template's execution. A search for the message
//! content would fail on repeated, trimmed or rewritten messages.
//!
//! 1. `source` inserts a marker at each iteration of each loop.
//! 2. A marker is printed if the loop variable is a message, which assigns each piece of text to a message.
//! 3. `turns` removes the header (the output of `add_generation_prompt`) and white space after the end of turn.
//!
//! Templates may look ahead (`messages[loop.index0 + 1]`), scan all messages first, or copy a message to a variable.
//! An ambiguous result is an error.

mod adapt;
pub mod budget;
mod built_in;
mod clock;
mod environment;
mod examples;
mod fallback;
mod fingerprint;
pub mod limits;
mod markers;
pub mod parser;
mod printed;
pub mod python;
mod source;
mod tool_calls;
mod turns;
mod unrendered;

use std::error::Error as _;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use minijinja::{Environment, Value};
use serde_json::{Map, Value as Json};

use crate::conversation::{Conversation, Message};
use budget::RenderFailure;
use markers::Turn;
use turns::{MessageText, TurnDelimiters};

pub use built_in::{BuiltInTemplate, ChatTemplateSource};
pub use clock::Clock;
pub(crate) use printed::PrintedChat;
pub use tool_calls::{ToolCallFormat, ToolCallKeys, ToolCallParameters};
pub use turns::TurnError;
pub use unrendered::UnrenderedParts;

/// Compiled chat template with its variables.
#[derive(Clone)]
pub struct ChatTemplate {
    name: String,
    source: String,
    environment: Arc<Environment<'static>>,
    /// Reason why an earlier rendering was aborted. Later renderings then fail at once.
    given_up: OnceLock<String>,
    variables: Map<String, Json>,
    has_generation: bool,
    /// Text around the assistant's words, or the reason why example chats do not show it.
    delimiters: OnceLock<Result<TurnDelimiters, TemplateError>>,
    /// `None` if the template fails on the example chat.
    renders_reasoning: OnceLock<Option<bool>>,
    with_tools: Option<Box<ChatTemplate>>,
}

/// Option to append the generation prompt, as `add_generation_prompt` in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddGenerationPrompt {
    /// The text ends with the last message.
    No,
    /// The text ends with the generation prompt, such as `<|im_start|>assistant`.
    Yes,
}

/// Rendered conversation with the spans of the assistant's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole text.
    pub text: String,
    /// Spans of the assistant's text: ordered, disjoint, not empty.
    pub spans: Vec<MessageSpan>,
}

/// Span of text of one message: what the assistant writes, or the content of another role's message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageSpan {
    /// Index of the message. A message may have several spans or none. `None` for `{% generation %}` blocks outside
    /// of any loop over the messages.
    pub message: Option<usize>,
    /// Byte range in the text.
    pub range: Range<usize>,
}

/// Error of a chat template.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TemplateError {
    /// The source is not valid Jinja.
    #[error("parse chat template {name}, line {line}: {message}")]
    Syntax {
        /// File or argument of the template.
        name: String,
        /// Line in the template, from 1.
        line: usize,
        /// The syntax error.
        message: String,
    },
    /// There is no memory to parse the template.
    #[error("parse chat template {name}: {source}")]
    Memory {
        /// File or argument of the template.
        name: String,
        /// Error of the thread that did not start.
        source: parser::ThreadSpawnError,
    },
    /// The template fails on this conversation, or calls `raise_exception`.
    #[error("render chat template {name}, line {line}: {message}")]
    Render {
        /// File or argument of the template.
        name: String,
        /// Line in the template, from 1.
        line: usize,
        /// Message of the template engine.
        message: String,
    },
    /// The rendering exceeds a limit on time or memory.
    #[error("render chat template {name}: {reason}; look for loops or texts that grow without end")]
    LimitExceeded {
        /// File or argument of the template.
        name: String,
        /// The exceeded limit.
        reason: String,
    },
    /// The conversation has no messages.
    #[error("render chat template {name}: the conversation has no messages")]
    Empty {
        /// File or argument of the template.
        name: String,
    },
    /// The assistant's text cannot be located in the rendered text.
    #[error(
        "find the assistant's text in what chat template {name} prints: {reason}. Put \
         {{% generation %}} ... {{% endgeneration %}} around it in the template"
    )]
    AssistantTextNotFound {
        /// File or argument of the template.
        name: String,
        /// Reason why the text cannot be located.
        reason: TurnError,
    },
    /// The contents of messages of other roles cannot be located in the rendered text.
    #[error(
        "find the contents of messages in what chat template {name} prints: {reason}. Train on the assistant only \
         (remove `roles_to_train`), or use a template that prints contents unchanged"
    )]
    ContentNotFound {
        /// File or argument of the template.
        name: String,
        /// Reason why the contents cannot be located.
        reason: TurnError,
    },
}

impl TemplateError {
    /// Adds a cause to the message of the template engine.
    fn because(self, cause: Option<String>) -> Self {
        match (self, cause) {
            (Self::Render { name, line, message }, Some(cause)) => {
                Self::Render { name, line, message: format!("{cause} ({message})") }
            }
            (error, _) => error,
        }
    }
}

const TEXT: &str = "text";
/// Name of the template with marks at turns and generation blocks.
const MARKED: &str = "marked";
/// Name of the template with marks at generation blocks only.
const BLOCKS: &str = "blocks";

/// Variables that every rendering sets. A user's value would be overwritten.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "add_generation_prompt", markers::FENCE];

/// Rejects the name of a variable that every rendering sets. The error completes "failed to start: ".
pub fn check_variable(name: &str) -> Result<(), String> {
    match OWN_VARIABLES.contains(&name) {
        false => Ok(()),
        true => {
            Err(format!("{name} is set for each conversation by the program; give the template's own variables only"))
        }
    }
}

impl ChatTemplate {
    /// Compiles a template. Errors show `name`: its file or argument.
    pub fn new(name: impl Into<String>, source: &str) -> Result<Self, TemplateError> {
        let name = name.into();
        // Jinja converts every kind of line break to "
        // ".
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        if source.len() > limits::MAX_SOURCE {
            let message = format!("it has {} bytes, over the limit of {}", source.len(), limits::MAX_SOURCE);
            return Err(TemplateError::Syntax { name, line: 1, message });
        }
        let has_generation = source::has_generation(&source);
        let mut environment = environment::environment(Clock::System);
        let unusable = |error: minijinja::Error| {
            let name = name.clone();
            match error.source().and_then(|source| source.downcast_ref::<parser::ThreadSpawnError>()) {
                Some(source) => TemplateError::Memory { name, source: source.clone() },
                None => TemplateError::Syntax { name, line: error.line().unwrap_or(1), message: describe(&error) },
            }
        };
        for (text, source) in [
            (TEXT, source::plain(&source)),
            (MARKED, source::mark_generation_blocks_and_loops(&source)),
            (BLOCKS, source::mark_generation_blocks(&source)),
        ] {
            parser::add_template(&mut environment, text, source).map_err(unusable)?;
        }
        Ok(Self {
            name,
            source,
            environment: Arc::new(environment),
            given_up: OnceLock::new(),
            variables: Map::new(),
            has_generation,
            delimiters: OnceLock::new(),
            renders_reasoning: OnceLock::new(),
            with_tools: None,
        })
    }

    /// Sets the template for conversations with tool definitions.
    #[must_use]
    pub fn with_tool_use(self, template: ChatTemplate) -> Self {
        Self { with_tools: Some(Box::new(template)), ..self }
    }

    /// Sets a template variable: `bos_token`, `enable_thinking`, `documents`, ...
    #[must_use]
    pub fn with_variable(mut self, name: impl Into<String>, value: impl Into<Json>) -> Self {
        let (name, value) = (name.into(), value.into());
        let with_tools = self.with_tools.take();
        self.with_tools = with_tools.map(|it| Box::new(it.with_variable(name.clone(), value.clone())));
        self.variables.insert(name, value);
        self.delimiters = OnceLock::new();
        self.renders_reasoning = OnceLock::new();
        self
    }

    /// Returns the template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Sets the clock of `strftime_now`.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.with_tools = self.with_tools.take().map(|it| Box::new(it.with_clock(clock)));
        environment::set_clock(Arc::make_mut(&mut self.environment), clock);
        self
    }

    /// File or argument of the template.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns true if the template has `{% generation %}` blocks.
    pub fn has_generation_blocks(&self) -> bool {
        self.has_generation
    }

    /// Renders a conversation.
    ///
    /// If the template fails, retries with parsed tool call arguments, and with empty strings for missing contents.
    pub fn render(&self, chat: &Conversation, ending: AddGenerationPrompt) -> Result<String, TemplateError> {
        Ok(self.print(chat, ending)?.text)
    }

    /// Renders a conversation and locates the assistant's text.
    pub fn render_turns(&self, chat: &Conversation) -> Result<RenderedChat, TemplateError> {
        let printed = self.print(chat, AddGenerationPrompt::No)?;
        Ok(RenderedChat { spans: printed.turns()?, text: printed.text })
    }

    fn for_chat(&self, chat: &Conversation) -> &ChatTemplate {
        match &self.with_tools {
            Some(template) if chat.tools.is_some() => template,
            _ => self,
        }
    }

    fn spans(&self, chat: &Conversation, text: &str) -> Result<Vec<MessageSpan>, TemplateError> {
        let marks = |template| self.marks(template, chat, AddGenerationPrompt::No, text);
        if !self.has_generation {
            return self.spans_by_turn(chat, text, &turns::pieces(&marks(MARKED)?));
        }
        // Generation blocks are valid even if the turns cannot be located.
        let marks = marks(MARKED).or_else(|_| marks(BLOCKS))?;
        let blocks = turns::generation_spans(&marks).map_err(|reason| self.unclear(reason))?;
        let pieces = turns::pieces(&marks);
        Ok(blocks.into_iter().map(|range| MessageSpan { message: turns::owner(&pieces, &range), range }).collect())
    }

    fn spans_by_turn(
        &self,
        chat: &Conversation,
        text: &str,
        pieces: &[MessageText],
    ) -> Result<Vec<MessageSpan>, TemplateError> {
        let delimiters = self.delimiters(chat)?;
        let mut spans: Vec<MessageSpan> = Vec::new();
        for (message, _) in chat.messages.iter().enumerate().filter(|(_, m)| m.is_assistant()) {
            let piece = match piece_of(pieces, message) {
                Err(TurnError::NoText { .. }) if chat.messages[message].is_empty_answer() => continue,
                piece => piece.map_err(|reason| self.unclear(reason))?,
            };
            let range = match delimiters.written(text, piece) {
                Err(TurnError::NoText { .. }) if chat.messages[message].is_empty_answer() => continue,
                written => written.map_err(|reason| self.unclear(reason))?,
            };
            if spans.last().is_some_and(|last| last.range.end > range.start) {
                return Err(self.unclear(TurnError::NotContiguous { message }));
            }
            spans.push(MessageSpan { message: Some(message), range });
        }
        Ok(spans)
    }

    /// Renders the conversation with markers, removes them and returns their positions.
    fn marks(
        &self,
        template: &'static str,
        chat: &Conversation,
        ending: AddGenerationPrompt,
        text: &str,
    ) -> Result<Vec<(usize, markers::Marker)>, TemplateError> {
        let disturbed = || self.unclear(TurnError::OutputChangedByMarkers);
        let fence = markers::fence(text).ok_or_else(disturbed)?;
        let marked = self.run(template, self.context(chat, ending, Some(fence)))?;
        let (unmarked, marks) = markers::extract(&marked, fence).ok_or_else(disturbed)?;
        if unmarked == text { Ok(marks) } else { Err(disturbed()) }
    }

    fn context(&self, chat: &Conversation, ending: AddGenerationPrompt, fence: Option<char>) -> Value {
        let turn = |(index, message): (usize, &Message)| {
            let fields = python::from_json(&Json::Object(fields_for_template(message.fields())));
            Value::from_object(Turn { index, fields })
        };
        let messages: Vec<Value> = chat.messages.iter().enumerate().map(turn).collect();
        let own = [
            ("messages", Value::from(messages)),
            ("tools", chat.tools.as_ref().map_or_else(|| Value::from(()), python::from_json)),
            ("add_generation_prompt", Value::from(ending == AddGenerationPrompt::Yes)),
        ];
        let documents = ("documents", Value::from(()));
        let extra = self.variables.iter().map(|(name, v)| (name.as_str(), python::from_json(v)));
        let fence = fence.map(|fence| (markers::FENCE, Value::from(fence.to_string())));
        Value::from_pairs([documents].into_iter().chain(extra).chain(own).chain(fence))
    }

    fn run(&self, template: &'static str, context: Value) -> Result<String, TemplateError> {
        if let Some(reason) = self.given_up.get() {
            return Err(self.over_budget(reason));
        }
        budget::render(&self.environment, template, context).map_err(|failure| match failure {
            RenderFailure::LimitExceeded(reason) => self.over_budget(self.given_up.get_or_init(|| reason)),
            RenderFailure::Template(error) if error.kind() == minijinja::ErrorKind::OutOfFuel => {
                self.over_budget(self.given_up.get_or_init(|| describe(&error)))
            }
            RenderFailure::Template(error) => TemplateError::Render {
                name: self.name.clone(),
                line: error.line().unwrap_or(1),
                message: describe(&error),
            },
        })
    }

    fn over_budget(&self, reason: &str) -> TemplateError {
        TemplateError::LimitExceeded { name: self.name.clone(), reason: reason.to_owned() }
    }

    fn unclear(&self, reason: TurnError) -> TemplateError {
        TemplateError::AssistantTextNotFound { name: self.name.clone(), reason }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("name", &self.name)
            .field("variables", &self.variables)
            .finish_non_exhaustive()
    }
}

fn piece_of(pieces: &[MessageText], message: usize) -> Result<&MessageText, TurnError> {
    let mut own = pieces.iter().filter(|piece| piece.message == message);
    match (own.next(), own.next()) {
        (None, _) => Err(TurnError::NoText { message }),
        (Some(piece), None) => Ok(piece),
        (Some(_), Some(_)) => Err(TurnError::NotContiguous { message }),
    }
}

/// Returns the fields of a message as transformers passes them to a template.
///
/// Omits null keys. Passes the reasoning, which has three names, under the two that templates read.
fn fields_for_template(fields: &Map<String, Json>) -> Map<String, Json> {
    let own = fields.iter().filter(|(_, value)| !value.is_null());
    let own = own.map(|(key, value)| (key.clone(), value.clone()));
    let names = ["reasoning_content", "thinking", "reasoning"];
    let reasoning = names.iter().filter_map(|name| fields.get(*name)).find(|value| !value.is_null());
    let Some(reasoning) = reasoning else { return own.collect() };
    let thinking = [("thinking".to_owned(), reasoning.clone())];
    let mut aliased: Map<String, Json> = thinking.into_iter().chain(own).collect();
    aliased.insert("reasoning_content".into(), reasoning.clone());
    aliased
}

fn describe(error: &minijinja::Error) -> String {
    if let Some(limit) = limits::explain(error) {
        return limit;
    }
    match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    }
}
