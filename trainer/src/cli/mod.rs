//! The command line: what can be asked, and how an answer or an error reaches the person who asked.

mod chat;
mod check;
mod doctor;
mod estimate;
mod generate;
mod logging;
mod merge;
mod mesh;
mod options;
mod preprocess;
mod profile;
mod train;
mod ui;
mod verify_parallel;

use std::io::Write;
use std::sync::LazyLock;

use candlewick_runtime::error_file;
use candlewick_runtime::exit::{backtrace, completions};
use clap::error::{ContextKind, ContextValue};
use clap::{Parser, Subcommand};

use crate::exit::{ExitCode, classify, report};
use crate::metrics::Versions;
use crate::plan::LoggerPlan;
use crate::recipe::{RecipeError, key_of_option};

use options::{Format, Verbosity, hub};
pub use ui::Ui;

/// The version and, where the build names it, the commit.
static VERSION: LazyLock<String> = LazyLock::new(|| Versions::this().to_string());

/// Trains language models from recipes.
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
  trainer schema > recipe.schema.json

Exit codes:
  0 done, 1 failed, 2 wrong command line or recipe, 3 wrong data, 4 out of memory
  (or an estimate that does not fit),
  5 loss not finite, 6 checkpoint or disk, 7 another rank failed,
  75 stopped on request with a checkpoint saved, 128+n ended by signal n";

#[derive(Debug, Subcommand)]
enum Command {
    /// Train as a recipe says
    #[command(after_long_help = train::EXAMPLES)]
    Train(train::Train),
    /// Resolve a recipe and print what would happen: no device, no network
    #[command(after_long_help = check::EXAMPLES)]
    Check(check::Check),
    /// Read the data as a run would and print what the model will learn; nothing is trained
    #[command(visible_aliases = ["data", "process-data"], after_long_help = preprocess::EXAMPLES)]
    Preprocess(preprocess::Preprocess),
    /// Say what memory a run will need, without weights, device or data
    #[command(after_long_help = estimate::EXAMPLES)]
    Estimate(estimate::EstimateArgs),
    /// Print how ranks would share the work: the mesh, and with --schedule a pipeline's steps
    #[command(visible_alias = "plan", after_long_help = mesh::EXAMPLES)]
    Mesh(mesh::MeshArgs),
    /// Compare two steps of a shrunken model on the recipe's mesh, as threads, with one rank's
    #[command(visible_alias = "selfcheck", after_long_help = verify_parallel::EXAMPLES)]
    VerifyParallel(verify_parallel::VerifyParallel),
    /// Chat with a model: a line a turn, answers as they are generated
    #[command(after_long_help = chat::EXAMPLES)]
    Chat(chat::Chat),
    /// Answer prompts or conversations, or continue texts with --raw
    #[command(after_long_help = generate::EXAMPLES)]
    Generate(generate::Generate),
    /// Merge an adapter into its base model, as a folder for transformers and everything that reads those
    #[command(after_long_help = MERGE_EXAMPLES)]
    Merge(merge::MergeArgs),
    /// Say what this machine has: processor, memory, GPUs, NVIDIA's libraries, the Hub, disks
    Doctor {
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// Print the JSON schema of recipes, for editors
    Schema,
    /// Print a script that completes this program's commands in a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the version
    Version,
}

const MERGE_EXAMPLES: &str = "\
Examples:
  trainer merge runs/lora --output merged
  trainer merge runs/lora/adapter/global_step_40 --output merged --base base --dtype f32";

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(error),
    };
    error_file::record_panics();
    // Without it such a write kills.
    let _ = crate::signals::outlive_file_limits();
    match run(&cli) {
        Ok(code) => code,
        Err(error) => {
            let code = classify(&error);
            let verbose = cli.verbosity.verbose;
            let error = detailed(error, verbose);
            let trace = if verbose > 1 { backtrace(&error) } else { String::new() };
            let report = report(&error) + &trace;
            error_file::write(report.trim_end());
            // A reader that has gone away is no failure.
            let _ = std::io::stderr().write_all(report.as_bytes());
            code
        }
    }
}

/// Prints clap's error. An option that is a key of the recipe gets a tip with the form of such keys.
fn refuse(mut error: clap::Error) -> ExitCode {
    let takes_keys = error.get(ContextKind::Usage).is_some_and(|usage| usage.to_string().contains("[KEY=VALUE]"));
    let option = error.get(ContextKind::InvalidArg).filter(|_| takes_keys);
    if let Some(tip) = option.and_then(|option| key_tip(&option.to_string())) {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    // Help and the version are "errors" that go to stdout. A closed pipe is no failure.
    let _ = error.print();
    if error.use_stderr() { ExitCode::Usage } else { ExitCode::Ok }
}

/// The tip for `--train_iters 3` or `--max_steps=3`: `train_iters=3`.
fn key_tip(option: &str) -> Option<String> {
    let key = key_of_option(option)?;
    let mut arguments = std::env::args().skip_while(|argument| argument.split('=').next() != Some(option));
    let value = match arguments.next()?.split_once('=') {
        Some((_, value)) => Some(value.to_owned()),
        None => arguments.next().filter(|next| !next.starts_with('-')),
    };
    Some(format!("write keys of the recipe after it: {key}={}", value.as_deref().unwrap_or("VALUE")))
}

/// Adds the long notes of a recipe's error, which `-v` shows.
fn detailed(error: anyhow::Error, verbose: u8) -> anyhow::Error {
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
    let ui = Ui::new(cli.verbosity.quiet);
    match &cli.command {
        Command::Train(train) => train::run(train, cli.verbosity, &ui),
        Command::Check(check) => check::run(check, cli.verbosity, &ui),
        Command::Preprocess(args) => preprocess::run(args, cli.verbosity, &ui),
        Command::Estimate(asked) => estimate::run(asked, cli.verbosity, &ui),
        Command::Mesh(asked) => mesh::run(asked, cli.verbosity, &ui),
        Command::VerifyParallel(asked) => verify_parallel::run(asked, cli.verbosity, &ui),
        Command::Chat(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), None)?;
            chat::run(args, &hub(&ui)?)
        }
        Command::Generate(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), None)?;
            generate::run(args, &hub(&ui)?)
        }
        Command::Merge(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), None)?;
            merge::run(args, &hub(&ui)?, &ui)
        }
        Command::Doctor { json } => doctor::run(if *json { Format::Json } else { Format::Text }, &ui),
        Command::Schema => ui.answer(&format!("{:#}", crate::recipe::json_schema())),
        Command::Completions { shell } => ui.answer(completions::<Cli>(*shell).trim_end()),
        Command::Version => ui.answer(&format!("trainer {}", *VERSION)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_example_parses() {
        let examples = [EXAMPLES, train::EXAMPLES, check::EXAMPLES, preprocess::EXAMPLES, estimate::EXAMPLES];
        let others = [mesh::EXAMPLES, verify_parallel::EXAMPLES, chat::EXAMPLES, generate::EXAMPLES, MERGE_EXAMPLES];
        let examples = [examples.join("\n"), others.join("\n")].join("\n");
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
