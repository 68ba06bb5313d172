//! `trainer preprocess`: fills the token cache, and prints statistics, samples and the steps' tokens.

mod tokens;

use std::io::{self, Write};
use std::sync::Arc;

use anyhow::{Context, Result};
use candlewick_runtime::run_id::RunId;
use candlewick_text::hub::Hub;
use candlewick_text::printable::printable;
use clap::Args;
use serde_json::{Value, json};

use super::logging;
use super::options::{OutputFormat, RecipeArgs, Verbosity, WorldSizeArgs, plan, recipe_hub};
use crate::data::{
    Batch, Cursor, DataReport, Dataset, GlobalBatch, IGNORE_INDEX, PreparedData, ReaderShard, TrainSteps,
};
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::run::prepare_data_until;
use crate::signals::{SignalReaction, StopSignals};
use candlewick_text::quantity::counted;
use tokens::{Marking, TokenPrinter};

#[derive(Debug, Args)]
pub(super) struct PreprocessArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Also print the first N samples of the first epoch. Targets are coloured, or in [[ ]] without colours
    #[arg(long, value_name = "N", default_value_t = 0)]
    show: usize,
    /// Also print the first N steps: text with its targets, or token ids with --output-format json
    #[arg(long, value_name = "N", default_value_t = 0)]
    steps: usize,
    /// Print one JSON object: statistics, lengths, packing, sources, and the samples of --show
    #[arg(long, conflicts_with_all = ["output_format", "steps"])]
    json: bool,
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
  trainer preprocess recipe.yaml --show 5
  trainer preprocess recipe.yaml --show 5 --json
  trainer preprocess recipe.yaml --steps 2 --ranks 16
  trainer preprocess recipe.yaml --steps 2 --output-format json data.max_length=512";

/// Prepares the data of a recipe and prints statistics.
pub(super) fn run(args: &PreprocessArgs, verbosity: Verbosity) -> Result<ExitCode> {
    let mut plan = plan(&args.recipe, verbosity, args.world.world_info()?)?;
    // Other commands respect `fail_on_missing_cache`; this one fills the cache.
    plan.data.fail_on_missing_cache = false;
    logging::start(verbosity, &plan.logger, Vec::new())?;
    show(&plan, &recipe_hub(&plan.recipe)?, args)
}

/// Prepares the data of `plan` and prints what `args` select.
fn show(plan: &Plan, hub: &Hub, args: &PreprocessArgs) -> Result<ExitCode> {
    let signals = StopSignals::install(None).context("failed to watch for signals")?;
    let (assets, prepared) = prepare_data_until(plan, hub, RunId::now(), &signals)?;
    signals.set_reaction(SignalReaction::EndAtOnce);
    let mut out = io::stdout().lock();
    let shown = ShownData::of(plan, &prepared)?;
    let written = match (args.json, args.output_format) {
        (true, _) => {
            let printer = TokenPrinter::new(&assets.tokenizer, Marking::Brackets);
            let summary = summary(&prepared, &shown, &printer, args.show);
            writeln!(out, "{}", printable(&format!("{summary:#}")))
        }
        (false, OutputFormat::Json) => {
            let steps = steps(plan, &prepared, args.steps)?;
            steps.iter().try_for_each(|step| writeln!(out, "{}", step_json(step)))
        }
        (false, OutputFormat::Text) => {
            let marking = Marking::of_stdout();
            let printer = TokenPrinter::new(&assets.tokenizer, marking);
            write_statistics(&mut out, plan, &prepared, &shown)
                .and_then(|()| write_samples(&mut out, &shown, (&printer, marking), args.show))
                .and_then(|()| write_steps(&mut out, plan, &prepared, (&printer, marking), args.steps))
        }
    };
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("failed to write to stdout"),
        _ => Ok(ExitCode::Ok),
    }
}

/// The training data that are summarized and shown: all of them, or the first chunk of a stream.
struct ShownData {
    dataset: Arc<Dataset>,
    report: DataReport,
    is_chunk: bool,
}

impl ShownData {
    fn of(plan: &Plan, prepared: &PreparedData) -> Result<Self> {
        let Some(streamed) = &prepared.streamed else {
            let report = DataReport::new(&prepared.train, &plan.data);
            return Ok(Self { dataset: prepared.train.clone(), report, is_chunk: false });
        };
        let (dataset, chunk_plan) = streamed.first_chunk()?;
        Ok(Self { report: DataReport::new(&dataset, &chunk_plan), dataset: Arc::new(dataset), is_chunk: true })
    }
}

fn stream(plan: &Plan, prepared: &PreparedData) -> Result<TrainSteps> {
    Ok(TrainSteps::new(prepared, &plan.data, Cursor::default(), ReaderShard { rank: 0, n_ranks: 1 })?)
}

fn steps(plan: &Plan, prepared: &PreparedData, n_steps: usize) -> Result<Vec<GlobalBatch>> {
    let mut stream = stream(plan, prepared)?;
    let steps = std::iter::from_fn(|| stream.next_step(&|own| Ok(vec![own?])).transpose());
    steps.take(n_steps).collect()
}

fn write_statistics(out: &mut impl Write, plan: &Plan, prepared: &PreparedData, shown: &ShownData) -> io::Result<()> {
    prepared.notes.iter().try_for_each(|note| writeln!(out, "{}", printable(note)))?;
    match shown.is_chunk {
        true => writeln!(out, "\nthe first chunk of the stream:\n{}", printable(&shown.report.to_string()))?,
        false => writeln!(out, "\n{}", printable(&format!("{}\n{}", prepared.token_stats, shown.report)))?,
    }
    let stream = stream(plan, prepared).map_err(io::Error::other)?;
    plan.steps(&stream).iter().try_for_each(|line| writeln!(out, "{line}"))?;
    plan.parameters().map_or(Ok(()), |parameters| writeln!(out, "parameters: {parameters}"))
}

fn write_samples(
    out: &mut impl Write,
    ShownData { dataset, report, .. }: &ShownData,
    (printer, marking): (&TokenPrinter<'_>, Marking),
    n_samples: usize,
) -> io::Result<()> {
    if n_samples > 0 {
        writeln!(out, "\nthe first samples of the first epoch; {}", marking.legend())?;
    }
    for (number, &index) in report.order.iter().take(n_samples).enumerate() {
        let (ids, is_target) = tokens(dataset, index);
        let n_targets = is_target.iter().filter(|is_target| **is_target).count();
        let (place, n_tokens) = (dataset.locate(index), ids.len());
        writeln!(
            out,
            "--- sample {}: {}, {}, {}",
            number + 1,
            printable(&place),
            counted(n_tokens, "token"),
            counted(n_targets, "target")
        )?;
        writeln!(out, "{}", printer.text(&ids, &is_target))?;
    }
    Ok(())
}

fn write_steps(
    out: &mut impl Write,
    plan: &Plan,
    prepared: &PreparedData,
    (printer, marking): (&TokenPrinter<'_>, Marking),
    n_steps: usize,
) -> io::Result<()> {
    for (i, step) in steps(plan, prepared, n_steps).map_err(io::Error::other)?.iter().enumerate() {
        let (n_tokens, n_targets) = (step.n_tokens(), step.n_targets);
        writeln!(
            out,
            "\nstep {}: {}, {}; {}",
            i + 1,
            counted(n_tokens, "token"),
            counted(n_targets, "target"),
            marking.legend()
        )?;
        for batch in &step.micro_batches {
            for pair in batch.cu_seqlens.windows(2) {
                let is_target = |i: usize| i > pair[0] && batch.targets[i - 1] != IGNORE_INDEX;
                let is_target: Vec<bool> = (pair[0]..pair[1]).map(is_target).collect();
                writeln!(out, "---\n{}", printer.text(&batch.ids[pair[0]..pair[1]], &is_target))?;
            }
        }
    }
    Ok(())
}

/// Returns the tokens of a sequence, and a flag for each target. The first token is never one.
fn tokens(dataset: &Dataset, index: usize) -> (Vec<u32>, Vec<bool>) {
    let sample = dataset.get(index);
    let mut is_target: Vec<bool> = sample.target_mask().collect();
    is_target.iter_mut().take(1).for_each(|first| *first = false);
    (sample.ids().collect(), is_target)
}

fn summary(prepared: &PreparedData, shown: &ShownData, printer: &TokenPrinter<'_>, n_samples: usize) -> Value {
    let ShownData { dataset, report, is_chunk } = shown;
    let part = if *is_chunk { "first_chunk" } else { "all" };
    let sample = |&index: &usize| {
        let (ids, is_target) = tokens(dataset, index);
        let text = printer.text(&ids, &is_target);
        json!({"place": dataset.locate(index), "ids": ids, "is_target": is_target, "text": text})
    };
    let samples: Vec<Value> = report.order.iter().take(n_samples).map(sample).collect();
    json!({"notes": prepared.notes, "token_stats": prepared.token_stats, "part": part, "report": report, "samples": samples})
}

fn step_json(step: &GlobalBatch) -> Value {
    let batch = |batch: &Batch| json!({"ids": batch.ids, "targets": batch.targets, "cu_seqlens": batch.cu_seqlens});
    let micro_batches: Vec<_> = step.micro_batches.iter().map(batch).collect();
    json!({"epoch": step.epoch, "n_targets": step.n_targets, "micro_batches": micro_batches})
}
