//! `trainer mesh`: prints the device mesh, the division of experts, the pipeline stages and the pipeline schedule.

use std::fmt::Write;

use anyhow::{Context, Result, anyhow};
use candlewick_comm::mesh::{Axis, Degrees, Mesh};
use candlewick_parallel::PipelineSchedule;
use candlewick_text::quantity::counted;
use clap::Args;

use super::Ui;
use super::options::{RecipeArgs, Verbosity, at_least_one, plan};
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::resolve::WorldInfo;

#[derive(Debug, Args)]
pub(super) struct MeshArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// Also print the pipeline schedule: the micro-batches of each stage over time
    #[arg(long)]
    schedule: bool,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer mesh recipe.yaml --ranks 8
  trainer mesh recipe.yaml --ranks 4 --schedule pipeline_parallel_size=4 gradient_accumulation_steps=8";

pub(super) fn run(args: &MeshArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let plan = plan(&args.recipe, verbosity, WorldInfo::first_of(args.ranks))?;
    let mesh =
        Mesh::new(plan.ranks.degrees(), args.ranks).map_err(|error| anyhow!("failed to make the mesh: {error}"))?;
    let mut text = format!("{}: {}\n{mesh}", counted(args.ranks, "rank"), plan.ranks.degrees());
    text += &experts(&plan);
    if plan.pipeline.stages > 1 {
        text += &stages(&plan)?;
    }
    if args.schedule {
        text += &schedule(&plan)?;
    }
    plan.notes.iter().try_for_each(|note| write!(text, "\nnote: {note}"))?;
    ui.print(text.trim_end())?;
    Ok(ExitCode::Ok)
}

/// Describes the division of each layer's experts over the ranks; empty for a dense model.
fn experts(plan: &Plan) -> String {
    let Some(moe) = plan.model.config.as_ref().and_then(|config| config.moe()) else { return String::new() };
    let degrees = plan.ranks.degrees();
    let Degrees { ep, etp, .. } = degrees;
    let split = if etp > 1 { format!(", each split over {etp} ranks (etp)") } else { String::new() };
    format!(
        "\nexperts of a layer: {}, {} on a rank (ep {ep}){split}\nexpert data parallel degree: {} (ranks with the same experts)",
        moe.n_experts,
        moe.n_experts / ep,
        degrees.of(Axis::Edp)
    )
}

/// Lists the blocks of each stage.
fn stages(plan: &Plan) -> Result<String> {
    let config = plan.model.config.as_ref().context("failed to make the mesh: the model's config is not known")?;
    let layout = plan.pipeline.layout(config);
    let mtp = match config.n_mtp_layers() {
        0 => String::new(),
        1 => ", 1 MTP layer".to_owned(),
        n => format!(", {n} MTP layers"),
    };
    let mut text = String::new();
    for stage in 0..layout.n_stages() {
        let runs = (0..layout.n_chunks()).map(|chunk| {
            let blocks = layout.blocks(stage, chunk);
            let embedding = if layout.is_first(stage, chunk) { "embedding, " } else { "" };
            let head = if layout.is_last(stage, chunk) { format!("{mtp}, head") } else { String::new() };
            match blocks.len() {
                0 => format!("{embedding}no block{head}"),
                1 => format!("{embedding}1 block ({}){head}", blocks.start),
                n => format!("{embedding}{n} blocks ({} to {}){head}", blocks.start, blocks.end - 1),
            }
        });
        write!(text, "\nstage {stage}: {}", runs.collect::<Vec<_>>().join("; "))?;
    }
    Ok(text + "\n")
}

/// Size limit of a printed schedule, in forward passes of all stages.
const MAX_PASSES: usize = 1_000_000;

fn schedule(plan: &Plan) -> Result<String> {
    let (pipeline, n_micros) = (&plan.pipeline, plan.data.gradient_accumulation_steps);
    let n_passes = n_micros.saturating_mul(pipeline.stages * pipeline.chunks);
    if n_passes > MAX_PASSES {
        let problem = anyhow!(
            "failed to print the schedule: it has {n_passes} forward passes, over the limit of {MAX_PASSES}; lower \
             gradient_accumulation_steps for this command"
        );
        return Err(problem.context(ExitCode::Usage));
    }
    let table = PipelineSchedule::new(pipeline.schedule_kind(), pipeline.stages, pipeline.chunks, n_micros);
    Ok(format!(
        "\n{}; a backward pass, in brackets, takes twice the time of a forward pass\n{table}\n",
        counted(n_micros, "micro-batch")
    ))
}
