//! Waits for files and processes by events of the kernel, without polling intervals.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::{Errno, read, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Waits until `condition` holds. It is checked after each change of a file under `folder`, or under its parent while the
/// folder does not exist.
///
/// # Panics
/// If the condition does not hold within `limit`.
#[track_caller]
pub fn wait_for_files(folder: &Path, name: &str, limit: Duration, condition: impl Fn() -> bool) {
    let end = Instant::now() + limit;
    let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).expect("inotify is available");
    loop {
        let watched = if folder.is_dir() { folder } else { folder.parent().expect("the folder has a parent") };
        watch(&events, watched);
        if condition() {
            return;
        }
        assert!(is_readable_by(&events, end), "{name}: not within {limit:?}");
        while read(&events, &mut [0; 4096]).is_ok() {}
    }
}

/// Waits until all processes have exited; returns those that still run after `limit`.
///
/// # Panics
/// If the kernel refuses to watch a process.
pub fn wait_for_exit(pids: &[Pid], limit: Duration) -> Vec<Pid> {
    let end = Instant::now() + limit;
    pids.iter().copied().filter(|pid| !exits_by(*pid, end)).collect()
}

/// Adds a watch on `folder` and on every folder below; folders that are deleted meanwhile are skipped.
fn watch(events: &impl AsFd, folder: &Path) {
    let flags = WatchFlags::CREATE | WatchFlags::MODIFY | WatchFlags::MOVED_TO | WatchFlags::DELETE;
    let _ = inotify::add_watch(events, folder, flags);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            watch(events, &entry.path());
        }
    }
}

fn exits_by(pid: Pid, end: Instant) -> bool {
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => is_readable_by(&process, end),
        Err(Errno::SRCH) => true,
        Err(error) => panic!("failed to watch process {}: {error}", pid.as_raw_nonzero()),
    }
}

fn is_readable_by(file: &impl AsFd, end: Instant) -> bool {
    let left = end.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).expect("the time-out is of minutes");
    let mut files = [PollFd::new(file, PollFlags::IN)];
    retry_on_intr(|| poll(&mut files, Some(&timeout))).expect("files can be polled") > 0
}
