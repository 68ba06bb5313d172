//! An error as text: at most a screen of it.

use std::backtrace::BacktraceStatus;
use std::fmt::Write as _;

/// Writes an error and its causes, each once. A backtrace follows only if RUST_BACKTRACE asks for one.
pub(super) fn report(error: &anyhow::Error) -> String {
    let mut text = String::from("error: ");
    for (depth, cause) in error.chain().enumerate() {
        let cause = cause.to_string();
        if depth == 0 {
            text += &cause;
        } else if !text.contains(&cause) {
            // Many errors say their cause in their own words already.
            let _ = write!(text, "\n  because: {}", cause.replace('\n', "\n  "));
        }
    }
    text.push('\n');
    if error.backtrace().status() == BacktraceStatus::Captured {
        let _ = writeln!(text, "\n{}", error.backtrace());
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_report_says_each_cause_once() {
        let inner = io::Error::other("the disk is gone");
        let error = anyhow::Error::new(inner).context("failed to save").context("failed to train: failed to save");
        assert_eq!(report(&error).lines().take(2).collect::<Vec<_>>(), [
            "error: failed to train: failed to save",
            "  because: the disk is gone",
        ]);
    }
}
