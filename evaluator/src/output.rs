//! Output folder of an evaluation: results, sample records and cached responses.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candlewick_text::files::write_durably;
use candlewick_text::long_integer;
use serde::Serialize;

/// Output folder of one run, with lm-eval's file names.
#[derive(Clone, Debug)]
pub struct ResultsFolder {
    folder: PathBuf,
    /// Start time of the run, as it appears in file names.
    date: String,
    /// File name of the results without date and extension.
    stem: String,
}

impl ResultsFolder {
    /// Returns the output folder of a model: `path/MODEL`, or the parent of `path` if `path` ends in `.json`.
    pub fn new(path: &Path, model_name: &str, date: String) -> Self {
        if path.extension().is_some_and(|extension| extension == "json") {
            let folder = path.parent().unwrap_or(Path::new("")).to_owned();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            return Self { folder, date, stem };
        }
        Self { folder: path.join(sanitize_model_name(model_name)), date, stem: "results".to_owned() }
    }

    /// Returns the folder of the response cache.
    pub fn response_cache_folder(&self) -> PathBuf {
        self.folder.join("answers")
    }

    /// Writes a task's sample records as `samples_TASK_DATE.jsonl` and returns the path.
    pub fn write_samples<T: Serialize>(&self, task: &str, samples: &[T]) -> Result<PathBuf> {
        self.write(&format!("samples_{}_{}.jsonl", sanitize_task_name(task), self.date), |file| {
            samples.iter().try_for_each(|sample| {
                let line = serde_json::to_string(sample)?;
                file.write_all(long_integer::to_text(&line).as_bytes())?;
                file.write_all(b"\n")
            })
        })
    }

    /// Writes `results_DATE.json` and returns the path.
    pub fn write_results(&self, results: &impl Serialize) -> Result<PathBuf> {
        self.write(&format!("{}_{}.json", self.stem, self.date), |file| {
            serde_json::to_writer_pretty(&mut *file, results)?;
            file.write_all(b"\n")
        })
    }

    /// Writes the HTML report and returns the path.
    pub fn write_report(&self, page: &str) -> Result<PathBuf> {
        self.write(&format!("{}_{}.html", self.stem, self.date), |file| file.write_all(page.as_bytes()))
    }

    /// Writes a file atomically, and flushes it to disk.
    fn write(&self, name: &str, fill: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<PathBuf> {
        let path = self.folder.join(name);
        write_durably(&path, fill).with_context(|| format!("failed to write {}", path.display()))?;
        Ok(path)
    }
}

/// Replaces every character except letters, digits and `_` by `_`, as lm-eval does for task names in file names.
pub fn sanitize_task_name(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() || c == '_' { c } else { '_' }).collect()
}

/// Replaces the characters that are invalid in file names by `__`, as lm-eval does for model names.
pub fn sanitize_model_name(name: &str) -> String {
    let mut text = String::new();
    for part in name.split(|c| "\"<>:/\\|?*[]".contains(c)).enumerate().filter(|(i, part)| *i == 0 || !part.is_empty())
    {
        text += if part.0 == 0 { "" } else { "__" };
        text += part.1;
    }
    // A trailing invalid character becomes a trailing `__`.
    if name.ends_with(|c| "\"<>:/\\|?*[]".contains(c)) { text + "__" } else { text }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn names_are_those_of_lm_eval() {
        let names = ["HuggingFaceTB/SmolLM2", "/models/b/a", "runs/a//b", "plain", "a/"];
        assert_eq!(
            names.map(sanitize_model_name),
            ["HuggingFaceTB__SmolLM2", "__models__b__a", "runs__a__b", "plain", "a__"]
        );
    }

    #[test]
    fn a_tasks_name_leads_to_no_other_folder() {
        let folder = tempfile::tempdir().unwrap();
        let output = ResultsFolder::new(folder.path(), "a", "now".into());
        let samples = output.write_samples("../../b::é-1", &[1]).unwrap();
        assert_eq!(samples, folder.path().join("a/samples_______b__é_1_now.jsonl"));
    }

    #[test]
    fn files_are_whole_and_where_they_are_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let output = ResultsFolder::new(folder.path(), "a/b", "2026-01-02T03-04-05".into());
        let samples = output.write_samples("task", &[1, 2]).unwrap();
        assert_eq!(samples, folder.path().join("a__b/samples_task_2026-01-02T03-04-05.jsonl"));
        assert_eq!(fs::read_to_string(samples).unwrap(), "1\n2\n");
        let results = output.write_results(&serde_json::json!({"a": 1})).unwrap();
        assert_eq!(results, folder.path().join("a__b/results_2026-01-02T03-04-05.json"));
        assert_eq!(fs::read_dir(folder.path().join("a__b")).unwrap().count(), 2);
        let named = ResultsFolder::new(&folder.path().join("x/mine.json"), "a/b", "now".into());
        assert_eq!(named.write_results(&1).unwrap(), folder.path().join("x/mine_now.json"));
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "a file").unwrap();
        let output = ResultsFolder::new(folder.path(), "a", "now".into());
        let error = format!("{:#}", output.write_results(&1).unwrap_err());
        assert!(error.contains("failed to write") && error.contains("results_now.json"), "{error}");
    }
}
