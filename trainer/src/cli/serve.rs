//! `trainer serve`: serves a model over HTTP.

use anyhow::Result;
use candlewick_inference::command::{ServeOptions, serve};
use candlewick_text::hub::Hub;
use clap::Args;

use crate::exit::ExitCode;

pub(super) const EXAMPLES: &str = "\
Examples:
  trainer serve runs/my-run
  trainer serve HuggingFaceTB/SmolLM2-135M-Instruct --served-model-name smol --port 8080
  trainer serve base --adapter runs/my-lora --api-key secret --host 0.0.0.0";

#[derive(Debug, Args)]
pub(super) struct ServeCommand {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    options: ServeOptions,
}

pub(super) fn run(args: &ServeCommand, hub: &Hub) -> Result<ExitCode> {
    serve(&args.model, &args.options, hub).map(|()| ExitCode::Ok)
}
