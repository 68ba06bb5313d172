//! `trainer replay`: computes loss and gradient of a batch that a guard kept.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_comm::rank_env::RankEnv;
use candlewick_text::printable::printable;
use candlewick_text::quantity::counted;
use clap::Args;
use serde_json::Value;

use super::options::{OutputFormat, Verbosity, hub, key_value, known};
use super::{Ui, logging};
use crate::exit::ExitCode;
use crate::plan::Plan;
use crate::recipe::Loaded;
use crate::resolve::{HubAccess, WorldInfo};
use crate::run::{KeptBatch, ReplayReport, ReplayTotals, ReplayWeights, ReplayedSequence, connect, replay};

/// The most characters of a sequence that are printed.
const SHOWN: usize = 600;

/// The keys of a recipe that divide a run over ranks. A replay has one rank.
const PARALLEL_KEYS: [&str; 8] = [
    "sequence_parallel_size",
    "context_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "pipeline_layers",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
];

#[derive(Debug, Args)]
pub(super) struct ReplayArgs {
    /// A run's output folder, or a file in its folder `kept_batches`
    #[arg(value_name = "RUN")]
    path: PathBuf,
    /// The step of the kept batch [default: the last one]
    #[arg(long, value_name = "N")]
    step: Option<usize>,
    /// The number of printed sequences, those with the highest loss
    #[arg(long, value_name = "N", default_value_t = 5)]
    rows: usize,
    /// A sharded checkpoint with the weights [default: the newest one when the batch was kept]
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Use the weights at the start of the run
    #[arg(long, conflicts_with = "checkpoint")]
    initial_weights: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t = OutputFormat::Text)]
    output_format: OutputFormat,
    /// Overrides of recipe keys, such as `device=cpu`. Values are YAML
    #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
    overrides: Vec<String>,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  trainer replay runs/my-run
  trainer replay runs/my-run --step 1200 --rows 20
  trainer replay runs/my-run/kept_batches/step_1200.json --checkpoint runs/my-run/checkpoints/epoch_0_global_step_1000
  trainer replay runs/my-run --output-format json device=cpu";

pub(super) fn run(args: &ReplayArgs, verbosity: Verbosity, ui: &Ui) -> Result<ExitCode> {
    let kept = KeptBatch::read(&absolute(&args.path), args.step)?;
    let weights = match (&args.checkpoint, args.initial_weights) {
        (Some(dir), _) => ReplayWeights::Checkpoint(absolute(dir)),
        (None, true) => ReplayWeights::Initial,
        (None, false) => ReplayWeights::Recorded,
    };
    std::env::set_current_dir(&kept.folder)
        .with_context(|| format!("failed to enter {}, the folder in which the run was started", kept.folder.display()))
        .context(ExitCode::Data)?;
    let plan = plan_of(&kept, &args.overrides, verbosity)?;
    logging::start(verbosity, &plan.logger, Vec::new())?;
    let (_, device) = connect(&plan, &RankEnv::single())?;
    let report = replay(&kept, &plan, &weights, &hub()?, &device)?;
    match args.output_format {
        OutputFormat::Text => ui.print(text(&report, args.rows).trim_end()),
        OutputFormat::Json => ui.print(&serde_json::to_string(&report)?),
    }
}

/// Returns a path that does not depend on the current folder.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Makes the plan of the run again, for one rank.
fn plan_of(kept: &KeptBatch, overrides: &[String], verbosity: Verbosity) -> Result<Plan> {
    let recipe = serde_json::to_string(&on_one_rank(kept.recipe.clone()))?;
    let loaded = Loaded::parse(&kept.recipe_path, recipe, overrides)?;
    let world = || WorldInfo::first_of(1);
    let here = known(&loaded, HubAccess::ThisMachine, verbosity, world())?.of_run_here(&loaded);
    let plan = Plan::resolve(&loaded, &here)?;
    let plan = match here.config.is_some() {
        true => plan,
        false => Plan::resolve(&loaded, &known(&loaded, HubAccess::Network, verbosity, world())?.of_run_here(&loaded))?,
    };
    let n_ranks = plan.ranks.n_ranks();
    match n_ranks {
        1 => Ok(plan),
        _ => Err(anyhow!("failed to replay: the overrides need {n_ranks} ranks, and a replay has one")
            .context(ExitCode::Usage)),
    }
}

/// Returns a recipe without the keys that divide a run over ranks, and without trackers.
fn on_one_rank(mut recipe: Value) -> Value {
    if let Some(keys) = recipe.as_object_mut() {
        for key in PARALLEL_KEYS.into_iter().chain(["report_to", "wandb", "mlflow"]) {
            keys.remove(key);
        }
        let sharding = keys.get_mut("deepspeed").and_then(|deepspeed| deepspeed.get_mut("zero_optimization"));
        if let Some(sharding) = sharding.and_then(Value::as_object_mut) {
            sharding.remove("mics_shard_size");
        }
        // A record of experts is not written again.
        if let Some(moe) = keys.get_mut("moe").and_then(Value::as_object_mut) {
            moe.remove("routing_replay");
        }
    }
    recipe
}

/// Formats a report.
fn text(report: &ReplayReport, n_rows: usize) -> String {
    let ReplayReport { step, reason, recorded, replayed, n_targets, n_tokens, .. } = report;
    let weights = match &report.checkpoint {
        Some(dir) => format!("of {}, after step {}", dir.display(), report.weights_after_step),
        None => "at the start of the run".to_owned(),
    };
    let mut out = format!(
        "step {step}: {reason}\nweights: {weights}\n{}, {}\n\n",
        counted(*n_tokens, "token"),
        counted(*n_targets, "target")
    );
    out += &format!("{:<12}{:>14}{:>14}\n", "", "in the run", "replayed");
    let value = |value: Option<f64>| value.map_or_else(|| "not finite".to_owned(), |value| format!("{value:.6}"));
    let row = |name: &str, of: fn(&ReplayTotals) -> Option<f64>| {
        format!("{name:<12}{:>14}{:>14}\n", value(of(recorded)), value(of(replayed)))
    };
    out += &row("loss", |totals| totals.loss);
    out += &row("grad_norm", |totals| totals.grad_norm);
    out += "\ngradient norm by layer\n";
    for (layer, norm) in &report.grad_norms {
        out += &format!("  {layer:<20}{:>14}\n", value(*norm));
    }
    let shown = n_rows.min(report.sequences.len());
    out += &format!("\nsequences with the highest loss ({shown} of {})\n", report.sequences.len());
    report.sequences.iter().take(n_rows).for_each(|sequence| out += &sequence_text(sequence));
    out
}

fn sequence_text(sequence: &ReplayedSequence) -> String {
    let ReplayedSequence { micro_batch, sources, loss, n_targets, n_tokens, text, .. } = sequence;
    let loss = match loss {
        Some(loss) => format!("loss {loss:.4}"),
        None if *n_targets == 0 => "no loss".to_owned(),
        None => "loss not finite".to_owned(),
    };
    let sources = sources.join(", ");
    let shown: String = text.chars().take(SHOWN).collect();
    let more = if shown.len() < text.len() { " ..." } else { "" };
    let head = format!(
        "--- {loss}, {}, {}, micro-batch {micro_batch}: {sources}",
        counted(*n_targets, "target"),
        counted(*n_tokens, "token")
    );
    format!("{head}\n{}{more}\n", printable(&shown))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_replay_keeps_all_keys_but_those_of_ranks_and_trackers() {
        let recipe = json!({
            "seed": 7, "tensor_parallel_size": 2, "report_to": "wandb", "moe": {"routing_replay": {}, "z_loss_coeff": 0.1},
            "deepspeed": {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
        });
        let want = json!({"seed": 7, "moe": {"z_loss_coeff": 0.1}, "deepspeed": {"zero_optimization": {"stage": 3}}});
        assert_eq!(on_one_rank(recipe), want);
    }
}
