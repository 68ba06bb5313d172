//! The ends of a run, and the next start of the same command: it says that nothing is left to train, or that a new run begins,
//! or it continues.
#![cfg(debug_assertions)]

use std::fs;
use std::process::Output;

use crate::support::{Run, stderr};

/// The end of a run.
struct Ending {
    arguments: &'static [&'static str],
    /// The variable of a failpoint and its value, in the first start.
    failpoint: Option<(&'static str, &'static str)>,
    /// The exit code; `None` of a killed process.
    code: Option<i32>,
    /// The steps of the first start.
    n_steps: usize,
    /// The end, as the next start describes it.
    reason: &'static str,
    /// The next start of a run with a `sharded` checkpoint.
    next: NextStart,
}

enum NextStart {
    /// It trains nothing, and names the change that trains on.
    NothingLeft(&'static str),
    /// It continues from this step.
    ContinuesFrom(usize),
}

use NextStart::{ContinuesFrom, NothingLeft};

const TERMINATE: &str = "CANDLEWICK_TEST_TERMINATE_AT";
const KILL: &str = "CANDLEWICK_TEST_KILL_AT";
const MORE_STEPS: &str = "raise epochs, train_iters or train_tokens";
const STOPPING: [&str; 2] = ["early_stopping={patience: 2, min_delta: 100}", "eval_interval=2"];

const ENDINGS: [Ending; 6] = [
    Ending {
        arguments: &["train_iters=4"],
        failpoint: None,
        code: Some(0),
        n_steps: 4,
        reason: "all steps are done",
        next: NothingLeft(MORE_STEPS),
    },
    // The signal arrives after the last step, and no evaluation follows.
    Ending {
        arguments: &["train_iters=4", "eval_interval=0", "data.eval_sources=[]"],
        failpoint: Some((TERMINATE, "step_computed:4")),
        code: Some(0),
        n_steps: 4,
        reason: "all steps are done",
        next: NothingLeft(MORE_STEPS),
    },
    Ending {
        arguments: &STOPPING,
        failpoint: None,
        code: Some(0),
        n_steps: 6,
        reason: "early stopping: loss/eval has not improved in 2 evaluations",
        next: NothingLeft("raise early_stopping.patience, or remove early_stopping"),
    },
    Ending {
        arguments: &["exit_iteration=3"],
        failpoint: None,
        code: Some(0),
        n_steps: 3,
        reason: "exit_iteration was reached",
        next: NothingLeft("raise or remove exit_iteration"),
    },
    Ending {
        arguments: &["exit_iteration_this_run=3"],
        failpoint: None,
        code: Some(0),
        n_steps: 3,
        reason: "exit_iteration_this_run was reached",
        next: ContinuesFrom(3),
    },
    Ending {
        arguments: &["train_iters=6"],
        failpoint: Some((KILL, "step_computed:4")),
        code: None,
        n_steps: 3,
        reason: "was killed",
        next: ContinuesFrom(2),
    },
];

/// Starts the run until its end.
fn end(run: &Run, ending: &Ending, more: &[&str]) -> Output {
    let mut command = run.command("train", &[ending.arguments, more].concat());
    command.envs(ending.failpoint);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), ending.code, "{}", stderr(&output));
    output
}

fn n_steps(run: &Run) -> usize {
    run.losses().len()
}

/// Starts the same command again, and returns its log.
#[track_caller]
fn restart(run: &Run, ending: &Ending, more: &[&str]) -> String {
    let output = run.train(&[ending.arguments, more].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    stderr(&output)
}

#[test]
fn a_run_with_a_checkpoint_trains_on_or_says_why_not() {
    let more = ["checkpoint.0.save_every_n_steps=2", "checkpoint.0.save_end_of_training=true"];
    for ending in &ENDINGS {
        let run = Run::new();
        end(&run, ending, &more);
        assert_eq!(n_steps(&run), ending.n_steps, "{}", ending.reason);
        let log = restart(&run, ending, &more);
        run.assert_resumed();
        match ending.next {
            NothingLeft(remedy) => {
                assert!(log.contains(&format!("nothing left to train: {}", ending.reason)), "{log}");
                assert!(log.contains(&format!(". To train on, {remedy}")), "{log}");
                assert_eq!(n_steps(&run), ending.n_steps, "{}: it trained again", ending.reason);
            }
            ContinuesFrom(step) => {
                assert!(!log.contains("nothing left to train"), "{log}");
                let resumed_from = run.report()["resumed_from"].to_string();
                assert!(resumed_from.ends_with(&format!("global_step_{step}\"")), "{resumed_from}");
                assert!(n_steps(&run) > ending.n_steps, "{}", ending.reason);
            }
        }
    }
}

#[test]
fn a_run_without_a_checkpoint_begins_again_and_logs_it() {
    for ending in &ENDINGS {
        let run = Run::new();
        end(&run, ending, &["checkpoint=null"]);
        let log = restart(&run, ending, &["checkpoint=null"]);
        let begins = "a new run begins: the earlier one in this folder ";
        assert!(log.contains(begins) && log.contains(ending.reason), "{}: {log}", ending.reason);
        assert!(run.report()["resumed_from"].is_null());
    }
}

/// Stops the run after two steps by a signal. It has no checkpoint but that of the stop.
fn stop(run: &Run, arguments: &[&str]) {
    let arguments = [arguments, &["checkpoint=null"]].concat();
    let stopped = run.command("train", &arguments).env(TERMINATE, "step_computed:2").output().unwrap();
    assert_eq!(stopped.status.code(), Some(75), "{}", stderr(&stopped));
}

#[track_caller]
fn assert_resumed_from_stop(run: &Run, step: usize) {
    let resumed_from = run.report()["resumed_from"].to_string();
    let want = format!("stop_checkpoint/epoch_0_global_step_{step}\"");
    assert!(resumed_from.ends_with(&want), "{resumed_from}");
}

/// The checkpoint of the stop is older than the end.
#[test]
fn an_end_after_a_stop_replaces_the_checkpoint_of_the_stop_or_deletes_it_after_all_steps() {
    for ending in &ENDINGS {
        let run = Run::new();
        stop(&run, ending.arguments);
        end(&run, ending, &["checkpoint=null"]);
        let remains = fs::exists(run.path().join("run/stop_checkpoint")).unwrap();
        let is_complete = ending.reason == "all steps are done";
        assert_eq!(remains, !is_complete, "{}", ending.reason);
        let log = restart(&run, ending, &["checkpoint=null"]);
        match ending.next {
            _ if is_complete => assert!(log.contains("a new run begins"), "{log}"),
            // An earlier end than that of the data has a checkpoint of its step.
            NothingLeft(_) => {
                assert!(log.contains("nothing left to train"), "{log}");
                assert_resumed_from_stop(&run, ending.n_steps);
            }
            ContinuesFrom(step) => {
                assert!(!log.contains("nothing left to train") && !log.contains("a new run begins"), "{log}");
                let is_of_this_start = ending.arguments[0].starts_with("exit_iteration_this_run");
                assert_resumed_from_stop(&run, if is_of_this_start { 2 + step } else { step });
            }
        }
    }
}

#[test]
fn a_run_that_ended_early_after_a_stop_trains_on_with_a_higher_limit() {
    for (limit, higher, n_steps) in [
        (&STOPPING[..], &["early_stopping={patience: 3, min_delta: 100}", STOPPING[1]][..], 6),
        (&["exit_iteration=3"], &["exit_iteration=5"], 3),
    ] {
        let run = Run::new();
        stop(&run, limit);
        run.train_ok(&[limit, &["checkpoint=null"]].concat());
        run.train_ok(&[higher, &["checkpoint=null"]].concat());
        assert_resumed_from_stop(&run, n_steps);
        assert_eq!(run.losses().len(), n_steps + 2, "{limit:?}");
    }
}

/// The first step of a warm-up has the rate 0, and the run ends after it.
#[test]
fn a_run_without_a_rate_says_that_the_weights_do_not_change() {
    let warmup = ["scheduler.warmup_ratio=0.5", "train_iters=24"];
    let warning = "the learning rate is 0 in the 1 step until the run ends: the weights do not change";
    for (more, want) in [("exit_iteration=1", true), ("exit_iteration_this_run=2", false), ("seed=7", false)] {
        let output = Run::new().train(&[&warmup[..], &[more]].concat());
        assert_eq!(stderr(&output).contains(warning), want, "{more}: {}", stderr(&output));
    }
}

/// The start that failed has its own run.json.
#[test]
fn a_new_run_after_a_start_that_failed_is_logged() {
    let run = Run::new();
    run.train_ok(&["train_iters=2", "checkpoint=null"]);
    run.write("stop", "");
    let kill_switch = format!("kill_switch_path={}", run.path().join("stop").display());
    assert_eq!(run.train(&["train_iters=2", "checkpoint=null", &kill_switch]).status.code(), Some(1));
    let log = stderr(&run.train(&["train_iters=2", "checkpoint=null"]));
    assert!(log.contains("a new run begins: the earlier one in this folder has ended, and no checkpoint"), "{log}");
}

/// Every start finds a loss above the limit in its first step.
#[test]
fn a_run_that_the_loss_watchdog_ended_continues_from_its_newest_checkpoint() {
    const WATCHDOG: &str = "loss_watchdog={action: stop, max_loss: 1}";
    for (more, begins_again) in [("seed=7", false), ("checkpoint=null", true)] {
        let run = Run::new();
        run.train_ok(&["exit_iteration=3", more]);
        for start in 0..2 {
            let output = run.train(&[WATCHDOG, more]);
            assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
            let log = stderr(&output);
            assert_eq!(log.contains("a new run begins"), begins_again, "{log}");
            assert_eq!(log.contains("resumed after step 3"), !begins_again, "{log}");
            assert!(
                start == 0
                    || !begins_again
                    || log.contains("this folder ended (failed to train: the loss of step 1 is "),
                "{log}"
            );
        }
    }
}
