//! Runs this node's workers once: starts them, performs the actions of [`WorkerGroupRun`], and reaps them.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use super::decisions::{
    Action, Announcement, ShutdownPolicy, WorkerExit, WorkerGroupOutcome, WorkerGroupRun, root_cause,
};
use super::worker::{WorkerProcess, WorkerSpec};
use crate::error_file::ErrorFile;
use crate::event::{Event, is_caught};
use crate::event_queue::EventQueue;
use crate::generation::{Generation, line_prefix, worker_command, worker_variables};
use crate::guard::Guard;
use crate::log_dir::{AttemptLogDir, contains_files};
use crate::output::WorkerOutputs;
use crate::plan::LaunchPlan;
use crate::report::{RootCause, file_tail};
use crate::streams::StdStream;
use candlewick_comm::rank_env::Variables;

/// The specification of one run of the worker group.
#[derive(Debug)]
pub struct WorkerGroupSpec<'a> {
    /// The launch plan.
    pub plan: &'a LaunchPlan,
    /// The result of the rendezvous.
    pub generation: &'a Generation,
    /// Number of restarts so far.
    pub restart: usize,
    /// Log directory of the attempt.
    pub logs: &'a AttemptLogDir,
    /// Host name of this node.
    pub hostname: &'a str,
    /// Environment variables of the launcher.
    pub variables: &'a Variables,
}

/// The result of a run of the worker group.
#[derive(Debug)]
pub struct WorkerGroupResult {
    /// The outcome.
    pub outcome: WorkerGroupOutcome,
    /// Root cause of a failure.
    pub root: Option<RootCause>,
    /// True if a stop signal was received.
    pub is_stopping: bool,
}

/// Runs this node's workers until all have exited. `announce` publishes events to the other nodes.
pub fn run(
    spec: &WorkerGroupSpec,
    events: &EventQueue,
    guard: &mut Guard,
    announce: &dyn Fn(Announcement),
) -> io::Result<WorkerGroupResult> {
    let started = Instant::now();
    let mut workers = start_all(spec, events, guard)?;
    let mut pending_signals = PendingSignals::new(workers.len(), events);
    let timeouts = spec.plan.shutdown_timeouts;
    let policy = ShutdownPolicy { timeouts, ending_signals: spec.plan.signals.numbers.clone() };
    let mut group = WorkerGroupRun::new(workers.len(), policy);
    while !group.running().is_empty() {
        pending_signals.deliver(group.running(), &workers);
        let next_poll = pending_signals.is_any().then(|| Instant::now() + HANDLER_POLL_INTERVAL);
        let action = match events.next(group.deadline().into_iter().chain(next_poll).min()) {
            Some(Event::Peer { generation, .. }) if generation != spec.generation.number => Action::Wait,
            Some(event) => {
                let action = group.handle(&event, Instant::now());
                group.announcement(&event).into_iter().for_each(announce);
                action
            }
            None if group.deadline().is_some_and(|deadline| Instant::now() >= deadline) => group.on_deadline(),
            None => Action::Wait,
        };
        let running = group.running().iter().map(|local_rank| &workers[*local_rank]);
        match action {
            Action::Wait => {}
            Action::Terminate(signal) => running.for_each(|worker| worker.terminate(signal)),
            Action::Forward(signal) => running.for_each(|worker| worker.forward(signal)),
        }
    }
    reap_all(&mut workers, events, guard);
    let outcome = group.outcome();
    let root = match &outcome {
        WorkerGroupOutcome::Failed(failures) => find_root_cause(spec, &workers, failures, group.exits(), started),
        _ => None,
    };
    Ok(WorkerGroupResult { outcome, root, is_stopping: group.is_stopping() })
}

/// The interval between checks for a signal handler of a worker.
const HANDLER_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Forwarded signals that arrived before a worker started. The worker receives them once it has a handler.
struct PendingSignals(Vec<(usize, i32)>);

impl PendingSignals {
    fn new(n_workers: usize, events: &EventQueue) -> Self {
        let signals = events.forwarded_signals();
        Self((0..n_workers).flat_map(|local_rank| signals.iter().map(move |signal| (local_rank, *signal))).collect())
    }

    fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    fn deliver(&mut self, running: &[usize], workers: &[WorkerProcess]) {
        self.0.retain(|(local_rank, signal)| {
            let worker = &workers[*local_rank];
            let is_running = running.contains(local_rank);
            let is_delivered = is_running && is_caught(worker.pid().as_raw_pid(), *signal);
            if is_delivered {
                worker.forward(*signal);
            }
            is_running && !is_delivered
        });
    }
}

/// Starts all workers. After an error, the workers started so far are killed.
fn start_all(spec: &WorkerGroupSpec, events: &EventQueue, guard: &mut Guard) -> io::Result<Vec<WorkerProcess>> {
    let outputs = WorkerOutputs::open(&spec.plan.output, spec.logs)?;
    let mut workers = Vec::new();
    for local_rank in 0..spec.plan.local_world_size {
        let worker = worker_spec(spec, local_rank);
        let worker = WorkerProcess::start(&worker, &outputs, guard, events.sender());
        match worker {
            Ok(worker) => workers.push(worker),
            Err(error) => {
                reap_all(&mut workers, events, guard);
                return Err(error);
            }
        }
    }
    Ok(workers)
}

/// Returns the specification of one worker.
pub fn worker_spec(spec: &WorkerGroupSpec, local_rank: usize) -> WorkerSpec {
    let WorkerGroupSpec { plan, generation, restart, logs, variables, .. } = spec;
    let mut env = worker_variables(plan, generation, *restart, local_rank, variables);
    let error_file = logs.error_file(local_rank).display().to_string();
    env.insert("TORCHELASTIC_ERROR_FILE".into(), error_file);
    let command = worker_command(plan, local_rank);
    WorkerSpec { local_rank, command, variables: env, prefix: line_prefix(plan, generation, local_rank) }
}

/// Kills leftover processes and reaps the workers. The guard drops a process group before the kernel can reuse its ID.
fn reap_all(workers: &mut [WorkerProcess], events: &EventQueue, guard: &mut Guard) {
    workers.iter().for_each(WorkerProcess::kill_leftovers);
    for worker in workers {
        guard.unwatch(worker.pid());
        worker.reap(&|| events.interrupted().is_some());
    }
}

fn find_root_cause(
    spec: &WorkerGroupSpec,
    workers: &[WorkerProcess],
    failures: &[WorkerExit],
    exits: &[WorkerExit],
    started: Instant,
) -> Option<RootCause> {
    let error = |exit: &WorkerExit| ErrorFile::read(&spec.logs.error_file(exit.local_rank));
    let failure_time = |exit: &WorkerExit| match error(exit) {
        Some(error) if error.timestamp > 0 => error.timestamp,
        _ => unix_seconds(exit.at),
    };
    let root = root_cause(failures, failure_time)?;
    let local_rank = root.local_rank;
    let folder = spec.logs.worker_dir(local_rank);
    let mut other_exits: Vec<_> = exits
        .iter()
        .filter(|exit| exit.local_rank != local_rank && exit.reason.code() != 0)
        .map(|exit| (spec.generation.rank(exit.local_rank), *exit))
        .collect();
    other_exits.sort_by_key(|(rank, exit)| (!exit.is_failure(), *rank));
    Some(RootCause {
        rank: spec.generation.rank(local_rank),
        local_rank,
        pid: workers[local_rank].pid().as_raw_pid(),
        hostname: spec.hostname.to_owned(),
        reason: root.reason,
        attempt: spec.generation.number,
        elapsed: root.at.saturating_duration_since(started),
        error: error(&root),
        stderr_tail: stderr_tail(spec, &workers[local_rank], local_rank),
        logs: contains_files(&folder).then_some(folder),
        other_exits,
    })
}

/// Returns the last lines of a worker's stderr, read from the log file if stderr is redirected.
fn stderr_tail(spec: &WorkerGroupSpec, worker: &WorkerProcess, local_rank: usize) -> Vec<String> {
    let output = &spec.plan.output;
    let is_in_file = output.redirects.of(local_rank).err && !output.tee.of(local_rank).err;
    if is_in_file { file_tail(&spec.logs.stream_file(local_rank, StdStream::Err)) } else { worker.stderr_tail() }
}

fn unix_seconds(at: Instant) -> u64 {
    let time = SystemTime::now().checked_sub(at.elapsed());
    let since = time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}
