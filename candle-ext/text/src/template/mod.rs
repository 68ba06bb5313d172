//! Chat templates: Jinja programs that print a conversation the way a model was taught to read it.
//!
//! Besides the text we need to know which part of it the model wrote, for that is what it learns
//! from. A template with `{% generation %}` blocks says so itself. For the others (nearly all) the
//! answer comes from how the template runs, never from searching for the content, which fails on
//! repeated, trimmed or rewritten messages: `source` puts a marker at each step of each loop, a
//! marker speaks if the loop stands at a message, and so each piece of text has its message.
//! Unlike recording which message was read last, this is not misled by templates that look ahead
//! (`messages[loop.index0 + 1]`), scan all messages first, or read a message into a variable.
//! `turns` then takes off the header (what `add_generation_prompt` prints) and the white space
//! behind the end of turn. What does not come out clearly is an error, never a guess.

pub mod budget;
mod clock;
mod environment;
mod fallback;
mod fingerprint;
mod json;
pub mod limits;
mod markers;
mod source;
mod tool_arguments;
mod turns;
mod unrendered;

use std::borrow::Cow;
use std::error::Error as _;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use minijinja::value::Serde;
use minijinja::{Environment, Value};
use serde_json::{Map, Value as Json};

use crate::conversation::{Conversation, Message};
use budget::RenderFailure;
use markers::Turn;
use turns::{Piece, Probe, Prompts, TurnDelimiters};

pub use clock::Clock;
pub use turns::TurnError;
pub use unrendered::UnrenderedParts;

/// A compiled chat template with the values it prints besides the messages.
pub struct ChatTemplate {
    name: String,
    source: String,
    environment: Arc<Environment<'static>>,
    /// The reason why a rendering was given up. No further one is tried.
    given_up: OnceLock<String>,
    variables: Map<String, Json>,
    has_generation: bool,
    delimiters: OnceLock<TurnDelimiters>,
    renders_reasoning: OnceLock<bool>,
    with_tools: Option<Box<ChatTemplate>>,
}

/// How a rendering ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddGenerationPrompt {
    /// With the last message.
    No,
    /// With the words that make the model speak (`add_generation_prompt`).
    Yes,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    /// The whole text.
    pub text: String,
    /// The bytes of it that the model writes: in order, disjoint, none of them empty.
    pub spans: Vec<AssistantSpan>,
}

/// Text that the model writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssistantSpan {
    /// Which message's turn it stands in, from 0. A turn may have several spans, or none. Not known
    /// of `{% generation %}` blocks outside of any loop over the messages.
    pub message: Option<usize>,
    /// Where it is in the text.
    pub range: Range<usize>,
}

/// Why a template could not be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TemplateError {
    /// It is not Jinja.
    #[error("parse chat template {name}, line {line}: {message}")]
    Syntax {
        /// The file or argument that holds the template.
        name: String,
        /// Its line, from 1.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// There is no memory to parse it.
    #[error("parse chat template {name}: {source}")]
    Memory {
        /// The file or argument that holds the template.
        name: String,
        /// The thread that did not start.
        source: limits::ThreadSpawnError,
    },
    /// It stopped at this conversation: a mistake, or its own `raise_exception`.
    #[error("render chat template {name}, line {line}: {message}")]
    Render {
        /// The file or argument that holds the template.
        name: String,
        /// Its line, from 1.
        line: usize,
        /// What it said.
        message: String,
    },
    /// It takes too much time or memory.
    #[error("render chat template {name}: {reason}; look for loops or texts that grow without end")]
    LimitExceeded {
        /// The file or argument that holds the template.
        name: String,
        /// The limit that one rendering exceeded.
        reason: String,
    },
    /// There is nothing to render.
    #[error("render chat template {name}: the conversation has no messages")]
    Empty {
        /// The file or argument that holds the template.
        name: String,
    },
    /// The text is there, but not which part of it is the assistant's.
    #[error(
        "find the assistant's text in what chat template {name} prints: {reason}. Put \
         {{% generation %}} ... {{% endgeneration %}} around it in the template"
    )]
    AssistantTextNotFound {
        /// The file or argument that holds the template.
        name: String,
        /// What was expected.
        reason: TurnError,
    },
}

impl TemplateError {
    /// Adds the cause to what the template engine says.
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
/// With marks at turns and at generation blocks.
const MARKED: &str = "marked";
/// With marks at generation blocks only.
const BLOCKS: &str = "blocks";

/// Variables that every rendering sets: a value given for one would be lost.
const OWN_VARIABLES: [&str; 4] = ["messages", "tools", "add_generation_prompt", markers::FENCE];

/// Refuses the name of a variable that renderings set themselves. The error completes "failed to start: ".
pub fn check_variable(name: &str) -> Result<(), String> {
    match OWN_VARIABLES.contains(&name) {
        false => Ok(()),
        true => {
            Err(format!("{name} is set for each conversation by the program; give the template's own variables only"))
        }
    }
}

impl ChatTemplate {
    /// Compiles a template. `name` stands in errors: say where it is from.
    pub fn new(name: impl Into<String>, source: &str) -> Result<Self, TemplateError> {
        let name = name.into();
        // Jinja reads every kind of line end as "\n".
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        if source.len() > limits::MAX_SOURCE {
            let message = format!("it has {} bytes, over the limit of {}", source.len(), limits::MAX_SOURCE);
            return Err(TemplateError::Syntax { name, line: 1, message });
        }
        let has_generation = source::has_generation(&source);
        let mut environment = environment::environment(Clock::System);
        let unusable = |error: minijinja::Error| {
            let name = name.clone();
            match error.source().and_then(|source| source.downcast_ref::<limits::ThreadSpawnError>()) {
                Some(source) => TemplateError::Memory { name, source: source.clone() },
                None => TemplateError::Syntax { name, line: error.line().unwrap_or(1), message: describe(&error) },
            }
        };
        for (text, source) in [
            (TEXT, source::plain(&source)),
            (MARKED, source::with_loop_marks(&source)),
            (BLOCKS, source::with_generation_marks(&source)),
        ] {
            limits::add_template(&mut environment, text, source).map_err(unusable)?;
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

    /// Uses another template for conversations that offer tools.
    #[must_use]
    pub fn with_tool_use(self, template: ChatTemplate) -> Self {
        Self { with_tools: Some(Box::new(template)), ..self }
    }

    /// Gives the template a variable: `bos_token`, `enable_thinking`, `documents`, ...
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

    /// Returns the template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Lets `strftime_now` tell this clock's time.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.with_tools = self.with_tools.take().map(|it| Box::new(it.with_clock(clock)));
        environment::set_clock(Arc::make_mut(&mut self.environment), clock);
        self
    }

    /// The file or argument that holds the template.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the template marks the assistant's text itself.
    pub fn has_generation_blocks(&self) -> bool {
        self.has_generation
    }

    /// Prints a conversation as it is. A template that fails on it is given the objects that arguments of tool
    /// calls mean, and empty texts for missing contents.
    pub fn render(&self, chat: &Conversation, ending: AddGenerationPrompt) -> Result<String, TemplateError> {
        Ok(self.print(chat, ending)?.1)
    }

    /// Prints a conversation and says which part of it the assistant wrote.
    pub fn render_turns(&self, chat: &Conversation) -> Result<RenderedChat, TemplateError> {
        let (chat, text) = self.print(chat, AddGenerationPrompt::No)?;
        let spans = if chat.has_assistant() { self.for_chat(&chat).spans(&chat, &text)? } else { Vec::new() };
        Ok(RenderedChat { text, spans })
    }

    /// The text, and the conversation as the template could read it.
    fn print<'a>(
        &self,
        chat: &'a Conversation,
        ending: AddGenerationPrompt,
    ) -> Result<(Cow<'a, Conversation>, String), TemplateError> {
        let template = self.for_chat(chat);
        if chat.messages.is_empty() {
            return Err(TemplateError::Empty { name: template.name.clone() });
        }
        let error = match template.run(TEXT, template.context(chat, ending, None)) {
            Ok(text) => return Ok((Cow::Borrowed(chat), text)),
            Err(error @ TemplateError::LimitExceeded { .. }) => return Err(error),
            Err(error) => error,
        };
        for form in fallback::forms(chat) {
            if let Ok(text) = template.run(TEXT, template.context(&form, ending, None)) {
                return Ok((Cow::Owned(form), text));
            }
        }
        Err(error.because(fallback::odd_content(chat)))
    }

    fn for_chat(&self, chat: &Conversation) -> &ChatTemplate {
        match &self.with_tools {
            Some(template) if chat.tools.is_some() => template,
            _ => self,
        }
    }

    fn spans(&self, chat: &Conversation, text: &str) -> Result<Vec<AssistantSpan>, TemplateError> {
        let marks = |template| self.marks(template, chat, AddGenerationPrompt::No, text);
        if !self.has_generation {
            return self.spans_by_turn(chat, text, &turns::pieces(&marks(MARKED)?));
        }
        // A block says what is generated even where the turns cannot be told.
        let marks = marks(MARKED).or_else(|_| marks(BLOCKS))?;
        let blocks = turns::generation_spans(&marks).map_err(|reason| self.unclear(reason))?;
        let pieces = turns::pieces(&marks);
        Ok(blocks.into_iter().map(|range| AssistantSpan { message: turns::owner(&pieces, &range), range }).collect())
    }

    fn spans_by_turn(
        &self,
        chat: &Conversation,
        text: &str,
        pieces: &[Piece],
    ) -> Result<Vec<AssistantSpan>, TemplateError> {
        let delimiters = self.delimiters()?;
        let mut spans: Vec<AssistantSpan> = Vec::new();
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
            spans.push(AssistantSpan { message: Some(message), range });
        }
        Ok(spans)
    }

    /// What stands around an assistant's words, learnt by printing small chats.
    fn delimiters(&self) -> Result<&TurnDelimiters, TemplateError> {
        if let Some(delimiters) = self.delimiters.get() {
            return Ok(delimiters);
        }
        let question = Conversation::new([Message::new("user", "question")]);
        let closed = self.run(TEXT, self.context(&question, AddGenerationPrompt::No, None))?;
        let open = self.run(TEXT, self.context(&question, AddGenerationPrompt::Yes, None))?;
        let added = open.strip_prefix(closed.as_str()).unwrap_or_default();
        let marks = self.marks(MARKED, &question, AddGenerationPrompt::Yes, &open)?;
        let tail = &open[marks.last().map_or(open.len(), |(at, _)| *at)..];
        // Each pair differs from its first letter to its last.
        let (first, second) = (self.probe("one", "two")?, self.probe("six", "four")?);
        let pairs = first.into_iter().zip(second);
        let probes: Vec<Probe> = pairs
            .map(|((text, piece), (other, other_piece))| {
                let other = other[other_piece.range].to_owned();
                Probe { text, piece, other }
            })
            .collect();
        Ok(self.delimiters.get_or_init(|| TurnDelimiters::learn(&Prompts { added, tail }, &probes)))
    }

    /// The assistant's two turns in a chat where it says these words.
    fn probe(&self, early: &str, late: &str) -> Result<Vec<(String, Piece)>, TemplateError> {
        let chat = Conversation::new([
            Message::new("user", "question"),
            Message::new("assistant", early),
            Message::new("user", "question"),
            Message::new("assistant", late),
        ]);
        let text = self.run(TEXT, self.context(&chat, AddGenerationPrompt::No, None))?;
        let pieces = turns::pieces(&self.marks(MARKED, &chat, AddGenerationPrompt::No, &text)?);
        let turn = |message| piece_of(&pieces, message).map(|piece| (text.clone(), piece.clone()));
        [1, 3].into_iter().map(turn).collect::<Result<_, _>>().map_err(|reason| self.unclear(reason))
    }

    /// Prints the conversation with markers and takes them out again.
    fn marks(
        &self,
        template: &'static str,
        chat: &Conversation,
        ending: AddGenerationPrompt,
        text: &str,
    ) -> Result<Vec<(usize, markers::Mark)>, TemplateError> {
        let disturbed = || self.unclear(TurnError::OutputChangedByMarkers);
        let fence = markers::fence(text).ok_or_else(disturbed)?;
        let marked = self.run(template, self.context(chat, ending, Some(fence)))?;
        let (unmarked, marks) = markers::extract(&marked, fence).ok_or_else(disturbed)?;
        if unmarked == text { Ok(marks) } else { Err(disturbed()) }
    }

    fn context(&self, chat: &Conversation, ending: AddGenerationPrompt, fence: Option<char>) -> Value {
        let turn = |(index, message): (usize, &Message)| {
            let fields = Value::from(Serde(fields_for_template(message.fields())));
            Value::from_object(Turn { index, fields })
        };
        let messages: Vec<Value> = chat.messages.iter().enumerate().map(turn).collect();
        let own = [
            ("messages", Value::from(messages)),
            ("tools", Value::from(Serde(&chat.tools))),
            ("add_generation_prompt", Value::from(ending == AddGenerationPrompt::Yes)),
        ];
        let documents = ("documents", Value::from(()));
        let extra = self.variables.iter().map(|(name, v)| (name.as_str(), Value::from(Serde(v))));
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

fn piece_of(pieces: &[Piece], message: usize) -> Result<&Piece, TurnError> {
    let mut own = pieces.iter().filter(|piece| piece.message == message);
    match (own.next(), own.next()) {
        (None, _) => Err(TurnError::NoText { message }),
        (Some(piece), None) => Ok(piece),
        (Some(_), Some(_)) => Err(TurnError::NotContiguous { message }),
    }
}

/// A message as transformers gives it to a template: without the keys that are null, and with
/// reasoning, which goes by three names, under the two that templates read.
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
