//! Command-line options that select tasks, their data and their prompt format.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use candlewick_text::template::{ChatTemplate, ChatTemplateSource, check_variable};
use candlewick_text::tokenizer::{Tokenizer, TokenizerError};
use clap::{Args, ValueEnum};
use serde_json::Value as Json;

use super::key_values::key_values;
use crate::task::{ChatFormatter, DataOverrides, PromptOptions, TaskConfig, TaskRegistry, allow_modified_python};
use candlewick_runtime::exit::ExitCode;

/// Options that select task files.
#[derive(Debug, Args)]
pub(super) struct TaskArgs {
    /// Additional task file or folder, which overrides built-in tasks; repeatable
    #[arg(long, alias = "include_path", value_name = "PATH")]
    pub(super) include_path: Vec<PathBuf>,
    /// Use built-in implementations although a task's Python file differs from that of lm-eval 0.4.13
    #[arg(long, aliases = ["native-twins", "native_twins"])]
    allow_changed_python: bool,
}

/// Options of data and prompts.
#[derive(Debug, Args)]
pub(super) struct PromptArgs {
    /// Data of a task: a file (the evaluated split), a folder with one file per split (virology_test.csv,
    /// arc_easy/test.jsonl, test.jsonl), a glob pattern, or a Hub id. TASK may be a pattern such as 'mmlu_*'
    #[arg(long, value_name = "TASK=PATH")]
    pub(super) data: Vec<String>,
    /// Number of few-shot examples; has no effect on tasks that require zero
    #[arg(long, short = 'f', alias = "num_fewshot", value_name = "N")]
    pub(super) num_fewshot: Option<usize>,
    /// Seed of few-shot sampling
    #[arg(long, alias = "fewshot_seed", default_value_t = 1234, value_name = "N")]
    pub(super) fewshot_seed: u64,
    /// Reproduce another program exactly. By default, the few-shot examples of a document depend only on the seed,
    /// the task and the document
    #[arg(long, value_enum, value_name = "PROGRAM")]
    pub(super) compat: Option<Compat>,
    /// Apply the model's chat template, its template of this name, a built-in one (chatml, llama3, ...), or a Jinja file
    #[arg(long, visible_alias = "chat-template", alias = "apply_chat_template", value_name = "NAME|FILE", num_args = 0..=1,
          default_missing_value = "")]
    pub(super) apply_chat_template: Option<String>,
    /// Format each few-shot example as a chat turn, not all in one user message [default: true with a chat template]
    #[arg(long, alias = "fewshot_as_multiturn", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(super) fewshot_as_multiturn: Option<bool>,
    /// Variables of the chat template: key=value, or a JSON object such as {"enable_thinking": false}
    #[arg(long, alias = "chat_template_args", value_name = "JSON", num_args = 1.., requires = "apply_chat_template")]
    pub(super) chat_template_args: Vec<String>,
    /// Value of the chat template's variable enable_thinking
    #[arg(long, alias = "enable_thinking", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true",
          requires = "apply_chat_template")]
    pub(super) enable_thinking: Option<bool>,
    /// System instruction, prepended to every prompt
    #[arg(long, alias = "system_instruction", value_name = "TEXT")]
    pub(super) system_instruction: Option<String>,
    /// Overrides of the tasks' generation_kwargs: comma-separated key=value, such as until=["a","b"], or a JSON
    /// object
    #[arg(long, alias = "gen_kwargs", value_name = "KEY=VALUE", num_args = 1..)]
    pub(super) gen_kwargs: Vec<String>,
}

/// Program whose results are reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Compat {
    /// lm-evaluation-harness 0.4.13 in one process
    LmEval,
}

impl TaskArgs {
    pub(super) fn registry(&self) -> Result<TaskRegistry> {
        if self.allow_changed_python {
            allow_modified_python();
        }
        let registry = TaskRegistry::load(&self.include_path)?;
        for error in registry.load_errors().iter().take(3) {
            tracing::warn!("skipped a task file: {error}");
        }
        Ok(registry)
    }
}

impl PromptArgs {
    /// Returns the chat template of `--apply-chat-template`: the tokenizer's, a built-in one or that of a file. `None` if the
    /// tokenizer has none and the option names none.
    ///
    /// # Errors
    /// If the name is unknown, or a template is invalid.
    pub(super) fn template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        let failed = |error: TokenizerError| anyhow!("failed to {error}").context(ExitCode::Usage);
        let name = self.apply_chat_template.as_deref().filter(|name| !name.is_empty());
        let template = match name.filter(|name| !tokenizer.has_chat_template(name)) {
            None => tokenizer.chat_template(name).map_err(failed)?,
            Some(other) => {
                let source = ChatTemplateSource::parse(other).map_err(|problem| {
                    let folder = tokenizer.directory().display();
                    let problem = format!(
                        "failed to start: --apply-chat-template: {folder} has no template `{other}`, and {problem}"
                    );
                    anyhow!(problem).context(ExitCode::Usage)
                })?;
                Some(source.compile(tokenizer).map_err(failed)?)
            }
        };
        template.map(|template| self.with_template_args(template)).transpose()
    }

    /// Returns the chat template with the variables of `--chat-template-args`.
    fn with_template_args(&self, template: ChatTemplate) -> Result<ChatTemplate> {
        let given = key_values("--chat-template-args", &self.chat_template_args);
        let mut given = given.map_err(|problem| anyhow!("failed to start: {problem}").context(ExitCode::Usage))?;
        for name in given.keys() {
            let refused =
                |problem| anyhow!("failed to start: --chat-template-args: {problem}").context(ExitCode::Usage);
            check_variable(name).map_err(refused)?;
        }
        given.extend(self.enable_thinking.map(|thinks| ("enable_thinking".to_owned(), Json::Bool(thinks))));
        Ok(given.into_iter().fold(template, |template, (name, value)| template.with_variable(name, value)))
    }

    /// Parses `--data` for the selected tasks.
    pub(super) fn data_overrides(&self, tasks: &[TaskConfig]) -> Result<DataOverrides> {
        Ok(DataOverrides::read("--data", &self.data, tasks)?)
    }

    /// Returns the prompt options. `chat` is the model's chat template, if any.
    pub(super) fn options<'a>(&self, chat: Option<&'a dyn ChatFormatter>) -> Result<PromptOptions<'a>> {
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
            gen_kwargs: key_values("--gen-kwargs", &self.gen_kwargs).map_err(|problem| usage(&problem))?,
            ..PromptOptions::default()
        })
    }
}
