//! `evaluator prefetch`: downloads the model and the data sets of tasks, and writes a lock file.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candlewick_inference::command::{Prefetch, PrefetchOptions, find_folders};
use candlewick_text::hub::{Hub, HubSettings, LockContext};
use clap::Args;

use super::tasks::TaskArgs;
use crate::task::{DataOverrides, PromptOptions, Task};
use candlewick_runtime::terminal::print_line;

#[derive(Debug, Args)]
pub(super) struct TaskPrefetchArgs {
    /// A Hugging Face folder, a Hub id, an adapter folder, or a run's output folder
    #[arg(long, short = 'M', required_unless_present = "tasks")]
    model: Option<String>,
    /// The branch, tag or commit of a Hub id
    #[arg(long, requires = "model")]
    revision: Option<String>,
    /// A PEFT adapter on top of the model
    #[arg(long, requires = "model")]
    adapter: Option<String>,
    /// Comma-separated tasks, groups, tags, patterns such as mmlu_* and YAML files
    #[arg(long, short, value_delimiter = ',', num_args = 1..)]
    tasks: Vec<String>,
    #[command(flatten)]
    source: TaskArgs,
    /// Data of a task, as in `evaluator run`
    #[arg(long, value_name = "TASK=PATH", requires = "tasks")]
    data: Vec<String>,
    /// Number of few-shot examples, which may come from another split
    #[arg(long, short = 'f', alias = "num_fewshot", value_name = "N", requires = "tasks")]
    num_fewshot: Option<usize>,
    /// Lock file to write, for `evaluator run --lock`
    #[arg(long, value_name = "FILE", default_value = "evaluator.lock")]
    lock: PathBuf,
    #[command(flatten)]
    options: PrefetchOptions,
}

/// Examples for the long help.
pub(super) const EXAMPLES: &str = "\
Examples:
  evaluator prefetch --model HuggingFaceTB/SmolLM2-135M-Instruct --tasks arc_easy,piqa --num-fewshot 5
  evaluator run --lock evaluator.lock --model HuggingFaceTB/SmolLM2-135M-Instruct --tasks arc_easy,piqa --num-fewshot 5
  evaluator prefetch --tasks gsm8k --lock gsm8k.lock --output carry";

pub(super) fn run(args: &TaskPrefetchArgs) -> Result<()> {
    let LockContext { path, prefetch } = lock_context(&args.lock);
    let command = Prefetch { lock: &path, command: prefetch, options: &args.options, on_progress: None };
    print_line(&command.run(HubSettings::from_env(), |hub| args.open(hub))?)
}

/// Returns the names of a lock file for error messages.
pub(super) fn lock_context(lock: &Path) -> LockContext {
    LockContext { path: lock.to_owned(), prefetch: format!("evaluator prefetch --lock {}", lock.display()) }
}

impl TaskPrefetchArgs {
    /// Opens the model and the tasks, and returns the local paths among them.
    fn open(&self, hub: &Hub) -> Result<Vec<PathBuf>> {
        let mut local = Vec::new();
        if let Some(model) = &self.model {
            let folders = find_folders(model, self.revision.as_deref(), self.adapter.as_deref(), hub)?;
            let is_cached = |folder: &PathBuf| folder.starts_with(&hub.settings().cache);
            local.extend([folders.model].into_iter().chain(folders.adapter).filter(|folder| !is_cached(folder)));
        }
        local.extend(self.source.include_path.iter().cloned());
        local.extend(self.tasks.iter().map(PathBuf::from).filter(|path| path.is_file()));
        local.extend(self.open_tasks(hub)?.into_iter().map(PathBuf::from).filter(|path| path.is_file()));
        local.sort();
        local.dedup();
        Ok(local)
    }

    /// Loads the documents of the tasks, and returns the names of their files.
    fn open_tasks(&self, hub: &Hub) -> Result<Vec<String>> {
        if self.tasks.is_empty() {
            return Ok(Vec::new());
        }
        let selection = self.source.registry()?.select(&self.tasks.join(","))?;
        let paths = DataOverrides::read("--data", &self.data, &selection.tasks)?;
        let options = PromptOptions { num_fewshot: self.num_fewshot, ..PromptOptions::default() };
        let mut files = Vec::new();
        for config in selection.tasks {
            files.extend(Task::open(hub, config, &paths, &options)?.data().files());
        }
        Ok(files)
    }
}
