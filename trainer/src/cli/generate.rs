//! `trainer generate`: generates replies to prompts and conversations.

use anyhow::Result;
use candlewick_inference::command::{GenerateArgs, generate};
use candlewick_runtime::rank_env::rank_env;
use candlewick_text::hub::Hub;
use clap::Args;

use crate::exit::ExitCode;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer generate runs/my-run --prompt 'Who are you?'
  trainer generate runs/my-run --system 'You are Lumo.' --messages chat.json
  trainer generate HuggingFaceTB/SmolLM2-135M-Instruct --raw --prompt 'Once upon a time'
  launch --standalone --nproc-per-node 2 -- trainer generate runs/my-run --tensor-parallel-size 2 --prompt Hi";

#[derive(Debug, Args)]
pub(super) struct GenerateCommand {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    options: GenerateArgs,
}

pub(super) fn run(args: &GenerateCommand, hub: &Hub) -> Result<ExitCode> {
    generate(&args.model, &args.options, &rank_env()?, hub).map(|()| ExitCode::Ok)
}
