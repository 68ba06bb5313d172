//! `evaluator perplexity`: the loss of a model on a data set, as training measures its held-out loss.

use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use candlewick_text::format::{Format, FormatRequest};
use candlewick_text::hub::{DatasetRequest, Hub};
use candlewick_text::render::{EmptyThink, RenderOptions, Sample, Targets, TextSpecials, render_document};
use candlewick_text::source::{SampleBy, Source};
use clap::{ArgAction, Args, ValueEnum};
use serde_json::json;

use super::answer;
use super::model::Model;
use crate::exit::ExitCode;
use crate::lm::Lm;

#[derive(Debug, Args)]
pub(super) struct Perplexity {
    #[command(flatten)]
    model: Model,
    /// A file, a folder or a Hub data set, with `:split` after it if wanted. Rows may have any format that training reads:
    /// in chats the assistant's tokens count, in plain text all of them
    #[arg(long)]
    data: String,
    /// The format of the rows: messages, sharegpt, alpaca, prompt_completion or text [default: found by the first rows]
    #[arg(long)]
    format: Option<String>,
    /// The column of a role, or the items of a list: user=question, assistant=messages.role.assistant
    #[arg(long, value_name = "ROLE=PATH", value_parser = role_and_path)]
    role_mapping: Vec<(String, String)>,
    /// The key of a message's text
    #[arg(long, value_name = "KEY")]
    content_key: Option<String>,
    /// The column of the text or of the messages
    #[arg(long)]
    column: Option<String>,
    /// Count only the assistant's tokens of a chat, as `data.mask_inputs` of a recipe
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    mask_inputs: bool,
    /// Leave out an empty <think></think> before an answer, as `data.ignore_empty_think` of a recipe
    #[arg(long)]
    ignore_empty_think: bool,
    /// Put BOS before each plain text, as `data.add_bos_token` of a recipe [default: as the tokenizer]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    add_bos_token: Option<bool>,
    /// Put EOS after each plain text and count it, as `data.add_eos_token` of a recipe
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_value_t = false, default_missing_value = "true",
          action = ArgAction::Set)]
    add_eos_token: bool,
    /// The rows of a .txt file: line, paragraph or document
    #[arg(long, value_name = "UNIT", default_value = "line")]
    sample_by: SampleBy,
    /// The treatment of a row that is longer than the model's context
    #[arg(long, value_enum, default_value_t = Truncation::Error)]
    truncation: Truncation,
    /// The most rows to read
    #[arg(long)]
    limit: Option<usize>,
    /// Print the duration of the rows on stderr, as JSON; loading is not in it
    #[arg(long)]
    timings: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Truncation {
    /// An error that names the row
    Error,
    /// The row is cut off
    Truncate,
    /// The row is left out
    Drop,
    /// The row is cut into pieces, each with a context of its own
    Split,
}

pub(super) fn run(args: &Perplexity, hub: &Hub) -> Result<()> {
    let mut request = DatasetRequest::parse(&args.data, "test")?;
    request.read.sample_by = args.sample_by;
    let source = hub.dataset(&request)?;
    let format = Format::find(&args.format_request(&request), &*source)?;
    let n_rows = args.limit.map_or(source.len(), |limit| limit.min(source.len()));
    // With --timings stderr is JSON, for programs.
    if !args.timings {
        eprintln!("{}: {}; {n_rows} of {} rows", args.data, format.describe(), source.len());
    }
    let lm = args.model.load(hub)?;
    let began = Instant::now();
    let rows = (0..n_rows).flat_map(|row_idx| {
        let place = source.locate(row_idx);
        let samples = args
            .samples(&lm, &*source, &format, row_idx)
            .map_err(|error| error.context(format!("failed to read {place}")));
        match samples {
            Ok(samples) => samples.into_iter().map(|sample| Ok((place.clone(), sample))).collect(),
            Err(error) => vec![Err(error)],
        }
    });
    let held_out = lm.held_out(rows)?;
    let eval_time = began.elapsed().as_secs_f64();
    let (loss, n_targets) = (held_out.loss, held_out.n_targets);
    ensure!(
        n_targets > 0,
        anyhow!("failed to measure {}: its {n_rows} rows have no token that counts", args.data).context(ExitCode::Data)
    );
    if args.timings {
        let tokens_per_second = n_targets as f64 / eval_time;
        eprintln!("{}", json!({"tokens": n_targets, "eval_time": eval_time, "tokens_per_second": tokens_per_second}));
    }
    answer(&json!({"loss": loss, "perplexity": held_out.perplexity(), "tokens": n_targets, "rows": n_rows}).to_string())
}

impl Perplexity {
    fn format_request(&self, request: &DatasetRequest) -> FormatRequest {
        FormatRequest {
            format: self.format.clone(),
            role_mapping: self.role_mapping.clone(),
            content_key: self.content_key.clone(),
            column: self.column.clone(),
            id: Some(request.spec.name.clone()),
            ..FormatRequest::default()
        }
    }

    fn render_options(&self) -> RenderOptions {
        RenderOptions {
            targets: if self.mask_inputs { Targets::Assistant } else { Targets::Everything },
            empty_think: if self.ignore_empty_think { EmptyThink::Ignore } else { EmptyThink::Learn },
            specials: TextSpecials { add_bos_token: self.add_bos_token, add_eos_token: self.add_eos_token },
            ..RenderOptions::default()
        }
    }

    /// The sequences of one row: one, unless it is longer than the context.
    fn samples(&self, lm: &Lm, source: &dyn Source, format: &Format, row_idx: usize) -> Result<Vec<Sample>> {
        let document = format.read(source, row_idx)?;
        let sample = render_document(lm.tokenizer(), lm.template(), document, self.render_options())?;
        let fits = sample.len() <= lm.context();
        Ok(match self.truncation {
            Truncation::Drop if !fits => Vec::new(),
            Truncation::Truncate => sample.slices(lm.context()).take(1).collect(),
            Truncation::Split => sample.slices(lm.context()).collect(),
            Truncation::Error | Truncation::Drop => vec![sample],
        })
    }
}

fn role_and_path(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(role, path)| !role.is_empty() && !path.is_empty());
    let pair = pair.ok_or("expected ROLE=PATH, such as user=question or assistant=messages.role.assistant")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}
