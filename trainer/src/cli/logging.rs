//! Logging to stderr and to the recipe's log file, and the profiler's tracing layer.

use std::fs::{self, File};
use std::sync::Mutex;

use anyhow::{Context, Result};
use candlewick_command_line::stderr_has_colors;
use candlewick_runtime::log_lines::LogLineFormat;
use candlewick_runtime::progress::AboveBars;
use candlewick_runtime::rank_env::rank_env;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use super::options::Verbosity;
use crate::plan::LoggerPlan;
use crate::profiling::BoxedLayer;

/// Initializes logging of a command without a recipe. Only rank 0 prints, because all ranks log the same.
pub(super) fn start_on_first_rank(verbosity: Verbosity) -> Result<()> {
    start(verbosity, &LoggerPlan { print: rank_env()?.rank == 0, ..LoggerPlan::default() }, Vec::new())
}

/// Initializes logging for the rest of the process.
///
/// The level comes from RUST_LOG, else from `-q` and `-v`, else from the recipe's `logger.level`.
pub(super) fn start(verbosity: Verbosity, plan: &LoggerPlan, layers: Vec<BoxedLayer>) -> Result<()> {
    let level = match (verbosity.quiet, verbosity.verbose) {
        (true, _) => "error",
        (false, 0) => plan.level.as_deref().unwrap_or("warn"),
        (false, 1) => "info",
        (false, _) => "debug",
    };
    let filter = || EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let stderr = plan.print.then(|| {
        tracing_subscriber::fmt::layer()
            .with_writer(|| AboveBars)
            .with_ansi(stderr_has_colors())
            .event_format(LogLineFormat)
            .with_filter(filter())
    });
    let file = match &plan.file {
        Some(path) => path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| File::options().create(true).append(true).open(path))
            .map(|file| {
                let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(Mutex::new(file));
                Some(layer.with_filter(filter()))
            })
            .with_context(|| format!("failed to open the log file {} (logger.output_dir)", path.display()))?,
        None => None,
    };
    // An empty list of layers would disable the others.
    let layers = (!layers.is_empty()).then_some(layers);
    // A second initialization in one process (tests) keeps the first.
    let _ = tracing_subscriber::registry().with(layers).with(stderr).with(file).try_init();
    Ok(())
}
