//! Runs a model-written Python program in a child process that can write only to its own folder.
//!
//! The child has only `PATH` in its environment, and an empty working folder. Time, memory, file sizes and the number of
//! processes are limited. Namespaces take the network away, and mount other folders read-only; Landlock forbids writes
//! outside of the folder. One of the last two is required, unless the user waives it. The child can read every file that
//! the user can.
//!
//! `sandbox.py` starts the program, ends its remaining processes and reports success. A program that inspects its own
//! process can fake that report.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::unsafe_code::UnsafeCodePolicy;

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
/// Exit code of the supervisor if the kernel cannot confine a program.
const UNCONFINED: i32 = 11;

/// Returns an error if `policy` does not allow to run programs on this machine.
pub(crate) fn check(policy: UnsafeCodePolicy) -> Result<(), String> {
    program_succeeds("", policy).map(drop)
}

/// Runs a program and returns true if it ends without an exception. An error means that `policy` does not allow the
/// program, or that the sandbox itself failed.
pub(super) fn program_succeeds(program: &str, policy: UnsafeCodePolicy) -> Result<bool, String> {
    supervise(SUPERVISOR, program, policy)
}

fn supervise(supervisor: &str, program: &str, policy: UnsafeCodePolicy) -> Result<bool, String> {
    let confinement = match policy {
        UnsafeCodePolicy::Refuse => return Err(UnsafeCodePolicy::REFUSED.to_owned()),
        UnsafeCodePolicy::RunConfined => "confined",
        UnsafeCodePolicy::RunUnconfined => "any",
    };
    let folder = tempfile::tempdir()
        .map_err(|error| format!("failed to create a folder for a model-written program: {error}"))?;
    let word = format!("passed-{:016x}", nonce());
    let mut child = Command::new("python3")
        .args(["-I", "-c", supervisor])
        .args([SECONDS, BYTES, PROCESSES].map(|limit| limit.to_string()))
        .arg(confinement)
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
        Some(0) => Ok(child.stdout.take().is_some_and(|stdout| read(stdout, word.len()) == word.as_bytes())),
        // The supervisor or the program ended by a signal.
        Some(FAILED) | None => Ok(false),
        Some(UNCONFINED) => Err(UnsafeCodePolicy::UNCONFINED.to_owned()),
        Some(code) => Err(format!(
            "failed to prepare a process for a program of the model (exit code {code} of python3); the limits of this shell \
             (ulimit -a) may be too low"
        )),
    }
}

/// Reads `length` bytes of the supervisor's report without waiting for processes that keep the pipe open.
fn read(stdout: ChildStdout, length: usize) -> Vec<u8> {
    let (send, answer) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stdout.take(length as u64).read_to_end(&mut bytes);
        let _ = send.send(bytes);
    });
    answer.recv_timeout(GRACE).unwrap_or_default()
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

    fn succeeds(program: &str) -> Result<bool, String> {
        program_succeeds(program, UnsafeCodePolicy::RunConfined)
    }

    /// Returns the supervisor for a kernel without one of the two mechanisms.
    fn without(what: &str) -> String {
        let namespaces = ["if enter_namespaces()", "if False"];
        let landlock = ["LANDLOCK_VERSION) < 3", "LANDLOCK_VERSION) < 1000"];
        let replaced = |text: String, [from, to]: [&str; 2]| {
            assert!(text.contains(from));
            text.replace(from, to)
        };
        match what {
            "namespaces" => replaced(SUPERVISOR.to_owned(), namespaces),
            "landlock" => replaced(SUPERVISOR.to_owned(), landlock),
            _ => replaced(replaced(SUPERVISOR.to_owned(), namespaces), landlock),
        }
    }

    #[test]
    fn only_programs_that_finish_pass() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        assert!(succeeds("x = 1\nassert x == 1").unwrap());
        assert!(!succeeds("assert False").unwrap());
        assert!(!succeeds("import sys\nsys.exit(0)").unwrap());
        assert!(!succeeds("import os\nos._exit(0)").unwrap());
        assert!(!succeeds("def f(:").unwrap());
        assert!(!succeeds("print('passed')\nraise SystemExit").unwrap());
    }

    #[test]
    fn limits_hold() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let began = Instant::now();
        assert!(!succeeds("while True: pass").unwrap());
        assert!(!succeeds("x = bytearray(8 << 30)").unwrap());
        assert!(!succeeds("import time\ntime.sleep(60)").unwrap());
        assert!(succeeds("import os\nassert 'HOME' not in os.environ").unwrap());
        assert!(succeeds("import resource as r\nassert r.getrlimit(r.RLIMIT_NPROC)[0] < 1 << 20").unwrap());
        // One of the programs would sleep for a minute.
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_report_is_read_from_a_pipe_that_stays_open() {
        let mut child =
            Command::new("sh").args(["-c", "printf word; exec sleep 3600"]).stdout(Stdio::piped()).spawn().unwrap();
        let report = read(child.stdout.take().unwrap(), 4);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(report, b"word");
    }

    #[test]
    fn a_program_does_not_find_the_word_among_the_supervisors_names() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let forged = "import __main__, os\nos.write(__main__.answer, __main__.word.encode())\nos._exit(0)";
        assert!(!succeeds(forged).unwrap());
        assert!(!succeeds("import os\nos.write(1, b'passed')\nos.write(2, b'passed')\nos._exit(0)").unwrap());
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
            "import os, socket, time\nconnected, ready = os.pipe()\nif os.fork() == 0:\n    os.setsid()\n    \
             if os.fork() == 0:\n        s = socket.socket(socket.AF_UNIX)\n        s.connect({path:?})\n        \
             os.write(ready, b'+')\n        time.sleep(3600)\n    os._exit(0)\nos.wait()\nos.read(connected, 1)"
        );
        let began = Instant::now();
        assert!(succeeds(&escape).unwrap());
        assert!(began.elapsed() < Duration::from_secs(60), "it waited for a process that sleeps for an hour");
        let (mut left_behind, _) = listener.accept().unwrap();
        left_behind.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(left_behind.read(&mut [0]).unwrap(), 0);
    }

    /// Each operation on FILE outside of the working folder fails, and the program continues.
    const OUTSIDE: &str = r#"
import os
def fails(operation, *arguments):
    try:
        operation(*arguments)
    except OSError:
        return
    raise SystemExit("not refused")
for operation, *arguments in [
    (open, FILE, "w"), (open, FILE, "a"), (open, FILE, "r+"), (os.unlink, FILE), (os.truncate, FILE, 0),
    (os.rename, FILE, FILE + "2"), (os.rename, FILE, "mine"), (os.link, FILE, "link"), (os.rmdir, FILE + ".d"),
    (os.mkdir, FILE + "2"), (os.symlink, "x", FILE + "2"), (os.mkfifo, FILE + "2"), (open, FILE + "2", "w"),
]:
    fails(operation, *arguments)
os.symlink(FILE, "symlink")
fails(open, "symlink", "w")
assert open(FILE).read() == "precious"
"#;
    const ATTRIBUTES: &str = "fails(os.chmod, FILE, 0)\nfails(os.utime, FILE)\n";
    const INSIDE: &str = r#"
import os, subprocess, tempfile
os.mkdir("a"); os.mkdir("b")
open("a/x", "w").write("text")
os.rename("a/x", "b/x"); os.truncate("b/x", 1); os.chmod("b/x", 0o600); os.unlink("b/x"); os.rmdir("b")
with tempfile.NamedTemporaryFile() as file:
    file.write(b"text")
open("/dev/null", "w").write("text")
subprocess.run(["sh", "-c", "echo text > shell && cat shell > /dev/null"], check=True)
"#;
    const SEMAPHORE: &str = "import multiprocessing\nmultiprocessing.Semaphore(1).acquire()\n";
    /// Undoes the mounts, as far as it can, and writes to FILE.
    const ESCAPE: &str = r#"
import ctypes, struct
libc = ctypes.CDLL(None)
libc.unshare(0x10020000)
libc.mount(None, b"/", None, 0x5020, None)
libc.syscall(442, -100, b"/", 0x8000, struct.pack("4Q", 0, 1, 0, 0), ctypes.c_size_t(32))
open(FILE, "w").write("mine")
"#;

    #[test]
    fn a_program_writes_to_its_own_folder_only() {
        if Command::new("python3").arg("-V").output().is_err() || check(UnsafeCodePolicy::RunConfined).is_err() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        std::fs::create_dir(folder.path().join("file.d")).unwrap();
        let run = |supervisor: &str, program: &[&str]| {
            let program = format!("FILE = {file:?}\n{}", program.concat());
            supervise(supervisor, &program, UnsafeCodePolicy::RunConfined)
        };
        let whole = SUPERVISOR.to_owned();
        for (supervisor, outside, inside) in [
            (whole, [OUTSIDE, ATTRIBUTES], [INSIDE, SEMAPHORE]),
            (without("landlock"), [OUTSIDE, ATTRIBUTES], [INSIDE, SEMAPHORE]),
            (without("namespaces"), [OUTSIDE, ""], [INSIDE, ""]),
        ] {
            let outside = run(&supervisor, &outside);
            if outside.as_ref().is_err_and(|problem| problem == UnsafeCodePolicy::UNCONFINED) {
                // This kernel has the other mechanism only.
                continue;
            }
            assert_eq!(outside, Ok(true), "{supervisor}");
            assert_eq!(run(&supervisor, &inside), Ok(true), "{supervisor}");
            assert_eq!(run(&supervisor, &[ESCAPE]), Ok(false), "{supervisor}");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        }
    }

    #[test]
    fn a_program_that_cannot_be_confined_is_refused() {
        if Command::new("python3").arg("-V").output().is_err() {
            return;
        }
        let run = |policy| supervise(&without("both"), "x = 1", policy);
        assert!(run(UnsafeCodePolicy::RunConfined).unwrap_err().contains("--allow-unconfined-code"));
        assert_eq!(run(UnsafeCodePolicy::RunUnconfined), Ok(true));
        assert!(run(UnsafeCodePolicy::Refuse).unwrap_err().contains("--confirm-run-unsafe-code"));
    }
}
