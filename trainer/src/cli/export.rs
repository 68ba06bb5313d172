//! `trainer export`: writes a model as a Hugging Face folder or as GGUF, and pushes it to the Hub.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use candlewick_inference::command::DtypeOption;
use candlewick_model::checkpoint::{DEFAULT_SHARD_BYTES, ExpertTensors};
use candlewick_ops::DeviceChoice;
use candlewick_runtime::progress::show_downloads;
use candlewick_text::hub::{FolderUpload, Hub, RepoId, RepoKind, RepoVisibility};
use clap::{Args, ValueEnum};

use super::Ui;
use super::options::shard_bytes;
use crate::exit::ExitCode;
use crate::export::{Export, ExportFormat, ExportSource, FormatReport, model_card};

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer export runs/my-run --output my-model
  trainer export runs/my-lora --format gguf-q4_k_m --output my-model-gguf
  trainer export runs/my-run/checkpoints/epoch_1_global_step_40 --format safetensors,gguf-q8_0 --output my-model
  trainer export runs/my-run --output my-model --push-to-hub me/my-model

Every format is read back, and its logits are compared with those of the source on 16 short prompts and a chat. The output folder
appears after that. Files whose logits differ too much are kept in DIR.failed.";

#[derive(Debug, Args)]
pub(super) struct ExportArgs {
    /// Model: a run's output folder, a sharded checkpoint, a Hugging Face folder, an adapter folder, or a Hub id
    #[arg(value_name = "MODEL")]
    model: String,
    /// Output folder; must be empty or missing
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Formats, separated by commas
    #[arg(long, value_enum, value_name = "FORMAT", value_delimiter = ',', default_values_t = [ExportFormat::Safetensors])]
    format: Vec<ExportFormat>,
    /// Base model of an adapter: a folder or a Hub id [default: the adapter's base_model_name_or_path]
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Dtype of safetensors; auto is the model's
    #[arg(long, value_enum, default_value_t = DtypeOption::Auto)]
    dtype: DtypeOption,
    /// Maximum size of a safetensors file, such as 5GB or 500MiB [default: 5GB]
    #[arg(long, value_name = "BYTES", value_parser = shard_bytes)]
    max_shard_size: Option<u64>,
    /// Tensors of routed experts in safetensors
    #[arg(long, value_enum, default_value_t = ExpertTensorsOption::Separate)]
    expert_tensors: ExpertTensorsOption,
    /// Device that computes the logits: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
    /// Do not compare logits. Values are always compared
    #[arg(long, conflicts_with = "device")]
    skip_check: bool,
    /// Push the folder with a model card to this Hub repository. HF_TOKEN needs write access
    #[arg(long, value_name = "OWNER/NAME")]
    push_to_hub: Option<String>,
    /// Make a new Hub repository public; the default is private
    #[arg(long, requires = "push_to_hub")]
    public: bool,
}

/// Tensors of routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExpertTensorsOption {
    /// One per expert matrix, as on the Hub
    Separate,
    /// 3-D tensors of all experts of a layer, as transformers 5 holds them in memory
    Fused,
}

impl From<ExpertTensorsOption> for ExpertTensors {
    fn from(option: ExpertTensorsOption) -> Self {
        match option {
            ExpertTensorsOption::Separate => Self::Separate,
            ExpertTensorsOption::Fused => Self::Fused,
        }
    }
}

pub(super) fn run(args: &ExportArgs, hub: &Hub, ui: &Ui) -> Result<ExitCode> {
    let has_safetensors = args.format.contains(&ExportFormat::Safetensors);
    let is_fused = args.expert_tensors == ExpertTensorsOption::Fused;
    if !has_safetensors && (args.dtype != DtypeOption::Auto || args.max_shard_size.is_some() || is_fused) {
        let problem =
            "--dtype, --max-shard-size and --expert-tensors are of safetensors; a GGUF format names its dtype";
        return Err(anyhow!("failed to export: {problem}").context(ExitCode::Usage));
    }
    let repo = args.push_to_hub.as_deref().map(|id| repo_to_push(id, hub)).transpose()?;
    let device = args.device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
    let source = ExportSource::open(&args.model, args.base.as_deref(), hub)?;
    source.notes.iter().for_each(|note| ui.note(note));
    let config = source.model.config();
    if is_fused && config.moe().is_none() {
        let problem = "--expert-tensors fused: the model has no experts; remove the option";
        return Err(anyhow!("failed to export: {problem}").context(ExitCode::Usage));
    }
    config.transformers_warning().iter().for_each(|warning| ui.note(warning));
    let window = (0..config.n_layers()).filter_map(|layer_idx| config.window(layer_idx)).min();
    if let Some(window) = window.filter(|_| args.format.iter().any(|format| format.gguf().is_some())) {
        ui.note(&format!("llama.cpp has no sliding window for this model: texts of more than {window} tokens differ"));
    }
    let mut formats: Vec<ExportFormat> = Vec::new();
    for format in &args.format {
        if !formats.contains(format) {
            formats.push(*format);
        }
    }
    let export = Export {
        source: &source,
        output: &args.output,
        formats: &formats,
        dtype: args.dtype.named(),
        shard_bytes: args.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
        expert_tensors: args.expert_tensors.into(),
        check_on: (!args.skip_check).then_some(device),
        card: repo.as_ref().map(|repo| model_card(&repo.to_string(), &source, &args.format)),
    };
    let reports = export.run()?;
    ui.print(&reports.iter().map(describe).collect::<Vec<_>>().join("\n"))?;
    match repo {
        Some(repo) => push(&repo, args, hub, ui),
        None => Ok(ExitCode::Ok),
    }
}

/// Parses the id of a repository to write, and checks that there is a token, before the export begins.
fn repo_to_push(id: &str, hub: &Hub) -> Result<RepoId> {
    let refused = |problem: String| anyhow!("failed to {problem}").context(ExitCode::Usage);
    let repo = RepoId::parse(RepoKind::Model, id).map_err(|error| refused(error.to_string()))?;
    match (id.contains('/'), &hub.settings().token) {
        (false, _) => Err(refused(format!("push to {id}: name the owner, too: OWNER/{id}"))),
        (true, None) => {
            Err(refused(format!("push to {id}: there is no token; set HF_TOKEN to a token with write access")))
        }
        (true, Some(_)) => Ok(repo),
    }
}

fn push(repo: &RepoId, args: &ExportArgs, hub: &Hub, ui: &Ui) -> Result<ExitCode> {
    let visibility = if args.public { RepoVisibility::Public } else { RepoVisibility::Private };
    let upload = FolderUpload { repo, folder: &args.output, visibility, message: "Upload model with Candlewick" };
    let url = hub.upload(&upload, Some(show_downloads())).map_err(|error| {
        let folder = args.output.display();
        anyhow!("failed to {error}\nThe export is complete in {folder}; to push it again: hf upload {repo} {folder}")
            .context(ExitCode::Data)
    })?;
    ui.print(&format!("pushed to {url}"))
}

/// Describes a written format and its check.
pub(super) fn describe(report: &FormatReport) -> String {
    let mut text = format!("{}: {}, {}", report.path.display(), report.format, megabytes(report.n_bytes));
    if let Some(merge) = &report.merge {
        text += &format!(" in {}, {} parameters", merge.dtype.as_str(), merge.n_params);
        if merge.n_matrices > 0 {
            text += &format!(", {} matrices changed by the adapter", merge.n_matrices);
        }
        if merge.rounding > 0.0 {
            text += &format!(
                "\nrounding to {} loses {:.1}% of the adapter's update; --dtype f32 loses nothing",
                merge.dtype.as_str(),
                100.0 * merge.rounding
            );
        }
    }
    text += &match &report.check {
        Some(difference) => format!("\nread back: {difference}"),
        None => "\nlogits are not compared".to_owned(),
    };
    text
}

fn megabytes(n_bytes: u64) -> String {
    format!("{:.1} MB", n_bytes as f64 / 1e6)
}
