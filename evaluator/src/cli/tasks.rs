//! The options that say which tasks are meant, where their data are, and how their prompts are written.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use clap::{Args, ValueEnum};
use serde_json::{Map, Value as Json};

use crate::exit::ExitCode;
use crate::task::{ChatStyle, DataPaths, PromptOptions, Registry};

/// Where tasks are looked for.
#[derive(Debug, Args)]
pub(super) struct TaskSource {
    /// A file or folder of task files, beside the built-in ones and before them; may be given more than once
    #[arg(long, alias = "include_path", value_name = "PATH")]
    pub(super) include_path: Vec<PathBuf>,
}

/// How prompts are written.
#[derive(Debug, Args)]
pub(super) struct Prompts {
    /// Where a task's data are, instead of where its file says: a file (all of it is the split that is evaluated), a
    /// folder or pattern of files named after their splits, or a Hub id. TASK may be a pattern such as 'mmlu_*'
    #[arg(long, value_name = "TASK=PATH")]
    pub(super) data: Vec<String>,
    /// How many examples stand before a question; a task that insists on none has none
    #[arg(long, short = 'f', alias = "num_fewshot", value_name = "N")]
    pub(super) num_fewshot: Option<usize>,
    /// Seeds the choice of examples
    #[arg(long, alias = "fewshot_seed", default_value_t = 1234, value_name = "N")]
    pub(super) fewshot_seed: u64,
    /// Reproduce another program to the digit; by default each document's examples depend on nothing but the seed, the
    /// task and the document
    #[arg(long, value_enum, value_name = "PROGRAM")]
    pub(super) compat: Option<Compat>,
    /// Write prompts with the model's chat template, or with that of this name
    #[arg(long, alias = "apply_chat_template", value_name = "NAME", num_args = 0..=1, default_missing_value = "")]
    pub(super) apply_chat_template: Option<String>,
    /// Make each example a turn of the chat, or put all into the user's one turn [default: true with a chat template]
    #[arg(long, alias = "fewshot_as_multiturn", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(super) fewshot_as_multiturn: Option<bool>,
    /// What the system says first
    #[arg(long, alias = "system_instruction", value_name = "TEXT")]
    pub(super) system_instruction: Option<String>,
    /// Changes to the tasks' generation_kwargs: key=value,key=value or a JSON object
    #[arg(long, alias = "gen_kwargs", value_name = "KEY=VALUE")]
    pub(super) gen_kwargs: Option<String>,
}

/// What is reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Compat {
    /// lm-evaluation-harness 0.4.13 in one process
    LmEval,
}

impl TaskSource {
    pub(super) fn registry(&self) -> Result<Registry> {
        let registry = Registry::load(&self.include_path)?;
        for error in registry.broken().iter().take(3) {
            tracing::warn!("left aside: {error}");
        }
        Ok(registry)
    }
}

impl Prompts {
    /// The chat template that is asked for by name.
    pub(super) fn template_name(&self) -> Option<&str> {
        self.apply_chat_template.as_deref().filter(|name| !name.is_empty())
    }

    pub(super) fn data_paths(&self) -> Result<DataPaths> {
        Ok(DataPaths::parse(&self.data)?)
    }

    /// What the tasks are told. `chat` is the model's template, if there is one.
    pub(super) fn options<'a>(&self, chat: Option<&'a dyn ChatStyle>) -> Result<PromptOptions<'a>> {
        let usage = |problem: &str| anyhow!("failed to start: {problem}").context(ExitCode::Usage);
        let is_chat = self.apply_chat_template.is_some();
        if is_chat && chat.is_none() {
            return Err(usage("--apply-chat-template needs a model with a chat template"));
        }
        if self.fewshot_as_multiturn == Some(true) && !is_chat {
            return Err(usage("--fewshot-as-multiturn needs --apply-chat-template"));
        }
        Ok(PromptOptions {
            num_fewshot: self.num_fewshot,
            fewshot_seed: self.fewshot_seed,
            compat: self.compat.is_some(),
            chat: chat.filter(|_| is_chat),
            system_instruction: self.system_instruction.clone(),
            fewshot_as_multiturn: self.fewshot_as_multiturn.unwrap_or(is_chat),
            gen_kwargs: match &self.gen_kwargs {
                Some(text) => gen_kwargs(text).map_err(|problem| usage(&problem))?,
                None => Map::new(),
            },
            ..PromptOptions::default()
        })
    }
}

/// `key=value,key=value`, or JSON.
fn gen_kwargs(text: &str) -> Result<Map<String, Json>, String> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| format!("--gen-kwargs is not a JSON object: {error}"));
    }
    let pair = |word: &str| match word.split_once('=') {
        Some((key, value)) => Ok((key.trim().to_owned(), value_of(value.trim()))),
        None => Err(format!("--gen-kwargs: {word:?} is not key=value")),
    };
    text.split(',').filter(|word| !word.trim().is_empty()).map(pair).collect()
}

/// A value as lm-eval reads it: in quotes a text, otherwise a truth value, null, a number, or a text.
fn value_of(text: &str) -> Json {
    let quoted = |quote: char| text.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
    if let Some(inside) = quoted('\'').or_else(|| quoted('"')) {
        return Json::from(inside);
    }
    match text.to_lowercase().as_str() {
        "true" => Json::Bool(true),
        "false" => Json::Bool(false),
        "none" => Json::Null,
        _ => text
            .parse::<i64>()
            .map(Json::from)
            .or_else(|_| text.parse::<f64>().map(Json::from))
            .unwrap_or_else(|_| text.into()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn generation_keys_are_typed() {
        let found = gen_kwargs("temperature=0.5,do_sample=True,until='7',max_gen_toks=8,x=None").unwrap();
        let want = json!({"temperature": 0.5, "do_sample": true, "until": "7", "max_gen_toks": 8, "x": null});
        assert_eq!(Json::Object(found), want);
        assert_eq!(Json::Object(gen_kwargs("{\"until\": [\"a,b\"]}").unwrap()), json!({"until": ["a,b"]}));
        assert!(gen_kwargs("greedy").unwrap_err().contains("not key=value"));
    }
}
