//! Options of lm-eval that this program has no use for: those that cannot matter are named in a warning, and those that would
//! are refused with what to do instead.

use anyhow::{Result, anyhow};
use clap::Args;

use candlewick_runtime::exit::ExitCode;

#[derive(Debug, Args)]
pub(super) struct UnsupportedLmEvalArgs {
    #[arg(long, alias = "trust_remote_code", hide = true)]
    trust_remote_code: bool,
    #[arg(long, alias = "cache_requests", hide = true, num_args = 0..=1, default_missing_value = "true")]
    cache_requests: Option<String>,
    #[arg(long, alias = "check_integrity", hide = true)]
    check_integrity: bool,
    #[arg(long, short = 'C', hide = true, value_name = "FILE")]
    config: Option<String>,
    #[arg(long, hide = true, num_args = 1..)]
    metadata: Vec<String>,
    #[arg(long, alias = "wandb_args", hide = true, num_args = 1..)]
    wandb_args: Vec<String>,
    #[arg(long, alias = "wandb_config_args", hide = true, num_args = 1..)]
    wandb_config_args: Vec<String>,
    #[arg(long, alias = "trackio_args", hide = true, num_args = 1..)]
    trackio_args: Vec<String>,
    #[arg(long, alias = "hf_hub_log_args", hide = true, num_args = 1..)]
    hf_hub_log_args: Vec<String>,
}

impl UnsupportedLmEvalArgs {
    /// Refuses what would have an effect in lm-eval.
    pub(super) fn check(&self) -> Result<()> {
        const NOWHERE: &str = "results are files only; hand over what --output-path holds";
        let refused = [
            (
                self.check_integrity,
                "--check-integrity",
                "every task is checked when it is read; `evaluator show TASK` prints what it asks",
            ),
            (self.config.is_some(), "--config", "write the options on the command line"),
            (!self.metadata.is_empty(), "--metadata", "no task here reads it"),
            (!self.wandb_args.is_empty(), "--wandb-args", NOWHERE),
            (!self.wandb_config_args.is_empty(), "--wandb-config-args", NOWHERE),
            (!self.trackio_args.is_empty(), "--trackio-args", NOWHERE),
            (!self.hf_hub_log_args.is_empty(), "--hf-hub-log-args", NOWHERE),
        ];
        match refused.iter().find(|(is_given, ..)| *is_given) {
            None => Ok(()),
            Some((_, option, instead)) => {
                Err(anyhow!("failed to start: {option} is not understood here: {instead}").context(ExitCode::Usage))
            }
        }
    }

    /// What is given and changes nothing, in words.
    pub(super) fn warnings(&self) -> Vec<&'static str> {
        let given = [
            (self.trust_remote_code, "--trust-remote-code has no effect: no code is downloaded and run"),
            (
                self.cache_requests.is_some(),
                "--cache-requests has no effect: prompts are written anew, which takes seconds",
            ),
        ];
        given.into_iter().filter(|(is_given, _)| *is_given).map(|(_, said)| said).collect()
    }
}
