//! Starts `launch` and waits for its events, each with a timeout.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candlewick_comm::store::{Client, StoreSecret};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, inotify, mkfifoat};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// The output of a finished launcher.
#[derive(Debug)]
pub(crate) struct LauncherOutput {
    pub(crate) exit_code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A running launcher.
pub(crate) struct Launcher {
    child: Child,
    output_readers: Option<[thread::JoinHandle<String>; 2]>,
}

/// Kills the launcher of a failed test. Its guard kills the workers.
impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a command of `launch` with an almost empty environment.
pub(crate) fn command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn launch<S: AsRef<OsStr>>(arguments: &[S]) -> LauncherOutput {
    start(&mut command(arguments)).wait()
}

/// Runs a shell script as `n` workers of one node, with additional flags.
pub(crate) fn launch_script(n: usize, flags: &[&str], script: &str) -> LauncherOutput {
    launch(&script_arguments(n, flags, script))
}

pub(crate) fn start_script(n: usize, flags: &[&str], script: &str) -> Launcher {
    start(&mut command(&script_arguments(n, flags, script)))
}

pub(crate) fn script_arguments(n: usize, flags: &[&str], script: &str) -> Vec<String> {
    let n = n.to_string();
    let words = ["--standalone", "--nproc-per-node", &n].into_iter().chain(flags.iter().copied());
    words.chain(["--", "sh", "-c", script]).map(str::to_owned).collect()
}

pub(crate) fn start(command: &mut Command) -> Launcher {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let output_readers = [read_all(child.stdout.take().unwrap()), read_all(child.stderr.take().unwrap())];
    Launcher { child, output_readers: Some(output_readers) }
}

fn read_all(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

impl Launcher {
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Returns the process ID of the guard.
    pub(crate) fn guard(&self) -> Pid {
        let parent = format!("PPid:\t{}\n", self.child.id());
        let is_guard = |pid: &i32| {
            let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            read("status").contains(&parent) && read("cmdline").contains("__guard")
        };
        let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let pid = names.filter_map(|name| name.to_str()?.parse().ok()).find(is_guard);
        Pid::from_raw(pid.unwrap()).unwrap()
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> LauncherOutput {
        wait_for_exit(&self.child.id().to_string());
        let status = self.child.wait().unwrap();
        let [stdout, stderr] = self.output_readers.take().unwrap().map(|reader| reader.join().unwrap());
        LauncherOutput { exit_code: status.code(), stdout, stderr }
    }
}

impl LauncherOutput {
    /// Returns the sorted lines of stdout. Lines of different workers have no order.
    pub(crate) fn sorted_stdout(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }

    #[track_caller]
    pub(crate) fn stderr_contains(&self, words: &[&str]) -> &Self {
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is not in:\n{}", self.stderr);
        }
        self
    }

    #[track_caller]
    pub(crate) fn exits_with(&self, code: i32) -> &Self {
        assert_eq!(self.exit_code, Some(code), "{}\n{}", self.stdout, self.stderr);
        self
    }
}

/// The longest wait of a test. Only a program that hangs needs it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

/// Waits until a file ends with a newline, and returns its trimmed content.
#[track_caller]
pub(crate) fn wait_for_file(path: &Path) -> String {
    let events = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    let flags = inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::MOVED_TO;
    inotify::add_watch(&events, path.parent().unwrap(), flags).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let text = fs::read_to_string(path).unwrap_or_default();
        if text.ends_with('\n') {
            return text.trim().to_owned();
        }
        wait_readable(events.as_fd(), deadline, &path.display().to_string());
        rustix::io::read(&events, &mut [0; 4096]).unwrap();
    }
}

/// Waits until a process has exited. It may be a zombie.
#[track_caller]
pub(crate) fn wait_for_exit(pid: &str) {
    let pid = Pid::from_raw(pid.parse().unwrap()).unwrap();
    match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => {}
        process => wait_readable(process.unwrap().as_fd(), Instant::now() + TIMEOUT, "the exit of a process"),
    }
}

#[track_caller]
fn wait_readable(fd: BorrowedFd, deadline: Instant, what: &str) {
    let left = deadline.saturating_duration_since(Instant::now());
    let n_ready = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&left.try_into().unwrap()));
    assert!(n_ready.unwrap() > 0, "timed out waiting for {what}");
}

/// Waits until a counter of a store is positive.
#[track_caller]
pub(crate) fn wait_for_count(store: &Client, key: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while store.add(key, 0).unwrap() <= 0 {
        assert!(Instant::now() < deadline, "timed out waiting for {key}");
    }
}

/// Secret of the stores of several nodes.
pub(crate) const STORE_SECRET: &str = "secret-of-tests";

/// Connects to the store of a launcher with [`STORE_SECRET`], once it has started.
pub(crate) fn connect_to_store(port: u16) -> Client {
    Client::connect_with_secret("127.0.0.1", port, TIMEOUT, Some(StoreSecret::new(STORE_SECRET))).unwrap()
}

/// Creates a FIFO as a gate: `: < PATH` blocks a script until a process opens the gate.
pub(crate) fn create_gate(path: &Path) {
    mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
}

/// Opens a gate for as long as the result lives. In a script, `exec 9<>PATH` does the same.
#[must_use]
pub(crate) fn open_gate(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// Shell commands that start a child which ignores stop signals.
pub(crate) const START_CHILD: &str = "trap '' TERM INT HUP QUIT; sleep infinity & trap - TERM INT HUP QUIT";

/// A shell command that waits for a child for ever. Traps run at once.
pub(crate) const AWAIT_SIGNALS: &str = "while :; do wait; done";

/// Returns whether a process runs. A zombie does not.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Returns a free port below the ephemeral range. No other test process returns it.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static BLOCK: LazyLock<(u16, File)> = LazyLock::new(lock_ports);
    let base = 16000 + BLOCK.0 * 256;
    let mut ports = (0..256).map(|_| base + NEXT.fetch_add(1, Ordering::Relaxed) % 256);
    ports.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).unwrap()
}

/// Returns the first block of 256 ports that no running test process has, and the file that locks it.
fn lock_ports() -> (u16, File) {
    let lock = |block: u16| {
        let file = File::create(std::env::temp_dir().join(format!("candlewick-test-ports-{block}"))).ok()?;
        file.try_lock().ok()?;
        Some((block, file))
    };
    (0..64).find_map(lock).unwrap()
}

/// Returns a temporary directory and its path.
pub(crate) fn temp_folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    (folder, path)
}
