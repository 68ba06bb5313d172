//! The command `generate`: replies to prompts and conversations.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use candlewick_text::conversation::{Conversation, Message};
use candlewick_text::files::{MAX_CONFIG_FILE_BYTES, read_text_or_stdin};
use candlewick_text::hub::Hub;
use candlewick_text::template::{AddGenerationPrompt, ChatTemplate};
use clap::{ArgGroup, Args};

use super::model::{ComputeOptions, TemplateOptions};
use super::sampling::SamplingOptions;
use crate::generate::FinishReason;
use crate::lm::GeneratedText;
use crate::messages::conversations;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::stdout::print_line;

/// Options of `generate`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("input").required(true))]
pub struct GenerateArgs {
    #[command(flatten)]
    compute: ComputeOptions,
    /// A prompt; repeat it for several; - reads one from stdin
    #[arg(long, group = "input")]
    prompt: Vec<String>,
    /// System message of each prompt or conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Conversations: a file, or - for stdin. A JSON list of messages, an object with `messages` and optionally
    /// `tools`, or JSON lines of either
    #[arg(long, value_name = "FILE", group = "input", conflicts_with = "raw")]
    messages: Option<PathBuf>,
    /// Complete the prompt without a chat template
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    template: TemplateOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    /// Print prefill and decode times as JSON to stderr, without model loading
    #[arg(long)]
    pub timings: bool,
}

/// Default number of new tokens.
const MAX_NEW_TOKENS: usize = 64;

/// Generates replies to prompts and conversations with `model`, a path or Hub id, and prints them to stdout.
pub fn generate(model: &str, args: &GenerateArgs, hub: &Hub) -> Result<()> {
    let prompts = args.prompt.iter().map(|prompt| text_or_stdin(prompt)).collect::<Result<Vec<_>>>()?;
    let chats = args.chats(&prompts)?;
    let lm = args.template.apply(args.compute.load(model, hub)?)?;
    let options = args.sampling.options(&lm, MAX_NEW_TOKENS)?;
    let mut ignored = |_: &str| Ok(ControlFlow::Continue(()));
    if args.raw {
        for prompt in &prompts {
            args.show(prompts.len(), prompt, &lm.complete(prompt, &options, &mut ignored)?)?;
        }
        return Ok(());
    }
    let template = lm.chat_template()?;
    for chat in &chats {
        warn_of_what_is_not_printed(template, chat);
        let last = chat.messages.last().and_then(Message::text).unwrap_or_default();
        args.show(chats.len(), last, &lm.chat(chat, &options, &mut ignored)?)?;
    }
    Ok(())
}

impl GenerateArgs {
    /// Returns the conversations, each with the system message of the command line.
    fn chats(&self, prompts: &[String]) -> Result<Vec<Conversation>> {
        let of_prompt = |prompt: &String| Conversation::new([Message::new("user", prompt)]);
        let mut chats = match &self.messages {
            Some(path) => read_conversations(path)?,
            None => prompts.iter().map(of_prompt).collect(),
        };
        for (chat, i) in chats.iter_mut().zip(1..) {
            self.complete(chat)
                .map_err(|error| anyhow!("failed to read conversation {i}: {error}").context(ExitCode::Data))?;
        }
        Ok(chats)
    }

    /// Prepends the system message to a conversation, and rejects one without a message to reply to.
    fn complete(&self, chat: &mut Conversation) -> Result<()> {
        if let Some(system) = &self.system {
            let has_own = chat.messages.first().is_some_and(|first| first.role() == "system");
            ensure!(!has_own, "it begins with a system message of its own; remove that, or --system");
            chat.messages.insert(0, Message::new("system", system));
        }
        let ends_with_an_answer = chat.messages.last().is_some_and(Message::is_assistant);
        ensure!(
            !ends_with_an_answer,
            "it ends with the assistant's message, so there is nothing to answer; remove that message"
        );
        Ok(())
    }

    /// Prints a reply, after its prompt if there are several.
    fn show(&self, n_answers: usize, prompt: &str, said: &GeneratedText) -> Result<()> {
        if said.finish_reason == FinishReason::Context {
            eprintln!("note: the answer ends where the model's context is full");
        }
        match self.timings {
            true => eprintln!("{}", serde_json::to_string(&said.timings)?),
            false => eprintln!("{}", said.timings),
        }
        match n_answers {
            1 => print_line(&said.text),
            _ => print_line(&format!("> {prompt}\n{}\n", said.text.trim())),
        }
    }
}

/// Warns if the chat template ignores the system message or the tools.
fn warn_of_what_is_not_printed(template: &ChatTemplate, chat: &Conversation) {
    let render = |chat: &Conversation| template.render(chat, AddGenerationPrompt::Yes).ok();
    let Some(whole) = render(chat) else { return };
    let system = chat.messages.first().filter(|first| first.role() == "system").and_then(Message::text);
    if system.is_some_and(|system| !whole.contains(system.trim())) {
        tracing::warn!("the chat template leaves the system message out of the prompt: the model does not see it");
    }
    if chat.tools.is_some() && render(&Conversation { tools: None, ..chat.clone() }).as_ref() == Some(&whole) {
        tracing::warn!("the chat template leaves the tools out of the prompt: the model does not see them");
    }
}

fn text_or_stdin(prompt: &str) -> Result<String> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let text = read(Path::new("-"))?;
    Ok(text.strip_suffix('\n').unwrap_or(&text).to_owned())
}

fn read_conversations(path: &Path) -> Result<Vec<Conversation>> {
    let failed = || anyhow!("failed to read messages from {}", path.display()).context(ExitCode::Data);
    let text = read(path)?;
    conversations(&text).map_err(|error| anyhow!("{}: {error:#}", failed()).context(ExitCode::Data))
}

fn read(path: &Path) -> Result<String> {
    let text = read_text_or_stdin(path, MAX_CONFIG_FILE_BYTES);
    text.with_context(|| format!("failed to read {}", path.display())).context(ExitCode::Data)
}
