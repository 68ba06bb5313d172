//! `data.streaming`: rows that are tokenized while training.

use super::resolver::Resolver;
use crate::data::StreamingPlan;
use crate::recipe::HumanInt;

const KEY: &str = "data.streaming";
const BUFFER_SIZE: &str = "data.buffer_size";
const DEFAULT_BUFFER_SIZE: usize = 1024;

/// Returns the settings of streaming, and reports keys that need the number of all rows or tokens.
pub(super) fn resolve(resolver: &mut Resolver, mixture_key: Option<&str>) -> Option<StreamingPlan> {
    let recipe = resolver.recipe();
    let (data, scheduler) = (&recipe.data, &recipe.scheduler);
    if !resolver.pick(KEY, data.streaming, false) {
        if data.buffer_size.is_some() {
            resolver.report(&[BUFFER_SIZE], format!("{BUFFER_SIZE} needs {KEY}: true"));
        }
        return None;
    }
    let buffer_size = resolver.positive(BUFFER_SIZE, data.buffer_size, DEFAULT_BUFFER_SIZE);
    if recipe.train_iters.is_none_or(|HumanInt(steps)| steps == 0) {
        let message = format!("{KEY}: the number of steps in an epoch is unknown until all rows are read");
        resolver.report_with_advice(&[KEY], message, "set train_iters");
    }
    let is_set = |n: Option<HumanInt>| n.is_some_and(|n| n.0 > 0);
    let of_epoch = |n: Option<HumanInt>, m: Option<HumanInt>| is_set(n) || is_set(m);
    let by_epoch =
        recipe.checkpoint.iter().position(|entry| of_epoch(entry.save_every_n_epochs, entry.saves_per_epoch));
    let refused = [
        (data.train_eval_split.is_some_and(|(_, eval)| eval.0 > 0.0), "data.train_eval_split", "use data.eval_sources"),
        (
            recipe.min_iterations.is_some_and(|n| n.0 > 0),
            "min_iterations",
            "remove the key: epochs follow each other until train_iters",
        ),
        (recipe.overfit_first_batch == Some(true), "overfit_first_batch", "set data.streaming: false"),
        (data.repeat_to_pack_max_length == Some(true), "data.repeat_to_pack_max_length", "set data.streaming: false"),
        (data.order == Some(crate::data::RowOrder::LongestFirst), "data.order", "use shuffle or sequential"),
        (
            data.fail_on_missing_cache == Some(true),
            "data.fail_on_missing_cache",
            "remove the key: streaming fills no cache",
        ),
        (
            mixture_key.is_some(),
            mixture_key.unwrap_or_default(),
            "mix the rows in a file, or set data.streaming: false",
        ),
        (scheduler.warmup_tokens.is_some(), "scheduler.warmup_tokens", "use scheduler.warmup_steps"),
        (scheduler.num_decay_tokens.is_some(), "scheduler.num_decay_tokens", "use the decay in steps"),
        (by_epoch.is_some(), "checkpoint", "use save_every_n_steps instead of an interval in epochs"),
        (is_set(recipe.evals_per_epoch), "evals_per_epoch", "use eval_interval"),
    ];
    for (_, key, advice) in refused.into_iter().filter(|(is_set, ..)| *is_set) {
        let message = format!("{key}: not possible with {KEY}, which does not know all rows before the first step");
        resolver.report_with_advice(&[key], message, advice);
    }
    Some(StreamingPlan { buffer_size })
}
