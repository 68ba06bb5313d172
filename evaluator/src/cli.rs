//! The command line: asks a model on this machine, or from the Hub, and prints its answer to stdout.

mod answer;
mod answering;
mod compare;
mod foreign;
mod key_values;
mod limit;
mod ls;
mod model_args;
mod run;
mod seeds;
mod show;
mod tasks;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use candle_core::{DType, Device};
use candlewick_model::Config;
use candlewick_model::checkpoint::Checkpoint;
use candlewick_ops::{AttentionChoice, AttentionImpl, AttentionPasses, DeviceChoice};
use candlewick_parallel::Groups;
use candlewick_text::format::{Document, Format, FormatRequest, Purpose};
use candlewick_text::hub::{DatasetRequest, Hub, HubSettings, ModelPart};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde_json::json;

use crate::cores::choose_product;
use crate::error_file;
use crate::exit::{ExitCode, classify, completions, parse_arguments_from, report};
use crate::generate::GenerateOptions;
use crate::lm::Lm;
use crate::parts::Parts;
use crate::ranks::Ranks;

/// Evaluates language models.
#[derive(Debug, Parser)]
#[command(name = "evaluator", version, propagate_version = true, after_long_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  evaluator generate --model runs/quickstart/model/global_step_1000 --prompt 'Say wolf 4 times.'
  evaluator perplexity --model HuggingFaceTB/SmolLM2-135M-Instruct --data valid.txt --limit 100
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
    /// Answer a prompt as a turn of a chat, or continue it with --raw
    Generate(Generate),
    /// Print the loss and perplexity of texts, weighted by tokens, as JSON
    Perplexity(Perplexity),
    /// Print the log-probability of every token of a text as JSON
    Score(Score),
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
struct Model {
    /// A Hugging Face folder or a Hub id
    #[arg(long, short = 'M')]
    model: String,
    /// The branch, tag or commit of a Hub id
    #[arg(long)]
    revision: Option<String>,
    /// A PEFT adapter folder on top of the model
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// What computes: auto (the first GPU, if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// The number format to compute in; auto is that of the model
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,
    /// What computes attention
    #[arg(long, value_enum, default_value_t = Attention::Auto)]
    attn_implementation: Attention,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    #[value(alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
    /// The one that the model's config names, or else that of its weights
    Auto,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Attention {
    /// cuDNN on a GPU where it is there and takes the case, else fused
    #[value(alias = "sdpa")]
    Auto,
    /// cuDNN, in 16 bits
    Cudnn,
    /// Our kernels
    #[value(aliases = ["flash_attention_2", "flash_attention_3"])]
    Fused,
    /// Plain tensor operations with all scores in memory
    #[value(alias = "eager")]
    Reference,
    /// FlashAttention 2 on a GPU, in 16 bits, if the program was built with the feature flash-attn
    Flash,
}

#[derive(Debug, Args)]
struct Generate {
    #[command(flatten)]
    model: Model,
    /// What the model answers
    #[arg(long)]
    prompt: String,
    /// Continue the prompt as it stands, without a chat template
    #[arg(long)]
    raw: bool,
    /// The most tokens to generate
    #[arg(long, default_value_t = 64)]
    max_new_tokens: usize,
    /// 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the likeliest tokens whose probabilities reach this sum
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Seeds the sampling
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Say on stderr how long the prompt and the new tokens took, as JSON; loading is not in it
    #[arg(long)]
    timings: bool,
}

#[derive(Debug, Args)]
struct Perplexity {
    #[command(flatten)]
    model: Model,
    /// A file, a folder or a Hub data set, with `:split` behind it if wanted
    #[arg(long)]
    data: String,
    /// The column that holds the text
    #[arg(long)]
    column: Option<String>,
    /// The most rows to read
    #[arg(long)]
    limit: Option<usize>,
    /// Say on stderr how long the rows took, as JSON; loading is not in it
    #[arg(long)]
    timings: bool,
}

#[derive(Debug, Args)]
struct Score {
    #[command(flatten)]
    model: Model,
    /// The text
    #[arg(long)]
    text: String,
}

/// Runs the program with the process's arguments.
pub fn main() -> ExitCode {
    let arguments = match model_args::spread(std::env::args_os()) {
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
    tracing_subscriber::fmt().with_writer(io::stderr).without_time().with_max_level(level).init();
    error_file::watch_panics();
    match run(&cli.command) {
        Ok(()) => ExitCode::Ok,
        Err(error) => {
            let report = report(&error);
            error_file::write(report.trim_end());
            eprint!("{report}");
            classify(&error)
        }
    }
}

fn run(command: &Command) -> Result<()> {
    choose_product()?;
    let hub = Hub::new(HubSettings::from_env())?;
    match command {
        Command::Generate(args) => {
            let lm = args.model.load(&hub)?;
            let options = GenerateOptions {
                max_new_tokens: args.max_new_tokens,
                temperature: args.temperature,
                top_p: args.top_p,
                seed: args.seed,
            };
            let said = if args.raw { lm.complete(&args.prompt, &options)? } else { lm.chat(&args.prompt, &options)? };
            if args.timings {
                eprintln!("{}", serde_json::to_string(&said.timings)?);
            }
            answer(&said.text)
        }
        Command::Perplexity(args) => perplexity(args, &hub),
        Command::Ls(args) => ls::run(args),
        Command::Show(args) => show::run(args, &hub),
        Command::Compare(args) => compare::run(args),
        Command::Completions { shell } => answer(completions::<Cli>(*shell).trim_end()),
        Command::Run(args) => run::run(args, &hub),
        Command::Answer(args) => answer::run(args, &hub),
        Command::Score(args) => answer(&serde_json::to_string(&args.model.load(&hub)?.score(&args.text)?)?),
    }
}

fn perplexity(args: &Perplexity, hub: &Hub) -> Result<()> {
    let source = hub.dataset(&DatasetRequest::parse(&args.data, "test")?)?;
    let request = FormatRequest { purpose: Purpose::Causal, column: args.column.clone(), ..FormatRequest::default() };
    let format = Format::find(&request, &*source)?;
    let n_rows = args.limit.map_or(source.len(), |limit| limit.min(source.len()));
    let texts = (0..n_rows).map(|row_idx| match format.read(&*source, row_idx)? {
        Document::Text(text) => Ok(text),
        _ => anyhow::bail!("failed to read {} as text: it {}", source.locate(row_idx), format.describe()),
    });
    let lm = args.model.load(hub)?;
    let began = Instant::now();
    let held_out = lm.held_out(texts)?;
    let eval_time = began.elapsed().as_secs_f64();
    let (loss, n_targets) = (held_out.loss, held_out.n_targets);
    if args.timings {
        let tokens_per_second = n_targets as f64 / eval_time;
        eprintln!("{}", json!({"tokens": n_targets, "eval_time": eval_time, "tokens_per_second": tokens_per_second}));
    }
    answer(&json!({"loss": loss, "perplexity": held_out.perplexity(), "tokens": n_targets, "rows": n_rows}).to_string())
}

impl Model {
    fn load(&self, hub: &Hub) -> Result<Lm> {
        let device = self.device.open().map_err(|error| anyhow!("failed to {error}").context(ExitCode::Usage))?;
        self.load_from(&self.folder(hub)?, device, (Parts::WHOLE, &Parts::alone()?))
    }

    /// Loads the model on each rank, or its part of it, after one of them has downloaded it.
    fn load_on(&self, hub: &Hub, ranks: &Ranks, device: Device) -> Result<Lm> {
        let folder = ranks.in_turn(|| self.folder(hub))?;
        ranks.share(Config::read(&folder).map_err(Into::into).and_then(|config| ranks.parts.check(&config)))?;
        let load = || self.load_from(&folder, device, (ranks.parts, &ranks.groups));
        // Ranks that have a model together make groups of their own while they load it, and wait for each other.
        ranks.share(if ranks.parts.is_whole() { ranks.at_work().during(load) } else { load() })
    }

    fn folder(&self, hub: &Hub) -> Result<PathBuf> {
        Ok(hub.model(&self.model, self.revision.as_deref(), ModelPart::Whole)?)
    }

    fn load_from(&self, folder: &Path, device: Device, parts: (Parts, &Groups)) -> Result<Lm> {
        let config = Config::read(folder)?;
        let dtype = self.dtype.of(&config, folder)?;
        let attention = self.attention();
        let said = attention.explain(&device, dtype, config.attention_heads(), AttentionPasses::Forward);
        said.map_err(|error| anyhow!("failed to start: {error}").context(ExitCode::Usage))?;
        Ok(Lm::load_in_parts(folder, self.adapter.as_deref(), dtype, device, parts)?.with_attention(attention))
    }

    fn attention(&self) -> AttentionChoice {
        let implementation = match self.attn_implementation {
            Attention::Auto => AttentionImpl::Auto,
            Attention::Cudnn => AttentionImpl::Cudnn,
            Attention::Fused => AttentionImpl::Fused,
            Attention::Reference => AttentionImpl::Reference,
            Attention::Flash => AttentionImpl::Flash,
        };
        AttentionChoice { implementation, deterministic: false }
    }
}

impl Dtype {
    /// Returns torch's name of a dtype that was named.
    fn in_torch(self) -> Option<&'static str> {
        match self {
            Self::F32 => Some("float32"),
            Self::Bf16 => Some("bfloat16"),
            Self::F16 => Some("float16"),
            Self::Auto => None,
        }
    }

    fn of(self, config: &Config, folder: &Path) -> Result<DType> {
        let named = config.to_json();
        let named = ["dtype", "torch_dtype"].iter().find_map(|key| named.get(*key)?.as_str().map(str::to_owned));
        match (self, named.as_deref()) {
            (Self::Auto, None) => Ok(Checkpoint::open(folder)?.float_dtype().unwrap_or(DType::F32)),
            (Self::F32, _) | (Self::Auto, Some("float32")) => Ok(DType::F32),
            (Self::Bf16, _) | (Self::Auto, Some("bfloat16")) => Ok(DType::BF16),
            (Self::F16, _) | (Self::Auto, Some("float16")) => Ok(DType::F16),
            (Self::Auto, Some(other)) => {
                let error = anyhow!("failed to start: the config names {other}; choose a --dtype");
                Err(error.context(ExitCode::Usage))
            }
        }
    }
}

fn answer(text: &str) -> Result<()> {
    match writeln!(io::stdout().lock(), "{text}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("failed to write to stdout"),
    }
}
