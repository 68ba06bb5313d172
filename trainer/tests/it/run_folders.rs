//! The folder of a run: its checkpoints and exports are below `output_dir`, and no other run resumes them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::support::{Run, stderr, workspace};

/// A run whose checkpoints have no folders of their own.
fn run_below_output_dir() -> Run {
    let run = Run::new();
    for folder in ["checkpoints", "hf"] {
        run.edit(&format!("    output_dir: {}/{folder}\n", run.path().display()), "");
    }
    run
}

fn output_dir(run: &Run, name: &str) -> String {
    format!("output_dir={}", run.path().join(name).display())
}

fn report(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("run.json")).unwrap()).unwrap()
}

/// Returns the steps that metrics.jsonl records.
fn steps(folder: &Path) -> Vec<u64> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter(|record| record["loss"].is_f64()).map(|record| record["iter"].as_u64().unwrap()).collect()
}

#[track_caller]
fn refused(output: &Output, code: i32, texts: &[&str]) {
    let log = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{log}");
    for text in texts {
        assert!(log.contains(text), "{text:?} is not in:\n{log}");
    }
}

#[test]
fn every_run_of_a_sweep_with_a_shipped_recipe_trains() {
    let folder = tempfile::tempdir().unwrap();
    // The recipe's paths of data start at the current folder.
    std::os::unix::fs::symlink(workspace().join("recipes"), folder.path().join("recipes")).unwrap();
    for rate in ["1e-3", "1e-4"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
        command.args([
            "train",
            "quickstart",
            "train_iters=2",
            "eval_on_start=false",
            "eval_interval=0",
            "generate=null",
        ]);
        command.args(["data.eval_sources=[]", "checkpoint.0.auto_resume=true", "data.max_length=128"]);
        command.arg("train_log_iter_interval=1");
        command.args([&format!("output_dir=runs/{rate}"), &format!("optimizer.learning_rate={rate}")]);
        command.current_dir(folder.path()).stdin(Stdio::null()).env("HF_HUB_OFFLINE", "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let run = folder.path().join("runs").join(rate);
        assert_eq!((steps(&run), &report(&run)["resumed_from"]), (vec![1, 2], &Value::Null), "{rate}");
        assert!(run.join("checkpoints/epoch_0_global_step_2").is_dir(), "{rate}");
        assert!(run.join("model/global_step_2/model.safetensors").is_file(), "{rate}");
    }
}

#[test]
fn a_checkpoint_of_another_output_dir_is_an_error_with_the_remedies() {
    let run = Run::new();
    run.train_ok(&["exit_iteration=2"]);
    let other = output_dir(&run, "other");
    let dir = run.path().join("checkpoints/epoch_0_global_step_2").canonicalize().unwrap();
    let remedies = [
        format!("it is of the run in {}", run.path().join("run").display()),
        format!("resume_from_checkpoint={}", dir.display()),
        "remove `output_dir` from the checkpoint entry".to_owned(),
    ];
    refused(&run.train(&[&other, "exit_iteration=3"]), 6, &remedies.each_ref().map(String::as_str));
    // The same run continues.
    run.train_ok(&["exit_iteration=3"]);
    run.assert_resumed();
}

#[test]
fn a_moved_run_folder_resumes() {
    let run = run_below_output_dir();
    let [before, after] = ["before", "after"].map(|name| run.path().join(name));
    run.train_ok(&[&output_dir(&run, "before"), "exit_iteration=5"]);
    fs::rename(&before, &after).unwrap();
    run.train_ok(&[&output_dir(&run, "after"), "exit_iteration=7"]);
    let resumed_from = PathBuf::from(report(&after)["resumed_from"].as_str().unwrap());
    assert!(resumed_from.ends_with("after/checkpoints/epoch_0_global_step_5"), "{}", resumed_from.display());
    assert_eq!(steps(&after), (1..=7).collect::<Vec<_>>());
}

#[test]
fn a_new_run_starts_from_any_checkpoint_of_another_one() {
    let run = run_below_output_dir();
    run.train_ok(&["train_iters=12"]);
    let from = |step: usize| {
        let folder = run.path().join(format!("run/checkpoints/epoch_0_global_step_{step}"));
        format!("resume_from_checkpoint={}", folder.display())
    };
    let branch = output_dir(&run, "branch");
    refused(&run.train(&["train_iters=12", &from(5)]), 6, &["this run has a newer checkpoint", "another output_dir"]);
    let whole = format!("resume_from_checkpoint={}", run.path().join("run").display());
    refused(&run.train(&[&branch, &whole]), 6, &["it is not a checkpoint", "global_step_10"]);

    run.train_ok(&[&branch, &from(5), "train_iters=12", "exit_iteration=7"]);
    let folder = run.path().join("branch");
    assert_eq!(steps(&folder), [6, 7]);
    // A restart continues the new run.
    run.train_ok(&[&branch, &from(5), "train_iters=12"]);
    assert_eq!(steps(&folder), (6..=12).collect::<Vec<_>>());
    let weights = |name: &str| fs::read(run.path().join(name).join("model/global_step_12/model.safetensors")).unwrap();
    assert!(weights("branch") == weights("run"), "the weights differ");
}

#[test]
fn a_restart_continues_from_the_newest_checkpoint_after_the_named_one() {
    let run = run_below_output_dir();
    run.train_ok(&["train_iters=12", "exit_iteration=5"]);
    let dir = run.path().join("run/checkpoints/epoch_0_global_step_5");
    let named = format!("resume_from_checkpoint={}", dir.display());
    for exit in ["exit_iteration=7", "exit_iteration=9"] {
        run.train_ok(&["train_iters=12", &named, exit]);
    }
    fs::remove_dir_all(dir).unwrap();
    run.train_ok(&["train_iters=12", &named]);
    assert_eq!(steps(&run.path().join("run")), (1..=12).collect::<Vec<_>>());
}

#[test]
fn a_finished_run_trains_more_epochs() {
    let run = run_below_output_dir();
    run.edit("train_iters: 24\n", "epochs: 1\n");
    run.edit("eval_interval: 12", "eval_interval: 0");
    run.edit("save_every_n_steps: 5", "save_end_of_training: true");
    run.train_ok(&[]);
    let output = run.train(&["epochs=2"]);
    run.assert_resumed();
    assert!(
        stderr(&output).contains("warning:")
            && stderr(&output).contains("checkpoint: epochs: 1 in the checkpoint, 2 now")
    );
    assert_eq!(steps(&run.path().join("run")), (1..=40).collect::<Vec<_>>());
}

#[cfg(debug_assertions)]
mod stopped {
    use super::*;

    /// Trains until SIGTERM after the third step.
    #[track_caller]
    fn stop(run: &Run, arguments: &[&str]) -> String {
        stop_at(run, 3, arguments)
    }

    #[track_caller]
    fn stop_at(run: &Run, step: usize, arguments: &[&str]) -> String {
        let mut command = run.command("train", arguments);
        let output = command.env("CANDLEWICK_TEST_TERMINATE_AT", format!("step_computed:{step}")).output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
        stderr(&output)
    }

    fn exported(run: &Run) -> Vec<u8> {
        fs::read(run.path().join("run/model/global_step_6/model.safetensors")).unwrap()
    }

    const WITHOUT_CHECKPOINT: [&str; 2] = ["checkpoint=null", "train_iters=6"];

    #[test]
    fn a_stopped_run_without_checkpoints_continues_and_leaves_only_its_export() {
        let exports = ["checkpoint=[{type: huggingface}]", "train_iters=6"];
        for arguments in [WITHOUT_CHECKPOINT, exports] {
            let [whole, run] = [Run::new(), Run::new()];
            whole.train_ok(&arguments);
            let log = stop(&run, &arguments);
            let folder = run.path().join("run/stop_checkpoint");
            assert!(log.contains("the same command continues the run"), "{log}");
            assert!(folder.join("epoch_0_global_step_3").is_dir());
            run.train_ok(&arguments);
            run.assert_resumed();
            assert_eq!(run.losses(), whole.losses(), "{arguments:?}");
            assert!(exported(&run) == exported(&whole), "{arguments:?}: the weights differ");
            assert!(!folder.exists(), "{arguments:?}: the checkpoint remains");
            // A rerun starts from the beginning.
            run.train_ok(&arguments);
            assert!(run.report()["resumed_from"].is_null());
        }
    }

    #[test]
    fn a_run_whose_export_fails_continues_from_its_last_step() {
        let run = Run::new();
        let folder = run.path().join("hf");
        let export =
            format!("checkpoint={{type: huggingface, output_dir: {}, save_end_of_training: true}}", folder.display());
        let mut started = run.start_training(&[&export, "train_iters=300"]);
        started.wait_for("Train iter: 2/");
        run.write_foreign("hf/global_step_300/thesis.txt");
        let (code, log) = started.finish();
        assert_eq!(code, Some(6), "{log}");
        for text in [
            "a folder that this run did not write",
            "run/stop_checkpoint/epoch_15_global_step_300, and the same command",
        ] {
            assert!(log.contains(text), "{text:?} is not in:\n{log}");
        }
        fs::remove_dir_all(folder.join("global_step_300")).unwrap();
        run.train_ok(&[&export, "train_iters=300"]);
        run.assert_resumed();
        assert!(folder.join("global_step_300/model.safetensors").is_file());
        assert!(!run.path().join("run/stop_checkpoint").exists());
    }

    #[test]
    fn a_stopped_run_continues_with_an_entry_that_resumes() {
        let run = run_below_output_dir();
        stop(&run, &WITHOUT_CHECKPOINT);
        run.train_ok(&["train_iters=6"]);
        run.assert_resumed();
        assert!(!run.path().join("run/stop_checkpoint").exists());
    }

    #[test]
    fn changed_settings_of_a_stopped_run_are_an_error_until_it_is_named() {
        let run = Run::new();
        stop(&run, &WITHOUT_CHECKPOINT);
        let changed = [&WITHOUT_CHECKPOINT[..], &["optimizer.learning_rate=5e-3"]].concat();
        let change = "optimizer.learning_rate: 0.01 in the checkpoint, 0.005 now";
        refused(&run.train(&changed), 6, &[change, "set resume_from_checkpoint=", "delete "]);
        let dir = run.path().join("run/stop_checkpoint/epoch_0_global_step_3");
        let named = format!("resume_from_checkpoint={}", dir.display());
        let output = run.train(&[&changed[..], &[&named]].concat());
        assert!(stderr(&output).contains(&format!("changed since this checkpoint: {change}")), "{}", stderr(&output));
        run.assert_resumed();
        assert!(!dir.exists());
    }

    #[test]
    fn a_run_that_named_its_stop_checkpoint_continues_after_the_next_stop() {
        let run = Run::new();
        stop(&run, &WITHOUT_CHECKPOINT);
        let folder = run.path().join("run/stop_checkpoint");
        let named = format!("resume_from_checkpoint={}", folder.join("epoch_0_global_step_3").display());
        let arguments = [&WITHOUT_CHECKPOINT[..], &[&named]].concat();
        stop_at(&run, 5, &arguments);
        assert!(!folder.join("epoch_0_global_step_3").exists());
        run.train_ok(&arguments);
        assert!(run.report()["resumed_from"].as_str().unwrap().ends_with("global_step_5"));
        assert!(!folder.exists());
    }

    #[test]
    fn an_early_end_replaces_the_stop_checkpoint() {
        let run = Run::new();
        let exports = ["checkpoint=[{type: huggingface}]", "train_iters=6"];
        stop(&run, &exports);
        let folder = run.path().join("run/stop_checkpoint");
        run.train_ok(&[&exports[..], &["exit_iteration_this_run=1"]].concat());
        assert!(!folder.join("epoch_0_global_step_3").exists());
        run.train_ok(&exports);
        assert!(run.report()["resumed_from"].as_str().unwrap().ends_with("stop_checkpoint/epoch_0_global_step_4"));
        assert!(!folder.exists());
    }

    #[test]
    fn a_run_resumes_the_newest_checkpoint_of_all_entries() {
        let run = run_below_output_dir();
        run.train_ok(&["train_iters=6", "exit_iteration=2"]);
        stop(&run, &WITHOUT_CHECKPOINT);
        run.train_ok(&["train_iters=6", "exit_iteration=4"]);
        assert!(run.report()["resumed_from"].as_str().unwrap().ends_with("stop_checkpoint/epoch_0_global_step_3"));
        // That of another run stays.
        stop(&run, &WITHOUT_CHECKPOINT);
        run.train_ok(&["train_iters=6", "checkpoint.0.auto_resume=false", "exit_iteration=5"]);
        run.train_ok(&["train_iters=6"]);
        assert!(run.report()["resumed_from"].as_str().unwrap().ends_with("checkpoints/epoch_0_global_step_5"));
        assert!(run.path().join("run/stop_checkpoint/epoch_0_global_step_3").is_dir());
    }

    #[test]
    fn a_run_killed_while_it_deletes_its_stop_checkpoint_is_complete() {
        let run = Run::new();
        stop(&run, &WITHOUT_CHECKPOINT);
        let mut command = run.command("train", &WITHOUT_CHECKPOINT);
        command.env("CANDLEWICK_TEST_KILL_AT", "checkpoint_removing:3").output().unwrap();
        let folder = run.path().join("run/stop_checkpoint");
        assert!(folder.exists() && run.path().join("run/model/global_step_6").is_dir());
        run.train_ok(&WITHOUT_CHECKPOINT);
        assert!(!folder.exists() && run.path().join("run/model/global_step_6").is_dir());
    }

    #[test]
    fn a_stopped_run_that_saves_nothing_logs_it() {
        let run = Run::new();
        let mut command = run.command("train", &["checkpoint=none"]);
        let output = command.env("CANDLEWICK_TEST_TERMINATE_AT", "step_computed:3").output().unwrap();
        refused(&output, 1, &["nothing was saved"]);
    }
}
