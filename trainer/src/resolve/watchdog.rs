//! The loss watchdog.

use super::resolver::Resolver;
use crate::checkpoint::{CheckpointFormat, CheckpointPlan};
use crate::plan::LossWatchdogPlan;
use crate::recipe::SpikeAction;

pub(super) fn resolve(resolver: &mut Resolver, checkpoints: &[CheckpointPlan]) -> Option<LossWatchdogPlan> {
    let given = resolver.recipe().loss_watchdog.as_ref()?;
    let action = resolver.pick("loss_watchdog.action", given.action, SpikeAction::Skip);
    let sigma_factor = resolver.number("loss_watchdog.sigma_factor", given.sigma_factor, 6.0, 0.0, f64::MAX);
    if sigma_factor == 0.0 {
        resolver.report(&["loss_watchdog.sigma_factor"], "loss_watchdog.sigma_factor: expected above 0, found 0");
    }
    let key = "loss_watchdog.rolling_interval_length";
    let rolling_interval_length = resolver.count(key, given.rolling_interval_length, 128);
    if rolling_interval_length < 2 {
        resolver.report(&[key], format!("{key}: expected at least 2, found {rolling_interval_length}"));
    }
    let warmup_steps =
        resolver.count("loss_watchdog.warmup_steps", given.warmup_steps, rolling_interval_length.div_ceil(2));
    let key = "loss_watchdog.max_loss";
    let max_loss = given.max_loss.map(|max| resolver.number(key, Some(max), max.0, 0.0, f64::MAX));
    let max_events = resolver.count("loss_watchdog.max_events", given.max_events, 10);
    if action == SpikeAction::Rewind && !checkpoints.iter().any(saves_during_training) {
        let message = "loss_watchdog.action: rewind loads a checkpoint, and the run saves none to resume from";
        let advice = "add a checkpoint of type sharded with save_every_n_steps or save_every_n_epochs";
        resolver.report_with_advice(&["loss_watchdog.action"], message, advice);
    }
    Some(LossWatchdogPlan { action, sigma_factor, rolling_interval_length, warmup_steps, max_loss, max_events })
}

fn saves_during_training(plan: &CheckpointPlan) -> bool {
    plan.format == CheckpointFormat::Sharded && plan.has_interval()
}
