//! `trainer merge`: merges an adapter into its base model and saves a Hugging Face folder.

use std::path::PathBuf;

use anyhow::{Context, Result};
use candlewick_inference::command::DtypeOption;
use candlewick_model::{AdapterMerge, MergeReport};
use candlewick_text::hub::Hub;
use clap::Args;

use super::Ui;
use super::options::{not_found, shard_bytes};
use crate::exit::ExitCode;
use crate::export::{find_base, progress};

#[derive(Debug, Args)]
pub(super) struct MergeArgs {
    /// LoRA adapter: a PEFT folder, a Hub id, or the output folder of a LoRA run
    #[arg(value_name = "ADAPTER")]
    adapter: String,
    /// Output folder; must be empty or missing
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Base model: a folder or a Hub id [default: the adapter's base_model_name_or_path]
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Dtype of the merged weights; auto is the base model's
    #[arg(long, value_enum, default_value_t = DtypeOption::Auto)]
    dtype: DtypeOption,
    /// Maximum size of a weights file, such as 5GB or 500MiB
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = shard_bytes)]
    max_shard_size: u64,
}

pub(super) fn run(args: &MergeArgs, hub: &Hub, ui: &Ui) -> Result<ExitCode> {
    let (adapter, note) = hub.adapter(&args.adapter).map_err(not_found)?;
    note.iter().for_each(|note| ui.note(note));
    let (base, note) = find_base(&adapter, args.base.as_deref(), hub)?;
    ui.note(&note);
    let merge = AdapterMerge {
        base: &base,
        adapter: &adapter,
        output: &args.output,
        dtype: args.dtype.named(),
        shard_bytes: args.max_shard_size,
    };
    let merged = merge.run(&progress("merge")).with_context(|| format!("failed to merge {}", adapter.display()))?;
    ui.print(&describe(&merged, args))
}

fn describe(merged: &MergeReport, args: &MergeArgs) -> String {
    let MergeReport { dtype, n_matrices, n_params, rounding } = *merged;
    let mut text = format!(
        "{}: {n_params} parameters in {}, {n_matrices} matrices changed by the adapter; verified after writing",
        args.output.display(),
        dtype.as_str()
    );
    if rounding > 0.0 {
        text += &format!(
            "\nrounding to {} loses {:.1}% of the adapter's update; --dtype f32 loses nothing",
            dtype.as_str(),
            100.0 * rounding
        );
    }
    text
}
