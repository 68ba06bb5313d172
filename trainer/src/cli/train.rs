//! `trainer train`: from a recipe to a plan to a run.

use anyhow::{Result, anyhow};
use candlewick_comm::place::Place;
use candlewick_text::hub::{Hub, HubSettings};

use super::profile::Profile;
use super::{Recipe, Train, Ui, Verbosity, logging};
use crate::estimate::{Capacity, Setup, estimate};
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
    refuse_what_cannot_fit(&plan, &place, ui)?;
    let code = crate::run::train(&plan, &hub(ui)?, &world, &device)?;
    if let Some(profile) = profile {
        ui.remark(&profile.finish()?);
    }
    Ok(code)
}

/// Fails if the run cannot fit with rows of any length. Prints a note if it fits only with rows shorter than `data.max_length`.
fn refuse_what_cannot_fit(plan: &Plan, place: &Place, ui: &Ui) -> Result<()> {
    let capacity = Capacity::now(plan.device).of_one(place.local_world_size);
    let setup = Setup::on(plan, &capacity)?;
    let least = estimate(&Setup { row_tokens: 2, rows: 1, eval_load: None, ..setup.clone() }).shortages(&capacity);
    // An estimate is up to a tenth too high, and the system may find some more.
    if let Some(shortage) = least.into_iter().find(|short| short.needed_bytes / 5 * 4 > short.free_bytes) {
        let problem = format!("failed to start: the run needs {shortage}, whatever its rows are");
        let advice = "`trainer estimate RECIPE` says what takes it and what to change";
        return Err(anyhow!("{problem}; {advice}").context(ExitCode::OutOfMemory));
    }
    for shortage in estimate(&setup).shortages(&capacity).iter().filter(|_| place.rank == 0) {
        let rows = plan.data.max_length;
        ui.remark(&format!(
            "note: rows of {rows} tokens (data.max_length) would need {shortage}; see `trainer estimate`"
        ));
    }
    Ok(())
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
