//! `trainer clean` and `trainer cache`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use crate::support::{Run, stderr};

/// A run that trained twice: the second run moved the checkpoints and files of the first.
struct Trained(Run);

impl Trained {
    fn new() -> Self {
        let run = Run::new();
        let folder = run.path().display().to_string();
        run.edit(&format!("{folder}/checkpoints"), &format!("{folder}/run/checkpoints"));
        run.edit(&format!("output_dir: {folder}/hf"), &format!("output_dir: {folder}/run/model"));
        run.edit("auto_resume: true", "auto_resume: false");
        let short = ["train_iters=2", "checkpoint.0.save_every_n_steps=1", "checkpoint.1.save_every_n_steps=1"];
        run.train_ok(&short);
        run.train_ok(&[&short[..], &["optimizer.learning_rate=1e-3"]].concat());
        run.write_foreign("run/model/notes.txt");
        run.write_foreign("run/run.1.txt");
        run.write_foreign("run/own/run.1/data.txt");
        Self(run)
    }

    fn trainer(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.args(arguments).current_dir(self.0.path()).env("XDG_CACHE_HOME", self.0.path().join("home"));
        command.env("HF_HOME", self.0.path().join("hub")).env_remove("HF_HUB_CACHE");
        command.output().unwrap()
    }

    /// Runs a command that succeeds, and returns its output.
    #[track_caller]
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.trainer(arguments);
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the names in a folder of the run, without locks and links.
    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.0.path().join(folder)).unwrap();
        let entries = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.filter(|name| !name.starts_with('.') && name != "latest").collect();
        names.sort();
        names
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

#[test]
fn a_clean_removes_what_later_runs_replaced_and_nothing_else() {
    let run = Trained::new();
    let before = run.names("run");
    let superseded = ["run/checkpoints/run.1", "run/model/run.1", "run/metrics.1.jsonl", "run/run.1.json"];
    let listed = run.ok(&["clean", "run"]);
    for path in superseded {
        assert!(listed.contains(&format!("{path}  ")), "no {path} in:\n{listed}");
        assert!(run.path(path).exists(), "{path}");
    }
    assert!(listed.lines().count() == 5 && listed.contains("in all; --force removes them"), "{listed}");
    assert!(run.ok(&["clean", "run", "--force"]).contains("removed"));
    assert!(superseded.iter().all(|path| !run.path(path).exists()));
    let kept: Vec<String> = before.into_iter().filter(|it| it != "run.1.json" && it != "metrics.1.jsonl").collect();
    assert_eq!(run.names("run"), kept);
    assert_eq!(run.names("run/model"), ["global_step_1", "global_step_2", "notes.txt"]);
    assert_eq!(run.names("run/checkpoints").len(), 2);
    assert!(run.path("run/own/run.1/data.txt").exists());
    assert_eq!(run.ok(&["clean", "run"]), "nothing to remove\n");
    // --checkpoints adds older checkpoints; the newest of each kind stays.
    run.ok(&["clean", "run", "--checkpoints", "--force"]);
    assert_eq!(run.names("run/model"), ["global_step_2", "notes.txt"]);
    assert_eq!(run.names("run/checkpoints").len(), 1);
    run.0.train_ok(&["train_iters=3", "checkpoint.0.auto_resume=true"]);
}

#[test]
fn a_clean_refuses_a_folder_that_a_run_writes() {
    let run = Trained::new();
    let lock = fs::File::open(run.path("run/model/.lock")).unwrap();
    lock.lock().unwrap();
    let output = run.trainer(&["clean", "run", "--force"]);
    assert_eq!(output.status.code(), Some(6), "{}", stderr(&output));
    assert!(stderr(&output).contains("failed to clean: another run is writing to"), "{}", stderr(&output));
    assert!(run.path("run/model/run.1").exists());
    let none = run.trainer(&["clean", "nothing"]);
    assert_eq!(none.status.code(), Some(2), "{}", stderr(&none));
}

#[test]
fn cache_entries_are_listed_and_removed() {
    let run = Trained::new();
    let in_folder = |arguments: &[&str]| run.ok(&[arguments, &["--dir", "cache"]].concat());
    run.0.write_foreign("cache/mine.txt");
    fs::create_dir_all(run.path("hub/hub/models--org--name")).unwrap();
    let listed = in_folder(&["cache", "ls"]);
    assert!(listed.contains("train.jsonl") && listed.contains("eval.jsonl"), "{listed}");
    assert!(!listed.contains("mine.txt"), "{listed}");
    assert!(listed.contains("hub/models--org--name") && listed.contains("`hf cache`"), "{listed}");
    let name = listed.lines().next().unwrap().split_whitespace().find(|word| word.starts_with("tokens/")).unwrap();
    assert!(in_folder(&["cache", "rm", name, "--dry-run"]).contains("would remove"));
    assert!(in_folder(&["cache", "rm", "--older-than", "1d"]).contains("0 B  removed in all"));
    assert!(in_folder(&["cache", "rm", name]).contains(&format!("removed {name}")));
    assert!(!in_folder(&["cache", "ls"]).contains(name));
    in_folder(&["cache", "rm", "--all"]);
    assert_eq!(run.names("cache"), ["mine.txt"]);
    let unknown = run.trainer(&["cache", "rm", "nothing"]);
    assert!(stderr(&unknown).contains("failed to find the cache entry nothing"), "{}", stderr(&unknown));
    assert_eq!(run.trainer(&["cache", "rm"]).status.code(), Some(2));
    // Without --dir, the folder of the variable.
    run.ok(&["check", "quickstart"]);
    assert!(run.ok(&["cache", "ls"]).contains("data of shipped recipes"));
    run.ok(&["cache", "rm", "--all"]);
    assert_eq!(run.names("home/candlewick/recipes"), Vec::<String>::new());
}
