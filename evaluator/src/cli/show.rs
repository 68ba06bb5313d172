//! `evaluator show`: prints a task's prompts, targets and tokens for one document.

use std::fmt::Write as _;

use anyhow::{Result, anyhow};
use candlewick_model::Config;
use candlewick_text::hub::{Hub, ModelFiles};
use candlewick_text::printable::printable;
use candlewick_text::quantity::counted;
use candlewick_text::tokenizer::{SpecialTokens, Tokenizer};
use clap::Args;
use serde_json::{Value as Json, json};

use super::tasks::{PromptArgs, TaskArgs};
use crate::task::{ChatFormatter, DataOverrides, Instance, PromptOptions, Task, TaskConfig};
use candlewick_inference::answer::encode::{EmptyContinuation, EncodedPair, RequestEncoder};
use candlewick_inference::request::Request;
use candlewick_runtime::exit::ExitCode;
use candlewick_runtime::terminal::print_line;

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// Task, or several separated by commas
    tasks: String,
    /// Index of the document, from 0
    #[arg(long, default_value_t = 0, value_name = "N")]
    doc: usize,
    #[command(flatten)]
    source: TaskArgs,
    #[command(flatten)]
    prompts: PromptArgs,
    /// Model folder or Hub id. Its tokenizer shows the tokens of the prompt, and its chat template can be applied
    #[arg(long, visible_alias = "tokenizer", value_name = "MODEL")]
    model: Option<String>,
    /// Prepend BOS to contexts [default: as the tokenizer does]
    #[arg(long, alias = "add_bos_token", value_name = "BOOL")]
    add_bos_token: Option<bool>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Maximum number of generated tokens, if the task does not set it.
const MAX_GEN_TOKS: usize = 256;

pub(super) fn run(args: &ShowArgs, hub: &Hub) -> Result<()> {
    let selection = args.source.registry()?.select(&args.tasks)?;
    let paths = args.prompts.data_overrides(&selection.tasks)?;
    let folder = args.model.as_ref().map(|model| hub.model(model, None, ModelFiles::WithoutWeights)).transpose()?;
    let tokenizer = folder.map(Tokenizer::from_directory).transpose()?;
    let template = tokenizer.as_ref().map(|tokenizer| args.prompts.template(tokenizer)).transpose()?.flatten();
    let template = template.as_ref().map(|template| template as &dyn ChatFormatter);
    let options = PromptOptions { samples: Some(vec![args.doc]), ..args.prompts.options(template)? };
    let mut shown = Vec::new();
    for config in selection.tasks {
        shown.push(show(args, hub, (config, &paths), &options, tokenizer.as_ref())?);
    }
    match args.json {
        true => print_line(&serde_json::to_string_pretty(&shown)?),
        false => {
            let shown: Vec<String> = shown.iter().map(|task| text(task, tokenizer.is_some())).collect();
            print_line(&printable(&shown.join("\n\n")))
        }
    }
}

fn show(
    args: &ShowArgs,
    hub: &Hub,
    (config, paths): (TaskConfig, &DataOverrides),
    options: &PromptOptions,
    tokenizer: Option<&Tokenizer>,
) -> Result<Json> {
    // With `compat`, few-shot sampling depends on all earlier documents.
    let before = PromptOptions { samples: Some((0..=args.doc).collect()), ..options.clone() };
    let task = Task::open(hub, config, paths, options)?;
    let n = task.docs().len();
    if args.doc >= n {
        let problem =
            format!("failed to show {}: it has {}, numbered from 0", task.config().task, counted(n, "document"));
        return Err(anyhow!(problem).context(ExitCode::Usage));
    }
    let instances = task.instances(if options.compat { &before } else { options })?;
    let tokens = tokenizer.map(|tokenizer| RequestTokenizer::new(tokenizer, args.add_bos_token)).transpose()?;
    let asked = instances.iter().filter(|instance| instance.doc_id == args.doc && instance.repeat == 0);
    let requests = asked.map(|instance| request(instance, tokens.as_ref())).collect::<Result<Vec<_>>>()?;
    Ok(json!({
        "task": task.config().task,
        "doc_id": args.doc,
        "n_docs": n,
        "data": task.data(),
        "files": task.data().to_string(),
        "num_fewshot": task.num_fewshot(options),
        "doc": task.docs()[args.doc],
        "target": task.target(args.doc)?,
        "choices": task.choices(args.doc)?,
        "generation_kwargs": task.generation_kwargs(options),
        "requests": requests,
    }))
}

/// Tokenizer of requests, as the inference engine encodes them.
struct RequestTokenizer<'t> {
    encoder: RequestEncoder<'t>,
    /// Context length in tokens, if the model's config is available.
    max_length: Option<usize>,
}

impl<'t> RequestTokenizer<'t> {
    fn new(tokenizer: &'t Tokenizer, add_bos: Option<bool>) -> Result<Self> {
        let folder = tokenizer.directory();
        let has_config = folder.join("config.json").is_file();
        let max_length = if has_config { Some(Config::read(folder)?.max_positions()) } else { None };
        Ok(Self { encoder: RequestEncoder::new(tokenizer, add_bos), max_length })
    }

    /// Returns the input tokens of a request, its scored tokens, and the number of tokens truncated from the left.
    fn of(&self, request: &Request) -> Result<(Vec<u32>, Vec<u32>, usize)> {
        let max_length = self.max_length.unwrap_or(usize::MAX / 2);
        Ok(match request {
            Request::Loglikelihood { context, continuation } => {
                let EncodedPair { mut context, continuation } = self.encoder.pair(context, continuation)?;
                // The last token of the continuation is a target only, not an input.
                let n_truncated =
                    (context.len() + continuation.len()).saturating_sub(max_length + 1).min(context.len());
                context.drain(..n_truncated);
                (context, continuation, n_truncated)
            }
            Request::LoglikelihoodRolling { text } => {
                let ids = self.encoder.text(text)?;
                (if ids.is_empty() { Vec::new() } else { vec![self.encoder.prefix_token_id()?] }, ids, 0)
            }
            Request::GenerateUntil { context, settings } => {
                let mut ids = self.encoder.prompt(context)?;
                let room = max_length.saturating_sub(settings.max_gen_toks.unwrap_or(MAX_GEN_TOKS));
                let n_truncated = ids.len().saturating_sub(room);
                ids.drain(..n_truncated);
                (ids, Vec::new(), n_truncated)
            }
        })
    }

    /// Returns the text of each token.
    fn texts(&self, ids: &[u32]) -> Vec<String> {
        let tokenizer = self.encoder.tokenizer();
        let token = |id: &u32| {
            let plain = tokenizer.decode(&[*id], SpecialTokens::Include).unwrap_or_default();
            // A token that holds part of a UTF-8 character has no text; its vocabulary entry is printed.
            if plain.is_empty() || plain.contains('\u{fffd}') {
                tokenizer.id_to_token(*id).unwrap_or_default()
            } else {
                plain
            }
        };
        ids.iter().map(token).collect()
    }
}

fn request(instance: &Instance, tokens: Option<&RequestTokenizer>) -> Result<Json> {
    let (kind, context, continuation) = match &instance.request {
        Request::Loglikelihood { context, continuation } => {
            ("loglikelihood", context.as_str(), Some(continuation.as_str()))
        }
        Request::LoglikelihoodRolling { text } => ("loglikelihood_rolling", text.as_str(), None),
        Request::GenerateUntil { context, .. } => ("generate_until", context.as_str(), None),
    };
    let mut fields = json!({"type": kind, "context": context});
    if let Some(continuation) = continuation {
        fields["continuation"] = json!(continuation);
    }
    let Some(tokens) = tokens else { return Ok(fields) };
    match tokens.of(&instance.request) {
        Ok((seen, scored, n_truncated)) => {
            fields["context_tokens"] = json!(tokens.texts(&seen));
            if kind != "generate_until" {
                fields["continuation_tokens"] = json!(tokens.texts(&scored));
            }
            fields["truncated"] = json!(n_truncated);
        }
        // The output states why the document would be skipped.
        Err(error) if error.is::<EmptyContinuation>() => fields["problem"] = json!("its continuation has no tokens"),
        Err(error) => return Err(error.context("failed to show tokens")),
    }
    Ok(fields)
}

fn text(task: &Json, with_tokens: bool) -> String {
    let field = |value: &Json, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let mut out = format!(
        "{}: document {} of {}, {}\n{}\n",
        field(task, "task"),
        task["doc_id"],
        task["n_docs"],
        counted(task["num_fewshot"].as_u64().unwrap_or(0), "example"),
        field(task, "files")
    );
    let requests = task["requests"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (i, request) in requests.iter().enumerate() {
        let _ = writeln!(out, "\n--- request {} of {}: {} ---", i + 1, requests.len(), field(request, "type"));
        out += &field(request, "context");
        if let Some(continuation) = request["continuation"].as_str() {
            let _ = write!(out, "⟦{continuation}⟧");
        }
        out.push('\n');
        if let Some(problem) = request["problem"].as_str() {
            let _ = writeln!(out, "\n{problem}");
        } else if with_tokens {
            let joined = |key: &str| {
                let tokens = request[key].as_array().map(Vec::as_slice).unwrap_or_default();
                let text: Vec<&str> = tokens.iter().filter_map(Json::as_str).collect();
                (tokens.len(), text.join("|"))
            };
            let (n, context) = joined("context_tokens");
            let cut = request["truncated"].as_u64().filter(|n| *n > 0);
            let cut = cut.map_or_else(String::new, |n| format!(" (and {n} before, cut off)"));
            let _ = writeln!(out, "\n{}{cut}: {context}", counted(n, "token"));
            if request.get("continuation_tokens").is_some() {
                let (n, continuation) = joined("continuation_tokens");
                let are = if n == 1 { "is" } else { "are" };
                let _ = writeln!(out, "{} {are} scored: {continuation}", counted(n, "token"));
            }
        }
    }
    if requests.is_empty() {
        out += "\nno requests: the document has no text to score\n";
    }
    let _ = write!(out, "\n--- target ---\n{}", task["target"]);
    if let Some(choices) = task["choices"].as_array() {
        let _ = write!(out, "\n--- choices ---\n{}", Json::from(choices.clone()));
    }
    if task["generation_kwargs"].as_object().is_some_and(|kwargs| !kwargs.is_empty()) {
        let _ = write!(out, "\n--- generation_kwargs ---\n{}", task["generation_kwargs"]);
    }
    out
}
