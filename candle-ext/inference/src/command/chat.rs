//! The command `chat`: a conversation on stdin and stdout.

use std::io::Stdout;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use candle_core::Device;
use candlewick_comm::RankFailure;
use candlewick_comm::rank_env::RankEnv;
use candlewick_text::hub::{Hub, ModelAndAdapter};
use candlewick_text::template::Clock;
use clap::Args;
use clap::builder::FalseyValueParser;
use signal_hook::consts::SIGINT;
use signal_hook::flag;

use super::chat_input::ChatInput;
use super::model::{ComputeOptions, QuantizationOption, TemplateOptions};
use super::parallel::{ParallelArgs, check_single_replica};
use super::reply_printer::{ReplyPrinter, ThinkingStyle};
use super::sampling::SamplingOptions;
use crate::chat_session::{ChatReply, ChatSession, OnReply};
use crate::generate::FinishReason;
use crate::lm::Lm;
use crate::ranks::{EvalRanks, run_on_ranks};
use crate::reasoning::ReplyText;
use candlewick_runtime::cores::state_folder;
use candlewick_runtime::exit::{ExitCode, classify};
use candlewick_runtime::run_id::RunId;
use candlewick_runtime::terminal::print_note;

/// Options of `chat`.
#[derive(Debug, Args)]
pub struct ChatOptions {
    #[command(flatten)]
    compute: ComputeOptions,
    #[command(flatten)]
    parallel: ParallelArgs,
    /// The system message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Do not print the model's thinking
    #[arg(long, alias = "hidethinking")]
    hide_thinking: bool,
    /// Do not read or write the history of typed lines, $XDG_STATE_HOME/candlewick/chat_history
    #[arg(long, env = "CANDLEWICK_NO_HISTORY", value_parser = FalseyValueParser::new())]
    no_history: bool,
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
/adapter NAME  use another adapter on the same base model; without NAME none
/quit          end, as Ctrl-D does
/help          print this list
\"\"\"            begins and ends a message of several lines; so does a paste
Tab completes a command; the arrow keys edit a line and find earlier ones. Ctrl-C clears a line, or ends an answer; with several
ranks it ends the chat. A line that begins with a blank is sent as it is.";

/// Runs a chat with `model`, a path or Hub id: reads lines from stdin and streams replies to stdout.
///
/// `env` has the ranks that share the model. Rank 0 reads and prints, and the other ranks compute with it.
pub fn chat(model: &str, options: &ChatOptions, env: &RankEnv, hub: &Hub) -> Result<()> {
    run_on_ranks(env, options.parallel.config(), options.compute.device, |ranks, device| {
        ranks.process.all_ok(check_single_replica(ranks))?;
        let clock = RunId::agree(&ranks.process, Ok(RunId::now()))?.clock();
        let mut loader = ChatModelLoader { model, options, hub, ranks, device, clock, base: None };
        let lm = loader.load(options.compute.adapter.as_deref())?;
        let session = ranks.process.all_ok(options.session(lm))?;
        let printer = ReplyPrinter::of_stdout(options.thinking_style());
        let input = match ranks.process.is_first() {
            true => ChatInput::open(options.history(), ranks.process.size()),
            false => Ok(ChatInput::Pipe),
        };
        let input = ranks.process.all_ok(input)?;
        Chat { session, loader, printer, input, interrupt: Interrupt::watch(ranks.process.size())? }.run()
    })
}

impl ChatOptions {
    fn thinking_style(&self) -> ThinkingStyle {
        match self.hide_thinking {
            true => ThinkingStyle::Hidden,
            false => ThinkingStyle::of_stdout(),
        }
    }

    /// Returns the file of the typed lines.
    fn history(&self) -> Option<PathBuf> {
        (!self.no_history).then(state_folder)?.map(|folder| folder.join("chat_history"))
    }

    fn session(&self, lm: Lm) -> Result<ChatSession> {
        let generation = self.sampling.options(&lm, MAX_NEW_TOKENS)?;
        let mut session = ChatSession::new(lm, generation)?;
        session.set_system(self.system.as_deref().unwrap_or_default());
        Ok(session)
    }
}

/// Loader of the model of a chat, with one adapter or another.
struct ChatModelLoader<'c> {
    model: &'c str,
    options: &'c ChatOptions,
    hub: &'c Hub,
    ranks: &'c EvalRanks,
    device: Device,
    clock: Clock,
    /// The model without an adapter, whose weights all adapters share.
    base: Option<Lm>,
}

impl ChatModelLoader<'_> {
    /// Loads the model on each rank. Collective: all ranks must call it.
    fn load(&mut self, adapter: Option<&str>) -> Result<Lm> {
        let mut compute = self.options.compute.clone();
        compute.adapter = adapter.map(str::to_owned);
        let folders = compute.find_on(self.model, self.hub, self.ranks)?;
        let lm = match compute.quantization {
            QuantizationOption::None => self.load_on_base(&compute, &folders)?,
            // The scales belong to an adapter and its base together.
            QuantizationOption::Fp8 => compute.load_folders_on(&folders, self.ranks, self.device.clone())?,
        };
        let lm = self.options.template.apply(lm).map(|lm| lm.with_clock(self.clock));
        self.ranks.process.all_ok(lm)
    }

    /// Loads an adapter, or none, on the weights of the base model.
    fn load_on_base(&mut self, compute: &ComputeOptions, folders: &ModelAndAdapter) -> Result<Lm> {
        let ModelAndAdapter { model, adapter, .. } = folders;
        if self.base.as_ref().is_none_or(|base| base.folder() != model) {
            let base = ModelAndAdapter { model: model.clone(), adapter: None, notes: Vec::new() };
            self.base = Some(compute.load_folders_on(&base, self.ranks, self.device.clone())?);
        }
        let base = self.base.as_ref().context("failed to load the base model")?;
        self.ranks.process.all_ok(base.with_adapter(adapter.as_deref()))
    }
}

/// A chat on stdin and stdout of rank 0. The other ranks run the same commands.
struct Chat<'c> {
    session: ChatSession,
    loader: ChatModelLoader<'c>,
    printer: ReplyPrinter<Stdout>,
    /// The input of rank 0. The others read none.
    input: ChatInput,
    interrupt: Interrupt,
}

impl Chat<'_> {
    fn run(&mut self) -> Result<()> {
        if self.input.is_terminal() {
            self.note(&format!("{HELP}\n"));
        }
        while let Some(line) = self.next_line()? {
            match line.strip_prefix('/') {
                Some(command) => {
                    if self.command(command)?.is_break() {
                        return Ok(());
                    }
                }
                None if line.trim().is_empty() => {}
                None => self.reply(|session, on_reply| session.reply(line.trim(), on_reply).map(Some))?,
            }
        }
        Ok(())
    }

    /// Reads a line on rank 0, and returns it on all ranks; `None` at the end of the input.
    fn next_line(&mut self) -> Result<Option<String>> {
        let input = &mut self.input;
        let read = || Ok(serde_json::to_vec(&input.next()?)?);
        Ok(serde_json::from_slice(&self.loader.ranks.process.broadcast_from_first(read)?)?)
    }

    fn is_first(&self) -> bool {
        self.loader.ranks.process.is_first()
    }

    /// Prints a line to stderr, on rank 0.
    fn note(&self, text: &str) {
        if self.is_first() {
            print_note(text);
        }
    }

    fn command(&mut self, command: &str) -> Result<ControlFlow<()>> {
        let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match word {
            "quit" | "exit" => return Ok(ControlFlow::Break(())),
            "retry" => self.reply(ChatSession::retry)?,
            "edit" if rest.is_empty() => self.note("note: /edit needs the new text"),
            "edit" => self.reply(|session, on_reply| match session.undo() {
                Some(_) => session.reply(rest, on_reply).map(Some),
                None => Ok(None),
            })?,
            "undo" => match self.session.undo() {
                Some(message) => self.note(&format!("removed: {}", shortened(&message))),
                None => self.note(NO_TURN),
            },
            "reset" => {
                let n_removed = self.session.reset();
                self.note(&format!("removed messages: {n_removed}"));
            }
            "system" => {
                self.session.set_system(rest);
                self.note(&match rest.is_empty() {
                    true => "removed the system message".to_owned(),
                    false => format!("system message: {}", shortened(rest)),
                });
            }
            "adapter" => self.switch_adapter(Some(rest).filter(|name| !name.is_empty()))?,
            "help" => self.note(HELP),
            _ => self.note(&format!(
                "note: there is no command /{word}; /help lists them, and a blank before it sends it as a message"
            )),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Uses the base model with another adapter. If that fails, prints a note and keeps the loaded one. A lost rank ends the
    /// chat.
    fn switch_adapter(&mut self, adapter: Option<&str>) -> Result<()> {
        let loaded = self.loader.load(adapter);
        match loaded.and_then(|lm| self.session.set_model(lm)) {
            Ok(()) => {
                self.note(&adapter.map_or("without an adapter".to_owned(), |name| format!("adapter: {name}")));
                Ok(())
            }
            Err(error) if RankFailure::find_in(&*error).is_some() => Err(error),
            Err(error) => {
                // Another rank may have the cause.
                if self.is_first() || classify(&error) != ExitCode::Peer {
                    print_note(&format!("note: {error:#}; the chat continues with the loaded model"));
                }
                Ok(())
            }
        }
    }

    /// Generates a reply. If a message exceeds the context, prints a note; other errors end the chat.
    fn reply(
        &mut self,
        generate: impl FnOnce(&mut ChatSession, &mut OnReply) -> Result<Option<ChatReply>>,
    ) -> Result<()> {
        let is_first = self.is_first();
        let Self { session, printer, interrupt, .. } = self;
        interrupt.begin();
        let mut on_reply = |text: &ReplyText| {
            if is_first {
                printer.print(text).context(NOT_PRINTED)?;
            }
            Ok(if interrupt.is_asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        };
        let replied = generate(session, &mut on_reply);
        interrupt.end();
        match replied {
            Ok(Some(reply)) if is_first => {
                printer.end().context(NOT_PRINTED)?;
                print_notes(&reply);
            }
            Ok(Some(_)) => {}
            Ok(None) => self.note(NO_TURN),
            Err(error) if classify(&error) == ExitCode::Data => self.note(&format!("note: {error:#}")),
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Returns the beginning of a text, in one line.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}

/// Prints notes about a reply, and its speed.
fn print_notes(ChatReply { answer, n_dropped, .. }: &ChatReply) {
    if *n_dropped > 0 {
        let dropped = match n_dropped {
            1 => "the oldest message was dropped".to_owned(),
            n => format!("the oldest {n} messages were dropped"),
        };
        print_note(&format!("note: the context is full: {dropped}"));
    }
    match answer.finish_reason {
        FinishReason::Context => print_note("note: the answer ends where the model's context is full"),
        FinishReason::Length => print_note("note: the answer ends at --max-new-tokens"),
        FinishReason::Stop | FinishReason::Interrupted => {}
    }
    print_note(&answer.timings.to_string());
}

const NOT_PRINTED: &str = "failed to write to stdout";

const NO_TURN: &str = "note: the conversation has no message yet";

/// Ctrl-C handler: stops a running generation, else ends the program.
///
/// With several ranks Ctrl-C always ends the program: a launcher stops its ranks at the first one.
struct Interrupt {
    asked: Arc<AtomicBool>,
    is_idle: Arc<AtomicBool>,
}

impl Interrupt {
    fn watch(n_ranks: usize) -> Result<Self> {
        let own = Self { asked: Arc::default(), is_idle: Arc::new(AtomicBool::new(true)) };
        if n_ranks > 1 {
            return Ok(own);
        }
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
