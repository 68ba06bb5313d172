//! `trainer estimate`: the memory that a run will need.

use anyhow::{Context, Result, anyhow};

use super::{EstimateArgs, Ui, Verbosity, train};
use crate::estimate::{Capacity, Fixed, Report, Setup, choose};
use crate::exit::ExitCode;
use crate::plan::Seat;
use crate::recipe::{Loaded, MemoryModes};

pub(super) fn run(asked: &EstimateArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let loaded = Loaded::read(&asked.recipe.path, &asked.recipe.overrides)?;
    // What `memory: auto` takes depends on the device that is asked about: such a seat leaves it open.
    let plan = train::plan(&asked.recipe, verbosity, Seat::first_of(asked.ranks))?;
    let capacity = match &asked.device {
        Some(text) => {
            let parsed = Capacity::parse(text, plan.device);
            parsed.map_err(|problem| anyhow!("failed to read --device: {problem}").context(ExitCode::Usage))?
        }
        None => Capacity::now(plan.device),
    };
    let capacity = capacity.of_one(asked.ranks);
    let mut setup = Setup::on(&plan, &capacity)?;
    if loaded.recipe.memory == Some(MemoryModes::Auto)
        && capacity.bytes.is_some()
        && let Some(found) = choose(&setup, Fixed::of(&loaded), &capacity.usable()).found
    {
        setup.modes = found.modes;
    }
    let report = Report::new(plan.recipe.display().to_string(), &setup, &capacity);
    match asked.json {
        true => ui.answer(&serde_json::to_string_pretty(&report).context("failed to write the estimate as JSON")?)?,
        false => ui.answer(report.to_string().trim_end())?,
    };
    Ok(if report.fits == Some(false) { ExitCode::OutOfMemory } else { ExitCode::Ok })
}
