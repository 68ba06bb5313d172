//! Input of a chat on rank 0: the lines of a pipe, or an editor in the terminal.
//!
//! The editor has the keys of readline, a history in a file, completion of commands, and messages of several lines between
//! `"""`. A line of a pipe is taken as it is.

use std::cell::Cell;
use std::fs::DirBuilder;
use std::io::{self, BufRead, IsTerminal, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::stop_signals::stop_signals;
use candlewick_runtime::terminal::{print_note, print_prompt};
use rustix::process::{Signal, getpgrp, kill_process_group};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{CompletionType, Config, Editor, Helper};
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// The text before and after a message of several lines.
const BLOCK: &str = "\"\"\"";

/// The largest number of lines in the history.
const MAX_HISTORY: usize = 1000;

/// The commands of a chat, without the slash.
pub(super) const COMMANDS: [&str; 8] = ["adapter", "edit", "help", "quit", "reset", "retry", "system", "undo"];

/// A source of lines.
pub(super) enum ChatInput {
    Pipe,
    /// A terminal whose lines the system edits.
    Prompt,
    Editor(Box<LineEditor>),
}

/// An editor of lines in the terminal.
pub(super) struct LineEditor {
    editor: Editor<ChatHelper, FileHistory>,
    /// `None` without a history.
    history: Option<PathBuf>,
}

impl ChatInput {
    /// Opens stdin. `history` is the file of the typed lines.
    ///
    /// Lines of several ranks are not edited: their launcher receives Ctrl-C, which an editor would read as a key.
    pub(super) fn open(history: Option<PathBuf>, n_ranks: usize) -> Result<Self> {
        match (io::stdin().is_terminal(), n_ranks) {
            (false, _) => Ok(Self::Pipe),
            (true, 1) => {
                restore_terminal_at_signals().context("failed to watch for signals")?;
                Ok(Self::Editor(Box::new(LineEditor::open(history).context("failed to open the terminal")?)))
            }
            (true, _) => Ok(Self::Prompt),
        }
    }

    pub(super) fn is_terminal(&self) -> bool {
        !matches!(self, Self::Pipe)
    }

    /// Returns the next line, which may be a message of several lines; `None` at the end of the input.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        match self {
            Self::Pipe => next_line(),
            Self::Prompt => {
                print_prompt();
                next_line()
            }
            Self::Editor(editor) => editor.next(),
        }
    }
}

/// Restores the terminal before SIGTERM or SIGHUP ends the process. The editor reads in raw mode, with marked pastes.
fn restore_terminal_at_signals() -> io::Result<()> {
    const UNMARKED_PASTES: &[u8] = b"\x1b[?2004l";
    let settings = tcgetattr(io::stdin())?;
    let mut signals = Signals::new(stop_signals().into_iter().filter(|signal| *signal != SIGINT))?;
    let restore = move || {
        for signal in signals.forever() {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &settings);
            if io::stderr().is_terminal() {
                let _ = io::stderr().write_all(UNMARKED_PASTES);
            }
            let _ = emulate_default_handler(signal);
        }
    };
    thread::Builder::new().name("terminal".to_owned()).spawn(restore).map(drop)
}

fn next_line() -> Result<Option<String>> {
    let line = io::stdin().lock().lines().next().transpose();
    line.context("failed to read a line from stdin").context(ExitCode::Data)
}

impl LineEditor {
    fn open(history: Option<PathBuf>) -> rustyline::Result<Self> {
        let config = Config::builder()
            .max_history_size(MAX_HISTORY)?
            .completion_type(CompletionType::List)
            // The prompt does not go to stdout, which may be a file.
            .behavior(Behavior::PreferTerm)
            .build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(ChatHelper::default()));
        let history = history.filter(|path| match load(&mut editor, path) {
            Ok(()) => true,
            Err(error) => {
                print_note(&format!("note: the history {} is not used: {error}", path.display()));
                false
            }
        });
        Ok(Self { editor, history })
    }

    fn next(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(helper) = self.editor.helper() {
                helper.is_empty.set(true);
            }
            match self.editor.readline("> ") {
                Ok(line) => {
                    self.remember(&line);
                    return Ok(Some(without_block_marks(&line)));
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) if self.is_empty() => interrupt(),
                // Ctrl-C clears a line, and a resize of the terminal needs a new one.
                Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => {}
                Err(error) => {
                    return Err(error).context("failed to read a line from the terminal").context(ExitCode::Data);
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.editor.helper().is_some_and(|helper| helper.is_empty.get())
    }

    /// Appends a line to the history at once: a killed chat keeps it.
    fn remember(&mut self, line: &str) {
        if line.trim().is_empty() || !self.editor.add_history_entry(line).unwrap_or(false) {
            return;
        }
        let Some(path) = &self.history else { return };
        if let Err(error) = self.editor.append_history(path) {
            print_note(&format!("note: failed to write the history {}: {error}", path.display()));
            self.history = None;
        }
    }
}

/// Reads the history, and creates the folder of a new one, which only the owner can read.
fn load(editor: &mut Editor<ChatHelper, FileHistory>, path: &Path) -> rustyline::Result<()> {
    if path.exists() {
        return editor.load_history(path);
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    Ok(DirBuilder::new().recursive(true).mode(0o700).create(folder)?)
}

/// Ends the process group, as Ctrl-C does in a terminal whose input is not edited.
fn interrupt() -> ! {
    let _ = kill_process_group(getpgrp(), Signal::INT);
    // The handler of the signal ends the process, unless the signal is ignored.
    thread::sleep(Duration::from_secs(1));
    std::process::exit(130)
}

/// Returns the position of the `"""` that begins the message, or the argument of a command.
fn block_start(line: &str) -> Option<usize> {
    let argument = match line.strip_prefix('/') {
        Some(_) => line.find(char::is_whitespace)?,
        None => 0,
    };
    let start = argument + line[argument..].len() - line[argument..].trim_start().len();
    line[start..].starts_with(BLOCK).then_some(start)
}

/// Returns true for a line with an opening `"""` and no closing one.
fn is_open_block(line: &str) -> bool {
    block_start(line).is_some_and(|start| !line[start + BLOCK.len()..].contains(BLOCK))
}

/// Removes the `"""` of a message. A message then begins with a blank, so it is not read as a command.
fn without_block_marks(line: &str) -> String {
    let Some(start) = block_start(line) else { return line.to_owned() };
    let text = line[start + BLOCK.len()..].trim_end();
    format!("{} {}", line[..start].trim_end(), text.strip_suffix(BLOCK).unwrap_or(text).trim())
}

/// Completion and validation of a line.
#[derive(Default)]
struct ChatHelper {
    is_empty: Cell<bool>,
}

impl Helper for ChatHelper {}

impl Highlighter for ChatHelper {}

impl Hinter for ChatHelper {
    type Hint = String;

    /// Gives no hint, and keeps for Ctrl-C if the line is empty: the editor calls this after each change.
    fn hint(&self, line: &str, _pos: usize, _ctx: &rustyline::Context<'_>) -> Option<String> {
        self.is_empty.set(line.is_empty());
        None
    }
}

impl Validator for ChatHelper {
    fn validate(&self, ctx: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_open_block(ctx.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for ChatHelper {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _ctx: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        Ok((0, commands_of(&line[..pos])))
    }
}

/// Returns the commands that begin as the text does.
fn commands_of(text: &str) -> Vec<String> {
    let Some(word) = text.strip_prefix('/') else { return Vec::new() };
    let named = COMMANDS.iter().filter(|command| command.starts_with(word));
    named.map(|command| format!("/{command}")).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_several_lines_is_between_quotes() {
        let check = |line: &str, is_open: bool, text: &str| {
            assert_eq!(is_open_block(line), is_open, "{line:?}");
            assert_eq!(without_block_marks(line), text, "{line:?}");
        };
        check("a \"\"\" b", false, "a \"\"\" b");
        check("\"\"\"", true, " ");
        check("\"\"\"a\nb", true, " a\nb");
        check("\"\"\"a\n/undo\n\"\"\"", false, " a\n/undo");
        check("\"\"\"/undo\"\"\" ", false, " /undo");
        check("/system \"\"\"Be\nbrief.\"\"\"", false, "/system Be\nbrief.");
        check("/undo", false, "/undo");
    }

    #[test]
    fn commands_are_completed() {
        let check = |text: &str, want: &[&str]| assert_eq!(commands_of(text), want, "{text:?}");
        check("/u", &["/undo"]);
        check("/re", &["/reset", "/retry"]);
        check("/undo", &["/undo"]);
        check("/x", &[]);
        check("u", &[]);
        check(" /u", &[]);
        check("/system u", &[]);
    }
}
