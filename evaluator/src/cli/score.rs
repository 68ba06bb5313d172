//! `evaluator score`: token log-probabilities of a text, or the loss and perplexity on a data set.

use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use candle_core::Device;
use candlewick_text::format::{Document, FormatError, FormatRequest, RowFormat};
use candlewick_text::hub::{DatasetRequest, Hub};
use candlewick_text::render::{EmptyThinkLoss, LossMask, RenderOptions, Sample, TextSpecialTokens, render_row};
use candlewick_text::source::{NullFieldRemoval, RowSource, SampleBy, WithoutNullFields};
use clap::{ArgAction, ArgGroup, Args, ValueEnum};
use serde_json::json;

use super::eval_loss_rows::{EvalLossRows, UnrenderedRowHandling};
use candlewick_inference::command::{ModelOptions, ParallelArgs, TemplateOptions};
use candlewick_inference::lm::Lm;
use candlewick_inference::ranks::{EvalRanks, run_on_ranks};
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::progress::{ProgressDisplay, ProgressUnit, WorkProgress, set_progress_display};
use candlewick_runtime::rank_env::rank_env;
use candlewick_runtime::terminal::{print_line, print_note};

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("scored").required(true))]
pub(super) struct ScoreArgs {
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    parallel: ParallelArgs,
    /// Print the log-probability of every token of this text
    #[arg(long, group = "scored")]
    text: Option<String>,
    #[command(flatten)]
    template: TemplateOptions,
    #[command(flatten)]
    rows: DatasetArgs,
}

/// Options of `--data`: the data set and its format.
#[derive(Debug, Args)]
struct DatasetArgs {
    /// Print the loss and perplexity on a file, a folder or a Hub data set; append `:split` to select a split. All
    /// training formats are supported. In chats only assistant tokens are scored, in plain text all tokens
    #[arg(long, group = "scored")]
    data: Option<String>,
    /// Format of the rows: messages, sharegpt, alpaca, prompt_completion or text [default: detected from the first
    /// rows]
    #[arg(long, conflicts_with = "text")]
    format: Option<String>,
    /// Column or path of a role: user=question, assistant=messages.role.assistant
    #[arg(long, conflicts_with = "text", value_name = "ROLE=PATH", value_parser = role_and_path)]
    role_mapping: Vec<(String, String)>,
    /// Key of a message's content
    #[arg(long, conflicts_with = "text", value_name = "KEY")]
    content_key: Option<String>,
    /// Column of the text or of the messages
    #[arg(long, conflicts_with = "text")]
    column: Option<String>,
    /// Remove null fields of nested structs, as `remove_none_values` in a recipe [default: true for Parquet, else false]
    #[arg(long, conflicts_with = "text", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    remove_none_values: Option<bool>,
    /// Score only the assistant's tokens of a chat, as `data.mask_inputs` in a recipe
    #[arg(long, conflicts_with = "text", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    mask_inputs: bool,
    /// Remove an empty <think></think> before a response, as `data.ignore_empty_think` in a recipe
    #[arg(long, conflicts_with = "text")]
    ignore_empty_think: bool,
    /// Handling of rows with messages or tool calls that the chat template does not render, as
    /// `data.unrendered_messages` in a recipe
    #[arg(long, conflicts_with = "text", value_enum, default_value_t = UnrenderedRowHandling::Error)]
    unrendered_messages: UnrenderedRowHandling,
    /// Prepend BOS to each plain text, as `data.add_bos_token` in a recipe [default: as the tokenizer does]
    #[arg(long, conflicts_with = "text", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    add_bos_token: Option<bool>,
    /// Append EOS to each text and score it, as `data.add_eos_token` in a recipe [default: true for completions,
    /// false for plain text]
    #[arg(long, conflicts_with = "text", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    add_eos_token: Option<bool>,
    /// Unit of a row in a .txt file: document (the whole file, as in training), paragraph or line
    #[arg(long, conflicts_with = "text", value_name = "UNIT", default_value = "document")]
    sample_by: SampleBy,
    /// Handling of rows longer than --max-length
    #[arg(long, conflicts_with = "text", value_enum, default_value_t = Truncation::Error)]
    truncation: Truncation,
    /// Maximum number of tokens in a sequence, as `data.max_length` in a recipe [default: the model's context length]
    #[arg(long, conflicts_with = "text", value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    max_length: Option<u32>,
    /// Maximum number of rows to read
    #[arg(long, conflicts_with = "text")]
    limit: Option<usize>,
    /// Print the duration of scoring, without loading, on stderr as JSON
    #[arg(long, conflicts_with = "text")]
    timings: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Truncation {
    /// Fail, and name the row
    Error,
    /// Truncate the row
    Truncate,
    /// Skip the row
    Drop,
    /// Split the row into several sequences
    Split,
}

impl ScoreArgs {
    /// Loads the model with its chat template. Collective: all ranks must call it.
    fn load_on(&self, hub: &Hub, ranks: &EvalRanks, device: Device) -> Result<Lm> {
        self.template.apply(self.model.load_on(hub, ranks, device)?)
    }
}

/// Scores a text or the rows of a data set. Rank 0 prints JSON.
pub(super) fn run(args: &ScoreArgs, hub: &Hub) -> Result<()> {
    if args.rows.timings {
        // stderr holds only JSON.
        set_progress_display(ProgressDisplay::Hidden);
    }
    run_on_ranks(&rank_env()?, args.parallel.config(), args.model.compute.device, |ranks, device| {
        let line = match (&args.text, &args.rows.data) {
            (Some(text), _) => serde_json::to_string(&args.load_on(hub, ranks, device)?.score(text)?)?,
            (None, Some(data)) => score_rows(args, data, hub, ranks, device)?,
            (None, None) => {
                return Err(anyhow!("failed to start: give --text or --data").context(ExitCode::Usage));
            }
        };
        ranks.process.on_first_rank(|| print_line(&line)).map(drop)
    })
}

/// Runs the deprecated command `evaluator perplexity` as `evaluator score`.
pub(super) fn run_deprecated_perplexity(args: &ScoreArgs, hub: &Hub) -> Result<()> {
    // With --timings, stderr holds only JSON.
    if !args.rows.timings && rank_env()?.rank == 0 {
        print_note("note: `evaluator perplexity` is now `evaluator score`");
    }
    run(args, hub)
}

/// Returns the loss and perplexity on a data set as JSON. Collective: all ranks must call it.
fn score_rows(args: &ScoreArgs, data: &str, hub: &Hub, ranks: &EvalRanks, device: Device) -> Result<String> {
    let (load, args) = (|| args.load_on(hub, ranks, device), &args.rows);
    let mut request = DatasetRequest::parse(data, "test")?;
    request.read.sample_by = args.sample_by;
    let source = ranks.process.one_rank_per_node_first(|| Ok(hub.dataset(&request)?))?;
    let source = WithoutNullFields::new(source.into(), NullFieldRemoval::of(args.remove_none_values));
    let format = RowFormat::find(&args.format_request(&request), &source).map_err(with_options)?;
    let n_rows = args.limit.map_or(source.len(), |limit| limit.min(source.len()));
    let reports = ranks.process.is_first() && !args.timings;
    if reports {
        print_note(&format!("{data}: {}; {n_rows} of {} rows", format.describe(), source.len()));
    }
    let lm = load()?;
    let max_length = args.max_length(lm.context())?;
    let began = Instant::now();
    let rows = ranks.process.keep_alive().during(|| args.rows(&lm, &source, &format, n_rows, max_length))?;
    let template = lm.template().map_or_else(String::new, |template| format!("chat template {}", template.name()));
    rows.refuse_unrendered(&template)?;
    if reports {
        if let Some(first) = source.first_row_with_removed_nulls() {
            print_note(&format!(
                "note: null fields of nested structs are removed, the first in {first}; --remove-none-values false \
                 keeps them"
            ));
        }
        rows.warnings(&template).iter().for_each(|warning| print_note(warning));
    }
    let progress = WorkProgress::start("score", ProgressUnit::Count("sequences"), rows.sequences.len());
    let held_out = lm.eval_loss(&rows.sequences, |n_done| {
        progress.set(n_done, rows.sequences.len());
        ranks.process.keep_alive().beat();
    })?;
    drop(progress);
    let eval_time = began.elapsed().as_secs_f64();
    let (loss, n_targets) = (held_out.loss, held_out.n_targets);
    ensure!(
        n_targets > 0,
        anyhow!("failed to score {data}: its {n_rows} rows have no target tokens").context(ExitCode::Data)
    );
    if args.timings && ranks.process.is_first() {
        let tokens_per_second = n_targets as f64 / eval_time;
        let speed = json!({"tokens": n_targets, "eval_time": eval_time, "tokens_per_second": tokens_per_second});
        print_note(&speed.to_string());
    }
    let report = json!({"loss": loss, "perplexity": held_out.perplexity(), "tokens": n_targets, "rows": rows.n_rows});
    Ok(report.to_string())
}

impl DatasetArgs {
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
            targets: if self.mask_inputs { LossMask::Turns } else { LossMask::AllTokens },
            empty_think: if self.ignore_empty_think { EmptyThinkLoss::Mask } else { EmptyThinkLoss::Include },
            specials: TextSpecialTokens { add_bos_token: self.add_bos_token, add_eos_token, max_text_tokens: None },
            ..RenderOptions::default()
        }
    }

    /// Returns the maximum number of tokens in a sequence.
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

    /// Tokenizes the first `n_rows` rows, and splits or truncates those longer than `max_length`.
    fn rows(
        &self,
        lm: &Lm,
        source: &dyn RowSource,
        format: &RowFormat,
        n_rows: usize,
        max_length: usize,
    ) -> Result<EvalLossRows> {
        let mut rows = EvalLossRows::new(self.unrendered_messages);
        for row_idx in 0..n_rows {
            let place = source.locate(row_idx);
            let sample = self.sample(lm, source, format, row_idx);
            let sample = sample.map_err(|error| error.context(format!("failed to read {place}")))?;
            let sequences = self.cut(&place, &sample, max_length)?;
            rows.add(place, &sample, sequences);
        }
        Ok(rows)
    }

    fn sample(&self, lm: &Lm, source: &dyn RowSource, format: &RowFormat, row_idx: usize) -> Result<Sample> {
        let document = format.read(source, row_idx).map_err(with_options)?;
        let options = self.render_options(&document);
        let sample = render_row(lm.tokenizer(), lm.template(), format, document, options)?;
        ensure!(
            !sample.has_doubled_bos(lm.tokenizer()),
            anyhow!(
                "it begins with BOS twice; for plain text use --add-bos-token false, else remove BOS from the row or from \
                 the chat template"
            )
            .context(ExitCode::Data)
        );
        Ok(sample)
    }

    /// Returns the sequences of one row: several only if it is split at `max_length`.
    fn cut(&self, place: &str, sample: &Sample, max_length: usize) -> Result<Vec<Sample>> {
        let fits = sample.len() <= max_length;
        Ok(match self.truncation {
            Truncation::Error if !fits => {
                let limit = match self.max_length {
                    Some(_) => format!("--max-length is {max_length}"),
                    None => format!("the model's context has {max_length} (max_position_embeddings)"),
                };
                let problem = format!(
                    "failed to score {place}: it has {} tokens, and {limit}; split the row with --truncation split, or \
                     choose truncate or drop",
                    sample.len()
                );
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

/// Replaces recipe keys in a format error by this command's options.
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
