//! Local models: a model folder, an adapter folder, or the output folder of a training run.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::HubError;
use crate::files::{MAX_CONFIG_FILE_BYTES, read_regular_file, without_bom};
use crate::printable::shortened;
use crate::suggestion::nearest;

pub(super) const CONFIG: &str = "config.json";
pub(super) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(super) const WEIGHTS: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

/// Model or adapter folder found on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalModel {
    /// Folder with the files.
    pub folder: PathBuf,
    /// Kind of the folder: model or adapter.
    pub contents: LocalModelKind,
    /// Rule that selected one of several exports, such as "newest of 3".
    pub choice: Option<String>,
}

impl LocalModel {
    /// Returns true if the folder holds an adapter.
    pub fn is_adapter(&self) -> bool {
        matches!(self.contents, LocalModelKind::Adapter { .. })
    }

    /// Returns a log line if one of several exports was selected: "model: runs/x/global_step_9 (newest of 3)".
    pub fn note(&self, what: &str) -> Vec<String> {
        let note = |choice: &String| format!("{what}: {} ({choice})", self.folder.display());
        self.choice.iter().map(note).collect()
    }
}

/// Kind of model in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalModelKind {
    /// Full model, or its tokenizer alone.
    Model,
    /// PEFT adapter.
    Adapter {
        /// `base_model_name_or_path` of the adapter.
        base: Option<String>,
    },
}

/// Link to the newest export, which training maintains.
const LATEST: &str = "latest";
/// Record of a training run, which names the best step.
const RUN_JSON: &str = "run.json";
/// Files that mark a model folder. The loader reports what else is missing.
const MARKS: [&str; 7] =
    [CONFIG, WEIGHTS, INDEX, "tokenizer.json", "tokenizer.model", "pytorch_model.bin", "pytorch_model.bin.index.json"];

/// Exported model in a folder `global_step_N`.
struct Export {
    folder: PathBuf,
    contents: LocalModelKind,
    step: u64,
}

/// Finds the local model at the path `name`. Returns `None` if `name` is not a folder.
///
/// Returns a model or adapter folder unchanged. In the output folder of a training run, selects the best export that
/// `run.json` names, else the newest. `run.json` also names the folders of the run's exports, which may be elsewhere.
pub fn local_model(name: &str) -> Result<Option<LocalModel>, HubError> {
    let path = Path::new(name);
    if !path.is_dir() {
        return Ok(None);
    }
    if let Some(contents) = contents_of(path) {
        return Ok(Some(LocalModel { folder: path.to_path_buf(), contents, choice: None }));
    }
    let current = subfolders(path).filter(|folder| !is_of_earlier_run(folder));
    let parents: Vec<PathBuf> = std::iter::once(path.to_path_buf()).chain(current).collect();
    let named = export_folders(path);
    let mut found = with_exports(&named);
    if found.is_empty() {
        found = with_exports(&parents);
    }
    // Exports of the folder itself take precedence over those one level down.
    if found.first().is_some_and(|(parent, _)| *parent == path) {
        found.truncate(1);
    }
    match found.len() {
        0 => Err(HubError::NotAModel { name: shorten(name), problem: without_exports(path, &parents) }),
        1 => Ok(found.pop().map(|(parent, exports)| choose(path, parent, exports))),
        _ => {
            let names: Vec<String> = found.iter().map(|(parent, _)| parent.display().to_string()).collect();
            let problem = format!("several of its folders hold exports; name one of {}", names.join(", "));
            Err(HubError::NotAModel { name: shorten(name), problem })
        }
    }
}

/// Lists the folders that have exports.
fn with_exports(folders: &[PathBuf]) -> Vec<(&PathBuf, Vec<Export>)> {
    folders.iter().map(|folder| (folder, exports_in(folder))).filter(|(_, exports)| !exports.is_empty()).collect()
}

/// Lists the folders of a run's exports that its `run.json` names. Those within the run's folder move with it.
fn export_folders(run: &Path) -> Vec<PathBuf> {
    let Some(report) = json_in(&run.join(RUN_JSON)) else { return Vec::new() };
    let of_run = report.get("folder").and_then(Value::as_str).map(PathBuf::from);
    let named = report.get("export_folders").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    named
        .map(|folder| match of_run.as_deref().and_then(|of_run| Path::new(folder).strip_prefix(of_run).ok()) {
            Some(within) => run.join(within),
            None => PathBuf::from(folder),
        })
        .collect()
}

/// Returns the end of a message about a missing path: `; did you mean X?`, or a period.
pub(crate) fn near(name: &str) -> String {
    near_path(Path::new(name)).map_or_else(|| ".".to_owned(), |path| format!("; did you mean {}?", path.display()))
}

/// Returns the existing path most similar to a missing one.
fn near_path(path: &Path) -> Option<PathBuf> {
    let parent = path.ancestors().skip(1).find(|ancestor| ancestor.is_dir() || *ancestor == Path::new(""))?;
    let wanted = path.strip_prefix(parent).ok()?.iter().next()?.to_string_lossy().into_owned();
    let listed = if parent == Path::new("") { Path::new(".") } else { parent };
    let names = subfolders(listed).filter_map(|folder| Some(folder.file_name()?.to_string_lossy().into_owned()));
    Some(parent.join(nearest(&wanted, names)?))
}

/// Shortens a name for a message.
pub(crate) fn shorten(name: &str) -> String {
    shortened(name, 200).into_owned()
}

fn contents_of(folder: &Path) -> Option<LocalModelKind> {
    let has = |name: &&str| folder.join(name).is_file();
    let is_adapter = has(&ADAPTER_CONFIG) && ![WEIGHTS, INDEX].iter().any(has);
    if is_adapter {
        return Some(LocalModelKind::Adapter { base: base_of(folder) });
    }
    (MARKS.iter().any(has) || has(&ADAPTER_WEIGHTS)).then_some(LocalModelKind::Model)
}

/// Returns the base model that an adapter folder names. The loader reports errors of the file.
pub(crate) fn base_of(folder: &Path) -> Option<String> {
    let config = json_in(&folder.join(ADAPTER_CONFIG))?;
    config.get("base_model_name_or_path")?.as_str().map(str::to_owned).filter(|base| !base.is_empty())
}

fn json_in(path: &Path) -> Option<Value> {
    serde_json::from_slice(without_bom(&read_regular_file(path, MAX_CONFIG_FILE_BYTES).ok()?)).ok()
}

/// Lists the subfolders by name, without links.
fn subfolders(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let mut folders: Vec<PathBuf> = entries.filter(is_folder).map(|entry| entry.path()).collect();
    folders.sort();
    folders.into_iter()
}

/// Returns true for a folder `run.N`, to which training moves an earlier run's checkpoints.
fn is_of_earlier_run(folder: &Path) -> bool {
    name_of(folder).strip_prefix("run.").is_some_and(|number| number.parse::<u32>().is_ok())
}

fn name_of(folder: &Path) -> String {
    folder.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Lists the exports with weights, ordered by step.
fn exports_in(parent: &Path) -> Vec<Export> {
    let export = |folder: PathBuf| {
        let step = name_of(&folder).strip_prefix("global_step_")?.parse().ok()?;
        let contents = contents_of(&folder)?;
        let weights = match contents {
            LocalModelKind::Model => &[WEIGHTS, INDEX][..],
            LocalModelKind::Adapter { .. } => &[ADAPTER_WEIGHTS],
        };
        let is_complete = weights.iter().any(|name| folder.join(name).is_file());
        is_complete.then_some(Export { folder, contents, step })
    };
    let mut exports: Vec<Export> = subfolders(parent).filter_map(export).collect();
    exports.sort_by_key(|export| export.step);
    exports
}

/// Selects the best export, or else the newest.
fn choose(run: &Path, parent: &Path, mut exports: Vec<Export>) -> LocalModel {
    let n = exports.len();
    let steps: Vec<u64> = exports.iter().map(|export| export.step).collect();
    let position = |step: u64| steps.iter().position(|own| *own == step);
    let of_link = fs::canonicalize(parent.join(LATEST)).ok();
    let written_last = of_link.and_then(|target| exports.iter().position(|it| it.folder.ends_with(name_of(&target))));
    let above = parent.parent().filter(|above| *above != Path::new("")).unwrap_or(Path::new("."));
    let best =
        [run, parent, above].into_iter().find_map(best_step).and_then(|(step, why)| Some((position(step)?, why)));
    let (idx, choice) = match (best, written_last) {
        (Some((idx, metric)), _) => (idx, format!("best {metric} of {n}")),
        (None, _) if n == 1 => (0, "the only export".to_owned()),
        (None, Some(idx)) => (idx, format!("newest of {n}")),
        (None, None) => (n - 1, format!("most steps of {n}")),
    };
    let Export { folder, contents, .. } = exports.swap_remove(idx);
    LocalModel { folder, contents, choice: Some(choice) }
}

/// Returns the best step in `run.json` and its metric. The recipe's `metric_for_best_model` enables it.
fn best_step(run: &Path) -> Option<(u64, String)> {
    let report = json_in(&run.join(RUN_JSON))?;
    let best = report.get("metrics")?.get("best")?;
    Some((best.get("iter")?.as_u64()?, best.get("metric")?.as_str()?.to_owned()))
}

/// Describes why a folder has no model, with the remedy.
fn without_exports(path: &Path, parents: &[PathBuf]) -> String {
    let is_sharded = |folder: &PathBuf| {
        let name = name_of(folder);
        name.starts_with("epoch_") && name.contains("_global_step_") && folder.join("manifest.json").is_file()
    };
    let holds_sharded = |parent: &PathBuf| subfolders(parent).any(|folder| is_sharded(&folder));
    let canonical = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if is_sharded(&canonical) || parents.iter().any(holds_sharded) {
        return format!(
            "it holds sharded checkpoints, from which training resumes, and no model folder. `trainer export {} --output DIR` \
             makes one",
            path.display()
        );
    }
    if let Some(problem) = without_model(path) {
        return problem;
    }
    let mut held: Vec<String> = fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .map(|it| it.file_name().to_string_lossy().into_owned())
        .collect();
    held.sort();
    let (n, shown) = (held.len(), held[..held.len().min(5)].join(", "));
    let holds = match n {
        0 => "it is empty".to_owned(),
        1..=5 => format!("it holds {shown}"),
        _ => format!("it holds {shown} and {} more", n - 5),
    };
    format!(
        "the folder has none of {CONFIG}, {ADAPTER_CONFIG} and tokenizer.json, and no export global_step_N; {holds}. Name the \
         folder with the model's files"
    )
}

/// Describes why the run of a folder has no model; `None` for a folder without a run.
fn without_model(run: &Path) -> Option<String> {
    let report = json_in(&run.join(RUN_JSON))?;
    let export_folders = report.get("export_folders").and_then(Value::as_array)?;
    let named: Vec<&str> = export_folders.iter().filter_map(Value::as_str).collect();
    let saved = match named.is_empty() {
        true => {
            "the run saves no model. Remove `checkpoint` from the recipe, or add an entry `{type: huggingface}` to it"
                .to_owned()
        }
        false => format!("the run has saved no model in {}", named.join(", ")),
    };
    let reason = report.get("exit").and_then(|exit| exit.get("reason")).and_then(Value::as_str);
    let end = match reason {
        Some(reason) => format!("the run ended: {reason}"),
        None => "the run has not ended, or was killed".to_owned(),
    };
    Some(format!("{saved}; {end}. Run `trainer train` on the recipe again"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct Run(tempfile::TempDir);

    impl Run {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn write(&self, path: &str, text: &str) -> &Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn export(&self, path: &str) -> &Self {
            self.write(&format!("{path}/config.json"), "{}").write(&format!("{path}/model.safetensors"), "")
        }

        fn adapter(&self, path: &str) -> &Self {
            self.write(&format!("{path}/adapter_config.json"), r#"{"base_model_name_or_path": "org/base"}"#);
            self.write(&format!("{path}/adapter_model.safetensors"), "")
        }

        fn name(&self, path: &str) -> String {
            self.0.path().join(path).to_str().unwrap().to_owned()
        }

        #[track_caller]
        fn finds(&self, name: &str, want: &str, choice: Option<&str>) -> LocalModelKind {
            let found = local_model(&self.name(name)).unwrap().unwrap();
            assert_eq!((found.folder, found.choice.as_deref()), (self.0.path().join(want), choice));
            found.contents
        }

        #[track_caller]
        fn refuses(&self, name: &str, want: &str) {
            let error = local_model(&self.name(name)).unwrap_err().to_string();
            assert!(error.contains(want), "{want:?} is not in {error:?}");
        }
    }

    #[test]
    fn a_run_folder_stands_for_its_newest_export() {
        let run = Run::new();
        run.export("r/model/global_step_9").export("r/model/global_step_22");
        // Unfinished, or another program's.
        run.write("r/model/global_step_30/config.json", "{}").export("r/model/.global_step_40.tmp");
        run.write("r/checkpoints/epoch_0_global_step_22/manifest.json", "{}");
        run.finds("r/model/global_step_9", "r/model/global_step_9", None);
        run.finds("r/model", "r/model/global_step_22", Some("most steps of 2"));
        run.finds("r", "r/model/global_step_22", Some("most steps of 2"));
        std::os::unix::fs::symlink("global_step_9", run.0.path().join("r/model/latest")).unwrap();
        run.finds("r", "r/model/global_step_9", Some("newest of 2"));
        run.finds("r/model/latest", "r/model/latest", None);
    }

    #[test]
    fn the_best_export_goes_before_the_newest_if_the_run_names_one() {
        let run = Run::new();
        run.export("r/model/global_step_9").export("r/model/global_step_22");
        run.write("r/run.json", r#"{"metrics": {"best": {"iter": 9, "metric": "loss/eval", "value": 1.0}}}"#);
        run.finds("r", "r/model/global_step_9", Some("best loss/eval of 2"));
        run.finds("r/model", "r/model/global_step_9", Some("best loss/eval of 2"));
        run.write("r/run.json", r#"{"metrics": {"best": {"iter": 7, "metric": "loss/eval", "value": 1.0}}}"#);
        run.finds("r", "r/model/global_step_22", Some("most steps of 2"));
    }

    #[test]
    fn an_adapter_names_its_base() {
        let run = Run::new();
        run.adapter("r/adapter/global_step_4");
        let base = Some("org/base".to_owned());
        assert_eq!(
            run.finds("r", "r/adapter/global_step_4", Some("the only export")),
            LocalModelKind::Adapter { base }
        );
    }

    #[test]
    fn a_run_folder_stands_for_the_exports_that_run_json_names() {
        let run = Run::new();
        let record = |folders: &[&str]| {
            let folders: Vec<String> = folders.iter().map(|folder| run.name(folder)).collect();
            let report =
                serde_json::json!({"folder": run.name("r"), "export_folders": folders, "exit": {"reason": "stopped"}});
            run.write("r/run.json", &report.to_string());
        };
        run.export("elsewhere/global_step_9").export("r/old/global_step_3");
        record(&["elsewhere"]);
        run.finds("r", "elsewhere/global_step_9", Some("the only export"));
        record(&["r/old"]);
        run.finds("r", "r/old/global_step_3", Some("the only export"));
        fs::rename(run.name("r"), run.name("moved")).unwrap();
        run.export("moved/other/global_step_5");
        run.finds("moved", "moved/old/global_step_3", Some("the only export"));
        for folder in ["moved/old", "moved/other"] {
            fs::remove_dir_all(run.name(folder)).unwrap();
        }
        run.refuses("moved", "the run has saved no model in");
        run.refuses("moved", "the run ended: stopped. Run `trainer train`");
        record(&[]);
        run.refuses("r", "the run saves no model");
    }

    #[test]
    fn a_folder_without_a_model_is_explained() {
        let run = Run::new();
        run.write("r/checkpoints/epoch_0_global_step_22/manifest.json", "{}");
        for name in ["r", "r/checkpoints", "r/checkpoints/epoch_0_global_step_22"] {
            run.refuses(name, "it holds sharded checkpoints");
        }
        run.export("two/a/global_step_1").export("two/b/global_step_1");
        run.refuses("two", "name one of");
        run.write("other/notes.txt", "");
        run.refuses("other", "it holds notes.txt");
        assert_eq!(local_model(&run.name("nope")).unwrap(), None);
    }

    #[test]
    fn the_nearest_existing_path_is_proposed() {
        let run = Run::new();
        run.export("runs/quickstart/model/global_step_1");
        assert_eq!(near(&run.name("runs/quikstart")), format!("; did you mean {}?", run.name("runs/quickstart")));
        assert_eq!(
            near(&run.name("runs/quickstart/modl")),
            format!("; did you mean {}?", run.name("runs/quickstart/model"))
        );
        assert_eq!(near(&run.name("zebra")), ".");
    }
}
