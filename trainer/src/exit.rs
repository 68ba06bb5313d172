//! Exit codes: which one an error has.

use std::error::Error as StdError;
use std::io;

use candlewick_model::ModelError;
use candlewick_text::format::FormatError;
use candlewick_text::hub::HubError;
use candlewick_text::source::SourceError;
use candlewick_text::template::TemplateError;
use candlewick_text::tokenizer::TokenizerError;

use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::plan::KnownError;
use crate::recipe::RecipeError;
use crate::run::NonFinite;

pub use evaluator::exit::ExitCode;

/// Finds the exit code of an error: the one that it carries, or that of the part that failed.
pub fn classify(error: &anyhow::Error) -> ExitCode {
    if let Some(code) = error.downcast_ref::<ExitCode>() {
        return *code;
    }
    error.chain().find_map(code_of).unwrap_or(ExitCode::Failed)
}

fn code_of(error: &(dyn StdError + 'static)) -> Option<ExitCode> {
    if let Some(code) = error.downcast_ref::<ExitCode>() {
        return Some(*code);
    }
    if error.is::<RecipeError>() {
        return Some(ExitCode::Usage);
    }
    if let Some(known) = error.downcast_ref::<KnownError>() {
        return Some(match known {
            KnownError::Recipe(_) => ExitCode::Usage,
            KnownError::Hub(_) => ExitCode::Data,
            KnownError::Model(error) => model_code(error),
        });
    }
    if error.is::<NonFinite>() {
        return Some(ExitCode::NonFinite);
    }
    if error.is::<CheckpointError>() {
        return Some(ExitCode::Checkpoint);
    }
    if error.is::<DataError>() || is_text_error(error) {
        return Some(ExitCode::Data);
    }
    if let Some(error) = error.downcast_ref::<ModelError>() {
        return Some(model_code(error));
    }
    error.downcast_ref::<io::Error>().and_then(io_code)
}

fn is_text_error(error: &(dyn StdError + 'static)) -> bool {
    error.is::<HubError>()
        || error.is::<SourceError>()
        || error.is::<FormatError>()
        || error.is::<TokenizerError>()
        || error.is::<TemplateError>()
}

/// A config is the user's to change, a file of weights is a checkpoint.
fn model_code(error: &ModelError) -> ExitCode {
    match error {
        ModelError::Key { .. } | ModelError::Unsupported(_) | ModelError::Lora { .. } => ExitCode::Usage,
        ModelError::In { source, .. } => model_code(source),
        ModelError::Tensor(_) => ExitCode::Failed,
        _ => ExitCode::Checkpoint,
    }
}

fn io_code(error: &io::Error) -> Option<ExitCode> {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::ReadOnlyFilesystem => {
            Some(ExitCode::Checkpoint)
        }
        io::ErrorKind::OutOfMemory => Some(ExitCode::OutOfMemory),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[track_caller]
    fn check(error: anyhow::Error, want: ExitCode) {
        assert_eq!(classify(&error), want, "{error:#}");
        assert_eq!(classify(&error.context("failed to train")), want);
    }

    #[test]
    fn an_error_has_the_code_of_the_part_that_failed() {
        check(anyhow!("something"), ExitCode::Failed);
        check(anyhow!("the loss is NaN at step 3").context(ExitCode::NonFinite), ExitCode::NonFinite);
        check(ExitCode::Peer.into(), ExitCode::Peer);
        check(io::Error::from(io::ErrorKind::StorageFull).into(), ExitCode::Checkpoint);
        check(io::Error::from(io::ErrorKind::OutOfMemory).into(), ExitCode::OutOfMemory);
        check(io::Error::from(io::ErrorKind::NotFound).into(), ExitCode::Failed);
        check(ModelError::Unsupported("bert".into()).into(), ExitCode::Usage);
        let mismatch = ModelError::Mismatch { folder: "m".into(), problem: "a tensor is missing".into() };
        check(mismatch.into(), ExitCode::Checkpoint);
        let recipe = crate::recipe::Loaded::parse("r.yaml".as_ref(), "x: 1".into(), &[]).map(drop);
        check(recipe.context("failed to read").err().unwrap_or_else(|| anyhow!("it is wrong")), ExitCode::Usage);
    }
}
