//! Exit codes of the program's errors.

use std::error::Error as StdError;

use candlewick_runtime::exit::{classify_by, model_code};
use candlewick_text::hub::HubError;
use evaluator::exit::code_of;

use crate::checkpoint::CheckpointError;
use crate::data::DataError;
use crate::recipe::RecipeError;
use crate::resolve::EnvironmentError;
use crate::routing::RoutingError;
use crate::schedule::ScheduleError;
use crate::step_error::{AllStepsSkipped, LossSpike, NonFinite};

pub use candlewick_runtime::exit::ExitCode;

/// Formats an error and its causes. Some errors name only the failed operation, such as "write /tmp/tokens", and get
/// the prefix "failed to".
pub fn report(error: &anyhow::Error) -> String {
    let outermost = error.chain().next();
    let needs_prefix = outermost.is_some_and(|error| {
        error.is::<DataError>()
            || error.is::<CheckpointError>()
            || error.is::<ScheduleError>()
            || error.is::<HubError>()
            || error.is::<RoutingError>()
    });
    let text = candlewick_runtime::exit::report(error);
    if needs_prefix { text.replacen("error: ", "error: failed to ", 1) } else { text }
}

/// Returns the exit code of an error: an attached code, else the code of the component that failed.
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
    match error.downcast_ref::<DataError>() {
        Some(DataError::Cache { .. }) => return Some(ExitCode::Checkpoint),
        Some(DataError::Stopped { .. }) => return Some(ExitCode::Preempted),
        _ => {}
    }
    if let Some(known) = error.downcast_ref::<RoutingError>() {
        return Some(match known {
            RoutingError::Write { .. } | RoutingError::Occupied { .. } => ExitCode::Checkpoint,
            RoutingError::Read { .. } | RoutingError::Unusable { .. } => ExitCode::Data,
        });
    }
    let codes = [
        (error.is::<RecipeError>(), ExitCode::Usage),
        (error.is::<DataError>(), ExitCode::Data),
        (error.is::<NonFinite>() || error.is::<AllStepsSkipped>() || error.is::<LossSpike>(), ExitCode::NonFinite),
        (error.is::<CheckpointError>(), ExitCode::Checkpoint),
        (error.is::<ScheduleError>(), ExitCode::Usage),
    ];
    codes.into_iter().find_map(|(is_match, code)| is_match.then_some(code))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_code_of_the_component_that_failed() {
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
