//! The launcher's handle of the guard: a process that kills the workers' process groups if the launcher is killed.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

use crate::child::GUARD;

/// A running guard process and the process groups that it watches. Dropping the handle ends it.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    process_groups: BTreeSet<i32>,
}

impl Guard {
    /// Starts the guard process.
    pub fn start() -> io::Result<Self> {
        Ok(Self { child: spawn()?, process_groups: BTreeSet::new() })
    }

    /// Adds a process group. A guard that was killed meanwhile is started again.
    pub fn watch(&mut self, group: Pid) -> io::Result<()> {
        self.process_groups.insert(group.as_raw_pid());
        if self.send('+', group.as_raw_pid()).is_ok() {
            return Ok(());
        }
        let _ = self.child.wait();
        self.child = spawn()?;
        self.process_groups.clone().into_iter().try_for_each(|group| self.send('+', group))
    }

    /// Removes a process group that has ended.
    pub fn unwatch(&mut self, group: Pid) {
        self.process_groups.remove(&group.as_raw_pid());
        // A guard that was killed watches no group.
        let _ = self.send('-', group.as_raw_pid());
    }

    fn send(&mut self, sign: char, group: i32) -> io::Result<()> {
        let pipe = self.child.stdin.as_mut().expect("spawned with a piped stdin");
        pipe.write_all(format!("{sign}{group}\n").as_bytes())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn spawn() -> io::Result<Child> {
    let mut command = own_program();
    command.arg(GUARD).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    command.spawn()
}

/// Returns a command of this executable, even if its file was replaced meanwhile.
pub fn own_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch");
    command
}
