//! Rendered conversation: its text, and the positions of its messages in the text.

use std::borrow::Cow;

use serde_json::Value as Json;

use super::{AddGenerationPrompt, ChatTemplate, MessageSpan, TEXT, TemplateError, TurnError, fallback, markers, turns};
use crate::conversation::{Conversation, Message};

/// Conversation that a template has rendered.
pub(crate) struct PrintedChat<'a> {
    /// The template, or its variant for conversations with tools.
    pub(super) template: &'a ChatTemplate,
    /// Form of the conversation that the template accepts.
    pub(super) chat: Cow<'a, Conversation>,
    pub(super) ending: AddGenerationPrompt,
    pub(super) text: String,
}

impl ChatTemplate {
    /// Renders a conversation.
    ///
    /// If the template fails, retries with parsed tool call arguments, and with empty strings for missing contents.
    pub(crate) fn print<'a>(
        &'a self,
        chat: &'a Conversation,
        ending: AddGenerationPrompt,
    ) -> Result<PrintedChat<'a>, TemplateError> {
        let template = self.for_chat(chat);
        if chat.messages.is_empty() {
            return Err(TemplateError::Empty { name: template.name.clone() });
        }
        let printed = |chat, text| PrintedChat { template, chat, ending, text };
        let error = match template.run(TEXT, template.context(chat, ending, None)) {
            Ok(text) => return Ok(printed(Cow::Borrowed(chat), text)),
            Err(error @ TemplateError::LimitExceeded { .. }) => return Err(error),
            Err(error) => error,
        };
        for form in fallback::forms(chat) {
            if let Ok(text) = template.run(TEXT, template.context(&form, ending, None)) {
                return Ok(printed(Cow::Owned(form), text));
            }
        }
        Err(error.because(fallback::odd_content(chat)))
    }
}

impl PrintedChat<'_> {
    /// Returns the texts that end a turn, such as `<|im_end|>`. Empty if the template prints none, or if its turns
    /// cannot be located.
    pub(crate) fn ends_of_turn(&self) -> Vec<String> {
        self.template.delimiters(&self.chat).map_or_else(|_| Vec::new(), |delimiters| delimiters.ends_of_turn())
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn template(&self) -> &ChatTemplate {
        self.template
    }

    /// Locates the assistant's text.
    pub(crate) fn turns(&self) -> Result<Vec<MessageSpan>, TemplateError> {
        match self.chat.has_assistant() {
            true => self.template.spans(&self.chat, &self.text),
            false => Ok(Vec::new()),
        }
    }

    /// Locates the contents of the messages that `is_wanted` selects by their indices, without white space at their
    /// ends. A message that the template does not print has no span.
    pub(crate) fn content_spans(&self, is_wanted: impl Fn(usize) -> bool) -> Result<Vec<MessageSpan>, TemplateError> {
        let Self { template, chat, ending, text } = self;
        let disturbed = || TemplateError::ContentNotFound {
            name: template.name.clone(),
            reason: TurnError::OutputChangedByMarkers,
        };
        let fence = markers::fence(text).ok_or_else(disturbed)?;
        let mark = |(idx, message): (usize, &Message)| match message.text() {
            Some(content) if is_wanted(idx) && !content.trim().is_empty() => {
                message.clone().with("content", Json::String(markers::around_content(content, idx, fence)))
            }
            _ => message.clone(),
        };
        let messages = chat.messages.iter().enumerate().map(mark).collect();
        let marked = Conversation { messages, tools: chat.tools.clone() };
        let marked = template.run(TEXT, template.context(&marked, *ending, None))?;
        let (unmarked, marks) = markers::extract(&marked, fence).ok_or_else(disturbed)?;
        if unmarked != *text {
            return Err(disturbed());
        }
        let spans = turns::content_spans(&marks).into_iter();
        Ok(spans.map(|(message, range)| MessageSpan { message: Some(message), range }).collect())
    }
}
