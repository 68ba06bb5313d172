//! Interactive shells of Slurm.

use std::fs::{self, File};

use rustix::process::{Pid, getpgrp, getppid, getsid};

/// Names of the shells with job control.
const SHELLS: [&str; 7] = ["bash", "zsh", "fish", "sh", "dash", "ksh", "tcsh"];

/// Returns true if this process is a command of an interactive shell: it has a terminal, its parent is a shell that leads the
/// session, and its process group is another than the shell's.
///
/// A shell with job control gives each command a group of its own. Tasks of `srun` have no terminal, and the one of
/// `srun --pty` leads its session, with its scripts in the same group. A wrapper such as `timeout` makes a group, too, but is
/// no shell.
pub(super) fn has_interactive_shell() -> bool {
    let session = getsid(None).ok();
    session.is_some_and(|session| session != getpgrp() && getppid() == Some(session) && is_shell(session))
        && File::open("/dev/tty").is_ok()
}

fn is_shell(process: Pid) -> bool {
    let name = fs::read_to_string(format!("/proc/{}/comm", process.as_raw_nonzero()));
    name.is_ok_and(|name| SHELLS.contains(&name.trim_end()))
}
