//! `trainer upcycle`: makes a mixture of experts from a dense model and saves a Hugging Face folder.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use candlewick_inference::command::DtypeOption;
use candlewick_model::{MoeLayerFreq, UpcycledExperts, UpcycledRouter, Upcycling, UpcyclingOutput, UpcyclingReport};
use candlewick_ops::ScoreFunction;
use candlewick_runtime::progress::ProgressUnit;
use candlewick_text::hub::{Hub, ModelFiles};
use clap::{Args, ValueEnum};

use super::Ui;
use super::options::{not_found, shard_bytes};
use crate::checkpoint::require_space;
use crate::exit::ExitCode;
use crate::export::progress;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer upcycle Qwen/Qwen3-0.6B --output qwen3-8x0.6b --num-experts 8 --num-experts-per-tok 2
  trainer upcycle dense --output moe --num-experts 64 --num-experts-per-tok 8 --granularity 8

The router is random and the experts are copies, so the new model computes the function of the dense one. With
--granularity G, an expert is one of G slices of the dense MLP. Then --num-experts 8*G and --num-experts-per-tok 2*G use
as many weights as 8 and 2 whole MLPs.";

#[derive(Debug, Args)]
pub(super) struct UpcycleArgs {
    /// Dense model: a folder, a Hub id, or the output folder of a run
    #[arg(value_name = "MODEL")]
    model: String,
    /// Output folder; must be empty or missing
    #[arg(long, short, value_name = "DIR")]
    output: PathBuf,
    /// Number of routed experts of a layer
    #[arg(long, value_name = "N", visible_alias = "n-experts")]
    num_experts: usize,
    /// Number of experts that process a token
    #[arg(long, value_name = "K", visible_aliases = ["top-k", "moe-router-topk"])]
    num_experts_per_tok: usize,
    /// Number of slices of the dense MLP; an expert is a copy of one slice
    #[arg(long, value_name = "G", default_value_t = 1, visible_alias = "moe-upcycling-granularity")]
    granularity: usize,
    /// Layers with experts: N for each layer whose index is a multiple of N, or a list with 1 (experts) or 0 (dense) for each
    /// layer, such as [1,0,1,0] or ([1]+[0])*2
    #[arg(long, value_name = "N|LIST", default_value = "1")]
    moe_layer_freq: MoeLayerFreq,
    /// Function from the router's logits to scores
    #[arg(long, value_enum, value_name = "NAME", default_value_t, visible_alias = "moe-router-score-function")]
    router_score_function: ScoreFunctionOption,
    /// Add an expert bias to each router, which training updates; it needs sigmoid or sqrtsoftplus
    #[arg(long, visible_alias = "moe-router-enable-expert-bias")]
    router_enable_expert_bias: bool,
    /// Seed of the router's initial values
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Dtype of the weights; auto is the dense model's
    #[arg(long, value_enum, default_value_t = DtypeOption::Auto)]
    dtype: DtypeOption,
    /// Maximum size of a weights file, such as 5GB or 500MiB
    #[arg(long, value_name = "BYTES", default_value = "5GB", value_parser = shard_bytes)]
    max_shard_size: u64,
}

/// Score function of a router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ScoreFunctionOption {
    /// Softmax over the experts
    #[default]
    Softmax,
    /// Sigmoid of each logit
    Sigmoid,
    /// Square root of the softplus of each logit
    Sqrtsoftplus,
}

impl From<ScoreFunctionOption> for ScoreFunction {
    fn from(option: ScoreFunctionOption) -> Self {
        match option {
            ScoreFunctionOption::Softmax => Self::Softmax,
            ScoreFunctionOption::Sigmoid => Self::Sigmoid,
            ScoreFunctionOption::Sqrtsoftplus => Self::SqrtSoftplus,
        }
    }
}

pub(super) fn run(args: &UpcycleArgs, hub: &Hub, ui: &Ui) -> Result<ExitCode> {
    let found = hub.find_model(&args.model, None, ModelFiles::All).map_err(not_found)?;
    found.note("model").iter().for_each(|note| ui.note(note));
    if found.is_adapter() {
        let problem = format!("{} is an adapter; merge it first with `trainer merge`", found.folder.display());
        return Err(anyhow!("failed to upcycle: {problem}").context(ExitCode::Usage));
    }
    let router =
        UpcycledRouter { score: args.router_score_function.into(), expert_bias: args.router_enable_expert_bias };
    let experts = UpcycledExperts {
        n_experts: args.num_experts,
        top_k: args.num_experts_per_tok,
        granularity: args.granularity,
        layer_freq: args.moe_layer_freq.clone(),
        router,
    };
    let failed = || format!("failed to upcycle {}", found.folder.display());
    let upcycling = Upcycling::open(&found.folder, experts, args.seed).with_context(failed)?;
    let warnings = [upcycling.config().transformers_warning(), upcycling.config().constant_weights()];
    warnings.iter().flatten().for_each(|warning| ui.note(warning));
    let dtype = args.dtype.named();
    require_space(&args.output, upcycling.n_bytes(dtype))?;
    let output = UpcyclingOutput { folder: &args.output, dtype, shard_bytes: args.max_shard_size };
    let report = upcycling.write(&output, &progress("upcycle", ProgressUnit::Count("tensors"))).with_context(failed)?;
    ui.print(&describe(&report, args))
}

fn describe(report: &UpcyclingReport, args: &UpcycleArgs) -> String {
    let UpcyclingReport { family, dtype, n_params, expert_size, n_moe_layers, n_layers } = *report;
    let layers =
        if n_moe_layers == n_layers { "each layer".to_owned() } else { format!("{n_moe_layers} of {n_layers} layers") };
    format!(
        "{}: {} with {} experts of intermediate size {expert_size} in {layers}, {n_params} parameters in {}; verified \
         after writing",
        args.output.display(),
        family.architecture(),
        args.num_experts,
        dtype.as_str()
    )
}
