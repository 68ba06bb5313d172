//! `trainer train`: from a recipe to a plan to a run.

use anyhow::Result;
use candlewick_text::hub::{Hub, HubSettings};

use super::{Recipe, Ui, Verbosity, logging};
use crate::exit::ExitCode;
use crate::plan::{Known, Plan, Reach};
use crate::recipe::Loaded;

pub(super) fn run(recipe: &Recipe, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let plan = plan(recipe, verbosity)?;
    logging::start(verbosity, &plan.logger)?;
    for note in &plan.notes {
        ui.remark(&format!("note: {note}"));
    }
    let hub = Hub::new(HubSettings::from_env())?.with_progress(ui.downloads());
    crate::run::train(&plan, &hub)
}

/// What is wrong with the recipe alone is said before the Hub is asked for the model's config.
fn plan(recipe: &Recipe, verbosity: Verbosity) -> Result<Plan> {
    let loaded = Loaded::read(&recipe.path, &recipe.overrides)?;
    let here = Known::gather(&loaded, Reach::ThisMachine, verbosity.console())?;
    let plan = Plan::resolve(&loaded, &here)?;
    if here.config.is_some() {
        return Ok(plan);
    }
    let known = Known::gather(&loaded, Reach::Network, verbosity.console())?;
    Ok(Plan::resolve(&loaded, &known)?)
}
