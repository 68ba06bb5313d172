//! Failed workers: exit codes, reports, restarts, and the end of all processes.

use std::fs;
use std::net::TcpListener;

use rustix::process::Signal;

use crate::launcher::{
    AWAIT_SIGNALS, START_CHILD, command, create_gate, is_alive, launch, launch_script, open_gate, script_arguments,
    start, start_script, temp_folder, wait_for_exit, wait_for_file,
};

#[test]
fn the_exit_code_is_that_of_the_first_failed_worker() {
    launch_script(2, &[], "exit 0").exits_with(0);
    launch_script(2, &[], "[ $RANK = 0 ] && exec sleep infinity; exit 42").exits_with(42);
    launch_script(2, &[], "[ $RANK = 0 ] && exec sleep infinity; kill -SEGV $$").exits_with(128 + 11);
    launch_script(1, &[], "exit 75").exits_with(75);
}

#[test]
fn the_report_has_rank_pid_exit_reason_and_stderr_tail() {
    let (_folder, logs) = temp_folder();
    let script = "echo thinking >&2; [ $RANK = 1 ] && { echo out of luck >&2; kill -9 $$; }; exec sleep infinity";
    let output = launch_script(3, &["--log-dir", logs.to_str().unwrap(), "--tee", "2"], script);
    output.exits_with(137).stderr_contains(&[
        "launch: rank 1 failed first\n",
        "  ended by signal 9 (SIGKILL): not sent by this launcher; the kernel sends it when memory runs out (see dmesg)\n",
        ", local rank 1\n",
        "  attempt  0, after ",
        "  stderr   thinking\n           out of luck\n",
        "/attempt_0/1\n",
        "  others   rank 0 was stopped: signal 15 (SIGTERM)\n           rank 2 was stopped: signal 15 (SIGTERM)\n",
    ]);
    assert_eq!(output.stderr.matches("failed first").count(), 1);
}

#[test]
fn the_report_has_the_stderr_tail_of_a_redirected_worker() {
    launch_script(1, &["--redirects", "3"], "echo in the file >&2; exit 1")
        .exits_with(1)
        .stderr_contains(&["stderr   in the file\n"]);
}

#[test]
fn an_error_file_is_reported_and_forwarded() {
    let (_folder, path) = temp_folder();
    let json =
        r#"{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "line 7", "timestamp": "9"}}}"#;
    let script = format!("printf '%s' '{json}' > $TORCHELASTIC_ERROR_FILE; exit 3");
    let own = path.join("own.json");
    let output = start(command(&script_arguments(1, &[], &script)).env("TORCHELASTIC_ERROR_FILE", &own)).wait();
    output.exits_with(3).stderr_contains(&["  error    ValueError: bad\n  where    line 7\n"]);
    let forwarded: serde_json::Value = serde_json::from_str(&fs::read_to_string(own).unwrap()).unwrap();
    assert_eq!(forwarded["message"]["errorCode"], 3);
}

#[test]
fn the_earliest_error_file_is_the_root_cause() {
    let (_folder, path) = temp_folder();
    let script = format!(
        r#"echo "{{\"message\": \"too bad\", \"timestamp\": $((20 - RANK))}}" > $TORCHELASTIC_ERROR_FILE
        [ $RANK = 0 ] && : < {0}/ready && exit 4
        {START_CHILD}; trap 'exit 5' TERM; exec 9<>{0}/ready; {AWAIT_SIGNALS}"#,
        path.display()
    );
    create_gate(&path.join("ready"));
    launch_script(2, &[], &script)
        .exits_with(5)
        .stderr_contains(&["rank 1 failed first", "rank 0 failed too: exit code 4"]);
}

#[test]
fn a_suspended_worker_is_continued_to_handle_sigterm() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "[ $RANK = 1 ] && : < {0}/ready && exit 1
         {START_CHILD}; trap 'exit 9' TERM; exec 9<>{0}/ready; kill -STOP $$; {AWAIT_SIGNALS}",
        path.display()
    );
    create_gate(&path.join("ready"));
    let output = launch_script(2, &["--shutdown-timeout", "1000"], &script);
    output.exits_with(1).stderr_contains(&["rank 0 failed too: exit code 9"]);
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "[ $RANK = 1 ] && : < {0}/ready && exit 1
         trap '' TERM; echo $$ > {0}/pid; exec 9<>{0}/ready; exec sleep infinity",
        path.display()
    );
    create_gate(&path.join("ready"));
    let output = launch_script(2, &["--shutdown-timeout", "0.2"], &script);
    output.exits_with(1).stderr_contains(&["rank 0 was stopped: signal 9 (SIGKILL)"]);
    assert!(!is_alive(&wait_for_file(&path.join("pid"))));
}

#[test]
fn child_processes_of_workers_end_with_them() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "exec 9<>{0}/ready$RANK; sleep infinity > /dev/null 2>&1 & echo $! > {0}/$RANK
         : < {0}/ready$((1 - RANK)); exit $RANK",
        path.display()
    );
    ["ready0", "ready1"].iter().for_each(|gate| create_gate(&path.join(gate)));
    launch_script(2, &[], &script).exits_with(1);
    for rank in ["0", "1"] {
        wait_for_exit(&wait_for_file(&path.join(rank)));
    }
}

#[test]
fn a_killed_launcher_leaves_no_orphans() {
    let (_folder, path) = temp_folder();
    let script = format!("sleep infinity & echo $! > {0}/child$RANK; echo $$ > {0}/worker$RANK; wait", path.display());
    let launcher = start_script(2, &[], &script);
    let names = ["worker0", "worker1", "child0", "child1"];
    let pids = names.map(|name| wait_for_file(&path.join(name)));
    assert!(pids.iter().all(|pid| is_alive(pid)));
    launcher.signal(Signal::KILL);
    pids.iter().for_each(|pid| wait_for_exit(pid));
    assert_eq!(launcher.wait().exit_code, None);
}

#[test]
fn workers_die_with_the_launcher_even_without_the_guard() {
    let (_folder, path) = temp_folder();
    let script = format!("echo $$ > {}/$RANK; exec sleep infinity", path.display());
    let launcher = start_script(2, &[], &script);
    let pids = ["0", "1"].map(|rank| wait_for_file(&path.join(rank)));
    rustix::process::kill_process(launcher.guard(), Signal::KILL).unwrap();
    launcher.signal(Signal::KILL);
    pids.iter().for_each(|pid| wait_for_exit(pid));
}

#[test]
fn all_workers_restart_after_a_failure() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS >> {0}/$RANK
         [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0
         [ $RANK = 1 ] && : < {0}/started && exit 9; exec 9<>{0}/started; exec sleep infinity",
        path.display()
    );
    create_gate(&path.join("started"));
    let logs = path.join("logs");
    let output = launch_script(2, &["--max-restarts", "3", "--log-dir", logs.to_str().unwrap(), "--tee", "3"], &script);
    output
        .exits_with(0)
        .stderr_contains(&["rank 1 failed first", "launch: restarting the worker group: restart 1 of 3"]);
    for rank in ["0", "1"] {
        assert_eq!(fs::read_to_string(path.join(rank)).unwrap(), "0 of 3\n1 of 3\n");
    }
    let run = fs::read_dir(logs).unwrap().next().unwrap().unwrap().path();
    assert!(run.join("attempt_0/1/stdout.log").exists() && run.join("attempt_1/1/stdout.log").exists());
}

#[test]
fn max_restarts_bounds_the_restarts() {
    let output = launch_script(1, &["--max-restarts", "2"], "exit 8");
    output.exits_with(8);
    assert_eq!(output.stderr.matches("rank 0 failed first").count(), 3);
}

#[test]
fn a_port_in_use_is_an_error_before_workers_start() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = launch(&["--master-port", port.as_str(), "sh", "-c", "echo started"]);
    output.exits_with(1).stderr_contains(&["the port is in use", &port, "--standalone"]);
    assert_eq!(output.stdout, "");
}

#[test]
fn a_killed_guard_does_not_affect_the_run() {
    let (_folder, path) = temp_folder();
    let script = format!("echo > {0}/$RANK; : < {0}/end", path.display());
    create_gate(&path.join("end"));
    let launcher = start_script(2, &[], &script);
    ["0", "1"].iter().for_each(|rank| drop(wait_for_file(&path.join(rank))));
    let guard = launcher.guard();
    rustix::process::kill_process(guard, Signal::KILL).unwrap();
    wait_for_exit(&guard.as_raw_pid().to_string());
    let _gate = open_gate(&path.join("end"));
    launcher.wait().exits_with(0);
}

/// Otherwise the process would stop itself and no launcher would continue it.
#[test]
fn a_worker_whose_launcher_died_exits_at_once() {
    launch(&["__worker", "1", "true"]).exits_with(126);
}

#[test]
fn a_process_outside_the_process_group_does_not_delay_the_launcher() {
    let (_folder, path) = temp_folder();
    let script = format!(
        "setsid sh -c 'echo $$ > {0}/$RANK; exec 9<>{0}/started$RANK; exec sleep infinity' &
         : < {0}/started$RANK; echo done",
        path.display()
    );
    (0..8).for_each(|rank| create_gate(&path.join(format!("started{rank}"))));
    let started = std::time::Instant::now();
    let output = launch_script(8, &[], &script);
    // An earlier version waited five seconds for each pipe of each worker.
    let took = started.elapsed();
    for rank in 0..8 {
        let pid = wait_for_file(&path.join(rank.to_string())).parse().unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    assert_eq!(output.exits_with(0).stdout.lines().count(), 8);
    assert!(took.as_secs() < 30, "{took:?}");
}

#[test]
fn an_error_file_without_an_object_is_forwarded() {
    let (_folder, path) = temp_folder();
    let script = "echo '[1]' > $TORCHELASTIC_ERROR_FILE; exit 3";
    let own = path.join("own.json");
    let output = start(command(&script_arguments(1, &[], script)).env("TORCHELASTIC_ERROR_FILE", &own)).wait();
    output.exits_with(3).stderr_contains(&["rank 0 failed first"]);
    assert_eq!(fs::read_to_string(own).unwrap(), "[1]");
}

#[test]
fn an_error_file_is_not_forwarded_after_a_successful_restart() {
    let (_folder, path) = temp_folder();
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; echo '{}' > $TORCHELASTIC_ERROR_FILE; exit 3";
    let own = path.join("own.json");
    let arguments = script_arguments(1, &["--max-restarts", "1"], script);
    start(command(&arguments).env("TORCHELASTIC_ERROR_FILE", &own)).wait().exits_with(0);
    assert!(!own.exists());
}

#[test]
fn a_closed_stderr_does_not_change_the_exit_code() {
    for (arguments, code) in [(script_arguments(1, &[], "exit 3"), 3), (vec!["no-such-program".to_owned()], 2)] {
        let mut launcher = command(&arguments).stderr(std::process::Stdio::piped()).spawn().unwrap();
        drop(launcher.stderr.take());
        assert_eq!(launcher.wait().unwrap().code(), Some(code));
    }
}
