//! `memory: auto`: selects the cheapest modes with which the run fits the free memory.

use super::{Environment, Machines};
use crate::estimate::{Candidate, FixedModes, ModeSearch, Modes, Resource, Setup, as_arguments, bytes, choose, usable};
use crate::plan::Plan;
use crate::plan::Setting;
use crate::recipe::{Loaded, Origin, RecipeError};

impl FixedModes {
    /// Returns the modes that a recipe sets itself.
    pub fn of(loaded: &Loaded) -> Self {
        Self { activations: super::model::ACTIVATIONS.iter().any(|key| loaded.is_set(key)) }
    }
}

/// Chooses the modes that `loaded` leaves open, so that the run fits the free memory with some headroom.
///
/// Fails with the candidates' sizes if none fits. The free memory is an argument (`env`).
pub(super) fn resolve(mut plan: Plan, loaded: &Loaded, env: &Environment) -> Result<Plan, RecipeError> {
    let wrong = |message: String, advice: &str| loaded.error(vec![loaded.fault(&["memory"], message).note(advice)]);
    if plan.model.config.is_none() {
        plan.notes.push("memory: auto chooses once the model's config.json is on this machine".into());
        return Ok(plan);
    }
    if env.world.machines == Machines::Unknown {
        plan.notes.push("memory: auto chooses where the ranks run, by what is free there".into());
        return Ok(plan);
    }
    let Some((capacity, free)) = env.capacity.as_ref().and_then(|capacity| Some((capacity, capacity.bytes?))) else {
        return Err(wrong("memory: auto needs to know what is free, and this machine does not tell".into(), MANUAL));
    };
    let setup = Setup::on(&plan, capacity).map_err(|error| wrong(format!("memory: failed to {error}"), MANUAL))?;
    let fixed = FixedModes::of(loaded);
    let choice = choose(&setup, fixed, &capacity.usable());
    let Some(found) = choice.found else {
        let longest = match choice.longest {
            Some(tokens) => format!("the longest row that would fit has {tokens} tokens: lower data.max_length"),
            None => "no row would fit: use a smaller model, 16-bit states or an adapter".to_owned(),
        };
        return Err(wrong(tried(&choice, free), &longest));
    };
    apply(&mut plan, found, fixed, free);
    Ok(plan)
}

const MANUAL: &str = "set memory: manual, and the modes yourself";

fn tried(choice: &ModeSearch, free: u64) -> String {
    let tried: Vec<String> = choice.tried.iter().map(needs).collect();
    format!("memory: nothing fits {} of the {} that are free: {}", bytes(usable(free)), bytes(free), tried.join("; "))
}

/// Formats a candidate's bytes and its shortages of resources other than device memory.
fn needs(candidate: &Candidate) -> String {
    let besides = candidate.short.iter().filter(|shortage| shortage.of != Resource::Device);
    let besides: String = besides.map(|shortage| format!(" and {shortage}")).collect();
    format!("{} needs {}{besides}", said(candidate.modes), bytes(candidate.peak_bytes))
}

fn said(modes: Modes) -> String {
    as_arguments(modes.keys().iter().map(|(key, value)| (*key, value)))
}

fn apply(plan: &mut Plan, found: Candidate, fixed: FixedModes, free: u64) {
    plan.model.activations = found.modes.activations;
    let key = super::model::ACTIVATIONS[0];
    if let Some(setting) = plan.settings.iter_mut().find(|setting| setting.key == key && !fixed.activations) {
        *setting = Setting::new(key, &found.modes.activations.to_recipe(), Origin::Memory);
    }
    let (modes, peak, free) = (said(found.modes), bytes(found.peak_bytes), bytes(free));
    plan.notes.push(format!("memory: auto takes {modes}: about {peak} of the {free} that are free"));
}
