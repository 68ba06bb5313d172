//! A worker process: it has a session of its own, one thread waits for its exit, and others read its output.

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
use crate::output::{LineTail, OutputReader, WorkerOutputs};
use crate::streams::StdStream;
use candlewick_comm::rank_env::Variables;

/// The specification of a worker process.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    /// Local rank.
    pub local_rank: usize,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Environment variables in addition to the inherited ones.
    pub variables: Variables,
    /// Prefix of its output lines.
    pub prefix: String,
}

/// A started worker process.
#[derive(Debug)]
pub struct WorkerProcess {
    pid: Pid,
    child: Child,
    readers: Vec<JoinHandle<()>>,
    /// Write end of the drain pipe: closing it makes the readers finish.
    drain_tx: Option<PipeWriter>,
    tail: LineTail,
}

impl WorkerProcess {
    /// Starts a worker. The guard watches it before the program runs. Its exit is sent to `events`.
    ///
    /// The calling thread must outlive the worker: the kernel kills the worker when that thread ends.
    pub fn start(
        spec: &WorkerSpec,
        outputs: &WorkerOutputs,
        guard: &mut Guard,
        events: Sender<Event>,
    ) -> io::Result<Self> {
        let tail = LineTail::default();
        let open_stream = |stream, tail| outputs.open_stream(spec.local_rank, stream, &spec.prefix, tail);
        let (out, err) =
            (open_stream(StdStream::Out, LineTail::default())?, open_stream(StdStream::Err, tail.clone())?);
        let mut command = own_program();
        command.arg(WORKER).arg(std::process::id().to_string()).args(&spec.command);
        // Only one worker inherits stdin: several readers would split the input.
        let stdin = if spec.local_rank == 0 { Stdio::inherit() } else { Stdio::null() };
        command.envs(&spec.variables).stdin(stdin).stdout(out.stdio).stderr(err.stdio);
        let mut child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let (drain_rx, drain_tx) = io::pipe()?;
        let drain_rx = Arc::new(drain_rx);
        let readers = [
            start_reader(out.reader, child.stdout.take(), &drain_rx),
            start_reader(err.reader, child.stderr.take(), &drain_rx),
        ];
        wait_for_stop(pid);
        let watched = guard.watch(pid).and_then(|()| Ok(kill_process(pid, Signal::CONT)?));
        if let Err(error) = watched {
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
        watch_exit(pid, spec.local_rank, events);
        Ok(Self { pid, child, readers: readers.into_iter().flatten().collect(), drain_tx: Some(drain_tx), tail })
    }

    /// Returns the process ID, which is also its process group.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Sends a stop signal to the worker's process group. A suspended process is continued to handle the signal, as
    /// systemd does.
    pub fn terminate(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            // A process that has exited needs no signal.
            let _ = kill_process_group(self.pid, signal);
            let _ = kill_process_group(self.pid, Signal::CONT);
        }
    }

    /// Sends a signal to the worker only. Its children may not handle the signal.
    pub fn forward(&self, signal: i32) {
        if let Some(signal) = Signal::from_named_raw(signal) {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Kills the remaining processes of the worker's process group. The kernel does not reuse the pid before
    /// [`WorkerProcess::reap`].
    pub fn kill_leftovers(&self) {
        self.terminate(Signal::KILL.as_raw());
    }

    /// Returns the last lines of its stderr; none if stderr is redirected.
    pub fn stderr_tail(&self) -> Vec<String> {
        self.tail.lines()
    }

    /// Waits until the output is written, and reaps the process. A slow console delays this; `is_interrupted` ends the
    /// wait.
    pub fn reap(&mut self, is_interrupted: &dyn Fn() -> bool) {
        self.drain_tx = None;
        while self.readers.iter().any(|reader| !reader.is_finished()) && !is_interrupted() {
            thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.wait();
    }
}

fn start_reader(
    reader: Option<OutputReader>,
    pipe: Option<impl io::Read + AsFd + Send + 'static>,
    drain_rx: &Arc<PipeReader>,
) -> Option<JoinHandle<()>> {
    Some(reader?.start(pipe?, Arc::clone(drain_rx)))
}

/// Waits until the process has stopped itself, see [`crate::child`]. An exit instead is reported by [`watch_exit`].
fn wait_for_stop(pid: Pid) {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
}

/// Waits for the exit on a new thread. [`WorkerProcess::reap`] reaps the process.
fn watch_exit(pid: Pid, local_rank: usize, events: Sender<Event>) {
    thread::spawn(move || {
        let reason = loop {
            match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(Some(status)) => break ExitReason::of(status),
                Ok(None) | Err(_) => break None,
            }
        };
        // An error means that the agent has ended.
        let _ = events.send(Event::Exited { local_rank, reason: reason.unwrap_or(ExitReason::Code(-1)) });
    });
}
