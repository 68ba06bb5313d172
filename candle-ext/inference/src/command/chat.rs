//! The command `chat`: a conversation on stdin and stdout.

use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use candlewick_text::hub::Hub;
use clap::Args;
use signal_hook::consts::SIGINT;
use signal_hook::flag;

use super::model::{ComputeOptions, TemplateOptions};
use super::sampling::SamplingOptions;
use crate::chat_session::{ChatReply, ChatSession};
use crate::generate::FinishReason;
use crate::lm::{Lm, OnText};
use candlewick_runtime::exit::{ExitCode, classify};

/// Options of `chat`.
#[derive(Debug, Args)]
pub struct ChatOptions {
    #[command(flatten)]
    compute: ComputeOptions,
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    template: TemplateOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
}

const MAX_NEW_TOKENS: usize = 512;

const HELP: &str = "\
/retry         answer the last message again, with the next seed
/edit TEXT     replace the last message by TEXT, and answer it
/undo          remove the last message and its answer
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT remove it
/adapter NAME  load the model again with another adapter; without NAME with none
/quit          end, as Ctrl-D does
Ctrl-C ends an answer. A line that begins with a blank is sent as it is.";

/// Runs a chat with `model`, a path or Hub id: reads lines from stdin and streams replies to stdout.
pub fn chat(model: &str, options: &ChatOptions, hub: &Hub) -> Result<()> {
    let lm = options.load(model, options.compute.adapter.as_deref(), hub)?;
    let generation = options.sampling.options(&lm, MAX_NEW_TOKENS)?;
    let session = ChatSession::new(lm, generation)?;
    let mut chat = Chat { session, model, options, hub, interrupt: Interrupt::watch()? };
    chat.session.set_system(options.system.as_deref().unwrap_or_default());
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        eprintln!("{HELP}\n");
    }
    let mut lines = io::stdin().lock().lines();
    loop {
        if is_terminal {
            eprint!("> ");
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.context("failed to read a line from stdin").context(ExitCode::Data)?;
        match line.strip_prefix('/') {
            Some(command) => {
                if chat.command(command)?.is_break() {
                    return Ok(());
                }
            }
            None if line.trim().is_empty() => {}
            None => chat.reply(|session, on_text| session.reply(line.trim(), on_text).map(Some))?,
        }
    }
}

impl ChatOptions {
    fn load(&self, model: &str, adapter: Option<&str>, hub: &Hub) -> Result<Lm> {
        let mut compute = self.compute.clone();
        compute.adapter = adapter.map(str::to_owned);
        self.template.apply(compute.load(model, hub)?)
    }
}

/// A chat on stdin and stdout.
struct Chat<'c> {
    session: ChatSession,
    model: &'c str,
    options: &'c ChatOptions,
    hub: &'c Hub,
    interrupt: Interrupt,
}

impl Chat<'_> {
    fn command(&mut self, command: &str) -> Result<ControlFlow<()>> {
        let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match word {
            "quit" | "exit" => return Ok(ControlFlow::Break(())),
            "retry" => self.reply(ChatSession::retry)?,
            "edit" if rest.is_empty() => eprintln!("note: /edit needs the new text"),
            "edit" => self.reply(|session, on_text| match session.undo() {
                Some(_) => session.reply(rest, on_text).map(Some),
                None => Ok(None),
            })?,
            "undo" => {
                if self.session.undo().is_none() {
                    eprintln!("{NO_TURN}");
                }
            }
            "reset" => self.session.reset(),
            "system" => self.session.set_system(rest),
            "adapter" => self.switch_adapter(Some(rest).filter(|name| !name.is_empty())),
            "help" => eprintln!("{HELP}"),
            _ => eprintln!(
                "note: there is no command /{word}; /help lists them, and a blank before it sends it as a message"
            ),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Loads the model with another adapter. If that fails, prints a note and keeps the loaded one.
    fn switch_adapter(&mut self, adapter: Option<&str>) {
        let loaded = self.options.load(self.model, adapter, self.hub);
        if let Err(error) = loaded.and_then(|lm| self.session.set_model(lm)) {
            eprintln!("note: {error:#}; the chat continues with the loaded model");
        }
    }

    /// Generates a reply. If a message exceeds the context, prints a note; other errors end the chat.
    fn reply(
        &mut self,
        generate: impl FnOnce(&mut ChatSession, &mut OnText) -> Result<Option<ChatReply>>,
    ) -> Result<()> {
        let Self { session, interrupt, .. } = self;
        interrupt.begin();
        let mut out = io::stdout().lock();
        let mut on_text = |text: &str| {
            write!(out, "{text}").and_then(|()| out.flush()).context("failed to write to stdout")?;
            Ok(if interrupt.is_asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        let replied = generate(session, &mut on_text);
        interrupt.end();
        let ChatReply { answer, n_dropped } = match replied {
            Err(error) if classify(&error) == ExitCode::Data => {
                eprintln!("note: {error:#}");
                return Ok(());
            }
            Ok(None) => {
                eprintln!("{NO_TURN}");
                return Ok(());
            }
            Ok(Some(reply)) => reply,
            Err(error) => return Err(error),
        };
        writeln!(out).context("failed to write to stdout")?;
        if n_dropped > 0 {
            eprintln!("note: the context is full: the oldest {n_dropped} messages were dropped");
        }
        match answer.finish_reason {
            FinishReason::Context => eprintln!("note: the answer ends where the model's context is full"),
            FinishReason::Length => eprintln!("note: the answer ends at --max-new-tokens"),
            FinishReason::Stop | FinishReason::Interrupted => {}
        }
        eprintln!("{}", answer.timings);
        Ok(())
    }
}

const NO_TURN: &str = "note: the conversation has no message yet";

/// Ctrl-C handler: stops a running generation, else ends the program.
struct Interrupt {
    asked: Arc<AtomicBool>,
    is_idle: Arc<AtomicBool>,
}

impl Interrupt {
    fn watch() -> Result<Self> {
        let own = Self { asked: Arc::default(), is_idle: Arc::new(AtomicBool::new(true)) };
        let watch = || {
            flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&own.is_idle))?;
            flag::register(SIGINT, Arc::clone(&own.asked))
        };
        watch().context("failed to watch for Ctrl-C")?;
        Ok(own)
    }

    fn begin(&self) {
        self.asked.store(false, Ordering::SeqCst);
        self.is_idle.store(false, Ordering::SeqCst);
    }

    fn end(&self) {
        self.is_idle.store(true, Ordering::SeqCst);
    }

    fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }
}
