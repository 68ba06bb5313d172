//! The files of a run: run.json and metrics.jsonl of its folder, or an earlier pair such as run.1.json and
//! metrics.1.jsonl.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use candlewick_text::quantity::counted;
use candlewick_text::suggestion::did_you_mean;

use super::saved_run::SavedRun;
use crate::exit::ExitCode;

/// Paths of a run's files. The files may be missing: a run that starts later creates them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFiles {
    /// Folder of the run.
    pub folder: PathBuf,
    /// Resolved plan and end of the run.
    pub run_json: PathBuf,
    /// Metrics.
    pub metrics: PathBuf,
}

impl RunFiles {
    /// Returns the files of a run's folder, or of one of its files run.json and metrics.jsonl.
    pub fn of(path: &Path) -> Self {
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() || !matches!(extension, Some("json" | "jsonl")) {
            return Self::in_folder(path, "");
        }
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        let number = number_of(path);
        let metrics = if extension == Some("jsonl") { path.to_owned() } else { metrics_of(&folder, path, &number) };
        let run_json =
            if extension == Some("json") { path.to_owned() } else { folder.join(format!("run{number}.json")) };
        Self { folder, run_json, metrics }
    }

    fn in_folder(folder: &Path, number: &str) -> Self {
        let run_json = folder.join(format!("run{number}.json"));
        let metrics = metrics_of(folder, &run_json, number);
        Self { folder: folder.to_owned(), run_json, metrics }
    }

    /// Returns true if a file of the run exists.
    pub fn exist(&self) -> bool {
        self.run_json.is_file() || self.metrics.exists()
    }

    /// Returns the error of a path without a run. It names runs in that folder, or with a similar name.
    pub fn missing(&self, path: &Path) -> anyhow::Error {
        let runs = |folder: &Path| -> Vec<String> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
            let is_run = |folder: &PathBuf| folder.is_dir() && RunFiles::of(folder).exist();
            entries.filter(is_run).map(|path| path.display().to_string()).collect()
        };
        let mut inside = runs(path);
        inside.sort();
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        let advice = match inside.as_slice() {
            [] if path.is_dir() => "expected the output_dir of a run, or its metrics.jsonl".to_owned(),
            [] => {
                let near = did_you_mean(&path.display().to_string(), runs(parent));
                format!("expected the output_dir of a run, or its metrics.jsonl{near}")
            }
            [first, ..] => format!("it has {} in folders; name one, such as {first}", counted(inside.len(), "run")),
        };
        let problem = match path.exists() {
            true => "it has neither run.json nor metrics.jsonl",
            false => "there is no such file or folder",
        };
        anyhow!("failed to read the run {}: {problem}; {advice}", path.display()).context(ExitCode::Usage)
    }

    /// Fails if no file of the run exists.
    pub fn require(&self, path: &Path) -> Result<()> {
        if self.exist() { Ok(()) } else { Err(self.missing(path)) }
    }
}

/// Returns the metrics file next to a run.json, or the one that it names. A copied folder has its own file.
fn metrics_of(folder: &Path, run_json: &Path, number: &str) -> PathBuf {
    let own = folder.join(format!("metrics{number}.jsonl"));
    if own.exists() {
        return own;
    }
    let named = SavedRun::read(run_json).ok().flatten().and_then(|saved| saved.metrics_path());
    named.filter(|path| path.exists()).unwrap_or(own)
}

/// Returns the number in a name such as metrics.1.jsonl, with its dot.
fn number_of(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let number = stem.rsplit_once('.').map(|(_, number)| number).filter(|number| number.parse::<u32>().is_ok());
    number.map_or_else(String::new, |number| format!(".{number}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn earlier_files_of_a_folder_are_found_in_pairs() {
        let of = |path: &str| RunFiles::of(Path::new(path));
        let pair = |files: RunFiles| (files.run_json, files.metrics);
        assert_eq!(pair(of("runs/a")), ("runs/a/run.json".into(), "runs/a/metrics.jsonl".into()));
        assert_eq!(of("runs/a/metrics.jsonl"), of("runs/a"));
        assert_eq!(pair(of("runs/a/metrics.2.jsonl")), ("runs/a/run.2.json".into(), "runs/a/metrics.2.jsonl".into()));
        assert_eq!(of("runs/a/run.2.json"), of("runs/a/metrics.2.jsonl"));
        assert_eq!(of("runs/qwen3-0.6b").run_json, Path::new("runs/qwen3-0.6b/run.json"));
    }

    #[test]
    fn metrics_in_another_folder_are_found_by_run_json_and_a_copy_has_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let [run, elsewhere] = ["run", "elsewhere.jsonl"].map(|name| dir.path().join(name));
        fs::create_dir(&run).unwrap();
        let json = serde_json::json!({"plan": {"log": {"metrics_path": elsewhere}}});
        fs::write(run.join("run.json"), json.to_string()).unwrap();
        fs::write(&elsewhere, "").unwrap();
        assert_eq!(RunFiles::of(&run).metrics, elsewhere);
        fs::write(run.join("metrics.jsonl"), "").unwrap();
        assert_eq!(RunFiles::of(&run).metrics, run.join("metrics.jsonl"));
    }

    #[test]
    fn a_path_without_a_run_is_an_error_with_runs_that_exist() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("runs/first")).unwrap();
        fs::write(dir.path().join("runs/first/run.json"), "{}").unwrap();
        let error = |name: &str| {
            let path = dir.path().join(name);
            format!("{:#}", RunFiles::of(&path).require(&path).unwrap_err())
        };
        assert!(error("runs").contains("it has 1 run in folders; name one, such as"), "{}", error("runs"));
        assert!(error("runs/frist").contains("did you mean"), "{}", error("runs/frist"));
        assert!(error("none/a").contains("no such file or folder; expected the output_dir of a run"));
    }
}
