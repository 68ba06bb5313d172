//! Runs a Python program that nobody has read: in a child without our environment, in an empty folder, without network
//! where the kernel allows to take it away, with limits on time, memory and files. It can still read what the user can.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What a program may take, as in the package evaluate.
const SECONDS: u64 = 3;
const BYTES: u64 = 4 << 30;

/// Sets the limits, runs the program, and answers with the word that it got if the program came to its end.
const RUNNER: &str = r#"
import os, resource, signal, sys
word = sys.stdin.readline().strip()
program = sys.stdin.read()
answer = os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
for n in (0, 1, 2):
    os.dup2(null, n)
seconds, size = int(sys.argv[1]), int(sys.argv[2])
for kind, most in (("CPU", seconds + 1), ("AS", size), ("FSIZE", 16 << 20), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (most, most))
try:
    import ctypes
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)
except Exception:
    pass
signal.setitimer(signal.ITIMER_REAL, seconds)
try:
    exec(compile(program, "program", "exec"), {"__name__": "program"})
except BaseException:
    os._exit(1)
os.write(answer, word.encode())
os._exit(0)
"#;

/// Whether a program runs to its end without an exception. An error is one of ours, not of the program.
pub(super) fn passes(program: &str) -> Result<bool, String> {
    let folder = tempfile::tempdir().map_err(|error| format!("failed to make a folder for a program: {error}"))?;
    let word = format!("passed-{:016x}", nonce());
    let mut child = Command::new("python3")
        .args(["-I", "-c", RUNNER, &SECONDS.to_string(), &BYTES.to_string()])
        .current_dir(folder.path())
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .map_err(|error| format!("failed to start python3, which runs the programs of the model: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A child that is gone already has failed.
        let _ = write!(stdin, "{word}\n{program}");
    }
    wait(&mut child)?;
    let mut answer = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        let _ = stdout.read_to_string(&mut answer);
    }
    Ok(answer == word)
}

/// Waits for the child's end, and ends it with all its children when time is over.
fn wait(child: &mut Child) -> Result<(), String> {
    let deadline = Instant::now() + Duration::from_secs(SECONDS + 2);
    let failed = |error: std::io::Error| format!("failed to wait for a program: {error}");
    while child.try_wait().map_err(failed)?.is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    if let Some(group) = rustix::process::Pid::from_raw(child.id() as i32) {
        // What the program left behind; nothing, as a rule.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    child.wait().map(|_| ()).map_err(failed)
}

/// A number that a program cannot guess.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_what_comes_to_its_end_passes() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        assert!(passes("x = 1\nassert x == 1").unwrap());
        assert!(!passes("assert False").unwrap());
        assert!(!passes("import sys\nsys.exit(0)").unwrap());
        assert!(!passes("import os\nos._exit(0)").unwrap());
        assert!(!passes("def f(:").unwrap());
        assert!(!passes("print('passed')\nraise SystemExit").unwrap());
    }

    #[test]
    fn limits_hold() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let began = Instant::now();
        assert!(!passes("while True: pass").unwrap());
        assert!(!passes("x = bytearray(8 << 30)").unwrap());
        assert!(!passes("import time\ntime.sleep(60)").unwrap());
        assert!(passes("import os\nassert 'HOME' not in os.environ").unwrap());
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
