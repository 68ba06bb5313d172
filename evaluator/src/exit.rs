//! Exit codes of task errors.

use std::error::Error as StdError;

use anyhow::Error;
use candlewick_runtime::exit::{self, ExitCode, classify_by};

use crate::task::TaskError;

/// Finds the exit code of an error: the one that it carries, or that of the part that failed.
pub fn classify(error: &Error) -> ExitCode {
    classify_by(error, code_of)
}

/// Finds the exit code of one error, without its causes.
pub fn code_of(error: &(dyn StdError + 'static)) -> Option<ExitCode> {
    match error.downcast_ref::<TaskError>() {
        Some(error) => Some(if error.is_usage() { ExitCode::Usage } else { ExitCode::Data }),
        None => exit::code_of(error),
    }
}
