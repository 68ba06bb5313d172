//! `evaluator show`: what exactly a task asks about a document.

use std::fmt::Write as _;

use anyhow::{Context, Result, anyhow};
use candlewick_text::hub::{Hub, ModelPart};
use candlewick_text::tokenizer::{Specials, Tokenizer};
use clap::Args;
use serde_json::{Value as Json, json};

use super::answer;
use super::tasks::{Prompts, TaskSource};
use crate::exit::ExitCode;
use crate::request::Request;
use crate::task::{ChatStyle, Instance, PromptOptions, Task, TaskConfig};

#[derive(Debug, Args)]
pub(super) struct Show {
    /// The task, or several with commas between them
    tasks: String,
    /// The number of a document, from 0
    #[arg(long, default_value_t = 0, value_name = "N")]
    doc: usize,
    #[command(flatten)]
    source: TaskSource,
    #[command(flatten)]
    prompts: Prompts,
    /// A model's folder or Hub id: its tokenizer shows where tokens begin, and its chat template is there to be applied
    #[arg(long, visible_alias = "tokenizer", value_name = "MODEL")]
    model: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Show, hub: &Hub) -> Result<()> {
    let folder = args.model.as_ref().map(|model| hub.model(model, None, ModelPart::WithoutWeights)).transpose()?;
    let tokenizer = folder.map(Tokenizer::from_directory).transpose()?;
    let template = tokenizer
        .as_ref()
        .map(|tokenizer| tokenizer.chat_template(args.prompts.template_name()))
        .transpose()?
        .flatten();
    let template = template.as_ref().map(|template| template as &dyn ChatStyle);
    let options = PromptOptions { samples: Some(vec![args.doc]), ..args.prompts.options(template)? };
    let selection = args.source.registry()?.select(&args.tasks)?;
    let mut shown = Vec::new();
    for config in selection.tasks {
        shown.push(show(args, hub, config, &options, tokenizer.as_ref())?);
    }
    match args.json {
        true => answer(&serde_json::to_string_pretty(&shown)?),
        false => answer(&shown.iter().map(|task| text(task, tokenizer.is_some())).collect::<Vec<_>>().join("\n\n")),
    }
}

fn show(
    args: &Show,
    hub: &Hub,
    config: TaskConfig,
    options: &PromptOptions,
    tokenizer: Option<&Tokenizer>,
) -> Result<Json> {
    // In lm-eval's way the examples depend on all documents before.
    let before = PromptOptions { samples: Some((0..=args.doc).collect()), ..options.clone() };
    let task = Task::open(hub, config, &args.prompts.data_paths()?, options)?;
    let n = task.docs().len();
    if args.doc >= n {
        let problem = format!("failed to show {}: it has {n} documents, from 0 on", task.config().task);
        return Err(anyhow!(problem).context(ExitCode::Usage));
    }
    let instances = task.instances(if options.compat { &before } else { options })?;
    let asked = instances.iter().filter(|instance| instance.doc_id == args.doc && instance.repeat == 0);
    let requests = asked.map(|instance| request(instance, tokenizer)).collect::<Result<Vec<_>>>()?;
    Ok(json!({
        "task": task.config().task,
        "doc_id": args.doc,
        "n_docs": n,
        "num_fewshot": task.num_fewshot(options),
        "doc": task.docs()[args.doc],
        "target": task.target(args.doc)?,
        "choices": task.choices(args.doc)?,
        "generation_kwargs": task.generation_kwargs(options),
        "requests": requests,
    }))
}

fn request(instance: &Instance, tokenizer: Option<&Tokenizer>) -> Result<Json> {
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
    if let Some(tokenizer) = tokenizer {
        let tokens = |text: &str| tokens(tokenizer, text).context("failed to show tokens");
        // Blanks at the border are scored with the continuation.
        let scored = continuation.map(|_| context.trim_end());
        fields["context_tokens"] = json!(tokens(scored.unwrap_or(context))?);
        if let Some(continuation) = continuation {
            let n_context = tokens(context.trim_end())?.len();
            fields["continuation_tokens"] = json!(tokens(&format!("{context}{continuation}"))?.split_off(n_context));
        }
    }
    Ok(fields)
}

/// The text of each token.
fn tokens(tokenizer: &Tokenizer, text: &str) -> Result<Vec<String>> {
    let ids = tokenizer.encode(text, Specials::Add)?;
    let token = |id: &u32| {
        let plain = tokenizer.decode(&[*id], Specials::Add).unwrap_or_default();
        // What is only a part of a character has no text of its own.
        if plain.is_empty() || plain.contains('\u{fffd}') {
            tokenizer.id_to_token(*id).unwrap_or_default()
        } else {
            plain
        }
    };
    Ok(ids.iter().map(token).collect())
}

fn text(task: &Json, with_tokens: bool) -> String {
    let field = |value: &Json, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let mut out = format!(
        "{}: document {} of {}, {} examples\n",
        field(task, "task"),
        task["doc_id"],
        task["n_docs"],
        task["num_fewshot"]
    );
    let requests = task["requests"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (i, request) in requests.iter().enumerate() {
        let _ = writeln!(out, "\n--- request {} of {}: {} ---", i + 1, requests.len(), field(request, "type"));
        out += &field(request, "context");
        if let Some(continuation) = request["continuation"].as_str() {
            let _ = write!(out, "⟦{continuation}⟧");
        }
        out.push('\n');
        if with_tokens {
            let joined = |key: &str| {
                let tokens = request[key].as_array().map(Vec::as_slice).unwrap_or_default();
                let text: Vec<&str> = tokens.iter().filter_map(Json::as_str).collect();
                (tokens.len(), text.join("|"))
            };
            let (n, context) = joined("context_tokens");
            let _ = writeln!(out, "\n{n} tokens: {context}");
            if request.get("continuation_tokens").is_some() {
                let (n, continuation) = joined("continuation_tokens");
                let _ = writeln!(out, "{n} tokens are scored: {continuation}");
            }
        }
    }
    if requests.is_empty() {
        out += "\nnothing is asked: there is nothing in the document to score\n";
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
