//! `memory: auto`: selects the cheapest modes with which the run fits the free memory.

use super::{Environment, Machines};
use crate::estimate::{
    Candidate, FixedModes, ModeSearch, Modes, Resource, Setup, as_arguments, choose, format_bytes, usable,
};
use crate::plan::{CheckpointingMode, Plan, ResolvedSetting};
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
    let wrong = |message: String, advice: &str| loaded.error(vec![loaded.fault_at(&["memory"], message).note(advice)]);
    if plan.model.config.is_none() {
        plan.notes.push("memory: auto selects the modes once the model's config.json is downloaded".into());
        return Ok(plan);
    }
    if env.world.machines == Machines::Unknown {
        plan.notes.push("memory: auto selects the modes on the machines of the ranks, by their free memory".into());
        return Ok(plan);
    }
    let Some((capacity, free)) = env.capacity.as_ref().and_then(|capacity| Some((capacity, capacity.bytes?))) else {
        return Err(wrong("memory: auto needs the free memory, which this machine does not report".into(), MANUAL));
    };
    let setup = Setup::on(&plan, capacity).map_err(|error| wrong(format!("memory: failed to {error}"), MANUAL))?;
    let fixed = FixedModes::of(loaded);
    let choice = choose(&setup, fixed, &capacity.usable());
    let Some(found) = choice.found else {
        let longest = match choice.longest {
            Some(tokens) => format!("the longest row that fits has {tokens} tokens: lower data.max_length"),
            None => "no row fits: use a smaller model, 16-bit optimizer states or an adapter".to_owned(),
        };
        return Err(wrong(tried(&choice, free), &longest));
    };
    apply(&mut plan, found, fixed, free);
    Ok(plan)
}

const MANUAL: &str = "set memory: manual, and the modes in the recipe";

fn tried(choice: &ModeSearch, free: u64) -> String {
    let tried: Vec<String> = choice.tried.iter().map(describe_candidate).collect();
    format!(
        "memory: no mode fits {} of the {} that are free: {}",
        format_bytes(usable(free)),
        format_bytes(free),
        tried.join("; ")
    )
}

/// Formats a candidate's bytes and its shortages of resources other than device memory.
fn describe_candidate(candidate: &Candidate) -> String {
    let others = candidate.short.iter().filter(|shortage| shortage.of != Resource::Device);
    let others: String = others.map(|shortage| format!(" and {shortage}")).collect();
    format!("{} needs {}{others}", modes_as_arguments(candidate.modes), format_bytes(candidate.peak_bytes))
}

fn modes_as_arguments(modes: Modes) -> String {
    as_arguments(modes.keys().iter().map(|(key, value)| (*key, value)))
}

fn apply(plan: &mut Plan, found: Candidate, fixed: FixedModes, free: u64) {
    plan.model.activations = found.modes.activations;
    if !fixed.activations {
        record(plan);
    }
    let (modes, peak, free) = (modes_as_arguments(found.modes), format_bytes(found.peak_bytes), format_bytes(free));
    plan.notes.push(format!("memory: auto selects {modes}: about {peak} of the {free} that are free"));
}

/// Replaces the setting of the chosen mode in the table.
fn record(plan: &mut Plan) {
    let key = super::model::ACTIVATIONS[0];
    let setting = ResolvedSetting::new(key, &plan.model.activations.to_recipe(), Origin::Memory("memory"));
    plan.replace_setting(setting);
}

impl Plan {
    /// Uses the checkpointing mode that all ranks agreed on. Returns a note if this rank selected another.
    pub(crate) fn use_modes_of_ranks(&mut self, agreed: CheckpointingMode) -> Option<String> {
        if self.model.activations == agreed {
            return None;
        }
        self.model.activations = agreed;
        record(self);
        let modes = modes_as_arguments(Modes::of(self));
        Some(self.replace_note("memory: auto selects", format!("{modes}: {OF_RANKS}")))
    }

    /// Replaces the setting with the same key in the table.
    pub(super) fn replace_setting(&mut self, setting: ResolvedSetting) {
        if let Some(old) = self.settings.iter_mut().find(|old| old.key == setting.key) {
            *old = setting;
        }
    }

    /// Replaces the note that begins with `subject`. Returns the new note.
    pub(super) fn replace_note(&mut self, subject: &str, statement: String) -> String {
        let note = format!("{subject} {statement}");
        self.notes.retain(|old| !old.starts_with(subject));
        self.notes.push(note.clone());
        note
    }
}

/// Reason of a choice that another rank decided.
pub(super) const OF_RANKS: &str = "the choice of the rank with the least free memory";
