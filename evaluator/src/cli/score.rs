//! `evaluator score`: log-probabilities of a text, or the loss on a data set as training measures it.

use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use candlewick_text::format::{Document, Format, FormatError, FormatRequest};
use candlewick_text::hub::{DatasetRequest, Hub};
use candlewick_text::render::{EmptyThinkLoss, LossMask, RenderOptions, Sample, TextSpecialTokens, render_row};
use candlewick_text::source::{RowSource, SampleBy};
use clap::{ArgAction, ArgGroup, Args, ValueEnum};
use serde_json::json;

use super::eval_loss_rows::EvalLossRows;
use candlewick_inference::command::Model;
use candlewick_inference::lm::Lm;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::progress::ProgressLines;
use candlewick_runtime::stdout::print_line;

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("scored").required(true))]
pub(super) struct Score {
    #[command(flatten)]
    model: Model,
    /// Print the log-probability of every token of this text
    #[arg(long, group = "scored")]
    text: Option<String>,
    #[command(flatten)]
    rows: ScoredRows,
}

/// Rows of a data set whose loss is measured.
#[derive(Debug, Args)]
struct ScoredRows {
    /// Print the loss and perplexity on a file, a folder or a Hub data set; append `:split` to select a split. Rows may have any format that training reads:
    /// in chats the assistant's tokens count, in plain text all of them
    #[arg(long, group = "scored")]
    data: Option<String>,
    /// The format of the rows: messages, sharegpt, alpaca, prompt_completion or text [default: found by the first rows]
    #[arg(long, conflicts_with = "text")]
    format: Option<String>,
    /// The column of a role, or the items of a list: user=question, assistant=messages.role.assistant
    #[arg(long, conflicts_with = "text", value_name = "ROLE=PATH", value_parser = role_and_path)]
    role_mapping: Vec<(String, String)>,
    /// The key of a message's text
    #[arg(long, conflicts_with = "text", value_name = "KEY")]
    content_key: Option<String>,
    /// The column of the text or of the messages
    #[arg(long, conflicts_with = "text")]
    column: Option<String>,
    /// Count only the assistant's tokens of a chat, as `data.mask_inputs` of a recipe
    #[arg(long, conflicts_with = "text", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    mask_inputs: bool,
    /// Leave out an empty <think></think> before an answer, as `data.ignore_empty_think` of a recipe
    #[arg(long, conflicts_with = "text")]
    ignore_empty_think: bool,
    /// Put BOS before each plain text, as `data.add_bos_token` of a recipe [default: as the tokenizer]
    #[arg(long, conflicts_with = "text", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    add_bos_token: Option<bool>,
    /// Put EOS after each text and count it, as `data.add_eos_token` of a recipe [default: true for a completion, false for
    /// plain text]
    #[arg(long, conflicts_with = "text", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    add_eos_token: Option<bool>,
    /// The rows of a .txt file: line, paragraph or document
    #[arg(long, conflicts_with = "text", value_name = "UNIT", default_value = "line")]
    sample_by: SampleBy,
    /// The treatment of a row that is longer than --max-length
    #[arg(long, conflicts_with = "text", value_enum, default_value_t = Truncation::Error)]
    truncation: Truncation,
    /// The most tokens of a sequence, as `data.max_length` of a recipe [default: the model's context]
    #[arg(long, conflicts_with = "text", value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    max_length: Option<u32>,
    /// The most rows to read
    #[arg(long, conflicts_with = "text")]
    limit: Option<usize>,
    /// Print the duration of the rows on stderr, as JSON; loading is not in it
    #[arg(long, conflicts_with = "text")]
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
    /// The row is cut into pieces, each a sequence of its own
    Split,
}

/// Scores a text or the rows of a data set, and prints JSON.
pub(super) fn run(args: &Score, hub: &Hub) -> Result<()> {
    match (&args.text, &args.rows.data) {
        (Some(text), _) => print_line(&serde_json::to_string(&args.model.load(hub)?.score(text)?)?),
        (None, Some(data)) => score_rows(args, data, hub),
        (None, None) => Err(anyhow!("failed to start: give --text or --data").context(ExitCode::Usage)),
    }
}

/// Runs the former command `perplexity`, which is `score --data`.
pub(super) fn run_as_perplexity(args: &Score, hub: &Hub) -> Result<()> {
    // With --timings stderr is JSON, for programs.
    if !args.rows.timings {
        eprintln!("note: `evaluator perplexity` is now `evaluator score`");
    }
    run(args, hub)
}

fn score_rows(Score { model, rows: args, .. }: &Score, data: &str, hub: &Hub) -> Result<()> {
    let mut request = DatasetRequest::parse(data, "test")?;
    request.read.sample_by = args.sample_by;
    let source = hub.dataset(&request)?;
    let format = Format::find(&args.format_request(&request), &*source).map_err(with_options)?;
    let n_rows = args.limit.map_or(source.len(), |limit| limit.min(source.len()));
    if !args.timings {
        eprintln!("{data}: {}; {n_rows} of {} rows", format.describe(), source.len());
    }
    let lm = model.load(hub)?;
    let max_length = args.max_length(lm.context())?;
    let began = Instant::now();
    // With --timings stderr is JSON, for programs.
    let progress = (!args.timings).then(|| ProgressLines::new("score", "sequences", |line| eprintln!("{line}")));
    let rows = args.rows(&lm, &*source, &format, n_rows, max_length)?;
    let template = lm.template().map_or_else(String::new, |template| format!("chat template {}", template.name()));
    rows.refuse_unrendered(&template)?;
    if !args.timings {
        rows.warnings(&template).iter().for_each(|warning| eprintln!("{warning}"));
    }
    let (n_sequences, n_with_targets) = (rows.sequences.len(), rows.n_rows);
    let sequences = rows.sequences.into_iter().enumerate().map(|(n_done, sequence)| {
        progress.iter().for_each(|progress| progress.set(n_done, n_sequences));
        Ok(sequence)
    });
    let held_out = lm.held_out(sequences)?;
    let eval_time = began.elapsed().as_secs_f64();
    let (loss, n_targets) = (held_out.loss, held_out.n_targets);
    ensure!(
        n_targets > 0,
        anyhow!("failed to measure {data}: its {n_rows} rows have no token that counts").context(ExitCode::Data)
    );
    if args.timings {
        let tokens_per_second = n_targets as f64 / eval_time;
        eprintln!("{}", json!({"tokens": n_targets, "eval_time": eval_time, "tokens_per_second": tokens_per_second}));
    }
    print_line(
        &json!({"loss": loss, "perplexity": held_out.perplexity(), "tokens": n_targets, "rows": n_with_targets})
            .to_string(),
    )
}

impl ScoredRows {
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

    fn render_options(&self, document: &Document) -> RenderOptions {
        let is_completion = matches!(document, Document::PromptCompletion { .. });
        let add_eos_token = self.add_eos_token.unwrap_or(is_completion);
        RenderOptions {
            targets: if self.mask_inputs { LossMask::AssistantTokens } else { LossMask::AllTokens },
            empty_think: if self.ignore_empty_think { EmptyThinkLoss::Mask } else { EmptyThinkLoss::Include },
            specials: TextSpecialTokens { add_bos_token: self.add_bos_token, add_eos_token },
            ..RenderOptions::default()
        }
    }

    /// Returns the most tokens of a sequence.
    fn max_length(&self, context: usize) -> Result<usize> {
        let max_length = self.max_length.map_or(context, |max_length| max_length as usize);
        ensure!(
            max_length <= context,
            anyhow!(
                "failed to start: --max-length {max_length} is longer than the model's context of {context} tokens"
            )
            .context(ExitCode::Usage)
        );
        Ok(max_length)
    }

    /// Renders the first `n_rows` rows and cuts those longer than `max_length`.
    fn rows(
        &self,
        lm: &Lm,
        source: &dyn RowSource,
        format: &Format,
        n_rows: usize,
        max_length: usize,
    ) -> Result<EvalLossRows> {
        let mut rows = EvalLossRows::default();
        for row_idx in 0..n_rows {
            let place = source.locate(row_idx);
            let sample = self.sample(lm, source, format, row_idx);
            let sample = sample.map_err(|error| error.context(format!("failed to read {place}")))?;
            let sequences = self.cut(&place, &sample, max_length)?;
            rows.add(place, &sample, sequences);
        }
        Ok(rows)
    }

    fn sample(&self, lm: &Lm, source: &dyn RowSource, format: &Format, row_idx: usize) -> Result<Sample> {
        let document = format.read(source, row_idx).map_err(with_options)?;
        let options = self.render_options(&document);
        Ok(render_row(lm.tokenizer(), lm.template(), format, document, options)?)
    }

    /// Returns the sequences of one row: one, unless it is longer than `max_length`.
    fn cut(&self, place: &str, sample: &Sample, max_length: usize) -> Result<Vec<Sample>> {
        let fits = sample.len() <= max_length;
        Ok(match self.truncation {
            Truncation::Error if !fits && self.max_length.is_some() => {
                let problem =
                    format!("failed to score {place}: it has {} tokens, --max-length is {max_length}", sample.len());
                return Err(anyhow!(problem).context(ExitCode::Data));
            }
            Truncation::Drop if !fits => Vec::new(),
            Truncation::Truncate => sample.slices(max_length).take(1).collect(),
            Truncation::Split => sample.slices(max_length).collect(),
            Truncation::Error | Truncation::Drop => vec![sample.clone()],
        })
    }
}

fn role_and_path(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(role, path)| !role.is_empty() && !path.is_empty());
    let pair = pair.ok_or("expected ROLE=PATH, such as user=question or assistant=messages.role.assistant")?;
    Ok((pair.0.to_owned(), pair.1.to_owned()))
}

/// Writes the options of this command where an error of the format names keys of a recipe.
fn with_options(error: FormatError) -> FormatError {
    match error {
        FormatError::UnknownFormat { place, problem, columns, help } => {
            FormatError::UnknownFormat { place, problem: as_options(&problem), columns, help: as_options(&help) }
        }
        FormatError::InvalidRow { place, format, problem, fix } => {
            FormatError::InvalidRow { place, format, problem: as_options(&problem), fix: as_options(&fix) }
        }
        FormatError::InvalidOption { key: "role_mapping", problem } => {
            FormatError::InvalidOption { key: "--role-mapping", problem }
        }
        other => other,
    }
}

/// Replaces `role_mapping: {user: a}` with `--role-mapping user=a`, and `content_key: b` with `--content-key b`.
fn as_options(text: &str) -> String {
    const MAPPING: &str = "role_mapping: {";
    let mut rest = text;
    let mut changed = String::new();
    while let Some((before, mapping)) = rest.split_once(MAPPING)
        && let Some((pairs, after)) = mapping.split_once('}')
    {
        let options = pairs.split(", ").map(|pair| format!("--role-mapping {}", pair.replacen(": ", "=", 1)));
        changed += before;
        changed += &options.collect::<Vec<_>>().join(" ");
        rest = after;
    }
    changed += rest;
    changed.replace(", content_key: ", " --content-key ").replace("column: COLUMN", "--column COLUMN")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proposed_mapping_is_written_as_options() {
        let proposed = "use role_mapping: {user: m.role.a, assistant: m.role.b}, content_key: said";
        let options = "use --role-mapping user=m.role.a --role-mapping assistant=m.role.b --content-key said";
        assert_eq!(as_options(proposed), options);
        assert_eq!(as_options("or column: COLUMN for plain text"), "or --column COLUMN for plain text");
        assert_eq!(as_options("role_mapping: plain text has no roles"), "role_mapping: plain text has no roles");
    }
}
