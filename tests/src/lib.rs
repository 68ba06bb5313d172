//! Tests of the whole system. This library finds files and waits for events; the tests are in `tests/`.

use std::io::{self, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

pub use wait::{wait_for_exit, wait_for_files};

mod wait;

/// Returns the folder of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the suite is a folder of the workspace")
}

/// Keeps the last of the `key=value` arguments with one key, since the trainer accepts each key once.
pub fn later_wins<T: AsRef<str>>(arguments: impl IntoIterator<Item = T>) -> Vec<String> {
    let key = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    let mut kept: Vec<String> = Vec::new();
    for argument in arguments {
        kept.retain(|earlier| key(earlier) != key(argument.as_ref()));
        kept.push(argument.as_ref().to_owned());
    }
    kept
}

/// Returns the path of a program of the workspace, which cargo builds into the parent folder of the tests.
///
/// # Panics
/// If it was not built.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of a running test is known");
    let folder = test.parent().and_then(Path::parent).expect("tests are in a folder of the profile's folder");
    let path = folder.join(name);
    assert!(path.is_file(), "failed to find {}: test the whole workspace, or build {name} first", path.display());
    path
}

/// Returns a host and a port at which no process listens. The host is a loopback address of this call alone: a port of
/// 127.0.0.1 may be given to another process before the test uses it.
///
/// # Panics
/// If the system has no free port.
pub fn unused_address() -> (String, u16) {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let [.., a, b] = std::process::id().to_be_bytes();
    let host = format!("127.{}.{a}.{b}", 64 + NEXT.fetch_add(1, Ordering::Relaxed) % 128);
    let listener = TcpListener::bind((host.as_str(), 0)).expect("a port of a loopback address is free");
    let port = listener.local_addr().expect("the listener has an address").port();
    (host, port)
}

/// Prints that a test is skipped because this machine lacks a program or a right. The test harness does not capture it.
pub fn report_skip(why: &str) {
    let _ = writeln!(io::stderr(), "skipped: {why}");
}

/// Reads a text file by its path from the root.
///
/// # Panics
/// If it cannot be read.
pub fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("failed to read {}: {error}", path.display()))
}

/// Lists the files that git tracks, by their paths from the root.
///
/// # Panics
/// If this is no git checkout, or git tracks no file.
pub fn tracked_files() -> Vec<PathBuf> {
    let output = Command::new("git").arg("ls-files").current_dir(root()).output().expect("git is installed");
    assert!(output.status.success(), "failed to list files: {}", String::from_utf8_lossy(&output.stderr));
    let listing = String::from_utf8(output.stdout).expect("paths are UTF-8");
    assert!(!listing.is_empty(), "git tracks no files here: `git add` them first");
    listing.lines().map(PathBuf::from).filter(|path| root().join(path).is_file()).collect()
}

/// Lists the Rust files under a folder, by their paths from the root.
///
/// # Panics
/// If this is no git checkout, or there are no Rust files.
pub fn rust_files(under: &str) -> Vec<PathBuf> {
    let files: Vec<_> = tracked_files()
        .into_iter()
        .filter(|path| path.starts_with(under) && path.extension().is_some_and(|e| e == "rs"))
        .collect();
    assert!(!files.is_empty(), "no Rust files under {under}");
    files
}

/// Returns a source file's text with comments and the unit tests at its end blanked; line numbers stay.
pub fn code_of(path: &Path) -> String {
    let text = read(path);
    let mut in_tests = false;
    let mut code = String::with_capacity(text.len());
    for line in text.lines() {
        in_tests |= line.starts_with("#[cfg(test)]");
        let end = if in_tests { 0 } else { line.find("//").unwrap_or(line.len()) };
        code.push_str(&line[..end]);
        code.push('\n');
    }
    code
}
