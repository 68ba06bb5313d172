//! A chat session: the conversation so far, truncated to the model's context length.

use std::ops::ControlFlow;

use anyhow::{Result, ensure};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::render_prompt;
use serde_json::Value as Json;

use crate::generate::GenerateOptions;
use crate::lm::{GeneratedText, Lm, warn_of_unrendered_parts};
use crate::reasoning::{ReasoningParser, ReplyText};
use candlewick_runtime::exit::ExitCode;

/// A multi-turn conversation with a model.
pub struct ChatSession {
    lm: Lm,
    options: GenerateOptions,
    system: Option<Message>,
    /// User and assistant messages.
    messages: Vec<Message>,
}

/// Callback that receives the newest part of a reply as it is generated, and may stop the generation.
pub type OnReply<'a> = dyn FnMut(&ReplyText) -> Result<ControlFlow<()>> + 'a;

/// Reply of the model in a chat.
#[derive(Clone, Debug)]
pub struct ChatReply {
    /// Generated reply.
    pub answer: GeneratedText,
    /// Reasoning and content of the reply.
    pub text: ReplyText,
    /// Number of messages dropped from the history to fit the context length.
    pub n_dropped: usize,
}

/// Prompt that leaves space for the reply.
struct FittingPrompt {
    /// Tokens.
    ids: Vec<u32>,
    /// Number of messages dropped from the history.
    n_dropped: usize,
}

impl ChatSession {
    /// Starts a conversation. The model must have a chat template.
    pub fn new(lm: Lm, options: GenerateOptions) -> Result<Self> {
        lm.chat_template()?;
        Ok(Self { lm, options, system: None, messages: Vec::new() })
    }

    /// Sets the system message, or removes it if `text` is empty.
    pub fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| Message::new("system", text));
        self.warn_of_unrendered_system();
    }

    /// Continues the conversation with another model, which must have a chat template.
    pub fn set_model(&mut self, lm: Lm) -> Result<()> {
        lm.chat_template()?;
        self.lm = lm;
        self.warn_of_unrendered_system();
        Ok(())
    }

    fn warn_of_unrendered_system(&self) {
        if let (Some(system), Some(template)) = (&self.system, self.lm.template()) {
            warn_of_unrendered_parts(template, &Conversation::new([system.clone(), Message::new("user", "question")]));
        }
    }

    /// Removes the last turn and returns the user's message, or `None` if there is no turn.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.messages.iter().rposition(|message| message.role() == "user")?;
        let removed = self.messages.split_off(at);
        removed.first().and_then(Message::text).map(str::to_owned)
    }

    /// Generates another reply to the user's last message, with the next seed. Returns `None` if there is no turn.
    pub fn retry(&mut self, on_reply: &mut OnReply) -> Result<Option<ChatReply>> {
        let Some(text) = self.undo() else { return Ok(None) };
        self.options.seed = self.options.seed.wrapping_add(1);
        self.reply(&text, on_reply).map(Some)
    }

    /// Clears the history except the system message, and returns the number of its messages.
    pub fn reset(&mut self) -> usize {
        std::mem::take(&mut self.messages).len()
    }

    /// Generates the reply to the user's next message. On an error the message is removed from the history.
    ///
    /// The oldest turns are dropped if they and the reply exceed the context length. The history has the reasoning in
    /// `reasoning_content`, so the chat template decides about the reasoning of earlier replies.
    pub fn reply(&mut self, text: &str, on_reply: &mut OnReply) -> Result<ChatReply> {
        self.messages.push(Message::new("user", text));
        let replied = self.drop_oldest().and_then(|dropped| self.generate(&dropped, on_reply));
        match &replied {
            Ok(reply) => self.messages.push(message_of(&reply.text)),
            Err(_) => drop(self.messages.pop()),
        }
        replied
    }

    fn generate(&self, FittingPrompt { ids, n_dropped }: &FittingPrompt, on_reply: &mut OnReply) -> Result<ChatReply> {
        let mut parser = ReasoningParser::for_prompt(self.lm.tokenizer(), self.lm.chat_template()?, ids)?;
        let mut whole = ReplyText::default();
        let mut add = |part: ReplyText| {
            whole.append(&part);
            on_reply(&part)
        };
        let answer = self.lm.chat(&self.conversation(), &self.options, &mut |text| add(parser.push(text)))?;
        let _ = add(parser.finish())?;
        Ok(ChatReply { answer, text: whole, n_dropped: *n_dropped })
    }

    fn conversation(&self) -> Conversation {
        Conversation::new(self.system.iter().chain(&self.messages).cloned())
    }

    /// Drops the oldest turns until a quarter of the context length (or `max_new_tokens`, if less) is free for the
    /// reply.
    fn drop_oldest(&mut self) -> Result<FittingPrompt> {
        let context = self.lm.context();
        let reserved = self.options.max_new_tokens.min(context / 4).max(1);
        let mut n_dropped = 0;
        loop {
            let ids = render_prompt(self.lm.tokenizer(), self.lm.chat_template()?, &self.conversation())?;
            if ids.len() + reserved <= context {
                return Ok(FittingPrompt { ids, n_dropped });
            }
            let n_turn = self.messages.len().min(2);
            ensure!(
                self.messages.len() > 1,
                anyhow::anyhow!(
                    "failed to answer: the message and the system message have {} tokens, but the model's context has \
                     {context}, of which {reserved} are reserved for the reply; shorten the message",
                    ids.len()
                )
                .context(ExitCode::Data)
            );
            self.messages.drain(..n_turn);
            n_dropped += n_turn;
        }
    }
}

/// Returns the message of a reply.
fn message_of(ReplyText { reasoning, content }: &ReplyText) -> Message {
    let message = Message::new("assistant", content.as_str());
    match reasoning.is_empty() {
        true => message,
        false => message.with("reasoning_content", Json::from(reasoning.as_str())),
    }
}
