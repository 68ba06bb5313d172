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

use super::model::ComputeOptions;
use super::sampling::SamplingOptions;
use crate::chat_session::{ChatReply, ChatSession};
use crate::generate::FinishReason;
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
    sampling: SamplingOptions,
}

const MAX_NEW_TOKENS: usize = 512;

const HELP: &str = "\
/reset        forget the conversation; the system message stays
/system TEXT  set the system message; without TEXT remove it
/quit         end, as Ctrl-D does
Ctrl-C ends an answer. A line that begins with a blank is sent as it is.";

/// Runs a chat with `model`, a path or Hub id: reads lines from stdin and streams replies to stdout.
pub fn chat(model: &str, options: &ChatOptions, hub: &Hub) -> Result<()> {
    let lm = options.compute.load(model, hub)?;
    let mut session = ChatSession::new(&lm, options.sampling.options(&lm, MAX_NEW_TOKENS)?)?;
    session.set_system(options.system.as_deref().unwrap_or_default());
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        eprintln!("{HELP}\n");
    }
    let interrupt = Interrupt::watch()?;
    let mut lines = io::stdin().lock().lines();
    loop {
        if is_terminal {
            eprint!("> ");
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.context("failed to read a line from stdin").context(ExitCode::Data)?;
        match line.strip_prefix('/') {
            Some(command) => {
                if command_of(&mut session, command).is_break() {
                    return Ok(());
                }
            }
            None if line.trim().is_empty() => {}
            None => reply(&mut session, line.trim(), &interrupt)?,
        }
    }
}

fn command_of(session: &mut ChatSession, command: &str) -> ControlFlow<()> {
    let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    match word {
        "quit" | "exit" => return ControlFlow::Break(()),
        "reset" => session.reset(),
        "system" => session.set_system(rest.trim()),
        "help" => eprintln!("{HELP}"),
        _ => eprintln!(
            "note: there is no command /{word}; /help lists them, and a blank before it sends it as a message"
        ),
    }
    ControlFlow::Continue(())
}

/// Generates the reply to one line. If the line exceeds the context, prints a note; other errors end the chat.
fn reply(session: &mut ChatSession, line: &str, interrupt: &Interrupt) -> Result<()> {
    interrupt.begin();
    let mut out = io::stdout().lock();
    let mut on_text = |text: &str| {
        write!(out, "{text}").and_then(|()| out.flush()).context("failed to write to stdout")?;
        Ok(if interrupt.is_asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let replied = session.reply(line, &mut on_text);
    interrupt.end();
    let ChatReply { answer, n_dropped } = match replied {
        Err(error) if classify(&error) == ExitCode::Data => {
            eprintln!("note: {error:#}");
            return Ok(());
        }
        replied => replied?,
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
    Ok(())
}

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
