//! The pipeline stages: their number, their blocks and the schedule.

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
            resolver.note(format!("{key} has no effect with one pipeline stage"));
        }
        return PipelinePlan { schedule, ..PipelinePlan::alone() };
    }
    let plan = PipelinePlan { stages, chunks, schedule, layers };
    match config.map(Config::n_layers) {
        Some(n_layers) => checked_layers(resolver, plan, n_layers),
        None => plan,
    }
}

/// Adds a note on the pipeline bubble if a step has fewer micro-batches than stages.
pub(super) fn note_bubble(resolver: &mut Resolver, plan: &PipelinePlan, n_micros: usize) {
    if n_micros >= plan.stages {
        return;
    }
    let waits = plan.stages - 1;
    let bubble = 100.0 * waits as f64 / (plan.chunks * n_micros + waits) as f64;
    resolver.note(format!(
        "gradient_accumulation_steps: {n_micros} is less than the {} pipeline stages: the bubble is {bubble:.0} %; raise it",
        plan.stages
    ));
}

/// Checks that the model chunks have the model's blocks.
fn checked_layers(resolver: &mut Resolver, plan: PipelinePlan, n_layers: usize) -> PipelinePlan {
    let n_chunks = plan.stages * plan.chunks;
    let plural = if plan.chunks == 1 { "" } else { "s" };
    let chunks = format!("{} stages with {} model chunk{plural} each", plan.stages, plan.chunks);
    match &plan.layers {
        Some(layers) if layers.len() != n_chunks => {
            let message = format!("{LAYERS}: {} numbers for {chunks}", layers.len());
            resolver.report_with_advice(&[LAYERS], message, format!("set {n_chunks} numbers"));
        }
        Some(layers) if layers.iter().sum::<usize>() != n_layers => {
            let sum: usize = layers.iter().sum();
            let message = format!("{LAYERS}: the sum is {sum} blocks, but the model has {n_layers}");
            resolver.report_with_advice(&[LAYERS], message, "set numbers whose sum is the model's blocks");
        }
        None if n_chunks > n_layers => {
            let message = format!("{SIZE}: {n_layers} blocks are too few for {chunks}");
            resolver.report_with_advice(
                &[SIZE, CHUNKS],
                message,
                format!("stages x model chunks must be at most {n_layers}"),
            );
        }
        _ => return plan,
    }
    PipelinePlan::alone()
}
