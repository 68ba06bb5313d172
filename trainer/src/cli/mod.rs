//! The command line: what can be asked, and how an answer or an error reaches the person who asked.

mod chat;
mod check;
mod data;
mod doctor;
mod estimate;
mod generate;
mod logging;
mod merge;
mod plan;
mod profile;
mod selfcheck;
mod train;
mod ui;

use std::io::Write;
use std::path::PathBuf;
use std::sync::LazyLock;

use candlewick_comm::place::{Place, Source};
use candlewick_runtime::error_file;
use candlewick_runtime::exit::{backtrace, completions};
use candlewick_runtime::place::place;
use clap::error::{ContextKind, ContextValue};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::exit::{ExitCode, classify, report};
use crate::metrics::{Console, Versions};
use crate::plan::{LoggerPlan, Machines, Seat};
use crate::recipe::{RecipeError, key_of_option};

use profile::Sort;
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
    #[command(after_long_help = TRAIN_EXAMPLES)]
    Train(Train),
    /// Resolve a recipe and print what would happen: no device, no network
    #[command(after_long_help = CHECK_EXAMPLES)]
    Check(Check),
    /// Read the data as a run would and print what the model will learn; nothing is trained
    #[command(visible_alias = "process-data", after_long_help = DATA_EXAMPLES)]
    Data(Data),
    /// Say what memory a run will need, without weights, device or data
    #[command(after_long_help = ESTIMATE_EXAMPLES)]
    Estimate(EstimateArgs),
    /// Print how ranks would share the work: the mesh, and with --schedule a pipeline's timetable
    #[command(after_long_help = PLAN_EXAMPLES)]
    Plan(PlanArgs),
    /// Compare two steps of a shrunken model on the recipe's mesh, as threads, with one rank's
    #[command(after_long_help = SELFCHECK_EXAMPLES)]
    Selfcheck(Selfcheck),
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

const TRAIN_EXAMPLES: &str = "\
Examples:
  trainer train recipe.yaml
  trainer train recipe.yaml train_iters=100 model.dtype=f32
  trainer train recipe.yaml --profile tottime train_iters=10
  trainer train recipe.yaml 'data.sources=[mine.jsonl]' checkpoint.0.output_dir=out
The same command goes on where the last run stopped, if a checkpoint has auto_resume: true.";

const CHECK_EXAMPLES: &str = "\
Examples:
  trainer check recipe.yaml
  trainer check recipe.yaml --all
  trainer check recipe.yaml --offline
  trainer check recipe.yaml --ranks 16
  trainer check recipe.yaml --output-format json optimizer.lr=1e-4";

const DATA_EXAMPLES: &str = "\
Examples:
  trainer data recipe.yaml
  trainer data recipe.yaml --steps 2
  trainer data recipe.yaml --steps 2 --ranks 16
  trainer data recipe.yaml --steps 2 --output-format json data.max_length=512";

const ESTIMATE_EXAMPLES: &str = "\
Examples:
  trainer estimate recipe.yaml
  trainer estimate recipe.yaml --device h100-80g data.max_length=32Ki
  trainer estimate recipe.yaml --device 24GiB --json
Exits with 4 if the run does not fit.";

const PLAN_EXAMPLES: &str = "\
Examples:
  trainer plan recipe.yaml --ranks 8
  trainer plan recipe.yaml --ranks 4 --schedule pipeline_parallel_size=4 gradient_accumulation_steps=8";

const MERGE_EXAMPLES: &str = "\
Examples:
  trainer merge runs/lora --output merged
  trainer merge runs/lora/adapter/global_step_40 --output merged --base base --dtype f32";

const SELFCHECK_EXAMPLES: &str = "\
Examples:
  trainer selfcheck recipe.yaml --ranks 4
  trainer selfcheck recipe.yaml --ranks 8 tensor_parallel_size=2 pipeline_parallel_size=2
Exits with 1 if they differ by more than rounding.";

#[derive(Debug, Args)]
struct Recipe {
    /// The recipe, a YAML file
    #[arg(value_name = "RECIPE")]
    path: PathBuf,
    /// Keys that replace the recipe's: `optimizer.lr=1e-4`, `data.sources.0.split=train`; values are YAML
    #[arg(value_name = "KEY=VALUE", value_parser = key_value)]
    overrides: Vec<String>,
}

#[derive(Debug, Args)]
struct Train {
    #[command(flatten)]
    recipe: Recipe,
    /// Print where the time went, by the time of each part alone or with its parts, and write a trace for Perfetto
    #[arg(long, value_enum, value_name = "SORT")]
    profile: Option<Sort>,
    /// Steps of the trace
    #[arg(long, value_name = "N", default_value_t = 5, requires = "profile")]
    profile_steps: usize,
}

#[derive(Debug, Args)]
struct Check {
    #[command(flatten)]
    recipe: Recipe,
    /// Print the settings that have their defaults, too (as does -v)
    #[arg(long)]
    all: bool,
    /// Also require that the whole model is on this machine, so that a run without a network can start
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    supposed: Supposed,
    /// How the plan is printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    output_format: Format,
}

#[derive(Debug, Args)]
struct Data {
    #[command(flatten)]
    recipe: Recipe,
    /// Print the first N steps too: texts with what is learned in [[ ]], or with json their token ids
    #[arg(long, value_name = "N", default_value_t = 0)]
    steps: usize,
    #[command(flatten)]
    supposed: Supposed,
    /// How the data are printed
    #[arg(long, value_enum, default_value_t = Format::Text)]
    output_format: Format,
}

/// Processes that are not there yet.
#[derive(Debug, Args)]
struct Supposed {
    /// Processes that will train together, wherever that is [default: those that this one was started with]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    ranks: Option<usize>,
}

impl Supposed {
    fn seat(&self) -> anyhow::Result<Seat> {
        self.ranks.map_or_else(|| Ok(seat(&place()?)), |n_ranks| Ok(Seat::first_of(n_ranks)))
    }
}

#[derive(Debug, Args)]
struct EstimateArgs {
    #[command(flatten)]
    recipe: Recipe,
    /// What must hold it: cpu, cuda, a GPU such as h100-80g, or bytes such as 24GiB [default: what the recipe's device has
    /// free now]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Processes that train together; the answer is for each of them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// For programs
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct PlanArgs {
    #[command(flatten)]
    recipe: Recipe,
    /// Processes that train together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// Print what each stage of the pipeline computes when, too
    #[arg(long)]
    schedule: bool,
}

#[derive(Debug, Args)]
struct Selfcheck {
    #[command(flatten)]
    recipe: Recipe,
    /// Processes that train together
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    ranks: usize,
    /// For programs
    #[arg(long)]
    json: bool,
}

/// How an answer is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people.
    Text,
    /// For programs: the plan as run.json holds it, or a line a step.
    Json,
}

#[derive(Clone, Copy, Debug, Args)]
struct Verbosity {
    /// Say less: errors only, no bar, no line a step
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Say more: every field of a step, all settings, the keys of the schema; twice: for debugging. RUST_LOG goes before it
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

impl Verbosity {
    fn console(self) -> Console {
        match (self.quiet, self.verbose) {
            (true, _) => Console::Quiet,
            (false, 0) => Console::Full,
            (false, _) => Console::Lines,
        }
    }
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(error),
    };
    error_file::watch_panics();
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
    candlewick_runtime::cores::choose_product()?;
    candlewick_runtime::cores::choose_kernels()?;
    candlewick_runtime::cores::tune_gemms()?;
    let ui = Ui::new(cli.verbosity.quiet);
    match &cli.command {
        Command::Train(train) => train::run(train, cli.verbosity, &ui),
        Command::Check(check) => check::run(check, cli.verbosity, &ui),
        Command::Data(data) => {
            let mut plan = train::plan(&data.recipe, cli.verbosity, data.supposed.seat()?)?;
            // It is this command that fills the cache.
            plan.data.fail_on_missing_cache = false;
            logging::start(cli.verbosity, &plan.logger, None)?;
            data::show(&plan, &train::hub(&ui)?, data.steps, data.output_format)
        }
        Command::Estimate(asked) => estimate::run(asked, cli.verbosity, &ui),
        Command::Plan(asked) => plan::run(asked, cli.verbosity, &ui),
        Command::Selfcheck(asked) => selfcheck::run(asked, cli.verbosity, &ui),
        Command::Chat(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), None)?;
            chat::run(args, &train::hub(&ui)?)
        }
        Command::Generate(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), None)?;
            generate::run(args, &train::hub(&ui)?)
        }
        Command::Merge(args) => {
            logging::start(cli.verbosity, &LoggerPlan::default(), None)?;
            merge::run(args, &train::hub(&ui)?, &ui)
        }
        Command::Doctor { json } => doctor::run(if *json { Format::Json } else { Format::Text }, &ui),
        Command::Schema => ui.answer(&format!("{:#}", crate::recipe::json_schema())),
        Command::Completions { shell } => ui.answer(completions::<Cli>(*shell).trim_end()),
        Command::Version => ui.answer(&format!("trainer {}", *VERSION)),
    }
}

fn seat(place: &Place) -> Seat {
    let machines = match place.source {
        _ if place.is_one_machine() => Machines::One,
        Source::Torchrun => Machines::Nodes,
        _ => Machines::Several,
    };
    Seat { rank: place.rank, n_ranks: place.world_size, n_here: place.local_world_size, machines }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of processes, at least 1".into())
}

fn key_value(text: &str) -> Result<String, String> {
    if text.contains('=') { Ok(text.to_owned()) } else { Err("expected KEY=VALUE, such as optimizer.lr=1e-4".into()) }
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
        let examples = [EXAMPLES, TRAIN_EXAMPLES, CHECK_EXAMPLES, DATA_EXAMPLES, ESTIMATE_EXAMPLES];
        let others = [PLAN_EXAMPLES, SELFCHECK_EXAMPLES, chat::EXAMPLES, generate::EXAMPLES, MERGE_EXAMPLES];
        let examples = [examples.join("\n"), others.join("\n")].join("\n");
        for line in examples.lines().map(str::trim).filter(|line| line.starts_with("trainer ")) {
            let words = line.split(" > ").next().unwrap_or(line).split(' ').map(|word| word.trim_matches('\''));
            assert!(Cli::try_parse_from(words).is_ok(), "{line}");
        }
    }

    #[test]
    fn an_argument_without_a_value_is_refused() {
        let error =
            Cli::try_parse_from(["trainer", "train", "r.yaml", "optimizer.lr"]).map(drop).map_err(|e| e.to_string());
        assert!(error.is_err_and(|text| text.contains("expected KEY=VALUE")));
    }
}
