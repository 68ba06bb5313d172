//! The command line of the `trainer` program.

mod cache;
mod chat;
mod check;
mod clean;
mod completion;
mod config;
mod convert;
mod disk_usage;
mod doctor;
mod estimate;
mod export;
mod fp8_advise;
mod generate;
mod logging;
mod merge;
mod mesh;
mod options;
mod prefetch;
mod preprocess;
mod profile;
mod recipes;
mod replay;
mod report;
mod serve;
mod train;
mod ui;
mod upcycle;
mod verify_parallel;
mod verify_resume;
mod watch;

use std::sync::LazyLock;

use anyhow::Context;
use candlewick_command_line::{ManArgs, Shell, complete, completions};
use candlewick_runtime::error_file;
use candlewick_runtime::exit::backtrace;
use candlewick_runtime::progress::set_progress_display;
use candlewick_runtime::terminal::print_note;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};

use crate::exit::{ExitCode, classify, report};
use crate::metrics::Versions;
use crate::plan::LoggerPlan;
use crate::recipe::{RecipeError, key_of_option};

use options::{OutputFormat, Verbosity, hub};
pub use ui::Ui;

/// The version, and the commit if the build sets it.
static VERSION: LazyLock<String> = LazyLock::new(|| Versions::this().to_string());

/// Train and fine-tune language models from YAML recipes.
#[derive(Debug, Parser)]
#[command(name = "trainer", version = &**VERSION, propagate_version = true, after_long_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    verbosity: Verbosity,
}

const EXAMPLES: &str = "\
Examples:
  trainer train recipes/quickstart.yaml
  trainer train recipes/quickstart.yaml optimizer.lr=1e-4 data.sources.0.sample_count=1K
  trainer check recipes/quickstart.yaml --output-format json
  trainer export runs/quickstart --format gguf-q4_k_m --output quickstart-gguf
  trainer schema > recipe.schema.json

Exit codes:
  0      success
  1      other failure
  2      invalid command line or recipe
  3      invalid data, tokenizer or chat template
  4      out of memory, or the estimate exceeds the memory
  5      non-finite loss or gradient
  6      checkpoint or disk failure
  7      another rank or a collective failed
  75     stopped by a signal, with a checkpoint to resume from
  128+N  terminated by signal N";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model from a recipe
    #[command(after_long_help = train::EXAMPLES)]
    Train(train::TrainArgs),
    /// Validate a recipe and print the resolved settings, without device or network
    #[command(after_long_help = check::EXAMPLES)]
    Check(check::CheckArgs),
    /// Convert a training file of axolotl, torchtune, LLaMA-Factory or picotron into a recipe, with a report
    #[command(after_long_help = convert::EXAMPLES)]
    Convert(convert::ConvertArgs),
    /// Tokenize and pack the data, fill the token cache and print token statistics
    #[command(visible_aliases = ["data", "process-data"], after_long_help = preprocess::EXAMPLES)]
    Preprocess(preprocess::PreprocessArgs),
    /// Download what a recipe needs from the Hub, and lock the commits for runs without a network
    #[command(after_long_help = prefetch::EXAMPLES)]
    Prefetch(prefetch::PrefetchArgs),
    /// Estimate the memory of a run, without loading weights or data
    #[command(after_long_help = estimate::EXAMPLES)]
    Estimate(estimate::EstimateArgs),
    /// Print the device mesh, the pipeline stages and the pipeline schedule
    #[command(visible_alias = "plan", after_long_help = mesh::EXAMPLES)]
    Mesh(mesh::MeshArgs),
    /// Compare two training steps on the recipe's device mesh with one rank, on a tiny model
    #[command(visible_alias = "selfcheck", after_long_help = verify_parallel::EXAMPLES)]
    VerifyParallel(verify_parallel::VerifyParallelArgs),
    /// Compare a run that stops and resumes from its checkpoint with an uninterrupted run, to the bit
    #[command(after_long_help = verify_resume::EXAMPLES)]
    VerifyResume(verify_resume::VerifyResumeArgs),
    /// Measure which linear layers are faster in FP8 on this device
    #[command(after_long_help = fp8_advise::EXAMPLES)]
    Fp8Advise(fp8_advise::Fp8AdviseArgs),
    /// Show a running or finished run in the terminal: loss, speed, memory, expert balance
    #[command(after_long_help = watch::EXAMPLES)]
    Watch(watch::WatchArgs),
    /// Write an HTML page of one or more runs: curves, results, settings, token statistics
    #[command(after_long_help = report::EXAMPLES)]
    Report(report::ReportArgs),
    /// List and remove results of a run's folder that later ones replaced: models, checkpoints, metrics of earlier runs
    #[command(after_long_help = clean::EXAMPLES)]
    Clean(clean::CleanArgs),
    /// List and remove entries of the token cache and of other caches
    #[command(subcommand, after_long_help = cache::EXAMPLES)]
    Cache(cache::CacheCommand),
    /// Compute loss and gradient of a batch that the loss watchdog or on_nonfinite kept, and print its worst rows
    #[command(after_long_help = replay::EXAMPLES)]
    Replay(replay::ReplayArgs),
    /// Chat with a model in the terminal
    #[command(after_long_help = chat::EXAMPLES)]
    Chat(chat::ChatCommand),
    /// Generate replies to prompts or conversations
    #[command(after_long_help = generate::EXAMPLES)]
    Generate(generate::GenerateCommand),
    /// Serve a model over HTTP, with OpenAI's endpoints for chats and completions
    #[command(after_long_help = serve::EXAMPLES)]
    Serve(serve::ServeCommand),
    /// Merge a LoRA adapter into its base model, and save a Hugging Face folder
    #[command(after_long_help = MERGE_EXAMPLES)]
    Merge(merge::MergeArgs),
    /// Write a model as a Hugging Face folder or as GGUF, check it, and push it to the Hub
    #[command(after_long_help = export::EXAMPLES)]
    Export(export::ExportArgs),
    /// Make a mixture of experts from a dense model, and save a Hugging Face folder
    #[command(after_long_help = upcycle::EXAMPLES)]
    Upcycle(upcycle::UpcycleArgs),
    /// Print diagnostics: CPU, memory, GPUs, NVIDIA libraries, Hub access, disks
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List, print or copy the recipes inside the program
    #[command(subcommand, after_long_help = recipes::EXAMPLES)]
    Recipes(recipes::RecipesCommand),
    /// Explain recipe keys and compare resolved settings
    Config {
        #[command(subcommand)]
        command: config::ConfigCommand,
    },
    /// Print the JSON schema of recipes, for editors
    Schema,
    /// Print a shell completion script
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the man page, or write the pages of all commands into a folder
    Man(ManArgs),
    /// Print the version
    Version,
}

const MERGE_EXAMPLES: &str = "\
Examples:
  trainer merge runs/lora --output merged
  trainer merge runs/lora/model/global_step_40 --output merged --base base --dtype f32

The folder is read back: every value is compared, and the logits on 16 short prompts and a chat are compared with those of base and
adapter. The output folder appears after that. A folder whose logits differ too much is kept in DIR.failed.";

/// Returns the command line of the program.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    complete(Cli::command);
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report_usage_error(error),
    };
    error_file::record_panics();
    // By default, SIGXFSZ kills the process at such a write.
    let _ = crate::signals::ignore_file_size_signal();
    match run(&cli) {
        Ok(code) => code,
        Err(error) => {
            let code = classify(&error);
            let verbose = cli.verbosity.verbose;
            let error = with_notes(error, verbose);
            let trace = if verbose > 1 { backtrace(&error) } else { String::new() };
            let report = report(&error) + &trace;
            error_file::write(report.trim_end());
            print_note(report.trim_end());
            code
        }
    }
}

/// Prints clap's error. Adds a tip if the recipe is missing, or if the unknown option is a recipe key.
fn report_usage_error(mut error: clap::Error) -> ExitCode {
    let takes_overrides = error.get(ContextKind::Usage).is_some_and(|usage| usage.to_string().contains("[KEY=VALUE]"));
    let option = error.get(ContextKind::InvalidArg).filter(|_| takes_overrides);
    let lacks_recipe =
        error.get(ContextKind::InvalidArg).is_some_and(|missing| missing.to_string().contains("<RECIPE>"));
    let tip = match (error.kind(), option) {
        (ErrorKind::MissingRequiredArgument, _) if lacks_recipe => {
            Some("`trainer recipes ls` lists the recipes inside the program, such as quickstart".to_owned())
        }
        (_, Some(option)) => key_tip(&option.to_string()),
        _ => None,
    };
    if let Some(tip) = tip {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    // clap reports --help and --version as errors that go to stdout. A closed pipe is no failure.
    let _ = error.print();
    if error.use_stderr() { ExitCode::Usage } else { ExitCode::Ok }
}

/// Returns the tip for `--train_iters 3` or `--max_steps=3`: `train_iters=3`.
fn key_tip(option: &str) -> Option<String> {
    let key = key_of_option(option)?;
    let mut arguments = std::env::args().skip_while(|argument| argument.split('=').next() != Some(option));
    let value = match arguments.next()?.split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None => arguments.next().filter(|next| !next.starts_with('-')),
    };
    Some(format!("write recipe keys as KEY=VALUE, after the recipe: {key}={}", value.as_deref().unwrap_or("VALUE")))
}

/// Adds the long notes of a recipe error, which `-v` shows.
fn with_notes(error: anyhow::Error, verbose: u8) -> anyhow::Error {
    match error.downcast::<RecipeError>() {
        Ok(error) if verbose > 0 => error.detailed().into(),
        Ok(error) => error.into(),
        Err(error) => error,
    }
}

fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    candlewick_runtime::cores::select_cpu_gemm_kernel()?;
    candlewick_runtime::cores::override_kernels()?;
    candlewick_runtime::cores::tune_gemms()?;
    set_progress_display(cli.verbosity.progress_display());
    let ui = Ui::new(cli.verbosity.quiet);
    match &cli.command {
        Command::Train(args) => train::run(args, cli.verbosity, &ui),
        Command::Check(args) => check::run(args, cli.verbosity, &ui),
        Command::Convert(args) => convert::run(args, &ui),
        Command::Preprocess(args) => preprocess::run(args, cli.verbosity),
        Command::Prefetch(args) => prefetch::run(args, cli.verbosity, &ui),
        Command::Estimate(args) => estimate::run(args, cli.verbosity, &ui),
        Command::Mesh(args) => mesh::run(args, cli.verbosity, &ui),
        Command::Fp8Advise(args) => fp8_advise::run(args, cli.verbosity, &ui),
        Command::VerifyParallel(args) => verify_parallel::run(args, cli.verbosity, &ui),
        Command::VerifyResume(args) => verify_resume::run(args, cli.verbosity, &ui),
        Command::Watch(args) => watch::run(args, &ui),
        Command::Report(args) => report::run(args, &ui),
        Command::Clean(args) => clean::run(args, &ui),
        Command::Cache(command) => cache::run(command, &ui),
        Command::Replay(args) => replay::run(args, cli.verbosity, &ui),
        Command::Chat(args) => {
            logging::start_on_first_rank(cli.verbosity)?;
            chat::run(args, &hub()?)
        }
        Command::Generate(args) => {
            logging::start_on_first_rank(cli.verbosity)?;
            generate::run(args, &hub()?)
        }
        Command::Serve(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), Vec::new())?;
            serve::run(args, &hub()?)
        }
        Command::Merge(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), Vec::new())?;
            merge::run(args, &hub()?, &ui)
        }
        Command::Export(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), Vec::new())?;
            export::run(args, &hub()?, &ui)
        }
        Command::Upcycle(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), Vec::new())?;
            upcycle::run(args, &hub()?, &ui)
        }
        Command::Doctor { json } => doctor::run(if *json { OutputFormat::Json } else { OutputFormat::Text }, &ui),
        Command::Recipes(command) => recipes::run(command, &ui),
        Command::Config { command } => config::run(command, cli.verbosity, &ui),
        Command::Schema => ui.print(&format!("{:#}", crate::recipe::json_schema())),
        Command::Completions { shell } => {
            let program = std::env::args_os().next().unwrap_or_default();
            ui.print(completions(&Cli::command(), *shell, program.as_ref()).trim())
        }
        Command::Man(args) => ui.print(&args.run(Cli::command()).context("failed to write the man pages")?),
        Command::Version => ui.print(&format!("trainer {}", *VERSION)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_example_parses() {
        let examples = [EXAMPLES, train::EXAMPLES, check::EXAMPLES, preprocess::EXAMPLES, estimate::EXAMPLES];
        let others = [mesh::EXAMPLES, verify_parallel::EXAMPLES, chat::EXAMPLES, generate::EXAMPLES, replay::EXAMPLES];
        let folders = [MERGE_EXAMPLES, export::EXAMPLES, upcycle::EXAMPLES, recipes::EXAMPLES, prefetch::EXAMPLES];
        let runs =
            [watch::EXAMPLES, report::EXAMPLES, verify_resume::EXAMPLES, clean::EXAMPLES, cache::EXAMPLES].join("\n");
        let config = config::EXAMPLES.join("\n") + "\n" + convert::EXAMPLES;
        let examples = [examples.join("\n"), others.join("\n"), folders.join("\n"), runs, config].join("\n");
        for line in examples.lines().map(str::trim).filter(|line| line.starts_with("trainer ")) {
            assert!(Cli::try_parse_from(words(line.split(" > ").next().unwrap_or(line))).is_ok(), "{line}");
        }
    }

    /// Splits a command line at spaces outside of single quotes.
    fn words(line: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        for (part_idx, part) in line.split('\'').enumerate() {
            let mut pieces = if part_idx % 2 == 0 { part.split(' ').collect() } else { vec![part] }.into_iter();
            words.last_mut().expect("there is a word").push_str(pieces.next().unwrap_or_default());
            words.extend(pieces.map(str::to_owned));
        }
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn an_argument_without_a_value_is_refused() {
        let error =
            Cli::try_parse_from(["trainer", "train", "r.yaml", "optimizer.lr"]).map(drop).map_err(|e| e.to_string());
        assert!(error.is_err_and(|text| text.contains("expected KEY=VALUE")));
    }
}
