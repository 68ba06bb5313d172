//! Pool of documents that few-shot examples are sampled from.

use candlewick_text::hub::Hub;
use serde::Serialize;

use super::builtin::{self, Doc};
use super::config::{FewshotSamples, TaskConfig};
use super::data::{self, DatasetSplit, SplitInfo};
use super::data_override::DataOverrides;
use super::error::TaskError;
use super::prompt::PromptOptions;

/// Pool of documents that few-shot examples are sampled from.
#[derive(Default)]
pub(super) struct FewshotPool {
    pub(super) docs: Vec<Doc>,
    /// Row index of each document, if the pool comes from the evaluated split.
    pub(super) rows: Vec<usize>,
    /// True if the evaluated document must be excluded from its own examples.
    pub(super) exclude_eval_doc: bool,
    /// Split of the examples; `None` for examples written in the task file.
    pub(super) data: Option<FewshotSplit>,
}

/// Split that few-shot examples are sampled from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FewshotSplit {
    /// Name, files and size of the split.
    #[serde(flatten)]
    pub of: SplitInfo,
    /// True if the examples come from the evaluated split.
    pub is_evaluated_split: bool,
}

/// Loads the few-shot pool; empty if the task uses no examples. `eval` is the evaluated split.
///
/// # Errors
///
/// The examples cannot be read, or the pool is smaller than `num_fewshot`.
pub(super) fn load_fewshot_pool(
    hub: &Hub,
    config: &TaskConfig,
    eval: &DatasetSplit,
    paths: &DataOverrides,
    options: &PromptOptions,
) -> Result<FewshotPool, TaskError> {
    let wanted = match (config.num_fewshot, options.num_fewshot) {
        (Some(0), _) => 0,
        (own, wanted) => wanted.or(own).unwrap_or(0),
    };
    if wanted == 0 {
        return Ok(FewshotPool::default());
    }
    let shots = load_candidates(hub, config, eval, paths, options)?;
    match shots.docs.len() {
        n if wanted <= n => Ok(shots),
        n => Err(TaskError::Selection(format!(
            "{} has only {n} documents to sample {wanted} few-shot examples from; request fewer \
             (num_fewshot)",
            config.task
        ))),
    }
}

fn load_candidates(
    hub: &Hub,
    config: &TaskConfig,
    eval: &DatasetSplit,
    paths: &DataOverrides,
    options: &PromptOptions,
) -> Result<FewshotPool, TaskError> {
    let fewshot = &config.fewshot;
    let (split, process) = match (&fewshot.split, &fewshot.samples) {
        (Some(split), _) => (split.as_str(), &fewshot.process_docs),
        (None, Some(FewshotSamples::Listed(docs))) => {
            return Ok(select_indices(FewshotPool { docs: docs.clone(), ..FewshotPool::default() }, config, options));
        }
        (None, Some(FewshotSamples::Function(function))) => {
            return Ok(select_indices(
                FewshotPool { docs: builtin::samples(function)?, ..FewshotPool::default() },
                config,
                options,
            ));
        }
        (None, None) => {
            let split = config.training_split.as_deref().or(config.validation_split.as_deref());
            (split.map_or_else(|| config.eval_split(), Ok)?, &config.process_docs)
        }
    };
    refuse_single_file(config, split, paths)?;
    let process = process.as_ref().map(builtin::process_docs).transpose()?;
    let opened = data::open(hub, config, split, paths, process)?;
    let of = opened.data();
    let is_evaluated_split = split == config.eval_split()? || !of.files.is_empty() && of.files == eval.data().files;
    // lm-eval compares the splits' names only, so a document may become its own example.
    let exclude_eval_doc = if options.compat { fewshot.split == config.test_split } else { is_evaluated_split };
    let rows = if options.compat || !exclude_eval_doc { Vec::new() } else { opened.row_indices().to_vec() };
    let data = Some(FewshotSplit { of, is_evaluated_split });
    Ok(select_indices(FewshotPool { docs: opened.into_docs(), rows, exclude_eval_doc, data }, config, options))
}

/// Returns an error if a single file replaces all splits of a task with few-shot examples.
fn refuse_single_file(config: &TaskConfig, split: &str, paths: &DataOverrides) -> Result<(), TaskError> {
    let (task, evaluated) = (&config.task, config.eval_split()?);
    match paths.single_file(task).filter(|_| split != evaluated) {
        None => Ok(()),
        Some(given) => Err(TaskError::Selection(format!(
            "{given} is one file, evaluated as {evaluated:?}, and the examples of {task} come from {split:?}; name a folder \
             with files for both, such as {evaluated}.jsonl and {split}.jsonl, or set 0 few-shot examples"
        ))),
    }
}

/// Keeps the documents at `fewshot_indices`, if the task has them.
fn select_indices(shots: FewshotPool, config: &TaskConfig, options: &PromptOptions) -> FewshotPool {
    match &config.fewshot.indices {
        // lm-eval 0.4.13 ignores `fewshot_indices`.
        Some(indices) if !options.compat => FewshotPool {
            docs: indices.iter().filter_map(|at| shots.docs.get(*at).cloned()).collect(),
            rows: indices.iter().filter_map(|at| shots.rows.get(*at).copied()).collect(),
            ..shots
        },
        _ => shots,
    }
}
