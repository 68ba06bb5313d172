//! `trainer check`: the plan, printed.

use anyhow::{Context, Result};

use super::train::known;
use super::{Check, Format, Ui, Verbosity};
use crate::exit::ExitCode;
use crate::plan::{Plan, Reach};
use crate::recipe::Loaded;

pub(super) fn run(check: &Check, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let loaded = Loaded::read(&check.recipe.path, &check.recipe.overrides)?;
    let reach = if check.offline { Reach::Offline } else { Reach::ThisMachine };
    let known = known(&loaded, reach, verbosity)?;
    let plan = Plan::resolve(&loaded, &known)?;
    match check.output_format {
        Format::Text => ui.answer(plan.to_string().trim_end()),
        Format::Json => ui.answer(&serde_json::to_string_pretty(&plan).context("failed to write the plan as JSON")?),
    }
}
