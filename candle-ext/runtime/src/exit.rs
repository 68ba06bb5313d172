//! Exit codes of the programs, which scripts and schedulers can rely on, and the formatting of errors.

use std::backtrace::BacktraceStatus;
use std::error::Error as StdError;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::io;
use std::process::Termination;

use candlewick_model::ModelError;
use candlewick_text::format::FormatError;
use candlewick_text::hub::HubError;
use candlewick_text::printable::{mask_passwords, printable, shorten_lines};
use candlewick_text::render::RenderError;
use candlewick_text::source::SourceError;
use candlewick_text::template::TemplateError;
use candlewick_text::template::parser::ThreadSpawnError;
use candlewick_text::tokenizer::TokenizerError;

use crate::peer_error::PeerError;

/// Exit code of a program. The numbers are stable.
///
/// It is also an error, so that a failure can carry its code: `error.context(ExitCode::NonFinite)`. A second signal during a
/// run exits immediately with 128 plus the signal's number, which is not listed here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ExitCode {
    /// Success.
    Ok = 0,
    /// Other failure.
    Failed = 1,
    /// Invalid command line or recipe. Nothing was started.
    Usage = 2,
    /// Invalid or missing data, tokenizer or chat template.
    Data = 3,
    /// Out of memory.
    OutOfMemory = 4,
    /// Non-finite loss or gradient.
    NonFinite = 5,
    /// Unreadable or unwritable checkpoint, a full or read-only disk, or an access that was denied.
    Checkpoint = 6,
    /// Failure of another rank or of a collective.
    Peer = 7,
    /// Stopped on request after a checkpoint was saved. Start the run again to resume it.
    Preempted = 75,
}

/// Returns the exit code of an error: the one that it carries, or that of its type.
pub fn classify(error: &anyhow::Error) -> ExitCode {
    classify_by(error, code_of)
}

/// Returns the exit code of an error like [`classify`], with `code_of` for the error and each of its causes in turn.
///
/// An I/O error of a full disk among the causes has the code `Checkpoint`, whatever the failed operation was. One of memory
/// that ran out, such as that of a file that cannot be mapped, has the code `OutOfMemory`.
pub fn classify_by(error: &anyhow::Error, code_of: impl Fn(&(dyn StdError + 'static)) -> Option<ExitCode>) -> ExitCode {
    match error.downcast_ref::<ExitCode>() {
        _ if error.chain().any(is_full_disk) => ExitCode::Checkpoint,
        _ if error.chain().any(is_without_memory) => ExitCode::OutOfMemory,
        Some(code) => *code,
        None => error.chain().find_map(code_of).unwrap_or(ExitCode::Failed),
    }
}

/// Returns the exit code of one error without its causes.
pub fn code_of(error: &(dyn StdError + 'static)) -> Option<ExitCode> {
    if let Some(code) = error.downcast_ref::<ExitCode>() {
        return Some(*code);
    }
    if error.is::<PeerError>() {
        return Some(ExitCode::Peer);
    }
    if candlewick_ops::is_out_of_memory(error) || is_without_stack(error) {
        return Some(ExitCode::OutOfMemory);
    }
    if let Some(error) = error.downcast_ref::<ModelError>() {
        return Some(model_code(error));
    }
    if is_text_error(error) {
        return Some(ExitCode::Data);
    }
    io_error(error).and_then(io_code)
}

/// Returns an error as an I/O error, also if candle has wrapped it.
fn io_error<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e io::Error> {
    error.downcast_ref::<io::Error>().or_else(|| candlewick_model::io_cause(error))
}

/// Returns true if an error or one of its causes is a thread without memory for its stack.
fn is_without_stack(error: &(dyn StdError + 'static)) -> bool {
    error.is::<ThreadSpawnError>() || error.source().is_some_and(is_without_stack)
}

fn is_text_error(error: &(dyn StdError + 'static)) -> bool {
    error.is::<HubError>()
        || error.is::<SourceError>()
        || error.is::<FormatError>()
        || error.is::<RenderError>()
        || error.is::<TokenizerError>()
        || error.is::<TemplateError>()
}

/// Returns the exit code of a model's error: `Usage` for its config, `Checkpoint` for its weights.
pub fn model_code(error: &ModelError) -> ExitCode {
    match error {
        ModelError::ConfigKey { .. } | ModelError::Unsupported(_) | ModelError::LoraKey { .. } => ExitCode::Usage,
        ModelError::InFile { source, .. } => model_code(source),
        ModelError::Tensor(_) => ExitCode::Failed,
        _ => ExitCode::Checkpoint,
    }
}

/// Returns true for a failed write to a disk that is full or read-only, or of a file beyond the size limit.
fn is_full_disk(error: &(dyn StdError + 'static)) -> bool {
    const KINDS: [io::ErrorKind; 4] = [
        io::ErrorKind::StorageFull,
        io::ErrorKind::QuotaExceeded,
        io::ErrorKind::ReadOnlyFilesystem,
        io::ErrorKind::FileTooLarge,
    ];
    let Some(error) = io_error(error) else { return false };
    KINDS.contains(&error.kind()) || error.get_ref().is_some_and(|inner| is_full_disk(inner))
}

/// Returns true for an I/O error of memory that ran out.
fn is_without_memory(error: &(dyn StdError + 'static)) -> bool {
    let Some(error) = io_error(error) else { return false };
    error.kind() == io::ErrorKind::OutOfMemory || error.get_ref().is_some_and(|inner| is_without_memory(inner))
}

/// Returns the exit code of an I/O error of an operation without a code of its own. A denied access is usually that of a
/// folder that cannot be written.
fn io_code(error: &io::Error) -> Option<ExitCode> {
    match error.kind() {
        io::ErrorKind::PermissionDenied => Some(ExitCode::Checkpoint),
        _ => None,
    }
}

/// Parses `arguments`, or prints clap's message and returns the exit code. The first argument is the program's name.
pub fn parse_arguments_from<C: clap::Parser>(arguments: impl IntoIterator<Item = OsString>) -> Result<C, ExitCode> {
    C::try_parse_from(arguments).map_err(|error| {
        // clap returns --help and --version as errors for stdout. A closed pipe is not an error.
        let _ = error.print();
        if error.use_stderr() { ExitCode::Usage } else { ExitCode::Ok }
    })
}

/// Formats an error and its causes, each once. Escapes control characters, masks passwords in URLs, and shortens lines.
///
/// Leaves out the cause of a [`PeerError`], which another rank prints.
pub fn report(error: &anyhow::Error) -> String {
    let mut text = String::from("error: ");
    // Skip an exit code that the error carries.
    let carried = usize::from(error.downcast_ref::<ExitCode>().is_some());
    let n_skipped = carried.min(error.chain().count() - 1);
    for (depth, cause) in error.chain().skip(n_skipped).enumerate() {
        let (is_peer, cause) = (cause.is::<PeerError>(), cause.to_string());
        if depth == 0 {
            text += &cause;
        } else if !text.contains(&cause) {
            // Many messages contain their cause already.
            let _ = write!(text, "\n  because: {}", cause.replace('\n', "\n  "));
        }
        if is_peer {
            break;
        }
    }
    text.push('\n');
    shorten_lines(&mask_passwords(&printable(&text)))
}

/// Formats the backtrace of an error, if RUST_BACKTRACE is set.
pub fn backtrace(error: &anyhow::Error) -> String {
    match error.backtrace().status() {
        BacktraceStatus::Captured => format!("\n{}\n", error.backtrace()),
        _ => String::new(),
    }
}

impl fmt::Display for ExitCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExitCode::Ok => "done",
            ExitCode::Failed => "failed",
            ExitCode::Usage => "the command line or the recipe is wrong",
            ExitCode::Data => "the data cannot be used",
            ExitCode::OutOfMemory => "memory ran out",
            ExitCode::NonFinite => "a loss or a gradient was not finite",
            ExitCode::Checkpoint => "a checkpoint cannot be read or written",
            ExitCode::Peer => "another rank failed",
            ExitCode::Preempted => "stopped on request, with a checkpoint saved",
        })
    }
}

impl std::error::Error for ExitCode {}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        std::process::ExitCode::from(code as u8)
    }
}

impl Termination for ExitCode {
    fn report(self) -> std::process::ExitCode {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn exit_codes_have_the_documented_numbers() {
        use ExitCode::*;
        let codes = [Ok, Failed, Usage, Data, OutOfMemory, NonFinite, Checkpoint, Peer, Preempted];
        assert_eq!(codes.map(|code| code as u8), [0, 1, 2, 3, 4, 5, 6, 7, 75]);
    }

    #[track_caller]
    fn check(error: anyhow::Error, want: ExitCode) {
        assert_eq!(classify(&error), want, "{error:#}");
        assert_eq!(classify(&error.context("failed to run")), want);
    }

    #[test]
    fn an_error_has_the_exit_code_of_its_type() {
        check(anyhow!("something"), ExitCode::Failed);
        check(anyhow!("the loss is NaN").context(ExitCode::NonFinite), ExitCode::NonFinite);
        check(ExitCode::Peer.into(), ExitCode::Peer);
        check(io::Error::from(io::ErrorKind::StorageFull).into(), ExitCode::Checkpoint);
        check(io::Error::from(io::ErrorKind::PermissionDenied).into(), ExitCode::Checkpoint);
        check(io::Error::from(io::ErrorKind::OutOfMemory).into(), ExitCode::OutOfMemory);
        check(io::Error::from(io::ErrorKind::NotFound).into(), ExitCode::Failed);
        let unsupported = ModelError::Unsupported("bert".into());
        check(ModelError::InFile { path: "config.json".into(), source: Box::new(unsupported) }.into(), ExitCode::Usage);
        let mismatch = ModelError::Mismatch { folder: "m".into(), problem: "a tensor is missing".into() };
        check(mismatch.into(), ExitCode::Checkpoint);
    }

    #[test]
    fn a_full_disk_has_one_exit_code_whatever_failed() {
        for kind in [
            io::ErrorKind::StorageFull,
            io::ErrorKind::QuotaExceeded,
            io::ErrorKind::ReadOnlyFilesystem,
            io::ErrorKind::FileTooLarge,
        ] {
            let error = || io::Error::from(kind);
            let write_lock = HubError::WriteLock { path: "r.lock".into(), source: error() };
            check(write_lock.into(), ExitCode::Checkpoint);
            check(io::Error::other(error()).into(), ExitCode::Checkpoint);
            check(candle_core::Error::from(error()).context("failed to offload").into(), ExitCode::Checkpoint);
            check(anyhow::Error::from(error()).context("failed to read").context(ExitCode::Data), ExitCode::Checkpoint);
        }
    }

    #[test]
    fn memory_that_ran_out_has_one_exit_code_whatever_failed() {
        let error = || io::Error::from(io::ErrorKind::OutOfMemory);
        let map = ModelError::Io { doing: "map", path: "model.safetensors".into(), source: error() };
        check(map.into(), ExitCode::OutOfMemory);
        check(io::Error::other(error()).into(), ExitCode::OutOfMemory);
        check(candle_core::Error::from(error()).context("failed to offload").into(), ExitCode::OutOfMemory);
        check(anyhow::Error::from(error()).context("failed to read").context(ExitCode::Data), ExitCode::OutOfMemory);
    }

    #[test]
    fn passwords_in_urls_are_masked_in_a_report() {
        let error = anyhow!("2 | uri: http://me:s3cret@host/a?b=1, https://t0ken@host").context("at ftp://h/p@q");
        let text = report(&error);
        assert!(
            text.contains("http://*********@host/a?b=1, https://*****@host") && text.contains("ftp://h/p@q"),
            "{text}"
        );
    }

    #[test]
    fn long_lines_of_a_report_are_shortened() {
        let error =
            anyhow!("there is no {}é{} at a.jsonl:3", "x".repeat(2_000_000), "y".repeat(5_000)).context("short");
        let text = report(&error);
        assert!(text.len() < 3_000 && text.starts_with("error: short\n  because: there is no xxx"), "{}", text.len());
        assert!(text.contains(" characters left out) ") && text.ends_with("yyy at a.jsonl:3\n"), "{text}");
    }

    #[test]
    fn control_characters_are_escaped_in_a_report() {
        let error = anyhow!("raise_exception: \x1b[31mred\u{202e}").context("failed to render");
        assert_eq!(report(&error).lines().nth(1), Some("  because: raise_exception: \\u001b[31mred\\u202e"));
    }

    #[test]
    fn a_report_lists_each_cause_once() {
        let inner = io::Error::other("the disk is gone");
        let error = anyhow::Error::new(inner).context("failed to save").context("failed to train: failed to save");
        assert_eq!(
            report(&error).lines().take(2).collect::<Vec<_>>(),
            ["error: failed to train: failed to save", "  because: the disk is gone",]
        );
    }
}
