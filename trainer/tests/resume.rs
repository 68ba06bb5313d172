//! A run that is killed and started again ends where an uninterrupted one ends, bit for bit.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::process::Stdio;
use std::time::Duration;

use support::{Run, stderr};

#[test]
fn a_run_killed_several_times_ends_with_the_same_weights() {
    let whole = Run::new();
    whole.train_ok(&[]);

    let killed = Run::new();
    let mut n_kills = 0;
    // Each start lives a little longer than the one before, so that the kills land in loading, stepping and saving.
    for attempt in 0u64.. {
        let mut child = killed.command("train", &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_millis(30 + 25 * attempt);
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if std::time::Instant::now() > deadline {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::yield_now();
        };
        match status {
            Some(status) => {
                assert!(status.success(), "{status}");
                break;
            }
            None => n_kills += 1,
        }
        assert!(n_kills < 400, "the run never got to its end");
    }
    assert!(n_kills > 0, "the run ended before it could be killed");
    assert!(whole.exported() == killed.exported(), "the weights differ after {n_kills} kills");
}

#[test]
fn a_run_in_two_parts_has_the_losses_of_a_run_in_one() {
    let whole = Run::new();
    whole.train_ok(&[]);
    let parts = Run::new();
    // Step 7 is no multiple of the accumulation or of an epoch's steps.
    parts.train_ok(&["exit_iteration=7"]);
    parts.train_ok(&[]);
    assert_eq!(parts.losses(), whole.losses());
    assert!(whole.exported() == parts.exported());
}

#[test]
fn a_termination_signal_saves_and_asks_to_be_run_again() {
    let whole = Run::new();
    whole.train_ok(&[]);
    let stopped = Run::new();
    let child = stopped.command("train", &[]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while !stopped.path().join("run/metrics.jsonl").exists() {
        std::thread::yield_now();
    }
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    stopped.train_ok(&[]);
    assert!(whole.exported() == stopped.exported());
}

#[test]
fn an_evaluation_on_start_comes_before_the_first_step_and_only_there() {
    let run = Run::new();
    run.train_ok(&["eval_on_start=true", "exit_iteration=5"]);
    run.train_ok(&["eval_on_start=true"]);
    let evals: Vec<_> =
        run.metrics().iter().filter(|it| !it["loss/eval"].is_null()).map(|it| it["iter"].clone()).collect();
    assert_eq!(evals, [0, 12, 24]);
    assert_eq!(run.metrics()[0]["iter"], 0);
}

#[test]
fn a_run_that_died_before_its_export_exports_when_started_again() {
    let run = Run::new();
    let at_the_end = "checkpoint.0.save_end_of_training=true";
    run.train_ok(&[at_the_end]);
    let exported = run.exported();
    std::fs::remove_dir_all(run.path().join("hf")).unwrap();
    run.train_ok(&[at_the_end]);
    assert!(run.exported() == exported);
}
