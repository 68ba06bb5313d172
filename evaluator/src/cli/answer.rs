//! `evaluator answer`: requests in, answers out, a line of JSON each.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use candlewick_text::files::{MAX_GENERATED_FILE_BYTES, read_text_or_stdin};
use candlewick_text::hub::Hub;
use clap::Args;
use serde::Deserialize;
use serde_json::json;

use super::request_args::{ParallelArgs, RequestArgs, progress_reporter};
use candlewick_inference::answer::{Answered, Answers, LmAnswers};
use candlewick_inference::command::Model;
use candlewick_inference::ranks::together;
use candlewick_inference::request::{GenerationSettings, Request, Response};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::place::place;
use candlewick_runtime::stdout::print_line;

#[derive(Debug, Args)]
pub(super) struct Answer {
    /// A file of requests, or - for stdin. A line is one of
    /// {"type": "loglikelihood", "context": "One plus one is", "continuation": " two"},
    /// {"type": "loglikelihood_rolling", "text": "..."} and
    /// {"type": "generate_until", "context": "...", "until": ["\n"]}, with the further keys max_gen_toks, do_sample,
    /// temperature, top_p and top_k
    requests: PathBuf,
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    parallel: ParallelArgs,
    #[command(flatten)]
    request_args: RequestArgs,
    /// Where the answers go, in the order of the requests [default: stdout]
    #[arg(long, short, alias = "output_path", value_name = "FILE")]
    output_path: Option<PathBuf>,
    /// A folder where answers are kept as they come: the same command goes on there, and asks nothing twice
    #[arg(long, short = 'c', alias = "use_cache", value_name = "FOLDER")]
    use_cache: Option<PathBuf>,
    /// Seeds what is sampled
    #[arg(long, default_value_t = 1234)]
    seed: u64,
}

pub(super) fn run(args: &Answer, hub: &Hub) -> Result<()> {
    together(&place()?, args.parallel.config(), args.model.compute.device, |ranks, device| {
        let requests = read(&args.requests)?;
        let lm = args.model.load_on(hub, ranks, device)?;
        let settings = args.request_args.settings(args.seed, args.use_cache.clone());
        let answers = LmAnswers::new(&lm, settings, ranks.crew())?;
        let answered = answers.with_progress(progress_reporter(ranks)).answer(&requests)?;
        ranks.process.on_first_rank(|| write(args.output_path.as_deref(), &answered)).map(drop)
    })
}

/// A line of the file of requests.
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

/// Reads requests. Lines without anything are skipped.
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

fn write(path: Option<&Path>, answered: &[Answered]) -> Result<()> {
    let mut text = String::new();
    for Answered { response, n_tokens, n_cut } in answered {
        let mut line = match response {
            Response::Loglikelihood { logprob, is_greedy } => json!({"logprob": logprob, "is_greedy": is_greedy}),
            Response::LoglikelihoodRolling(loglikelihood) => json!({"loglikelihood": loglikelihood}),
            Response::Text(text) => json!({"text": text}),
        };
        line["tokens"] = json!(n_tokens);
        line["truncated"] = json!(n_cut);
        text += &line.to_string();
        text.push('\n');
    }
    let n_cut = answered.iter().filter(|answered| answered.n_cut > 0).count();
    if n_cut > 0 {
        tracing::warn!("{n_cut} of {} requests were truncated: the model's context is shorter", answered.len());
    }
    match path {
        None => print_line(text.trim_end()),
        Some(path) => {
            let written = fs::File::create(path).and_then(|mut file| file.write_all(text.as_bytes()));
            written.with_context(|| format!("failed to write the answers to {}", path.display()))
        }
    }
}
