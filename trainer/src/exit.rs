//! Exit codes: which one an error of this program has.

use std::error::Error as StdError;

use candlewick_runtime::exit::{classify_by, model_code};
use candlewick_text::hub::HubError;
use evaluator::exit::code_of;

use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::plan::EnvironmentError;
use crate::recipe::RecipeError;
use crate::run::{AllStepsSkipped, NonFinite};
use crate::schedule::ScheduleError;

pub use candlewick_runtime::exit::ExitCode;

/// Writes an error and its causes. Most errors of the program say what could not be done: "keep tokens in /tmp".
pub fn report(error: &anyhow::Error) -> String {
    let outermost = error.chain().next();
    let completes = outermost.is_some_and(|error| {
        error.is::<DataError>()
            || error.is::<CheckpointError>()
            || error.is::<ScheduleError>()
            || error.is::<HubError>()
    });
    let text = candlewick_runtime::exit::report(error);
    if completes { text.replacen("error: ", "error: failed to ", 1) } else { text }
}

/// Finds the exit code of an error: the one that it carries, or that of the part that failed.
pub fn classify(error: &anyhow::Error) -> ExitCode {
    classify_by(error, |error| own_code(error).or_else(|| code_of(error)))
}

fn own_code(error: &(dyn StdError + 'static)) -> Option<ExitCode> {
    if let Some(known) = error.downcast_ref::<EnvironmentError>() {
        return Some(match known {
            EnvironmentError::Recipe(_) => ExitCode::Usage,
            EnvironmentError::Hub(_) => ExitCode::Data,
            EnvironmentError::Model(error) => model_code(error),
        });
    }
    if let Some(DataError::Cache { .. }) = error.downcast_ref::<DataError>() {
        return Some(ExitCode::Checkpoint);
    }
    let codes = [
        (error.is::<RecipeError>(), ExitCode::Usage),
        (error.is::<DataError>(), ExitCode::Data),
        (error.is::<NonFinite>() || error.is::<AllStepsSkipped>(), ExitCode::NonFinite),
        (error.is::<CheckpointError>(), ExitCode::Checkpoint),
        (error.is::<ScheduleError>(), ExitCode::Usage),
    ];
    codes.into_iter().find_map(|(is_it, code)| is_it.then_some(code))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_code_of_the_part_that_failed() {
        let recipe = crate::recipe::Loaded::parse("r.yaml".as_ref(), "x: 1".into(), &[]).unwrap_err();
        let known = EnvironmentError::Recipe(recipe.clone());
        for (error, code) in [
            (anyhow::Error::new(recipe), ExitCode::Usage),
            (known.into(), ExitCode::Usage),
            (
                DataError::Cache { path: "/tmp".into(), source: std::io::ErrorKind::StorageFull.into() }.into(),
                ExitCode::Checkpoint,
            ),
            (anyhow::anyhow!("something"), ExitCode::Failed),
            (anyhow::anyhow!("something").context(ExitCode::Preempted), ExitCode::Preempted),
        ] {
            assert_eq!(classify(&error), code, "{error:#}");
            assert_eq!(classify(&error.context("failed to train")), code);
        }
    }
}
