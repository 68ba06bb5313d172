//! Interactive shells of Slurm.

use std::fs::File;

use rustix::process::{getpgrp, getsid};

/// Returns true if an interactive shell started this process: it has a terminal, and a process group other than the session's.
///
/// A shell with job control gives each command a group of its own. Tasks of `srun` have no terminal, and the one of
/// `srun --pty` leads its session, with its scripts in the same group.
pub(super) fn has_interactive_shell() -> bool {
    let session = getsid(None).ok();
    session.is_some_and(|session| session != getpgrp()) && File::open("/dev/tty").is_ok()
}
