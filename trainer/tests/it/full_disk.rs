//! Disks that are too small, or that fill up during a run. Each is a tmpfs in a mount namespace of the run.

use std::fs;
use std::io::{self, Write};
use std::process::{Command, Output};

use crate::support::{Run, stderr};

/// Runs a shell script whose arguments are the command of a run. The folder `disk` is a disk of this size. Returns `None` if
/// this machine cannot mount one.
fn on_disk(run: &Run, size: &str, script: &str, arguments: &[&str]) -> Option<Output> {
    fs::create_dir(run.path().join("disk")).unwrap();
    let train = run.command("train", arguments);
    let script = format!("mount -t tmpfs -o size={size} none disk || exit 1\n: >mounted\n{script}");
    let mut unshare = Command::new("unshare");
    unshare.args(["--map-root-user", "--mount", "sh", "-c", &script, "sh"]);
    unshare.arg(train.get_program()).args(train.get_args()).current_dir(run.path());
    unshare.envs(train.get_envs().filter_map(|(name, value)| Some((name, value?))));
    match unshare.output() {
        // A failed run has the exit codes of `unshare` and `mount`.
        Ok(output) if run.path().join("mounted").exists() => Some(output),
        _ => {
            drop(writeln!(io::stderr(), "skipped: this machine cannot mount a disk in a namespace"));
            None
        }
    }
}

#[test]
fn a_disk_without_space_for_the_checkpoints_is_refused_before_the_first_step() {
    let run = Run::new();
    let arguments = ["train_iters=2", "checkpoint.0.output_dir=disk/saves"];
    let Some(output) = on_disk(&run, "100k", "exec \"$@\"", &arguments) else { return };
    let log = stderr(&output);
    assert_eq!(output.status.code(), Some(6), "{log}");
    assert!(log.contains("disk/saves") && log.contains("free") && !log.contains("Train iter"), "{log}");
}

/// A run whose disk fills up after a step.
#[cfg(debug_assertions)]
struct FilledUp<'a> {
    arguments: &'a [&'a str],
    /// The failpoint at which the disk fills up, with its step.
    filled_at: &'a str,
    /// Parts of the error.
    error: &'a [&'a str],
    /// The checkpoint that the same command continues from.
    resumed_from: &'a str,
}

/// Fills the disk while the run is paused, and starts the run again with free space.
#[cfg(debug_assertions)]
const FILL: &str = r#"
    "$@" 2>first.log & pid=$!
    until grep -q '^State:.[TtZ]' /proc/$pid/status; do :; done
    cat /dev/zero >disk/filler 2>cat.log
    kill -CONT $pid
    wait $pid; echo $? >first.code
    rm disk/filler
    unset CANDLEWICK_TEST_PAUSE_AT
    "$@" 2>second.log; echo $? >second.code
    cp disk/run/run.json disk/run/model/global_step_*/model.safetensors .
    ls disk/run >folders
    exit 0
"#;

#[cfg(debug_assertions)]
#[track_caller]
fn check_filled_up(case: &FilledUp<'_>) {
    let FilledUp { arguments, filled_at, error, resumed_from } = case;
    let arguments = &[arguments, &["output_dir=disk/run", "train_iters=12"][..]].concat();
    let run = Run::new();
    let script = format!("export CANDLEWICK_TEST_PAUSE_AT={filled_at}\n{FILL}");
    let Some(output) = on_disk(&run, "8m", &script, arguments) else { return };
    let read = |name: &str| {
        fs::read_to_string(run.path().join(name)).unwrap_or_else(|error| panic!("{name}: {error}: {}", stderr(&output)))
    };
    let [first, second] = ["first", "second"].map(|name| (read(&format!("{name}.code")), read(&format!("{name}.log"))));
    assert_eq!(first.0, "6\n", "{}", first.1);
    for part in *error {
        assert!(first.1.contains(part), "no {part:?} in:\n{}", first.1);
    }
    assert_eq!(second.0, "0\n", "{}", second.1);
    let report: serde_json::Value = serde_json::from_str(&read("run.json")).unwrap();
    assert!(
        report["resumed_from"].as_str().is_some_and(|dir| dir.ends_with(resumed_from)),
        "{}",
        report["resumed_from"]
    );
    assert!(!read("folders").contains("stop_checkpoint"), "the checkpoint of the failed run remains");

    let whole = Run::new();
    whole.train_ok(arguments);
    let weights = fs::read(whole.path().join("disk/run/model/global_step_12/model.safetensors")).unwrap();
    assert!(fs::read(run.path().join("model.safetensors")).unwrap() == weights, "the weights differ");
}

/// The export fails. The space of the checkpoint is reserved since the start.
#[cfg(debug_assertions)]
#[test]
fn a_run_without_checkpoints_whose_disk_fills_up_continues_from_its_last_step() {
    check_filled_up(&FilledUp {
        arguments: &["checkpoint=null"],
        filled_at: "step_computed:7",
        error: &[
            "failed to export the model; a checkpoint is saved in ",
            "the same command continues from it",
            "No space left",
        ],
        resumed_from: "run/stop_checkpoint/epoch_0_global_step_12",
    });
}

#[cfg(debug_assertions)]
#[test]
fn a_run_whose_disk_fills_up_before_a_checkpoint_continues_from_the_one_before() {
    const SHARDED: [&str; 2] =
        ["checkpoint.0.output_dir=disk/run/checkpoints", "checkpoint.1.output_dir=disk/run/model"];
    let asynchronous = &[SHARDED[0], SHARDED[1], "checkpoint.0.async_save=true"];
    for arguments in [&SHARDED[..], asynchronous] {
        check_filled_up(&FilledUp {
            arguments,
            // A thread writes this checkpoint during later steps.
            filled_at: "checkpoint_pruned:5",
            error: &[
                "epoch_0_global_step_10: no space left on the disk",
                "earlier ones are intact",
                "the same command then continues",
            ],
            resumed_from: "run/checkpoints/epoch_0_global_step_5",
        });
    }
}
