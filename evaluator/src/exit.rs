//! Exit codes of evaluator errors.

use std::error::Error as StdError;

use anyhow::Error;
use candlewick_runtime::exit::{self, ExitCode, classify_by};

use crate::task::TaskError;

/// Returns the process exit code for an error, from the error itself or the first of its causes that has one.
pub fn classify(error: &Error) -> ExitCode {
    classify_by(error, code_of)
}

/// Returns the exit code of one error, without its causes.
pub fn code_of(error: &(dyn StdError + 'static)) -> Option<ExitCode> {
    match error.downcast_ref::<TaskError>() {
        Some(error) => Some(if error.is_usage() { ExitCode::Usage } else { ExitCode::Data }),
        None => exit::code_of(error),
    }
}
