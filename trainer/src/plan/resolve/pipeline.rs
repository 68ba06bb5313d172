//! The stages of a pipeline: how many, which blocks each has, and in which order they compute.

use candlewick_model::Config;

use super::resolver::Resolver;
use crate::plan::PipelinePlan;
use crate::recipe::PipelineScheduleName;

const SIZE: &str = "pipeline_parallel_size";
const CHUNKS: &str = "virtual_pipeline_parallel_size";
const LAYERS: &str = "pipeline_layers";
const SCHEDULE: &str = "pipeline_schedule";

pub(super) fn resolve(resolver: &mut Resolver, config: Option<&Config>) -> PipelinePlan {
    let recipe = resolver.recipe();
    let n_ranks = resolver.env.world.n_ranks;
    let stages = resolver.positive(SIZE, recipe.pipeline_parallel_size, 1).max(1);
    let chunks = resolver.positive(CHUNKS, recipe.virtual_pipeline_parallel_size, 1).max(1);
    let one = PipelineScheduleName::OneForwardOneBackward;
    let schedule = resolver.pick(SCHEDULE, recipe.pipeline_schedule, one);
    let layers = recipe.pipeline_layers.as_ref().map(|layers| layers.iter().map(|n| n.0).collect::<Vec<usize>>());
    let layers = resolver.pick(LAYERS, layers.map(Some), None);
    if !n_ranks.is_multiple_of(stages) {
        super::ranks::report_indivisible(resolver, SIZE, (n_ranks, "rank"), &format!("{stages} stages"));
        return PipelinePlan::alone();
    }
    if stages == 1 {
        let is_chunked = recipe.virtual_pipeline_parallel_size.is_some_and(|n| n.0 > 1);
        let is_ordered = recipe.pipeline_schedule.is_some();
        let keys = [(CHUNKS, is_chunked), (LAYERS, layers.is_some()), (SCHEDULE, is_ordered)];
        for (key, _) in keys.into_iter().filter(|(_, given)| *given) {
            resolver.note(format!("{key} has no effect: there is one stage"));
        }
        return PipelinePlan { schedule, ..PipelinePlan::alone() };
    }
    let plan = PipelinePlan { stages, chunks, schedule, layers };
    match config.map(Config::n_layers) {
        Some(n_layers) => fits(resolver, plan, n_layers),
        None => plan,
    }
}

/// Says what it costs if the micro-batches of a step are fewer than the stages, which then wait for each other.
pub(super) fn note_bubble(resolver: &mut Resolver, plan: &PipelinePlan, n_micros: usize) {
    if n_micros >= plan.stages {
        return;
    }
    let waits = plan.stages - 1;
    let bubble = 100.0 * waits as f64 / (plan.chunks * n_micros + waits) as f64;
    resolver.note(format!(
        "gradient_accumulation_steps: {n_micros} do not fill {} stages, which wait {bubble:.0} % of the time; more fill them",
        plan.stages
    ));
}

/// Refuses runs that are not the model's blocks.
fn fits(resolver: &mut Resolver, plan: PipelinePlan, n_layers: usize) -> PipelinePlan {
    let n_runs = plan.stages * plan.chunks;
    let runs =
        format!("{} stages with {} run{} each", plan.stages, plan.chunks, if plan.chunks == 1 { "" } else { "s" });
    match &plan.layers {
        Some(layers) if layers.len() != n_runs => {
            let message = format!("{LAYERS}: {} numbers for {runs}", layers.len());
            resolver.report_with_advice(&[LAYERS], message, format!("give {n_runs} numbers"));
        }
        Some(layers) if layers.iter().sum::<usize>() != n_layers => {
            let sum: usize = layers.iter().sum();
            let message = format!("{LAYERS}: {sum} blocks in all, and the model has {n_layers}");
            resolver.report_with_advice(&[LAYERS], message, "let the numbers add up to the model's blocks");
        }
        None if n_runs > n_layers => {
            let message = format!("{SIZE}: {n_layers} blocks do not go around for {runs}");
            resolver.report_with_advice(
                &[SIZE, CHUNKS],
                message,
                format!("let stages times runs be at most {n_layers}"),
            );
        }
        _ => return plan,
    }
    PipelinePlan::alone()
}
