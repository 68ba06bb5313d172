//! `evaluator answer`: reads lm-eval requests from a JSONL file and writes their responses as JSONL.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_text_or_stdin, write_atomically};
use candlewick_text::hub::Hub;
use clap::Args;
use serde::Deserialize;
use serde_json::json;

use super::request_args::{RequestArgs, progress_reporter};
use candlewick_inference::answer::{EngineBackend, LmBackend, RequestOutput};
use candlewick_inference::command::{ModelOptions, ParallelArgs};
use candlewick_inference::ranks::run_on_ranks;
use candlewick_inference::request::{GenerationSettings, Request, Response};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::rank_env::rank_env;
use candlewick_runtime::terminal::print_line;

#[derive(Debug, Args)]
pub(super) struct AnswerRequestsArgs {
    /// JSONL file of requests, or - for stdin. A line has a `type`: loglikelihood (with context, continuation),
    /// loglikelihood_rolling (with text) or generate_until (with context, until). generate_until also takes
    /// max_gen_toks, do_sample, temperature, top_p and top_k
    requests: PathBuf,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    parallel: ParallelArgs,
    #[command(flatten)]
    request_args: RequestArgs,
    /// Output file of the responses, in the order of the requests [default: stdout]
    #[arg(long, short, alias = "output_path", value_name = "FILE")]
    output_path: Option<PathBuf>,
    /// Folder of the response cache. An interrupted command continues from it
    #[arg(long, short = 'c', alias = "use_cache", value_name = "FOLDER")]
    use_cache: Option<PathBuf>,
    /// Seed of sampled generations
    #[arg(long, default_value_t = 1234)]
    seed: u64,
}

pub(super) fn run(args: &AnswerRequestsArgs, hub: &Hub) -> Result<()> {
    run_on_ranks(&rank_env()?, args.parallel.config(), args.model.compute.device, |ranks, device| {
        let requests = read(&args.requests)?;
        let lm = args.model.load_on(hub, ranks, device)?;
        let settings = args.request_args.settings(args.seed, args.use_cache.clone());
        let answers = EngineBackend::new(&lm, settings, ranks.inference_group())?;
        let answered = answers.with_progress(progress_reporter(ranks)).answer(&requests)?;
        ranks.process.on_first_rank(|| write(args.output_path.as_deref(), &answered)).map(drop)
    })
}

/// Request in one line of the input file.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum RequestLine {
    Loglikelihood {
        #[serde(default)]
        context: String,
        continuation: String,
    },
    LoglikelihoodRolling {
        text: String,
    },
    GenerateUntil {
        context: String,
        #[serde(default)]
        until: Vec<String>,
        max_gen_toks: Option<usize>,
        #[serde(default)]
        do_sample: bool,
        #[serde(default)]
        temperature: f64,
        #[serde(default = "one")]
        top_p: f64,
        top_k: Option<usize>,
    },
}

fn one() -> f64 {
    1.0
}

impl From<RequestLine> for Request {
    fn from(line: RequestLine) -> Self {
        match line {
            RequestLine::Loglikelihood { context, continuation } => Self::Loglikelihood { context, continuation },
            RequestLine::LoglikelihoodRolling { text } => Self::LoglikelihoodRolling { text },
            RequestLine::GenerateUntil { context, until, max_gen_toks, do_sample, temperature, top_p, top_k } => {
                let settings = GenerationSettings { until, max_gen_toks, do_sample, temperature, top_p, top_k };
                Self::GenerateUntil { context, settings }
            }
        }
    }
}

/// Reads the requests of a JSONL file. Empty lines are skipped.
fn read(path: &Path) -> Result<Vec<Request>> {
    let text = read_text_or_stdin(path, MAX_GENERATED_FILE_BYTES);
    let text = text.with_context(|| format!("failed to read {}", path.display())).context(ExitCode::Data)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(i, line): (usize, &str)| {
        let line = serde_json::from_str::<RequestLine>(line);
        line.map(Request::from).map_err(|error| {
            anyhow!("failed to read line {} of {} as a request: {error}", i + 1, path.display()).context(ExitCode::Data)
        })
    };
    lines.map(parse).collect()
}

fn write(path: Option<&Path>, answered: &[RequestOutput]) -> Result<()> {
    let mut text = String::new();
    for RequestOutput { response, n_tokens, n_truncated } in answered {
        let mut line = match response {
            Response::Loglikelihood { logprob, is_greedy } => json!({"logprob": logprob, "is_greedy": is_greedy}),
            Response::LoglikelihoodRolling(loglikelihood) => json!({"loglikelihood": loglikelihood}),
            Response::Text(text) => json!({"text": text}),
        };
        line["tokens"] = json!(n_tokens);
        line["truncated"] = json!(n_truncated);
        text += &line.to_string();
        text.push('\n');
    }
    let n_truncated = answered.iter().filter(|answered| answered.n_truncated > 0).count();
    if n_truncated > 0 {
        tracing::warn!("{n_truncated} of {} requests were truncated to the model's context length", answered.len());
    }
    match path {
        None => print_line(text.trim_end()),
        Some(path) => {
            let written = write_atomically(path, |file| file.write_all(text.as_bytes()));
            written.with_context(|| format!("failed to write the responses to {}", path.display()))
        }
    }
}
