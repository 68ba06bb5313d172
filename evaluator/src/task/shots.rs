//! The documents that examples are chosen from: where they are, and whether a document may be among its own.

use candlewick_text::hub::Hub;

use super::ask::PromptOptions;
use super::config::{Samples, TaskConfig};
use super::data::{self, DataPaths};
use super::error::TaskError;
use super::native::{self, Doc};

/// The documents that examples are chosen from.
#[derive(Default)]
pub(super) struct Shots {
    pub(super) docs: Vec<Doc>,
    /// The rows that they are from, if those are of the split that is evaluated.
    pub(super) rows: Vec<usize>,
    /// Whether a document may be among its own examples.
    pub(super) leave_out: bool,
}

/// The documents that examples are chosen from, if there are to be any.
pub(super) fn shots(
    hub: &Hub,
    config: &TaskConfig,
    paths: &DataPaths,
    options: &PromptOptions,
) -> Result<Shots, TaskError> {
    let wanted = match (config.num_fewshot, options.num_fewshot) {
        (Some(0), _) => 0,
        (own, wanted) => wanted.or(own).unwrap_or(0),
    };
    let fewshot = &config.fewshot;
    if wanted == 0 {
        return Ok(Shots::default());
    }
    let (split, process) = match (&fewshot.split, &fewshot.samples) {
        (Some(split), _) => (split.as_str(), &fewshot.process_docs),
        (None, Some(Samples::Listed(docs))) => {
            return Ok(picked(Shots { docs: docs.clone(), ..Shots::default() }, config, options));
        }
        (None, Some(Samples::Function(function))) => {
            return Ok(picked(Shots { docs: native::samples(function)?, ..Shots::default() }, config, options));
        }
        (None, None) => {
            let split = config.training_split.as_deref().or(config.validation_split.as_deref());
            (split.map_or_else(|| config.eval_split(), Ok)?, &config.process_docs)
        }
    };
    let process = process.as_ref().map(native::process_docs).transpose()?;
    let opened = data::open(hub, config, split, paths, process)?;
    // lm-eval looks at what is written only, and may show a document as its own example.
    let leave_out = match options.compat {
        true => fewshot.split == config.test_split,
        false => split == config.eval_split()? || paths.is_one_file(&config.task),
    };
    let rows = if options.compat || !leave_out { Vec::new() } else { opened.rows().to_vec() };
    Ok(picked(Shots { docs: opened.into_docs(), rows, leave_out }, config, options))
}

/// The documents that `fewshot_indices` names.
fn picked(shots: Shots, config: &TaskConfig, options: &PromptOptions) -> Shots {
    match &config.fewshot.indices {
        // lm-eval 0.4.13 reads the key and forgets it.
        Some(indices) if !options.compat => Shots {
            docs: indices.iter().filter_map(|at| shots.docs.get(*at).cloned()).collect(),
            rows: indices.iter().filter_map(|at| shots.rows.get(*at).copied()).collect(),
            ..shots
        },
        _ => shots,
    }
}
