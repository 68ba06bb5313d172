//! A chat session: the conversation so far, truncated to the model's context length.

use anyhow::{Result, ensure};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::render::render_prompt;

use crate::generate::GenerateOptions;
use crate::lm::{GeneratedText, Lm, OnText};
use candlewick_runtime::exit::ExitCode;

/// A multi-turn conversation with a model.
pub struct ChatSession {
    lm: Lm,
    options: GenerateOptions,
    system: Option<Message>,
    /// User and assistant messages.
    messages: Vec<Message>,
}

/// Reply of the model in a chat.
#[derive(Clone, Debug)]
pub struct ChatReply {
    /// Generated reply.
    pub answer: GeneratedText,
    /// Number of messages dropped from the history to fit the context length.
    pub n_dropped: usize,
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
    }

    /// Continues the conversation with another model, which must have a chat template.
    pub fn set_model(&mut self, lm: Lm) -> Result<()> {
        lm.chat_template()?;
        self.lm = lm;
        Ok(())
    }

    /// Removes the last turn and returns the user's message, or `None` if there is no turn.
    pub fn undo(&mut self) -> Option<String> {
        let at = self.messages.iter().rposition(|message| message.role() == "user")?;
        let removed = self.messages.split_off(at);
        removed.first().and_then(Message::text).map(str::to_owned)
    }

    /// Generates another reply to the user's last message, with the next seed. Returns `None` if there is no turn.
    pub fn retry(&mut self, on_text: &mut OnText) -> Result<Option<ChatReply>> {
        let Some(text) = self.undo() else { return Ok(None) };
        self.options.seed = self.options.seed.wrapping_add(1);
        self.reply(&text, on_text).map(Some)
    }

    /// Clears the history except the system message.
    pub fn reset(&mut self) {
        self.messages.clear();
    }

    /// Generates the reply to the user's next message. On an error the message is removed from the history.
    ///
    /// The oldest turns are dropped if they and the reply exceed the context length.
    pub fn reply(&mut self, text: &str, on_text: &mut OnText) -> Result<ChatReply> {
        self.messages.push(Message::new("user", text));
        let replied = self.drop_oldest().and_then(|n_dropped| {
            let answer = self.lm.chat(&self.conversation(), &self.options, on_text)?;
            Ok(ChatReply { answer, n_dropped })
        });
        match &replied {
            Ok(reply) => self.messages.push(Message::new("assistant", reply.answer.text.as_str())),
            Err(_) => drop(self.messages.pop()),
        }
        replied
    }

    fn conversation(&self) -> Conversation {
        Conversation::new(self.system.iter().chain(&self.messages).cloned())
    }

    /// Drops the oldest turns until a quarter of the context length (or `max_new_tokens`, if less) is free for the
    /// reply. Returns the number of dropped messages.
    fn drop_oldest(&mut self) -> Result<usize> {
        let context = self.lm.context();
        let reserved = self.options.max_new_tokens.min(context / 4).max(1);
        let mut n_dropped = 0;
        loop {
            let prompt = render_prompt(self.lm.tokenizer(), self.lm.chat_template()?, &self.conversation())?;
            if prompt.len() + reserved <= context {
                return Ok(n_dropped);
            }
            let n_turn = self.messages.len().min(2);
            ensure!(
                self.messages.len() > 1,
                anyhow::anyhow!(
                    "failed to answer: the message and the system message have {} tokens, but the model's context has \
                     {context}, of which {reserved} are reserved for the reply; shorten the message",
                    prompt.len()
                )
                .context(ExitCode::Data)
            );
            self.messages.drain(..n_turn);
            n_dropped += n_turn;
        }
    }
}
