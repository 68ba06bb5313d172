//! Data overrides: `TASK=PATH` replaces the data source of a task file. TASK may be a pattern.

use std::collections::BTreeSet;
use std::path::Path;

use candlewick_text::source::{FileSelector, TaskFileNames, UnnamedFiles, name_words};
use candlewick_text::suggestion::did_you_mean;
use globset::GlobBuilder;

use super::config::{DatasetConfig, TaskConfig};
use super::error::TaskError;

/// Data paths that replace those of task files, from `--data` or a recipe.
#[derive(Clone, Debug, Default)]
pub struct DataOverrides {
    /// Name of the option or recipe key, for error messages.
    option: String,
    entries: Vec<DataPath>,
}

/// One override `TASK=PATH`.
#[derive(Clone, Debug)]
struct DataPath {
    task: String,
    path: String,
    /// True if the override applies to tasks of several data sets.
    is_shared: bool,
}

/// Maximum number of task names in an error message.
const MAX_LISTED: usize = 8;

impl DataOverrides {
    /// Parses `TASK=PATH` words for `tasks`. `option` is the option or key in error messages. A word that matches no
    /// task is an error. So are two words for the same TASK, and a single file for tasks of several data sets.
    pub fn read(option: &str, words: &[String], tasks: &[TaskConfig]) -> Result<Self, TaskError> {
        let entries = words.iter().map(|word| DataPath::read(option, word, tasks)).collect::<Result<_, _>>()?;
        let mut paths = Self { option: option.to_owned(), entries };
        paths.refuse_repeated()?;
        let shared = paths.entries.iter().map(|entry| paths.is_shared(entry, tasks)).collect::<Result<Vec<_>, _>>()?;
        paths.entries.iter_mut().zip(shared).for_each(|(entry, is_shared)| entry.is_shared = is_shared);
        Ok(paths)
    }

    fn refuse_repeated(&self) -> Result<(), TaskError> {
        let mut seen = BTreeSet::new();
        match self.entries.iter().find(|entry| !seen.insert(&entry.task)) {
            Some(DataPath { task, .. }) => {
                Err(TaskError::Selection(format!("{} {task}: two paths are given; keep one", self.option)))
            }
            None => Ok(()),
        }
    }

    /// Returns true if the override applies to tasks of several data sets. Its path must then be a folder.
    fn is_shared(&self, entry: &DataPath, tasks: &[TaskConfig]) -> Result<bool, TaskError> {
        let is_own = |task: &&TaskConfig| self.entry_of(&task.task).is_some_and(|own| own.is_same(entry));
        let served: Vec<&TaskConfig> = tasks.iter().filter(is_own).collect();
        let datasets: BTreeSet<_> = served.iter().map(|task| (&task.dataset.path, &task.dataset.name)).collect();
        let is_shared = datasets.len() > 1;
        if is_shared && Path::new(&entry.path).is_file() {
            let (option, DataPath { task, path, .. }) = (&self.option, entry);
            return Err(TaskError::Selection(format!(
                "{option} {task}={path}: one file is given to tasks of several data sets ({}); name a folder, or write \
                 {option} TASK=FILE for each",
                listed(&served)
            )));
        }
        Ok(is_shared)
    }

    /// Returns the path for a task: that of the last matching override.
    pub(super) fn path_of(&self, task: &str) -> Option<&str> {
        self.entry_of(task).map(|entry| entry.path.as_str())
    }

    /// Returns the override of a task as `--data TASK=FILE`, if it is a single file for all splits.
    pub(super) fn single_file(&self, task: &str) -> Option<String> {
        let path = self.path_of(task).filter(|path| Path::new(path).is_file())?;
        Some(format!("{} {task}={path}", self.option))
    }

    /// Returns the rule that selects a task's file for a split within a folder.
    pub(super) fn file_selector(&self, config: &TaskConfig) -> FileSelector {
        let Some(entry) = self.entry_of(&config.task) else { return FileSelector::All };
        let unnamed = match (entry.is_shared, entry.task == config.task) {
            (true, _) => UnnamedFiles::Reject,
            (false, true) => UnnamedFiles::AcceptOnly,
            (false, false) => UnnamedFiles::AcceptSplitNamed,
        };
        let remedy = format!("{} {}=FILE", self.option, config.task);
        FileSelector::ForTask(TaskFileNames { unnamed, remedy, ..file_names(&config.task, &config.dataset) })
    }

    fn entry_of(&self, task: &str) -> Option<&DataPath> {
        self.entries.iter().rev().find(|entry| entry.is_for(task))
    }
}

impl DataPath {
    fn read(option: &str, word: &str, tasks: &[TaskConfig]) -> Result<Self, TaskError> {
        let entry = match word.split_once('=') {
            Some((task, path)) if !task.is_empty() && !path.is_empty() => {
                Self { task: task.to_owned(), path: path.to_owned(), is_shared: false }
            }
            _ => {
                return Err(TaskError::Selection(format!("{option} {word:?} has no task or no path; write TASK=PATH")));
            }
        };
        match tasks.iter().any(|task| entry.is_for(&task.task)) {
            true => Ok(entry),
            false => Err(TaskError::Selection(unmatched(option, &entry.task, tasks))),
        }
    }

    fn is_for(&self, task: &str) -> bool {
        self.task == task
            || GlobBuilder::new(&self.task).build().is_ok_and(|glob| glob.compile_matcher().is_match(task))
    }

    fn is_same(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

fn unmatched(option: &str, name: &str, tasks: &[TaskConfig]) -> String {
    let names = || tasks.iter().map(|task| task.task.as_str());
    let is_group = names().any(|task| task.strip_prefix(name).is_some_and(|rest| rest.starts_with('_')));
    let near = if name.contains('*') { near_pattern(name, tasks) } else { did_you_mean(name, names()) };
    let advice = if is_group {
        format!("; write '{name}_*' for all tasks with this prefix")
    } else if near.is_empty() {
        format!("; selected are {}", listed(&tasks.iter().collect::<Vec<_>>()))
    } else {
        near
    };
    format!("{option} {name}: no selected task has that name{advice}")
}

/// Suggests a pattern such as `mmlu_*` from the prefixes of the selected tasks' names.
fn near_pattern(pattern: &str, tasks: &[TaskConfig]) -> String {
    let parts = |task: &TaskConfig| -> Vec<String> {
        task.task.match_indices('_').map(|(at, _)| format!("{}_*", &task.task[..at])).collect()
    };
    let patterns: BTreeSet<String> = tasks.iter().flat_map(parts).collect();
    did_you_mean(pattern, patterns.iter().map(String::as_str))
}

fn listed(tasks: &[&TaskConfig]) -> String {
    let names: Vec<&str> = tasks.iter().take(MAX_LISTED).map(|task| task.task.as_str()).collect();
    let more = match tasks.len().saturating_sub(MAX_LISTED) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    names.join(", ") + &more
}

/// Returns the file names that identify the data of a task.
fn file_names(task: &str, dataset: &DatasetConfig) -> TaskFileNames {
    let family = dataset.path.as_deref().and_then(|path| path.trim_end_matches('/').rsplit('/').next());
    let mut own = vec![task.to_owned()];
    own.extend(dataset.name.clone());
    let words = name_words(task);
    let prefix = name_words(family.unwrap_or_default());
    let rest = words.strip_prefix(prefix.as_slice()).filter(|rest| !rest.is_empty()).map(|rest| rest.join("_"));
    own.extend(rest.filter(|rest| !own.contains(rest)));
    TaskFileNames { own, family: family.map(str::to_owned), ..TaskFileNames::default() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::task::TaskRegistry;

    fn tasks(names: &str) -> Vec<TaskConfig> {
        TaskRegistry::load(&[]).unwrap().select(names).unwrap().tasks
    }

    fn rules(selected: &str, words: &[&str]) -> Vec<TaskFileNames> {
        let tasks = tasks(selected);
        let words: Vec<String> = words.iter().map(ToString::to_string).collect();
        let paths = DataOverrides::read("--data", &words, &tasks).unwrap();
        let rule = |task: &TaskConfig| match paths.file_selector(task) {
            FileSelector::ForTask(names) => names,
            FileSelector::All => TaskFileNames::default(),
        };
        tasks.iter().map(rule).collect()
    }

    #[test]
    fn a_tasks_files_have_its_name_or_that_of_its_data() {
        let names = rules("mmlu_virology", &["mmlu_virology=x"]).remove(0);
        assert_eq!(names.own, ["mmlu_virology", "virology"]);
        assert_eq!((names.family.as_deref(), names.unnamed), (Some("mmlu"), UnnamedFiles::AcceptOnly));
        assert_eq!(rules("arc_easy", &["arc_easy=x"])[0].own, ["arc_easy", "ARC-Easy"]);
        assert_eq!(rules("mmlu_pro_biology", &["*=x"])[0].own, ["mmlu_pro_biology", "biology"]);
    }

    #[test]
    fn a_pattern_for_several_data_sets_needs_files_with_their_names() {
        let unnamed = |selected: &str, words: &[&str]| -> Vec<UnnamedFiles> {
            rules(selected, words).into_iter().map(|names| names.unnamed).collect()
        };
        assert_eq!(unnamed("arc_easy,arc_challenge", &["arc_*=x"]), [UnnamedFiles::Reject; 2]);
        assert_eq!(unnamed("gsm8k,gsm8k_cot_zeroshot", &["gsm8k*=x"]), [UnnamedFiles::AcceptSplitNamed; 2]);
        assert_eq!(
            unnamed("arc_easy,arc_challenge", &["arc_*=x", "arc_easy=y"]),
            [UnnamedFiles::AcceptOnly, UnnamedFiles::AcceptSplitNamed]
        );
    }

    #[test]
    fn a_word_for_no_selected_task_is_refused() {
        let refused = |selected: &str, word: &str| {
            DataOverrides::read("--data", &[word.to_owned()], &tasks(selected)).unwrap_err().to_string()
        };
        let near = refused("arc_easy,piqa", "arc-easy=x");
        assert!(near.ends_with("--data arc-easy: no selected task has that name; did you mean `arc_easy`?"), "{near}");
        let near = refused("mmlu", "mmul_*=x");
        assert!(near.ends_with("--data mmul_*: no selected task has that name; did you mean `mmlu_*`?"), "{near}");
        assert!(refused("mmlu", "mmlu=x").contains("write 'mmlu_*' for all tasks with this prefix"));
        assert!(refused("piqa,boolq", "hellaswag=x").ends_with("; selected are piqa, boolq"));
        assert!(refused("piqa", "piqa").contains("write TASK=PATH"));
    }

    #[test]
    fn one_file_for_tasks_of_several_data_sets_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |selected: &str, words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| format!("{word}={}", file.path().display())).collect();
            DataOverrides::read("--data", &words, &tasks(selected)).map_err(|error| error.to_string())
        };
        let refused = read("arc_easy,arc_challenge", &["arc_*"]).unwrap_err();
        assert!(refused.contains("several data sets (arc_easy, arc_challenge)"), "{refused}");
        assert!(read("arc_easy,arc_challenge", &["arc_*", "arc_easy"]).is_ok());
        assert!(read("gsm8k,gsm8k_cot_zeroshot", &["gsm8k*"]).is_ok());
        let refused = read("arc_easy", &["arc_easy", "arc_easy"]).unwrap_err();
        assert!(refused.contains("--data arc_easy: two paths are given"), "{refused}");
    }
}
