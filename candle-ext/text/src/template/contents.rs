//! Location of the contents of messages of any role, and of the ends of turns.
//!
//! The conversation is rendered again with markers in the contents. Templates that print a system message outside of
//! the loop over messages, or quote a tool's result as JSON, keep the markers in place.

use super::{AddGenerationPrompt, ChatTemplate, MessageSpan, TemplateError, TurnError, markers, turns};
use crate::conversation::{Conversation, Message};
use serde_json::Value as Json;

const TEXT: &str = super::TEXT;

impl ChatTemplate {
    /// Locates the contents of the messages that `is_wanted` selects by their indices, without white space at their
    /// ends. A message that the template does not print has no span.
    pub fn content_spans(
        &self,
        chat: &Conversation,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<MessageSpan>, TemplateError> {
        let (chat, text) = self.print(chat, AddGenerationPrompt::No)?;
        let template = self.for_chat(&chat);
        let disturbed = || TemplateError::ContentNotFound {
            name: template.name.clone(),
            reason: TurnError::OutputChangedByMarkers,
        };
        let fence = markers::fence(&text).ok_or_else(disturbed)?;
        let mark = |(idx, message): (usize, &Message)| match message.text() {
            Some(content) if is_wanted(idx) && !content.trim().is_empty() => {
                message.clone().with("content", Json::String(markers::around_content(content, idx, fence)))
            }
            _ => message.clone(),
        };
        let messages = chat.messages.iter().enumerate().map(mark).collect();
        let marked = Conversation { messages, tools: chat.tools.clone() };
        let marked = template.run(TEXT, template.context(&marked, AddGenerationPrompt::No, None))?;
        let (unmarked, marks) = markers::extract(&marked, fence).ok_or_else(disturbed)?;
        if unmarked != text {
            return Err(disturbed());
        }
        let spans = turns::content_spans(&marks).into_iter();
        Ok(spans.map(|(message, range)| MessageSpan { message: Some(message), range }).collect())
    }

    /// Returns the texts that end a turn, such as `<|im_end|>`. Empty if the template prints none, or if its turns
    /// cannot be located.
    pub fn ends_of_turn(&self, chat: &Conversation) -> Vec<&str> {
        self.for_chat(chat).delimiters().map_or_else(|_| Vec::new(), turns::TurnDelimiters::ends_of_turn)
    }
}
