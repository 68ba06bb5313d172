//! One worker: a process in a session of its own, whose end is noticed at once and whose output is carried away.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use crate::child::WORKER;
use crate::event::Event;
use crate::exit::ExitReason;
use crate::guard::{Guard, own_program};
use crate::output::{Outlets, Pump, Tail};
use crate::streams::Stream;
use candlewick_comm::rank_env::Variables;

/// What is started.
#[derive(Clone, Debug)]
pub struct Start {
    /// Its number on this machine.
    pub local_rank: usize,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Variables beside those that it inherits.
    pub variables: Variables,
    /// What stands before its lines.
    pub prefix: String,
}

/// A worker that was started.
#[derive(Debug)]
pub struct Worker {
    pid: Pid,
    child: Child,
    pumps: Vec<JoinHandle<()>>,
    /// The pumps read on while this is open.
    is_over: Option<PipeWriter>,
    tail: Tail,
}

impl Worker {
    /// Starts a worker. `guard` knows of it before its first instruction, and `events` hears of its end.
    ///
    /// The thread that calls this must live as long as the worker: the kernel ends the worker with it.
    pub fn start(start: &Start, outlets: &Outlets, guard: &mut Guard, events: Sender<Event>) -> io::Result<Self> {
        let tail = Tail::default();
        let outlet = |stream, tail| outlets.outlet(start.local_rank, stream, &start.prefix, tail);
        let (out, err) = (outlet(Stream::Out, Tail::default())?, outlet(Stream::Err, tail.clone())?);
        let mut command = own_program();
        command.arg(WORKER).arg(std::process::id().to_string()).args(&start.command);
        // One worker may be fed through a pipe; several would tear the input apart.
        let stdin = if start.local_rank == 0 { Stdio::inherit() } else { Stdio::null() };
        command.envs(&start.variables).stdin(stdin).stdout(out.stdio).stderr(err.stdio);
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let (over, is_over) = io::pipe()?;
        let over = Arc::new(over);
        let pumps =
            [start_pump(out.pump, child.stdout.take(), &over), start_pump(err.pump, child.stderr.take(), &over)];
        wait_for_stop(pid);
        let watched = guard.watch(pid).and_then(|()| Ok(kill_process(pid, Signal::CONT)?));
        if let Err(error) = watched {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        notice_end(pid, start.local_rank, events);
        Ok(Self { pid, child, pumps: pumps.into_iter().flatten().collect(), is_over: Some(is_over), tail })
    }

    /// Returns its process, which is its process group too.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends an ending signal to the worker and the processes it started. A stopped process is continued, so that it
    /// handles the signal now and not after its grace period, as systemd does.
    pub fn signal(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            // One that is gone needs no signal.
            let _ = kill_process_group(self.pid, signal);
            let _ = kill_process_group(self.pid, Signal::CONT);
        }
    }

    /// Sends a signal to the worker alone: what it started may not know what is meant.
    pub fn notify(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Ends the processes that the worker left behind. Until [`Worker::reap`] the system gives its pid to no other process.
    pub fn end_leftovers(&self) {
        self.signal(Signal::KILL.as_raw());
    }

    /// Returns the last lines of its stderr, unless they went to a file only.
    pub fn last_lines(&self) -> Vec<String> {
        self.tail.lines()
    }

    /// Waits for its last lines to be carried away, and lets the kernel forget it. A console may take them slowly; when
    /// `is_interrupted` says so, the rest is given up.
    pub fn reap(&mut self, is_interrupted: &dyn Fn() -> bool) {
        self.is_over = None;
        while self.pumps.iter().any(|pump| !pump.is_finished()) && !is_interrupted() {
            thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.wait();
    }
}

fn start_pump(
    pump: Option<Pump>,
    pipe: Option<impl io::Read + AsFd + Send + 'static>,
    over: &Arc<PipeReader>,
) -> Option<JoinHandle<()>> {
    Some(pump?.start(pipe?, Arc::clone(over)))
}

/// A worker stops when it has left the launcher's session. One that ends instead is noticed later.
fn wait_for_stop(pid: Pid) {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
}

/// Waits on a thread, and leaves the process to be waited for by [`Worker::reap`].
fn notice_end(pid: Pid, local_rank: usize, events: Sender<Event>) {
    thread::spawn(move || {
        let ended = loop {
            match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(Some(status)) => break ExitReason::of(status),
                Ok(None) | Err(_) => break None,
            }
        };
        // Nobody listens after the attempt is over.
        let _ = events.send(Event::Exited { local_rank, ended: ended.unwrap_or(ExitReason::Code(-1)) });
    });
}
