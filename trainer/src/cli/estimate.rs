//! `trainer estimate`: the memory that a run will need.

use anyhow::{Context, Result, anyhow};

use super::{EstimateArgs, Recipe, Ui, Verbosity, train};
use crate::estimate::{Capacity, Fixed, Place, Report, Setup, choose, usable};
use crate::exit::ExitCode;
use crate::plan::Seat;
use crate::recipe::{Loaded, MemoryModes};

pub(super) fn run(asked: &EstimateArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let seat = Seat { n_ranks: asked.ranks, ..Seat::ALONE };
    let loaded = Loaded::read(&asked.recipe.path, &asked.recipe.overrides)?;
    // What `memory: auto` takes depends on the device that is asked about, not on what is free here.
    let manual = ["memory=manual".to_owned()];
    let overrides = asked.recipe.overrides.iter().chain(&manual).cloned().collect();
    let plan = train::plan(&Recipe { path: asked.recipe.path.clone(), overrides }, verbosity, seat)?;
    if plan.ranks.n_of_model() > 1 {
        let message = "failed to estimate: what ranks need that share matrices or blocks (tensor_parallel_size, \
                       pipeline_parallel_size) is not known yet; ask for one of them, with tensor_parallel_size=1 \
                       pipeline_parallel_size=1";
        return Err(anyhow!(message).context(ExitCode::Usage));
    }
    let capacity = match &asked.device {
        Some(text) => {
            let parsed = Capacity::parse(text, plan.device);
            parsed.map_err(|problem| anyhow!("failed to read --device: {problem}").context(ExitCode::Usage))?
        }
        None => Capacity::now(plan.device),
    };
    let capacity = match capacity.place {
        // The ranks of a machine have its memory together.
        Place::Cpu => Capacity { bytes: capacity.bytes.map(|bytes| bytes / asked.ranks as u64), ..capacity },
        Place::Gpu => capacity,
    };
    let mut setup = Setup::of(&plan, capacity.place)?;
    if let (Some(MemoryModes::Auto), Some(bytes)) = (loaded.recipe.memory, capacity.bytes)
        && let Some(found) = choose(&setup, Fixed::of(&loaded), usable(bytes)).found
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
