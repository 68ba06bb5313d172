//! Signals to the launcher: passed on, waited for, and answered by a code that says what came of them.

use std::path::Path;

use rustix::process::Signal;

use crate::launcher::{
    Launcher, LauncherOutput, command, is_alive, script_arguments, start, start_script, temp_folder, wait_for_file,
};

/// Starts two workers that say when they are ready, and then do `script`.
fn start_ready(temp_folder: &Path, script: &str) -> Launcher {
    let running = start_script(2, &[], &ready_script(temp_folder, script));
    wait_for_both(temp_folder);
    running
}

fn ready_script(temp_folder: &Path, script: &str) -> String {
    let turn = "while :; do sleep 0.01; done";
    format!("cd {}; {script}; echo $$ > $RANK.part; mv $RANK.part $RANK; {turn}", temp_folder.display())
}

fn wait_for_both(temp_folder: &Path) {
    ["0", "1"].iter().for_each(|rank| drop(wait_for_file(&temp_folder.join(rank))));
}

#[track_caller]
fn check(script: &str, signals: &[Signal], code: i32) -> LauncherOutput {
    let (_folder, path) = temp_folder();
    let running = start_ready(&path, script);
    signals.iter().for_each(|signal| running.signal(*signal));
    let output = running.wait();
    output.exits_with(code);
    output
}

#[test]
fn every_worker_may_save_after_sigterm() {
    let save = "trap 'echo saved; exit 75' TERM";
    let output = check(save, &[Signal::TERM], 75);
    assert_eq!(output.sorted_stdout(), ["[0]: saved", "[1]: saved"]);
    assert!(!output.stderr.contains("failed"), "{}", output.stderr);
}

#[test]
fn a_slow_worker_receives_the_signal_once() {
    let (_folder, path) = temp_folder();
    // Rank 1 listens for a while after rank 0 has ended.
    let script = format!(
        "cd {}; trap 'echo asked; asked=1' TERM; echo $$ > $RANK.part; mv $RANK.part $RANK
         while [ -z \"$asked\" ]; do sleep 0.01; done; [ $RANK = 0 ] && exit 75
         while grep -q '^State:.[RS]' /proc/$(cat 0)/status; do sleep 0.01; done
         i=0; while [ $i -lt 20 ]; do sleep 0.01; i=$((i+1)); done; exit 75",
        path.display()
    );
    let running = start_script(2, &[], &script);
    wait_for_both(&path);
    running.signal(Signal::TERM);
    let output = running.wait();
    assert_eq!(output.exits_with(75).sorted_stdout(), ["[0]: asked", "[1]: asked"]);
}

#[test]
fn the_received_signal_is_forwarded() {
    for (signal, code) in [(Signal::INT, 130), (Signal::HUP, 129), (Signal::QUIT, 131), (Signal::TERM, 143)] {
        let (_folder, path) = temp_folder();
        let own = command(&script_arguments(2, &[], &ready_script(&path, ":")));
        // Processes inherit ignored signals, and nohup ignores SIGHUP.
        let mut with_default_signals = std::process::Command::new("env");
        with_default_signals.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        with_default_signals.arg("--default-signal").arg(own.get_program()).args(own.get_args());
        let running = start(&mut with_default_signals);
        wait_for_both(&path);
        running.signal(signal);
        running.wait().exits_with(code);
    }
}

#[test]
fn a_second_interrupt_kills() {
    let (_folder, path) = temp_folder();
    let running = start_ready(&path, "trap 'echo heard > heard$RANK' INT");
    running.signal(Signal::INT);
    ["heard0", "heard1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    running.signal(Signal::INT);
    running.wait().exits_with(130);
}

#[test]
fn sigusr1_is_forwarded_and_ends_nothing() {
    let (_folder, path) = temp_folder();
    let running = start_ready(&path, "trap 'echo heard > heard$RANK' USR1; trap 'exit 75' TERM");
    running.signal(Signal::USR1);
    ["heard0", "heard1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    running.signal(Signal::TERM);
    running.wait().exits_with(75);
}

#[test]
fn no_restart_follows_a_stop_signal() {
    let (_folder, path) = temp_folder();
    let script = ready_script(&path, "trap 'exit 4' TERM");
    let running = start_script(2, &["--max-restarts", "5"], &script);
    wait_for_both(&path);
    running.signal(Signal::TERM);
    let output = running.wait();
    output.exits_with(4);
    assert!(!output.stderr.contains("again"), "{}", output.stderr);
}

#[test]
fn sighup_is_ignored_under_nohup() {
    let (_folder, path) = temp_folder();
    let script = ready_script(&path, "trap 'exit 75' TERM");
    let own = command(&script_arguments(2, &[], &script));
    let arguments: Vec<_> = own.get_args().map(|word| word.to_str().unwrap()).collect();
    let mut nohup = std::process::Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(own.get_program()).args(arguments);
    let running = start(&mut nohup);
    wait_for_both(&path);
    running.signal(Signal::HUP);
    running.signal(Signal::TERM);
    running.wait().exits_with(75);
}

#[test]
fn a_forwarded_signal_is_delivered_again_after_a_restart() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "cd {}; n=$TORCHELASTIC_RESTART_COUNT; sleep 0.1; trap 'echo heard > heard$n.$RANK; [ $n = 1 ] && exit 75' USR1
         echo > $n.$RANK; while [ $n = 1 ] || [ ! -e fail ]; do sleep 0.01; done; exit 1",
        path.display()
    );
    let running = start_script(2, &["--max-restarts", "1"], &script);
    ["0.0", "0.1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    running.signal(Signal::USR1);
    ["heard0.0", "heard0.1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    std::fs::write(path.join("fail"), "").unwrap();
    running.wait().exits_with(75);
    ["heard1.0", "heard1.1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
}

#[test]
fn sigusr1_is_forwarded_to_workers_but_not_to_their_children() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "cd {}; sleep 1000 & echo $! > child$RANK; trap 'echo heard > heard$RANK' USR1; trap 'exit 75' TERM
         echo > $RANK; while :; do sleep 0.01; done",
        path.display()
    );
    let running = start_script(2, &[], &script);
    wait_for_both(&path);
    running.signal(Signal::USR1);
    ["heard0", "heard1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    let children = ["child0", "child1"].map(|file| wait_for_file(&path.join(file)));
    assert!(children.iter().all(|pid| is_alive(pid)));
    running.signal(Signal::TERM);
    running.wait().exits_with(75);
}

/// A shell ignores SIGINT for what a script starts by `&`.
#[test]
fn sigint_is_handled_by_a_launcher_in_the_background() {
    let (_folder, path) = temp_folder();
    let script = ready_script(&path, "trap 'exit 75' TERM INT");
    let own = command(&script_arguments(2, &[], &script));
    let arguments: Vec<_> = own.get_args().map(|word| word.to_str().unwrap()).collect();
    let mut background = std::process::Command::new("sh");
    background.args(["-c", "trap '' INT; exec \"$0\" \"$@\""]).arg(own.get_program()).args(arguments);
    let running = start(&mut background);
    wait_for_both(&path);
    running.signal(Signal::INT);
    let output = running.wait();
    assert!([Some(75), Some(130)].contains(&output.exit_code), "{output:?}");
}
