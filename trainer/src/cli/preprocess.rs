//! `trainer preprocess`: prints the input tokens and their targets, and fills the token cache.

use std::io::{self, Write};

use anyhow::{Context, Result};
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::Hub;
use candlewick_text::printable::printable;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use clap::Args;
use serde_json::json;

use super::options::{OutputFormat, RecipeArgs, Verbosity, WorldSizeArgs, hub, plan};
use super::{Ui, logging};
use crate::data::{Batch, Cursor, DataError, GlobalBatch, IGNORE_INDEX, PreparedData, ReaderRank, TrainSteps};
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::run::prepare_data;

#[derive(Debug, Args)]
pub(super) struct PreprocessArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Also print the first N steps: text with targets in [[ ]], or token ids with --output-format json
    #[arg(long, value_name = "N", default_value_t = 0)]
    steps: usize,
    #[command(flatten)]
    world: WorldSizeArgs,
    /// Output format
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    output_format: OutputFormat,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer preprocess recipe.yaml
  trainer preprocess recipe.yaml --steps 2
  trainer preprocess recipe.yaml --steps 2 --ranks 16
  trainer preprocess recipe.yaml --steps 2 --output-format json data.max_length=512";

/// Prepares the data of a recipe and prints statistics.
pub(super) fn run(args: &PreprocessArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let mut plan = plan(&args.recipe, verbosity, args.world.world_info()?)?;
    // Other commands respect `fail_on_missing_cache`; this one fills the cache.
    plan.data.fail_on_missing_cache = false;
    logging::start(verbosity, &plan.logger, Vec::new())?;
    show(&plan, &hub(ui)?, args.steps, args.output_format)
}

/// Prepares the data of `plan` and prints the token statistics, or the first `n_steps` steps.
fn show(plan: &Plan, hub: &Hub, n_steps: usize, format: OutputFormat) -> Result<ExitCode> {
    let (assets, prepared) = prepare_data(plan, hub, RunId::now())?;
    let mut out = io::stdout().lock();
    let shown = match format {
        OutputFormat::Text => text(&mut out, plan, &assets.tokenizer, &prepared, n_steps),
        OutputFormat::Json => {
            let steps = steps(plan, &prepared, n_steps)?;
            steps.iter().try_for_each(|step| writeln!(out, "{}", to_json(step)))
        }
    };
    match shown {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("failed to write to stdout"),
        _ => Ok(ExitCode::Ok),
    }
}

fn stream(plan: &Plan, prepared: &PreparedData) -> Result<TrainSteps> {
    Ok(TrainSteps::new(prepared, &plan.data, Cursor::default(), ReaderRank { rank: 0, n_ranks: 1 })?)
}

fn steps(plan: &Plan, prepared: &PreparedData, n_steps: usize) -> Result<Vec<GlobalBatch>> {
    let mut stream = stream(plan, prepared)?;
    let steps = std::iter::from_fn(|| stream.next_step::<DataError>(&|own| Ok(vec![own?])).transpose());
    Ok(steps.take(n_steps).collect::<Result<_, _>>()?)
}

fn text(
    out: &mut impl Write,
    plan: &Plan,
    tokenizer: &Tokenizer,
    prepared: &PreparedData,
    n_steps: usize,
) -> io::Result<()> {
    prepared.notes.iter().try_for_each(|note| writeln!(out, "{}", printable(note)))?;
    if prepared.streamed.is_none() {
        writeln!(out, "\n{}", prepared.token_stats)?;
    }
    let stream = stream(plan, prepared).map_err(io::Error::other)?;
    plan.steps(&stream).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    plan.parameters().map_or(Ok(()), |parameters| writeln!(out, "parameters: {parameters}"))?;
    for (i, step) in steps(plan, prepared, n_steps).map_err(io::Error::other)?.iter().enumerate() {
        writeln!(
            out,
            "\nstep {}: {} tokens, {} targets; targets are in [[ ]]",
            i + 1,
            step.n_tokens(),
            step.n_targets
        )?;
        for batch in &step.micro_batches {
            for pair in batch.cu_seqlens.windows(2) {
                writeln!(out, "---\n{}", printable(&marked(tokenizer, batch, pair[0]..pair[1])))?;
            }
        }
    }
    Ok(())
}

/// Returns the text of a sequence with its target tokens in brackets.
fn marked(tokenizer: &Tokenizer, batch: &Batch, range: std::ops::Range<usize>) -> String {
    let is_target = |i: usize| i > range.start && batch.targets[i - 1] != IGNORE_INDEX;
    let mut text = String::new();
    let mut start = range.start;
    for i in range.clone() {
        let ends = i + 1 == range.end || is_target(i + 1) != is_target(start);
        if ends {
            let piece = tokenizer.decode(&batch.ids[start..=i], SpecialTokens::Include).unwrap_or_default();
            text += &if is_target(start) { format!("[[{piece}]]") } else { piece };
            start = i + 1;
        }
    }
    text
}

fn to_json(step: &GlobalBatch) -> serde_json::Value {
    let batch = |batch: &Batch| json!({"ids": batch.ids, "targets": batch.targets, "cu_seqlens": batch.cu_seqlens});
    let micro_batches: Vec<_> = step.micro_batches.iter().map(batch).collect();
    json!({"epoch": step.epoch, "n_targets": step.n_targets, "micro_batches": micro_batches})
}
