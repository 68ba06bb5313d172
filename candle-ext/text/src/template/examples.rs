//! Example chats, which show the text that a template puts around the assistant's words.
//!
//! Some templates fail on the program's own examples: they require a system message, tools or keys of messages. Then the
//! conversation itself is the example, with other words in its answers.

use std::borrow::Cow;

use serde_json::json;

use super::turns::{MessageText, Probe, Prompts, TurnDelimiters};
use super::{AddGenerationPrompt, ChatTemplate, MARKED, TEXT, TemplateError, TurnError, piece_of, turns};
use crate::conversation::{Conversation, Message};

/// Answers of two example chats, in turn. The words of each pair differ in their first and last character.
const WORDS: [[&str; 2]; 2] = [["one", "six"], ["two", "four"]];

/// Chat whose answers are replaced by other words.
pub(super) struct ProbeChat {
    /// The messages up to the last replaced answer.
    chat: Conversation,
    /// Indices of the answers to replace: at least one, ascending, each after another message.
    answers: Vec<usize>,
}

impl ProbeChat {
    /// Creates a chat of two questions and answers.
    pub(super) fn of_two_answers() -> Self {
        let chat =
            Conversation::new(["user", "assistant", "user", "assistant"].map(|role| Message::new(role, "question")));
        Self { chat, answers: vec![1, 3] }
    }

    /// Creates a chat from a conversation. `None` if it has no answer without tool calls after another message.
    pub(super) fn from_conversation(chat: &Conversation) -> Option<Self> {
        let is_answer = |idx: &usize| chat.messages[*idx].is_assistant() && !chat.messages[*idx].has_tool_calls();
        let answers: Vec<usize> = (1..chat.messages.len()).filter(is_answer).collect();
        let last = *answers.last()?;
        let messages = chat.messages[..=last].to_vec();
        Some(Self { chat: Conversation { messages, tools: chat.tools.clone() }, answers })
    }

    /// Returns the messages before the first answer.
    fn question(&self) -> Conversation {
        Conversation { messages: self.chat.messages[..self.answers[0]].to_vec(), tools: self.chat.tools.clone() }
    }

    /// Returns the chat with the first or the second words of each pair as answers, without reasoning.
    fn answered(&self, word: usize) -> Conversation {
        let mut chat = self.chat.clone();
        for (&idx, words) in self.answers.iter().zip(WORDS.iter().cycle()) {
            chat.messages[idx] = chat.messages[idx].clone().without_reasoning().with("content", json!(words[word]));
        }
        chat
    }

    /// Returns the chat with reasoning in its last answer.
    pub(super) fn with_reasoning(&self) -> Conversation {
        let mut chat = self.answered(0);
        let last = chat.messages.pop().map(|answer| answer.with("reasoning_content", json!("thought")));
        chat.messages.extend(last);
        chat
    }
}

impl ChatTemplate {
    /// Returns the text around the assistant's words, from the program's example chat. If the template fails on that,
    /// from `chat`.
    pub(super) fn delimiters(&self, chat: &Conversation) -> Result<Cow<'_, TurnDelimiters>, TemplateError> {
        let error = match self.delimiters.get_or_init(|| self.learn_delimiters(&ProbeChat::of_two_answers())) {
            Ok(delimiters) => return Ok(Cow::Borrowed(delimiters)),
            Err(error) => error.clone(),
        };
        let learned = ProbeChat::from_conversation(chat).and_then(|example| self.learn_delimiters(&example).ok());
        match (learned, error) {
            (Some(delimiters), _) => Ok(Cow::Owned(delimiters)),
            (None, TemplateError::Render { line, message, .. }) => {
                Err(self.unclear(TurnError::ExampleFailed { line, message }))
            }
            (None, error) => Err(error),
        }
    }

    fn learn_delimiters(&self, example: &ProbeChat) -> Result<TurnDelimiters, TemplateError> {
        let question = example.question();
        let closed = self.run(TEXT, self.context(&question, AddGenerationPrompt::No, None))?;
        let open = self.run(TEXT, self.context(&question, AddGenerationPrompt::Yes, None))?;
        let added = open.strip_prefix(closed.as_str()).unwrap_or_default();
        let marks = self.marks(MARKED, &question, AddGenerationPrompt::Yes, &open)?;
        let tail = &open[marks.last().map_or(open.len(), |(at, _)| *at)..];
        let [first, second] = [0, 1].map(|word| self.turns_of(&example.answered(word), &example.answers));
        let probe = |((text, piece), (other, other_piece)): ((String, MessageText), (String, MessageText))| {
            let other = other[other_piece.range].to_owned();
            Probe { text, piece, other }
        };
        let probes: Vec<Probe> = first?.into_iter().zip(second?).map(probe).collect();
        Ok(TurnDelimiters::learn(&Prompts { added, tail }, &probes))
    }

    /// Renders an example chat. Returns the text with the position of each answer.
    fn turns_of(&self, chat: &Conversation, answers: &[usize]) -> Result<Vec<(String, MessageText)>, TemplateError> {
        let text = self.run(TEXT, self.context(chat, AddGenerationPrompt::No, None))?;
        let pieces = turns::pieces(&self.marks(MARKED, chat, AddGenerationPrompt::No, &text)?);
        let turn = |message: &usize| piece_of(&pieces, *message).map(|piece| (text.clone(), piece.clone()));
        answers.iter().map(turn).collect::<Result<_, _>>().map_err(|reason| self.unclear(reason))
    }
}
