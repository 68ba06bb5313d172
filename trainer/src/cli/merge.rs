//! `trainer merge`: an adapter and its base model become one model folder.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use candlewick_inference::command::DtypeOption;
use candlewick_model::{AdapterMerge, LoraConfig, MergeReport};
use candlewick_text::hub::{Hub, ModelFiles};
use clap::Args;

use super::Ui;
use crate::estimate::parse_bytes;
use crate::exit::ExitCode;

#[derive(Debug, Args)]
pub(super) struct MergeArgs {
    /// The adapter: a PEFT folder, a Hub id, or the output folder of a run that trained one
    #[arg(value_name = "ADAPTER")]
    adapter: String,
    /// The folder to write; it must be empty or missing
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// The base model: a folder or a Hub id [default: the one that the adapter names]
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// The dtype of the merged weights; auto is that of the base model
    #[arg(long, value_enum, default_value_t = DtypeOption::Auto)]
    dtype: DtypeOption,
    /// The largest file of weights, such as 5GB or 500MiB
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = shard_bytes)]
    max_shard_size: u64,
}

pub(super) fn run(args: &MergeArgs, hub: &Hub, ui: &Ui) -> Result<ExitCode> {
    let (adapter, note) = hub.adapter(&args.adapter).map_err(failed)?;
    note.iter().for_each(|note| ui.note(note));
    let base = match &args.base {
        Some(base) => {
            let found = hub.find_model(base, None, ModelFiles::All).map_err(failed)?;
            found.note("base model").iter().for_each(|note| ui.note(note));
            found.folder
        }
        None => {
            let config = LoraConfig::read(&adapter).context("failed to read the adapter")?;
            let base = config.base_model().with_context(|| {
                let problem = "adapter_config.json has no base_model_name_or_path; name the base model with --base";
                format!("failed to find the base model of {}: {problem}", adapter.display())
            });
            hub.base_model(&adapter, base.context(ExitCode::Usage)?).map_err(failed)?
        }
    };
    ui.note(&format!("base model: {}", base.display()));
    let merge = AdapterMerge {
        base: &base,
        adapter: &adapter,
        output: &args.output,
        dtype: args.dtype.named(),
        shard_bytes: args.max_shard_size,
    };
    let merged = merge.run().with_context(|| format!("failed to merge {}", adapter.display()))?;
    ui.print(&describe(&merged, args))
}

fn describe(merged: &MergeReport, args: &MergeArgs) -> String {
    let MergeReport { dtype, n_matrices, n_params, rounding } = *merged;
    let mut text = format!(
        "{}: {n_params} parameters in {}, {n_matrices} matrices changed by the adapter; read again and compared",
        args.output.display(),
        dtype.as_str()
    );
    if rounding > 0.0 {
        text += &format!(
            "\nrounding to {} moves the changed matrices by {:.1}% of the adapter's change; --dtype f32 keeps all of it",
            dtype.as_str(),
            100.0 * rounding
        );
    }
    text
}

fn failed(error: candlewick_text::hub::HubError) -> anyhow::Error {
    anyhow!("failed to {error}").context(ExitCode::Data)
}

fn shard_bytes(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| "expected bytes, such as 5GB or 500MiB".to_owned())
}
