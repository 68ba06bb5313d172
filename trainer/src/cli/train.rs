//! `trainer train`: from a recipe to a plan to a run.

use anyhow::Result;
use candlewick_text::hub::{Hub, HubSettings};

use super::profile::Profile;
use super::{Recipe, Train, Ui, Verbosity, logging};
use crate::exit::ExitCode;
use crate::plan::{Known, KnownError, Plan, Reach, Seat};
use crate::recipe::Loaded;
use crate::run::connect;

pub(super) fn run(train: &Train, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let place = super::place()?;
    let plan = plan(&train.recipe, verbosity, super::seat(&place))?;
    let folder = plan.log.output_dir.clone().unwrap_or_default();
    let mut profile = train
        .profile
        .filter(|_| place.rank == 0)
        .map(|sort| Profile::create(folder, sort, train.profile_steps))
        .transpose()?;
    logging::start(verbosity, &plan.logger, profile.as_mut())?;
    for note in plan.notes.iter().filter(|_| place.rank == 0) {
        ui.remark(&format!("note: {note}"));
    }
    let (world, device) = connect(&plan, &place)?;
    let code = crate::run::train(&plan, &hub(ui)?, &world, &device)?;
    if let Some(profile) = profile {
        ui.remark(&profile.finish()?);
    }
    Ok(code)
}

/// The Hub as the environment describes it, with a bar for each download.
pub(super) fn hub(ui: &Ui) -> Result<Hub> {
    Ok(Hub::new(HubSettings::from_env())?.with_progress(ui.downloads()))
}

/// Resolves a recipe. What is wrong with the recipe alone is said before the Hub is asked for the model's config.
pub(super) fn plan(recipe: &Recipe, verbosity: Verbosity, seat: Seat) -> Result<Plan> {
    let loaded = Loaded::read(&recipe.path, &recipe.overrides)?;
    let here = known(&loaded, Reach::ThisMachine, verbosity, seat)?;
    let plan = Plan::resolve(&loaded, &here)?;
    if here.config.is_some() {
        return Ok(plan);
    }
    let known = known(&loaded, Reach::Network, verbosity, seat)?;
    Ok(Plan::resolve(&loaded, &known)?)
}

/// Looks at the machine and the Hub, and says what for if that fails.
pub(super) fn known(loaded: &Loaded, reach: Reach, verbosity: Verbosity, seat: Seat) -> Result<Known> {
    Known::gather(loaded, reach, verbosity.console(), seat).map_err(|error| match error {
        KnownError::Recipe(error) => error.into(),
        error => anyhow::Error::new(error).context("failed to find the model's config"),
    })
}
