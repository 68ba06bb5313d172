//! `trainer chat`: chats with a model on stdin and stdout.

use anyhow::Result;
use candlewick_inference::command::{ChatOptions, chat};
use candlewick_runtime::rank_env::rank_env;
use candlewick_text::hub::Hub;
use clap::Args;

use crate::exit::ExitCode;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer chat runs/my-run
  trainer chat runs/my-run/model/latest --temperature 0.7 --top-p 0.9
  trainer chat HuggingFaceTB/SmolLM2-135M-Instruct --max-new-tokens 200
  launch --standalone --nproc-per-node 2 --interactive -- trainer chat runs/my-run --tensor-parallel-size 2";

#[derive(Debug, Args)]
pub(super) struct ChatCommand {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    options: ChatOptions,
}

pub(super) fn run(args: &ChatCommand, hub: &Hub) -> Result<ExitCode> {
    chat(&args.model, &args.options, &rank_env()?, hub).map(|()| ExitCode::Ok)
}
