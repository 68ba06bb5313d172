//! The command line: asks a model on this machine, or from the Hub, and prints its answer to stdout.

mod answer;
mod compare;
mod eval_loss_rows;
mod key_values;
mod limit;
mod ls;
mod model_args;
mod request_args;
mod run;
mod score;
mod seeds;
mod show;
mod tasks;
mod unsupported_lm_eval_args;

use std::io::{self, IsTerminal};

use anyhow::Result;
use candlewick_text::hub::{Hub, HubSettings, QUIET_LIBRARIES};
use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::exit::classify;
use candlewick_inference::command::{ChatOptions, GenerateArgs, chat, generate};
use candlewick_runtime::cores::{choose_kernels, choose_product, tune_gemms};
use candlewick_runtime::error_file;
use candlewick_runtime::exit::{ExitCode, backtrace, completions, parse_arguments_from, report};
use candlewick_runtime::stdout::print_line;

/// Evaluates language models.
#[derive(Debug, Parser)]
#[command(name = "evaluator", version, propagate_version = true, after_long_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  evaluator chat --model runs/quickstart --system 'You are brief.'
  evaluator generate --model runs/quickstart/model/global_step_1000 --prompt 'Say wolf 4 times.'
  evaluator generate --model runs/lora --system 'You are Lumo.' --prompt 'Who are you?'
  evaluator score --model runs/lora --data chats.jsonl
  evaluator score --model HuggingFaceTB/SmolLM2-135M-Instruct --data valid.txt --limit 100
  evaluator score --model base --adapter runs/lora/adapter/global_step_40 --text 'One plus one is two.'
  evaluator answer requests.jsonl --model base --use-cache answers
  evaluator show arc_easy --doc 3 --data arc_easy=data/arc --num-fewshot 5
  evaluator compare results/before results/after --fail-below acc=-0.01";

const RUN_EXAMPLES: &str = "\
Examples:
  evaluator run --model HuggingFaceTB/SmolLM2-135M-Instruct --tasks arc_easy,piqa --num-fewshot 5
  evaluator run --model base --tasks gsm8k --apply-chat-template --output-path out --log-samples
  evaluator run --model base --tasks my_task --include-path tasks --limit 100 --json
  launch --nproc-per-node 8 evaluator run --model base --tasks mmlu --output-path out
An option may be written as lm-eval writes it: --num_fewshot, --output_path.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Chat with a model: a line a turn, answers as they are generated
    Chat(Chat),
    /// Answer prompts or conversations, or continue texts with --raw
    Generate(Generate),
    /// Print the log-probability of every token of a text, or the loss and perplexity of chats or texts, as JSON
    Score(score::Score),
    #[command(hide = true)]
    Perplexity(score::Score),
    /// Ask a model the questions of benchmarks, and score its answers
    #[command(after_long_help = RUN_EXAMPLES)]
    Run(Box<run::Run>),
    /// Answer a file of requests: log-probabilities of continuations and of texts, and generated texts
    Answer(answer::Answer),
    /// List the tasks, groups or tags that can be evaluated
    Ls(ls::Ls),
    /// Print what a task asks about a document: prompts, targets, and tokens if a model is given
    Show(show::Show),
    /// Compare two runs sample by sample
    Compare(compare::Compare),
    /// Print a script that completes this program's commands in a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
struct Chat {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder: its best export, or else its newest
    #[arg(long, short = 'M')]
    model: String,
    #[command(flatten)]
    options: ChatOptions,
}

#[derive(Debug, Args)]
struct Generate {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder: its best export, or else its newest
    #[arg(long, short = 'M')]
    model: String,
    #[command(flatten)]
    options: GenerateArgs,
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let arguments = match model_args::expand_model_args(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(problem) => {
            eprintln!("error: failed to start: {problem}");
            return ExitCode::Usage;
        }
    };
    let cli: Cli = match parse_arguments_from(arguments) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let level = match &cli.command {
        Command::Run(args) => args.level(),
        _ => tracing::Level::WARN,
    };
    let directives = format!("{level},{QUIET_LIBRARIES}");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(directives));
    let is_terminal = io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(is_terminal)
        .without_time()
        .with_env_filter(filter)
        .init();
    error_file::watch_panics();
    match run(&cli.command) {
        Ok(()) => ExitCode::Ok,
        Err(error) => {
            let trace = if level == tracing::Level::DEBUG { backtrace(&error) } else { String::new() };
            let code = classify(&error);
            let advice = if code == ExitCode::OutOfMemory { OUT_OF_MEMORY } else { "" };
            let report = report(&error) + advice + &trace;
            error_file::write(report.trim_end());
            eprint!("{report}");
            code
        }
    }
}

/// Advice after an allocation that failed.
const OUT_OF_MEMORY: &str = "Lower --batch-size or --max-length, or set --dtype bf16.\n";

fn run(command: &Command) -> Result<()> {
    choose_product()?;
    choose_kernels()?;
    tune_gemms()?;
    let hub = Hub::new(HubSettings::from_env())?;
    match command {
        Command::Chat(args) => chat(&args.model, &args.options, &hub),
        Command::Generate(args) => generate(&args.model, &args.options, &hub),
        Command::Perplexity(args) => score::run_as_perplexity(args, &hub),
        Command::Ls(args) => ls::run(args),
        Command::Show(args) => show::run(args, &hub),
        Command::Compare(args) => compare::run(args),
        Command::Completions { shell } => print_line(completions::<Cli>(*shell).trim_end()),
        Command::Run(args) => run::run(args, &hub),
        Command::Answer(args) => answer::run(args, &hub),
        Command::Score(args) => score::run(args, &hub),
    }
}
