//! `trainer merge`: merges an adapter into its base model and saves a Hugging Face folder.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use candlewick_inference::command::DtypeOption;
use candlewick_model::checkpoint::ExpertTensors;
use candlewick_ops::DeviceChoice;
use candlewick_text::hub::Hub;
use clap::Args;

use super::Ui;
use super::export::describe;
use super::options::shard_bytes;
use crate::exit::ExitCode;
use crate::export::{Export, ExportFormat, ExportSource};

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
    /// Device that computes the logits: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Do not compare logits. Values are always compared
    #[arg(long, conflicts_with = "device")]
    skip_check: bool,
}

pub(super) fn run(args: &MergeArgs, hub: &Hub, ui: &Ui) -> Result<ExitCode> {
    let device = args.device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    let source = ExportSource::open_adapter(&args.adapter, args.base.as_deref(), hub)?;
    source.notes.iter().for_each(|note| ui.note(note));
    source.model.config().transformers_warning().iter().for_each(|warning| ui.note(warning));
    let export = Export {
        source: &source,
        output: &args.output,
        formats: &[ExportFormat::Safetensors],
        dtype: args.dtype.named(),
        shard_bytes: args.max_shard_size,
        expert_tensors: ExpertTensors::default(),
        check_on: (!args.skip_check).then_some(device),
        card: None,
    };
    let reports = export.run().with_context(|| format!("failed to merge {}", source.folder.display()))?;
    ui.print(&reports.iter().map(describe).collect::<Vec<_>>().join("\n"))
}
