//! Command-line options for requests to the model: batch size and context length.

use std::path::PathBuf;

use clap::Args;

use candlewick_inference::answer::stop::ThinkEnd;
use candlewick_inference::answer::{BackendSettings, RequestProgress};
use candlewick_inference::ranks::EvalRanks;
use candlewick_runtime::progress::{ProgressUnit, WorkProgress};

#[derive(Clone, Debug, Args)]
pub(super) struct RequestArgs {
    /// Sequences per forward pass, or auto. Results do not depend on it
    #[arg(long, short, alias = "batch_size", default_value = "auto", value_parser = batch_size)]
    batch_size: BatchSize,
    /// Maximum context length in tokens [default: the model's]
    #[arg(long, alias = "max_length", value_name = "N", value_parser = at_least_one)]
    pub(super) max_length: Option<usize>,
    /// Maximum number of generated tokens, if neither request nor task sets it
    #[arg(long, alias = "max_gen_toks", value_name = "N", default_value_t = 256)]
    max_gen_toks: usize,
    /// Prepend BOS to contexts [default: as the tokenizer does]
    #[arg(long, alias = "add_bos_token", value_name = "BOOL")]
    pub(super) add_bos_token: Option<bool>,
    /// Maximum number of sequences per forward pass with --batch-size auto
    #[arg(long, alias = "max_batch_size", value_name = "N", value_parser = at_least_one)]
    max_batch_size: Option<usize>,
    /// Token that ends a model's thinking, as text or id. The response is the text after it, and stop sequences apply
    /// only there
    #[arg(long, alias = "think_end_token", value_name = "TOKEN")]
    pub(super) think_end_token: Option<String>,
}

/// Number of sequences in a forward pass; `None` for `auto`.
#[derive(Clone, Copy, Debug)]
struct BatchSize(Option<usize>);

fn batch_size(text: &str) -> Result<BatchSize, String> {
    // lm-eval's auto:N searches for the batch size N times; here it equals auto.
    match text.split_once(':').map_or(text, |(auto, _)| auto) {
        "auto" => Ok(BatchSize(None)),
        _ => {
            at_least_one(text).map(|n| BatchSize(Some(n))).map_err(|_| "expected auto or a number of at least 1".into())
        }
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of at least 1".into())
}

impl RequestArgs {
    /// Returns the settings of the inference engine, with the seed of sampled generations and the folder of the
    /// response cache.
    pub(super) fn settings(&self, seed: u64, log: Option<PathBuf>) -> BackendSettings {
        let Self { batch_size, max_length, max_gen_toks, add_bos_token, max_batch_size, .. } = *self;
        if batch_size.0.is_some() && max_batch_size.is_some() {
            tracing::warn!("--max-batch-size has no effect: it needs --batch-size auto");
        }
        BackendSettings {
            max_length,
            max_gen_toks,
            add_bos: add_bos_token,
            batch_size: batch_size.0,
            max_batch_size,
            think_end: self.think_end_token.as_deref().map(ThinkEnd::read),
            seed,
            cache_folder: log,
        }
    }

    /// Returns the batch size as given on the command line.
    pub(super) fn batch_size(&self) -> String {
        self.batch_size.0.map_or_else(|| "auto".to_owned(), |n| n.to_string())
    }
}

/// Creates the progress display on the first rank: a progress bar in a terminal, else log lines at intervals.
pub(super) fn progress_reporter(ranks: &EvalRanks) -> impl FnMut(RequestProgress) + use<> {
    let is_first = ranks.process.is_first();
    let mut shown = is_first.then(|| WorkProgress::start("evaluate", ProgressUnit::Count("requests"), 0));
    move |RequestProgress { n_done, n_all }| {
        shown.iter().for_each(|shown| shown.set(n_done, n_all));
        if n_done == n_all {
            shown = None;
        }
    }
}
