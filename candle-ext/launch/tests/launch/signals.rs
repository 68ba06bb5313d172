//! Signals to the launcher: forwarding, waiting for the workers, and the exit code.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use crate::launcher::{
    AWAIT_SIGNALS, Launcher, LauncherOutput, START_CHILD, command, create_gate, is_alive, open_gate, script_arguments,
    start, start_script, temp_folder, wait_for_exit, wait_for_file,
};

/// Starts two workers that run `script` and wait for signals. Returns when both are ready.
fn start_ready(folder: &Path, script: &str) -> Launcher {
    let launcher = start_script(2, &[], &ready_script(folder, script));
    wait_for_both(folder);
    launcher
}

fn ready_script(folder: &Path, script: &str) -> String {
    format!("cd {}; {START_CHILD}; {script}; echo $$ > $RANK; {AWAIT_SIGNALS}", folder.display())
}

fn wait_for_both(folder: &Path) {
    ["0", "1"].iter().for_each(|rank| drop(wait_for_file(&folder.join(rank))));
}

#[track_caller]
fn check(script: &str, signals: &[Signal], code: i32) -> LauncherOutput {
    let (_folder, path) = temp_folder();
    let launcher = start_ready(&path, script);
    signals.iter().for_each(|signal| launcher.signal(*signal));
    let output = launcher.wait();
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
    // Rank 0 exits after rank 1 has received SIGTERM. Rank 1 runs until the second SIGUSR1. The first shows that the
    // launcher has handled the exit of rank 0.
    let script = format!(
        "cd {}; {START_CHILD}; trap 'echo received; echo > received$RANK; [ $RANK = 0 ] && : < end && exit 75' TERM
         trap 'n=1$n; echo > notified$n' USR1; echo $$ > $RANK; until [ \"$n\" = 11 ]; do wait; done; exit 75",
        path.display()
    );
    create_gate(&path.join("end"));
    let launcher = start_script(2, &[], &script);
    wait_for_both(&path);
    launcher.signal(Signal::TERM);
    wait_for_file(&path.join("received1"));
    let _end = open_gate(&path.join("end"));
    wait_for_exit(&wait_for_file(&path.join("0")));
    launcher.signal(Signal::USR1);
    wait_for_file(&path.join("notified1"));
    launcher.signal(Signal::USR1);
    let output = launcher.wait();
    assert_eq!(output.exits_with(75).sorted_stdout(), ["[0]: received", "[1]: received"]);
}

#[test]
fn the_received_signal_is_forwarded() {
    for (signal, code) in [(Signal::INT, 130), (Signal::HUP, 129), (Signal::QUIT, 131), (Signal::TERM, 143)] {
        let (_folder, path) = temp_folder();
        let own = command(&script_arguments(2, &[], &ready_script(&path, ":")));
        // Ignored signals are inherited, and nohup ignores SIGHUP.
        let mut with_default_signals = std::process::Command::new("env");
        with_default_signals.env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        with_default_signals.arg("--default-signal").arg(own.get_program()).args(own.get_args());
        let launcher = start(&mut with_default_signals);
        wait_for_both(&path);
        launcher.signal(signal);
        launcher.wait().exits_with(code);
    }
}

#[test]
fn a_second_interrupt_kills() {
    let (_folder, path) = temp_folder();
    let launcher = start_ready(&path, "trap 'echo received > received$RANK' INT");
    launcher.signal(Signal::INT);
    ["received0", "received1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    launcher.signal(Signal::INT);
    launcher.wait().exits_with(130);
}

#[test]
fn sigusr1_is_forwarded_and_ends_nothing() {
    let (_folder, path) = temp_folder();
    let launcher = start_ready(&path, "trap 'echo received > received$RANK' USR1; trap 'exit 75' TERM");
    launcher.signal(Signal::USR1);
    ["received0", "received1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    launcher.signal(Signal::TERM);
    launcher.wait().exits_with(75);
}

#[test]
fn no_restart_follows_a_stop_signal() {
    let (_folder, path) = temp_folder();
    let script = ready_script(&path, "trap 'exit 4' TERM");
    let launcher = start_script(2, &["--max-restarts", "5"], &script);
    wait_for_both(&path);
    launcher.signal(Signal::TERM);
    let output = launcher.wait();
    output.exits_with(4);
    assert!(!output.stderr.contains("restarting"), "{}", output.stderr);
}

#[test]
fn sighup_is_ignored_under_nohup() {
    let (_folder, path) = temp_folder();
    let script = ready_script(&path, "trap 'exit 75' TERM");
    let own = command(&script_arguments(2, &[], &script));
    let arguments: Vec<_> = own.get_args().map(|word| word.to_str().unwrap()).collect();
    let mut nohup = std::process::Command::new("sh");
    nohup.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(own.get_program()).args(arguments);
    let launcher = start(&mut nohup);
    wait_for_both(&path);
    launcher.signal(Signal::HUP);
    launcher.signal(Signal::TERM);
    launcher.wait().exits_with(75);
}

#[test]
fn a_forwarded_signal_is_delivered_again_after_a_restart() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "cd {}; n=$TORCHELASTIC_RESTART_COUNT; {START_CHILD}; echo > started$n.$RANK; : < handler$n
         trap 'echo received > received$n.$RANK; [ $n = 1 ] && exit 75' USR1; echo $$ > $n.$RANK; {AWAIT_SIGNALS}",
        path.display()
    );
    let wait_for = |names: [&str; 2]| names.map(|name| wait_for_file(&path.join(name)));
    ["handler0", "handler1"].iter().for_each(|gate| create_gate(&path.join(gate)));
    let launcher = start_script(2, &["--max-restarts", "1"], &script);
    let _handler0 = open_gate(&path.join("handler0"));
    let [pid, _] = wait_for(["0.0", "0.1"]);
    launcher.signal(Signal::USR1);
    wait_for(["received0.0", "received0.1"]);
    kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    // A worker without a handler would die of SIGUSR1.
    wait_for(["started1.0", "started1.1"]);
    let _handler1 = open_gate(&path.join("handler1"));
    launcher.wait().exits_with(75);
    wait_for(["received1.0", "received1.1"]);
}

#[test]
fn sigusr1_is_forwarded_to_workers_but_not_to_their_children() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "cd {}; sleep infinity & echo $! > child$RANK; trap 'echo received > received$RANK' USR1; trap 'exit 75' TERM
         echo > $RANK; {AWAIT_SIGNALS}",
        path.display()
    );
    let launcher = start_script(2, &[], &script);
    wait_for_both(&path);
    launcher.signal(Signal::USR1);
    ["received0", "received1"].iter().for_each(|file| drop(wait_for_file(&path.join(file))));
    let children = ["child0", "child1"].map(|file| wait_for_file(&path.join(file)));
    assert!(children.iter().all(|pid| is_alive(pid)));
    launcher.signal(Signal::TERM);
    launcher.wait().exits_with(75);
}

/// A shell starts a background job with SIGINT ignored.
#[test]
fn sigint_is_handled_by_a_launcher_in_the_background() {
    let (_folder, path) = temp_folder();
    let script = ready_script(&path, "trap 'exit 75' TERM INT");
    let own = command(&script_arguments(2, &[], &script));
    let arguments: Vec<_> = own.get_args().map(|word| word.to_str().unwrap()).collect();
    let mut background = std::process::Command::new("sh");
    background.args(["-c", "trap '' INT; exec \"$0\" \"$@\""]).arg(own.get_program()).args(arguments);
    let launcher = start(&mut background);
    wait_for_both(&path);
    launcher.signal(Signal::INT);
    let output = launcher.wait();
    assert!([Some(75), Some(130)].contains(&output.exit_code), "{output:?}");
}
