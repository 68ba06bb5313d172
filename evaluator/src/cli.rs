//! The command line of the `evaluator` program.

mod answer;
mod compare;
mod eval_loss_rows;
mod key_values;
mod limit;
mod ls;
mod model_args;
mod prefetch;
mod request_args;
mod run;
mod score;
mod seeds;
mod show;
mod tasks;
mod unsupported_lm_eval_args;

use anyhow::{Context, Result};
use candlewick_command_line::{ManArgs, Shell, complete, completions, stderr_has_colors};
use candlewick_text::hub::{Hub, HubSettings};
use clap::{Args, CommandFactory, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::exit::classify;
use candlewick_inference::command::{ChatOptions, GenerateArgs, ServeOptions, chat, generate, serve};
use candlewick_runtime::cores::{override_kernels, select_cpu_gemm_kernel, tune_gemms};
use candlewick_runtime::error_file;
use candlewick_runtime::exit::{ExitCode, backtrace, parse_arguments_from, report};
use candlewick_runtime::log_lines::LogLineFormat;
use candlewick_runtime::progress::{AboveBars, show_downloads};
use candlewick_runtime::rank_env::rank_env;
use candlewick_runtime::terminal::{print_line, print_note};

/// Evaluates language models on lm-evaluation-harness tasks.
#[derive(Debug, Parser)]
#[command(name = "evaluator", version, propagate_version = true, after_long_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  evaluator score --model runs/lora --data chats.jsonl
  evaluator score --model HuggingFaceTB/SmolLM2-135M-Instruct --data valid.txt --truncation split
  evaluator score --model base --adapter runs/lora/model/global_step_40 --text 'One plus one is two.'
  launch --nproc-per-node 2 evaluator score --model moe --data chats.jsonl --expert-parallel-size 2
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
    /// Chat with a model. Former spelling of `trainer chat`
    #[command(hide = true)]
    Chat(ChatArgs),
    /// Answer prompts or conversations. Former spelling of `trainer generate`
    #[command(hide = true)]
    Generate(GenerateCommandArgs),
    /// Score a text (token log-probabilities) or a data set (loss and perplexity), and print JSON
    Score(score::ScoreArgs),
    /// Score a data set. Former spelling of `evaluator score`
    #[command(hide = true)]
    Perplexity(score::ScoreArgs),
    /// Evaluate a model on lm-evaluation-harness tasks
    #[command(after_long_help = RUN_EXAMPLES)]
    Run(Box<run::RunArgs>),
    /// Download a model and the data of tasks from the Hub, and lock the commits for runs without a network
    #[command(after_long_help = prefetch::EXAMPLES)]
    Prefetch(prefetch::TaskPrefetchArgs),
    /// Run the lm-eval requests of a JSONL file
    #[command(hide = true)]
    Answer(answer::AnswerRequestsArgs),
    /// List tasks, groups or tags
    Ls(ls::LsArgs),
    /// Print a task's requests for one document: prompts, targets, and the tokens if --model is given
    Show(show::ShowArgs),
    /// Serve a model over HTTP, with OpenAI's endpoints for chats and completions
    Serve(ServeCommandArgs),
    /// Compare the results of two runs, sample by sample
    Compare(compare::CompareArgs),
    /// Print a shell completion script
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the man page, or write the pages of all commands into a folder
    Man(ManArgs),
}

#[derive(Debug, Args)]
struct ChatArgs {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(long, short = 'M')]
    model: String,
    #[command(flatten)]
    options: ChatOptions,
}

#[derive(Debug, Args)]
struct GenerateCommandArgs {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(long, short = 'M')]
    model: String,
    #[command(flatten)]
    options: GenerateArgs,
}

#[derive(Debug, Args)]
struct ServeCommandArgs {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder (its best export, else its newest)
    #[arg(value_name = "MODEL")]
    model: String,
    #[command(flatten)]
    options: ServeOptions,
}

/// Returns the command line of the program.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    complete(Cli::command);
    let arguments = match model_args::expand_model_args(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(problem) => {
            print_note(&format!("error: failed to start: {problem}"));
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
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level.to_string()));
    tracing_subscriber::fmt()
        .with_writer(|| AboveBars)
        .with_ansi(stderr_has_colors())
        .event_format(LogLineFormat)
        .with_env_filter(filter)
        .init();
    error_file::record_panics();
    match run(&cli.command) {
        Ok(code) => code,
        Err(error) => {
            let trace = if level == tracing::Level::DEBUG { backtrace(&error) } else { String::new() };
            let code = classify(&error);
            let advice = if code == ExitCode::OutOfMemory { OUT_OF_MEMORY } else { "" };
            let report = report(&error) + advice + &trace;
            error_file::write(report.trim_end());
            print_note(report.trim_end());
            code
        }
    }
}

/// Advice printed after an out-of-memory error.
const OUT_OF_MEMORY: &str = "Lower --batch-size or --max-length, or set --dtype bf16.\n";

fn run(command: &Command) -> Result<ExitCode> {
    select_cpu_gemm_kernel()?;
    override_kernels()?;
    tune_gemms()?;
    let hub = Hub::new(HubSettings::from_env())?.with_progress(show_downloads());
    match command {
        Command::Chat(args) => {
            print_new_name("evaluator chat", "trainer chat");
            chat(&args.model, &args.options, &rank_env()?, &hub)
        }
        Command::Generate(args) => {
            // With --timings stderr is JSON, for programs.
            if !args.options.timings {
                print_new_name("evaluator generate", "trainer generate");
            }
            generate(&args.model, &args.options, &rank_env()?, &hub)
        }
        Command::Perplexity(args) => score::run_deprecated_perplexity(args, &hub),
        Command::Ls(args) => ls::run(args),
        Command::Show(args) => show::run(args, &hub),
        Command::Serve(args) => serve(&args.model, &args.options, &hub),
        Command::Compare(args) => compare::run(args),
        Command::Completions { shell } => {
            let program = std::env::args_os().next().unwrap_or_default();
            print_line(completions(&Cli::command(), *shell, program.as_ref()).trim())
        }
        Command::Man(args) => print_line(&args.run(Cli::command()).context("failed to write the man pages")?),
        Command::Run(args) => return run::run(args, &args.hub(hub)?),
        Command::Prefetch(args) => prefetch::run(args),
        Command::Answer(args) => {
            if is_first_process() {
                print_note(
                    "note: `evaluator answer` is a former command; `evaluator run` evaluates tasks, `evaluator score` texts",
                );
            }
            answer::run(args, &hub)
        }
        Command::Score(args) => score::run(args, &hub),
    }?;
    Ok(ExitCode::Ok)
}

/// Prints a note that the command `former` is now called `current`.
fn print_new_name(former: &str, current: &str) {
    print_note(&format!("note: `{former}` is now `{current}`"));
}

/// Returns true if the variable RANK is unset or 0.
fn is_first_process() -> bool {
    std::env::var("RANK").map_or(true, |rank| rank == "0")
}
