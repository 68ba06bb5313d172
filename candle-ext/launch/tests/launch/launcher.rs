//! Starts `launch` and waits for what it does: never for a time, only for an event, and not for ever.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A finished run.
#[derive(Debug)]
pub(crate) struct LauncherOutput {
    pub(crate) exit_code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A run that goes on.
pub(crate) struct Launcher {
    child: Child,
    output_readers: Option<[thread::JoinHandle<String>; 2]>,
}

/// A test that fails leaves nothing behind: the guard ends the workers of a launcher that is killed.
impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `launch` with few variables of its own.
pub(crate) fn command<S: AsRef<OsStr>>(arguments: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_launch"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap()).args(arguments).stdin(Stdio::null());
    command
}

pub(crate) fn launch<S: AsRef<OsStr>>(arguments: &[S]) -> LauncherOutput {
    start(&mut command(arguments)).wait()
}

/// Runs a script of the shell as `n` workers of one node, with flags before it.
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
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its guard: the child that is neither a worker nor has become one.
    pub(crate) fn guard(&self) -> rustix::process::Pid {
        let parent = format!("PPid:\t{}\n", self.child.id());
        let is_guard = |pid: &i32| {
            let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            read("status").contains(&parent) && read("cmdline").contains("__guard")
        };
        let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let pid = names.filter_map(|name| name.to_str()?.parse().ok()).find(is_guard);
        rustix::process::Pid::from_raw(pid.unwrap()).unwrap()
    }

    #[track_caller]
    pub(crate) fn wait(mut self) -> LauncherOutput {
        let mut status = None;
        wait_until("the launcher's end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let [stdout, stderr] = self.output_readers.take().unwrap().map(|reader| reader.join().unwrap());
        LauncherOutput { exit_code: status.unwrap().code(), stdout, stderr }
    }
}

impl LauncherOutput {
    /// The lines of stdout, sorted: between workers there is no order.
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

/// Looks again and again, and gives up after a time that only a hanging program needs.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
pub(crate) fn wait_for_file(path: &Path) -> String {
    let mut text = String::new();
    wait_until(&path.display().to_string(), || {
        text = fs::read_to_string(path).unwrap_or_default();
        text.ends_with('\n')
    });
    text.trim().to_owned()
}

/// A process that nobody has waited for is gone all the same.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// A port that no other test takes: below those that the system gives out, and beginning elsewhere in each process.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let base = 16000 + (std::process::id() % 64) as u16 * 256;
    let mut ports = (0..256).map(|_| base + NEXT.fetch_add(1, Ordering::Relaxed) % 256);
    ports.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).unwrap()
}

/// A folder with the path of a file in it, for scripts.
pub(crate) fn temp_folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    (folder, path)
}
