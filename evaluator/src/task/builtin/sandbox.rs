//! Runs a model-written Python program in a child process without network access where the kernel allows it.
//!
//! The child has only `PATH` in its environment, and an empty working folder. Time, memory, file sizes and the number of
//! processes are limited. The child can read every file that the user can.
//!
//! `sandbox.py` starts the program, ends its remaining processes and reports success. A program that inspects its own
//! process can fake that report.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit in seconds and memory limit in bytes, as in the package evaluate.
const SECONDS: u64 = 3;
const BYTES: u64 = 4 << 30;
/// Maximum number of additional processes and threads of the user.
const PROCESSES: u64 = 64;
/// Extra time of the supervisor: its start, and the end of the program's remaining processes.
const GRACE: Duration = Duration::from_secs(5);

/// Supervisor that starts the program and reports its success on stdout.
const SUPERVISOR: &str = include_str!("sandbox.py");
/// Exit code of the supervisor for a failed program.
const FAILED: i32 = 10;

/// Runs a program and returns true if it ends without an exception. An error means that the sandbox itself failed.
pub(super) fn program_succeeds(program: &str) -> Result<bool, String> {
    let folder = tempfile::tempdir()
        .map_err(|error| format!("failed to create a folder for a model-written program: {error}"))?;
    let word = format!("passed-{:016x}", nonce());
    let mut child = Command::new("python3")
        .args(["-I", "-c", SUPERVISOR])
        .args([SECONDS, BYTES, PROCESSES].map(|limit| limit.to_string()))
        .current_dir(folder.path())
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("failed to start python3, which runs model-written programs: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A write error means that the child has already failed.
        let _ = write!(stdin, "{word}\n{program}");
    }
    let status = wait(&mut child)?;
    match status.code() {
        Some(0) => Ok(child.stdout.take().is_some_and(|stdout| read(stdout) == word.as_bytes())),
        // The supervisor or the program ended by a signal.
        Some(FAILED) | None => Ok(false),
        Some(code) => Err(format!(
            "failed to prepare a process for a program of the model (exit code {code} of python3); the limits of this shell \
             (ulimit -a) may be too low"
        )),
    }
}

/// Reads the supervisor's report without waiting for processes that keep the pipe open.
fn read(stdout: ChildStdout) -> Vec<u8> {
    let (send, answer) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.take(64).read_to_end(&mut bytes);
        let _ = send.send(bytes);
    });
    answer.recv_timeout(Duration::from_secs(1)).unwrap_or_default()
}

/// Waits for the supervisor, and kills its process group after the time limit.
fn wait(child: &mut Child) -> Result<ExitStatus, String> {
    let deadline = Instant::now() + Duration::from_secs(SECONDS) + GRACE;
    let failed = |error: std::io::Error| format!("failed to wait for a program: {error}");
    while child.try_wait().map_err(failed)?.is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
        // The group is usually empty already.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    child.wait().map_err(failed)
}

/// Returns a random number, which the program cannot guess.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_that_finish_pass() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        assert!(program_succeeds("x = 1\nassert x == 1").unwrap());
        assert!(!program_succeeds("assert False").unwrap());
        assert!(!program_succeeds("import sys\nsys.exit(0)").unwrap());
        assert!(!program_succeeds("import os\nos._exit(0)").unwrap());
        assert!(!program_succeeds("def f(:").unwrap());
        assert!(!program_succeeds("print('passed')\nraise SystemExit").unwrap());
    }

    #[test]
    fn limits_hold() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let began = Instant::now();
        assert!(!program_succeeds("while True: pass").unwrap());
        assert!(!program_succeeds("x = bytearray(8 << 30)").unwrap());
        assert!(!program_succeeds("import time\ntime.sleep(60)").unwrap());
        assert!(program_succeeds("import os\nassert 'HOME' not in os.environ").unwrap());
        assert!(program_succeeds("import resource as r\nassert r.getrlimit(r.RLIMIT_NPROC)[0] < 1 << 20").unwrap());
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_program_does_not_find_the_word_among_the_supervisors_names() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let forged = "import __main__, os\nos.write(__main__.answer, __main__.word.encode())\nos._exit(0)";
        assert!(!program_succeeds(forged).unwrap());
        assert!(!program_succeeds("import os\nos.write(1, b'passed')\nos.write(2, b'passed')\nos._exit(0)").unwrap());
    }

    /// A process in a session of its own is not in the process group.
    #[test]
    fn child_processes_of_a_program_end_with_it() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let escape = format!(
            "import os, socket, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        \
             s = socket.socket(socket.AF_UNIX)\n        s.connect({path:?})\n        time.sleep(3600)\n    os._exit(0)\n\
             os.wait()\ntime.sleep(0.5)"
        );
        let began = Instant::now();
        assert!(program_succeeds(&escape).unwrap());
        assert!(began.elapsed() < Duration::from_secs(SECONDS) + 2 * GRACE);
        let (mut left_behind, _) = listener.accept().unwrap();
        left_behind.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(left_behind.read(&mut [0]).unwrap(), 0);
    }
}
