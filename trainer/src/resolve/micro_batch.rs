//! `micro_batch_size: auto`: selects the rows of a micro-batch that fit the free memory. The rows of a step do not change.

use super::memory::OF_RANKS;
use super::{Environment, Machines};
use crate::estimate::{Setup, choose_micro_batch, format_bytes};
use crate::plan::{MicroBatchChoice, Plan, ResolvedSetting};
use crate::recipe::Origin;

const SELECTS: &str = "micro_batch_size: auto selects";
const KEY: &str = "micro_batch_size";
const ACCUMULATION: &str = "gradient_accumulation_steps";

/// Selects the rows of a micro-batch, if the recipe leaves them open. Stays at one row if the losses depend on the rows, or
/// while a fact is unknown, and adds the reason to the notes.
pub(super) fn resolve(mut plan: Plan, env: &Environment) -> Plan {
    if plan.micro_batch == MicroBatchChoice::Recipe {
        return plan;
    }
    if let Some(reason) = plan.reason_for_one_row() {
        let note = one_row(&mut plan, reason);
        plan.notes.push(note);
        return plan;
    }
    match select(&mut plan, env) {
        Ok(note) | Err(note) => plan.notes.push(note),
    }
    plan
}

/// Selects the rows, and returns a note with the estimate. Fails with a note if a fact is unknown.
fn select(plan: &mut Plan, env: &Environment) -> Result<String, String> {
    if plan.data.gradient_accumulation_steps == 1 {
        let remedy = format!("set {ACCUMULATION} to the rows of a step on each data-parallel rank");
        return Err(one_row(plan, &format!("a step has one row; {remedy}")));
    }
    if plan.model.config.is_none() {
        return Err(format!("{KEY}: auto selects the rows once the model's config.json is downloaded"));
    }
    if env.world.machines == Machines::Unknown {
        return Err(format!("{KEY}: auto selects the rows on the machines of the ranks, by their free memory"));
    }
    let Some((capacity, free)) = env.capacity.as_ref().and_then(|capacity| Some((capacity, capacity.bytes?))) else {
        return Err(one_row(plan, "this machine does not report its free memory"));
    };
    let setup = match Setup::on(plan, capacity) {
        Ok(setup) => setup,
        Err(error) => return Err(one_row(plan, &format!("failed to {error}"))),
    };
    let found = choose_micro_batch(&setup, &capacity.usable());
    plan.set_micro_batch_size(found.rows);
    record(plan, found.rows);
    let (peak, free) = (format_bytes(found.peak_bytes), format_bytes(free));
    let rounding =
        if plan.fp8.is_some() && found.rows > 1 { "; FP8 scales are those of larger micro-batches" } else { "" };
    Ok(format!("{SELECTS} {}: about {peak} of the {free} that are free{rounding}", found.rows))
}

/// Selects one row. Returns a note with the reason.
fn one_row(plan: &mut Plan, reason: &str) -> String {
    record(plan, 1);
    format!("{SELECTS} 1: {reason}")
}

/// Replaces the settings of the batch in the table.
fn record(plan: &mut Plan, rows: usize) {
    plan.replace_setting(ResolvedSetting::new(KEY, &rows, Origin::Memory(KEY)));
    let accumulation = ResolvedSetting::new(ACCUMULATION, &plan.data.gradient_accumulation_steps, Origin::Derived);
    // With one row the recipe's number holds.
    if plan.settings.iter().any(|old| old.key == ACCUMULATION && old.value != accumulation.value) {
        plan.replace_setting(accumulation);
    }
}

impl Plan {
    /// Uses the rows of a micro-batch that all ranks agreed on. Returns a note if this rank selected others.
    pub(crate) fn use_micro_batch_of_ranks(&mut self, rows: usize) -> Option<String> {
        if self.data.micro_batch_size == rows {
            return None;
        }
        self.set_micro_batch_size(rows);
        record(self, rows);
        Some(self.replace_note(SELECTS, format!("{rows}: {OF_RANKS}")))
    }

    /// Cuts the rows of a step into micro-batches of `rows` rows. Their number must divide those of a rank.
    pub(crate) fn set_micro_batch_size(&mut self, rows: usize) {
        let data = &mut self.data;
        let of_rank = data.micro_batch_size * data.gradient_accumulation_steps;
        debug_assert!(of_rank.is_multiple_of(rows), "{of_rank} rows cannot be divided by {rows}");
        (data.micro_batch_size, data.gradient_accumulation_steps) = (rows, of_rank / rows);
    }

    /// Returns the reason if losses depend on the division of a step into micro-batches by more than rounding.
    pub(crate) fn reason_for_one_row(&self) -> Option<&'static str> {
        let drops = self.model.adapter.as_ref().is_some_and(|adapter| adapter.dropout() > 0.0);
        let moe = self.moe.as_ref();
        let reasons = [
            (drops, "lora_dropout draws its masks for each micro-batch"),
            (
                moe.is_some_and(|moe| !moe.losses.is_empty()),
                "the losses of the routers are computed for each micro-batch",
            ),
            (moe.is_some_and(|moe| moe.capacity_factor.is_some()), "the capacity of experts is that of a micro-batch"),
            (moe.is_some_and(|moe| moe.sinkhorn), "Sinkhorn balances the tokens of a micro-batch"),
            (
                moe.is_some_and(|moe| moe.input_jitter_eps > 0.0 || moe.benchmark.is_on()),
                "the noise of the routers is drawn for each micro-batch",
            ),
            (
                moe.is_some_and(|moe| moe.routing_replay.is_some()),
                "moe.routing_replay stores the experts of each micro-batch",
            ),
        ];
        reasons.into_iter().find_map(|(depends, reason)| depends.then_some(reason))
    }
}
