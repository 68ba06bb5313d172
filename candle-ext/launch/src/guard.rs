//! The launcher's end of the guard: a process that kills the workers' groups if the launcher dies without doing so.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

use crate::child::GUARD;

/// A running guard. It ends with this value.
#[derive(Debug)]
pub struct Guard(Child);

impl Guard {
    /// Starts the guard.
    pub fn start() -> io::Result<Self> {
        let mut command = own_program();
        command.arg(GUARD).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
        command.spawn().map(Self)
    }

    /// Tells it of a process group.
    pub fn watch(&mut self, group: Pid) -> io::Result<()> {
        self.tell('+', group)
    }

    /// Tells it that a process group has ended.
    pub fn forget(&mut self, group: Pid) -> io::Result<()> {
        self.tell('-', group)
    }

    fn tell(&mut self, sign: char, group: Pid) -> io::Result<()> {
        let pipe = self.0.stdin.as_mut().expect("the pipe was asked for at the start");
        pipe.write_all(format!("{sign}{}\n", group.as_raw_nonzero()).as_bytes())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// This program, even if its file was replaced meanwhile.
pub fn own_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("launch");
    command
}
