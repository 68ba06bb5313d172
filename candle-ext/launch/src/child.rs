//! The internal subcommands of `launch`: the worker process before it executes the user's program, and the guard
//! process that outlives a killed launcher.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, BufRead};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, kill_process_group, set_parent_process_death_signal, setsid,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::console::log;

/// The first argument of a worker process. The launcher's pid and the user's program follow.
pub const WORKER: &str = "__worker";
/// The first argument of the guard process.
pub const GUARD: &str = "__guard";

/// Runs an internal subcommand, if the arguments name one.
pub fn run(arguments: &[OsString]) -> Option<ExitCode> {
    match arguments.first()?.to_str()? {
        WORKER => Some(become_worker(&arguments[1..])),
        GUARD => Some(run_guard()),
        _ => None,
    }
}

/// Prepares this process and executes the user's program.
///
/// The process starts a session of its own, so that only the launcher receives signals of the terminal. It requests
/// SIGKILL from the kernel at the launcher's death. It stops itself until the guard watches it. The session and the
/// death signal survive the exec.
fn become_worker(arguments: &[OsString]) -> ExitCode {
    let [launcher, program, arguments_after @ ..] = arguments else { return ExitCode::from(NOT_STARTED) };
    let prepared = setsid().and_then(|_| set_parent_process_death_signal(Some(Signal::KILL)));
    // If the launcher died before the death signal was set, no process would continue this one after SIGSTOP.
    let is_orphan =
        getppid().is_none_or(|parent| Some(parent.as_raw_nonzero().to_string().as_str()) != launcher.to_str());
    if is_orphan {
        return ExitCode::from(NOT_STARTED);
    }
    if let Err(error) = prepared.and_then(|()| kill_process(getpid(), Signal::STOP)) {
        log(&format!("failed to prepare {}: {error}", program.display()));
        return ExitCode::from(NOT_STARTED);
    }
    let error = Command::new(program).args(arguments_after).exec();
    log(&format!("failed to start {}: {error}", program.display()));
    ExitCode::from(if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_STARTED })
}

/// A shell's exit code for a program that does not exist.
const NOT_FOUND: u8 = 127;
/// A shell's exit code for a program that cannot be executed.
const NOT_STARTED: u8 = 126;

/// Reads the process groups of running workers from stdin, `+PID` and `-PID`, and kills the remaining ones at its end.
///
/// The pipe closes when the launcher dies, whatever the cause. The kernel's death signal reaches the workers only; the
/// guard kills their children too.
fn run_guard() -> ExitCode {
    let _ = setsid();
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        // A scheduler signals every process of the job. The guard must survive the launcher.
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let mut alive = BTreeSet::new();
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        match (line.get(..1), line.get(1..).and_then(|number| number.parse::<i32>().ok())) {
            (Some("+"), Some(pid)) => alive.insert(pid),
            (_, Some(pid)) => alive.remove(&pid),
            _ => false,
        };
    }
    for pid in alive.into_iter().filter_map(Pid::from_raw) {
        let _ = kill_process_group(pid, Signal::KILL);
    }
    ExitCode::SUCCESS
}
