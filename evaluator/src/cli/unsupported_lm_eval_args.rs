//! lm-eval options without support. Options without effect on results cause a warning; others are an error with an
//! alternative.

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
    /// Returns an error for an option that would change the results in lm-eval.
    pub(super) fn check(&self) -> Result<()> {
        const NOWHERE: &str = "results are only written to files; upload the files of --output-path";
        let refused = [
            (
                self.check_integrity,
                "--check-integrity",
                "task files are always checked; `evaluator show TASK` prints the prompts",
            ),
            (self.config.is_some(), "--config", "write the options on the command line"),
            (!self.metadata.is_empty(), "--metadata", "no task reads it"),
            (!self.wandb_args.is_empty(), "--wandb-args", NOWHERE),
            (!self.wandb_config_args.is_empty(), "--wandb-config-args", NOWHERE),
            (!self.trackio_args.is_empty(), "--trackio-args", NOWHERE),
            (!self.hf_hub_log_args.is_empty(), "--hf-hub-log-args", NOWHERE),
        ];
        match refused.iter().find(|(is_given, ..)| *is_given) {
            None => Ok(()),
            Some((_, option, instead)) => {
                Err(anyhow!("failed to start: {option} is not supported: {instead}").context(ExitCode::Usage))
            }
        }
    }

    /// Returns a warning for each given option without effect.
    pub(super) fn warnings(&self) -> Vec<&'static str> {
        let given = [
            (self.trust_remote_code, "--trust-remote-code has no effect: downloaded code is never run"),
            (self.cache_requests.is_some(), "--cache-requests has no effect: prompts are built in every run"),
        ];
        given.into_iter().filter(|(is_given, _)| *is_given).map(|(_, said)| said).collect()
    }
}
