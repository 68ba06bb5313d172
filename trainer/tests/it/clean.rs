//! `trainer clean` and `trainer cache`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};

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
fn a_clean_leaves_checkpoints_that_are_not_known_to_be_of_the_run() {
    let run = Run::new();
    run.edit("auto_resume: true", "auto_resume: false");
    let short = ["train_iters=2", "checkpoint.0.save_every_n_steps=1", "checkpoint.1.save_every_n_steps=1"];
    run.train_ok(&short);
    run.train_ok(&[&short[..], &["optimizer.learning_rate=1e-3"]].concat());
    let run = Trained(run);
    let clean = ["clean", "run", "--checkpoints", "--force"];
    let run_json = fs::read_to_string(run.path("run/run.json")).unwrap();
    let names = || ["checkpoints", "hf", "checkpoints/run.1"].map(|folder| run.names(folder));
    let before = names();
    let kept = |arguments: &[&str], reason: &str| {
        let listed = run.ok(arguments);
        assert_eq!(names(), before, "{listed}");
        assert!(listed.contains("skipped") && listed.contains(reason), "no {reason:?} in:\n{listed}");
    };
    // The relative path of another folder, seen from this one.
    let home = run.0.path().display().to_string();
    run.0.write("run/run.json", &run_json.replace(&format!("{home}/"), ""));
    kept(&clean, "relative to the folder");
    run.0.write("run/run.json", &run_json);
    // A copy of the run's folder.
    fs::create_dir(run.path("copy")).unwrap();
    run.0.write("copy/run.json", &run_json);
    kept(&["clean", "copy", "--checkpoints", "--force"], "copied or moved");
    // Another run moved the checkpoints of this one.
    let other = format!("output_dir={home}/other");
    run.0.train_ok(&[&short[..], &[&other]].concat());
    assert!(run.path("checkpoints/run.2").is_dir());
    let before = names();
    assert!(run.ok(&clean).contains("not of this run"));
    assert_eq!(names(), before);
    run.ok(&["clean", "other", "--force"]);
    assert!(!run.path("checkpoints/run.2").exists());
}

#[cfg(debug_assertions)]
#[test]
fn a_clean_keeps_the_newest_model_until_a_newer_run_has_one() {
    let run = Trained::new();
    run.ok(&["clean", "run", "--force"]);
    let rerun = ["train_iters=2", "optimizer.learning_rate=2e-3"];
    let mut command = run.0.command("train", &rerun);
    command.env("CANDLEWICK_TEST_KILL_AT", "step_computed:1").output().unwrap();
    let kept = ["run/model/run.1", "run/checkpoints/run.1", "run/metrics.1.jsonl"];
    let listed = run.ok(&["clean", "run", "--checkpoints", "--force"]);
    assert!(kept.iter().all(|path| run.path(path).exists()), "{listed}");
    assert!(listed.contains("no newer run has a complete checkpoint"), "{listed}");
    let save = ["checkpoint.0.save_every_n_steps=2", "checkpoint.1.save_every_n_steps=2"];
    run.0.train_ok(&[&rerun[..], &save].concat());
    let listed = run.ok(&["clean", "run", "--force"]);
    assert!(!kept.iter().any(|path| run.path(path).exists()), "{listed}");
    assert_eq!(run.names("run/model"), ["global_step_2", "notes.txt"]);
}

#[test]
fn a_clean_keeps_the_best_of_the_saved_steps_or_all_if_it_is_unknown() {
    let run = Trained::new();
    let mut report: Value = serde_json::from_slice(&fs::read(run.path("run/run.json")).unwrap()).unwrap();
    report["plan"]["best"] = json!({"metric": "loss/eval", "greater_is_better": false});
    report["metrics"]["best"] = json!({"iter": 3, "metric": "loss/eval", "value": 0.5});
    run.0.write("run/run.json", &report.to_string());
    let metrics = fs::read_to_string(run.path("run/metrics.jsonl")).unwrap();
    let evaluated = |losses: &[(usize, f64)]| -> String {
        let lines = losses.iter().map(|(iter, loss)| json!({"iter": iter, "loss/eval": loss}).to_string() + "\n");
        lines.collect()
    };
    let training: String =
        metrics.lines().filter(|line| !line.contains("eval")).map(|line| format!("{line}\n")).collect();
    run.0.write("run/metrics.jsonl", &training);
    let clean = ["clean", "run/run.1.json", "--checkpoints", "--force"];
    let listed = run.ok(&clean);
    assert!(listed.contains("the best one is unknown"), "{listed}");
    assert_eq!(run.names("run/model"), ["global_step_1", "global_step_2", "notes.txt"]);
    run.0.write("run/metrics.jsonl", &(training.clone() + &evaluated(&[(1, 1.0), (2, 2.0), (3, 0.5)])));
    run.ok(&["clean", "run", "--checkpoints", "--force"]);
    assert_eq!(run.names("run/model"), ["global_step_1", "global_step_2", "notes.txt"]);
    run.0.write("run/metrics.jsonl", &(training + &evaluated(&[(1, 2.0), (2, 1.0)])));
    run.ok(&["clean", "run", "--checkpoints", "--force"]);
    assert_eq!(run.names("run/model"), ["global_step_2", "notes.txt"]);
}

#[test]
fn an_interrupted_clean_can_be_repeated() {
    let run = Trained::new();
    for folder in ["run/model/.global_step_1.tmp", "run/model/run.1/.global_step_2.tmp"] {
        run.0.write_foreign(&format!("{folder}/model.safetensors"));
        run.0.write_foreign(&format!("{folder}/.candlewick_unfinished"));
    }
    run.0.write_foreign("run/kept_batches.1/step_3.json");
    run.ok(&["clean", "run", "--checkpoints", "--force"]);
    assert_eq!(run.names("run/model"), ["global_step_2", "notes.txt"]);
    assert!(!run.path("run/kept_batches.1").exists() && !run.path("run/model/.global_step_1.tmp").exists());
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
