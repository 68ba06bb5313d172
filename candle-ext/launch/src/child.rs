//! The two small programs that `launch` also is: a worker before it becomes the user's program, and the guard that
//! outlives a killed launcher. Both are started by the launcher with a word that no user types.

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

/// The first argument of a worker that is not yet the user's program; then come the launcher's pid and the program.
pub const WORKER: &str = "__worker";
/// The first argument of the guard.
pub const GUARD: &str = "__guard";

/// Runs one of the two, if the arguments ask for it.
pub fn run(arguments: &[OsString]) -> Option<ExitCode> {
    match arguments.first()?.to_str()? {
        WORKER => Some(become_worker(&arguments[1..])),
        GUARD => Some(run_guard()),
        _ => None,
    }
}

/// Leaves the launcher's session, so that its terminal reaches the worker through the launcher only, asks to die with
/// the launcher, stops until the guard knows of it, and becomes the program. What is asked of the kernel here survives
/// the exec.
fn become_worker(arguments: &[OsString]) -> ExitCode {
    let [launcher, program, arguments_after @ ..] = arguments else { return ExitCode::from(NOT_STARTED) };
    let prepared = setsid().and_then(|_| set_parent_process_death_signal(Some(Signal::KILL)));
    // The launcher may have died before it could be watched: nobody would wake what stops now.
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

/// What a shell returns for a program that is not there, and for one that cannot be executed.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

/// Reads which process groups are alive, `+PID` and `-PID`, and kills those that are left when the launcher is gone:
/// its end of the pipe closes however it died. The kernel's signal reaches the workers alone, this their children too.
fn run_guard() -> ExitCode {
    let _ = setsid();
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        // Who ends the whole job ends the launcher too, and the guard is then needed most.
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
