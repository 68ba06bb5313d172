//! Runs this node's workers once: starts them, carries out the decisions about them, and reaps them.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use super::decisions::{Action, Announcement, Outcome, Rules, WorkerExit, WorkerGroupRun, root_cause};
use super::worker::{Start, Worker};
use crate::error_file::ErrorFile;
use crate::event::{Event, is_caught};
use crate::generation::{Generation, line_prefix, worker_command, worker_variables};
use crate::guard::Guard;
use crate::logs::{AttemptLogs, has_files};
use crate::mailbox::Mailbox;
use crate::output::Outlets;
use crate::plan::Plan;
use crate::report::{RootCause, last_lines};
use crate::streams::Stream;
use candlewick_comm::rank_env::Variables;

/// The settings of one run of the worker group.
#[derive(Debug)]
pub struct Setting<'a> {
    /// The settings.
    pub plan: &'a Plan,
    /// What the nodes agreed on.
    pub generation: &'a Generation,
    /// How many failures there were before.
    pub restart: usize,
    /// Its folders.
    pub logs: &'a AttemptLogs,
    /// This machine's name.
    pub host: &'a str,
    /// The launcher's own variables.
    pub variables: &'a Variables,
}

/// The end of a run of the worker group.
#[derive(Debug)]
pub struct Ending {
    /// In one word.
    pub outcome: Outcome,
    /// Who failed first, if somebody did.
    pub root: Option<RootCause>,
    /// Whether a signal asked the group to end.
    pub is_stopping: bool,
}

/// Runs this node's workers to their end. `tell` gets what the other nodes must hear before that.
pub fn run(setting: &Setting, mailbox: &Mailbox, guard: &mut Guard, tell: &dyn Fn(Announcement)) -> io::Result<Ending> {
    let began = Instant::now();
    let mut workers = start_all(setting, mailbox, guard)?;
    let mut notices = Notices::new(workers.len(), mailbox);
    let grace = setting.plan.grace;
    let rules = Rules { grace, ending: setting.plan.signals.numbers.clone() };
    let mut group = WorkerGroupRun::new(workers.len(), rules);
    while !group.running().is_empty() {
        notices.deliver(group.running(), &workers);
        let look_again = notices.is_any().then(|| Instant::now() + LOOK_AGAIN);
        let action = match mailbox.next(group.deadline().into_iter().chain(look_again).min()) {
            Some(Event::Peer { generation, .. }) if generation != setting.generation.number => Action::Wait,
            Some(event) => {
                let action = group.on(&event, Instant::now());
                group.announcement(&event).into_iter().for_each(tell);
                action
            }
            None if group.deadline().is_some_and(|deadline| Instant::now() >= deadline) => group.time_is_up(),
            None => Action::Wait,
        };
        let running = group.running().iter().map(|local_rank| &workers[*local_rank]);
        match action {
            Action::Wait => {}
            Action::Send(signal) => running.for_each(|worker| worker.signal(signal)),
            Action::Notify(signal) => running.for_each(|worker| worker.notify(signal)),
        }
    }
    reap_all(&mut workers, mailbox, guard);
    let outcome = group.outcome();
    let root = match &outcome {
        Outcome::Failed(failures) => describe(setting, &workers, failures, group.exits(), began),
        _ => None,
    };
    Ok(Ending { outcome, root, is_stopping: group.is_stopping() })
}

/// How long to wait for a worker to be ready for a notice.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Signals of the past that workers have not heard: each hears them as soon as it has a handler.
struct Notices(Vec<(usize, i32)>);

impl Notices {
    fn new(n_workers: usize, mailbox: &Mailbox) -> Self {
        let signals = mailbox.notices();
        Self((0..n_workers).flat_map(|local_rank| signals.iter().map(move |signal| (local_rank, *signal))).collect())
    }

    fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    fn deliver(&mut self, running: &[usize], workers: &[Worker]) {
        self.0.retain(|(local_rank, signal)| {
            let worker = &workers[*local_rank];
            let is_running = running.contains(local_rank);
            let is_heard = is_running && is_caught(worker.pid().as_raw_pid(), *signal);
            if is_heard {
                worker.notify(*signal);
            }
            is_running && !is_heard
        });
    }
}

/// Either all are started, or those that were are ended again.
fn start_all(setting: &Setting, mailbox: &Mailbox, guard: &mut Guard) -> io::Result<Vec<Worker>> {
    let outlets = Outlets::open(&setting.plan.output, setting.logs)?;
    let mut workers = Vec::new();
    for local_rank in 0..setting.plan.local_world_size {
        let start = start_of(setting, local_rank);
        let worker = Worker::start(&start, &outlets, guard, mailbox.sender());
        match worker {
            Ok(worker) => workers.push(worker),
            Err(error) => {
                reap_all(&mut workers, mailbox, guard);
                return Err(error);
            }
        }
    }
    Ok(workers)
}

/// Returns what one worker is started with.
pub fn start_of(setting: &Setting, local_rank: usize) -> Start {
    let Setting { plan, generation, restart, logs, variables, .. } = setting;
    let mut own = worker_variables(plan, generation, *restart, local_rank, variables);
    let error_file = logs.error_file(local_rank).display().to_string();
    own.insert("TORCHELASTIC_ERROR_FILE".into(), error_file);
    let command = worker_command(plan, local_rank);
    Start { local_rank, command, variables: own, prefix: line_prefix(plan, generation, local_rank) }
}

/// The guard must not hear of a number's end after the kernel may have given it to somebody else.
fn reap_all(workers: &mut [Worker], mailbox: &Mailbox, guard: &mut Guard) {
    workers.iter().for_each(Worker::end_leftovers);
    for worker in workers {
        guard.forget(worker.pid());
        worker.reap(&|| mailbox.interrupted().is_some());
    }
}

fn describe(
    setting: &Setting,
    workers: &[Worker],
    failures: &[WorkerExit],
    exits: &[WorkerExit],
    began: Instant,
) -> Option<RootCause> {
    let error = |exit: &WorkerExit| ErrorFile::read(&setting.logs.error_file(exit.local_rank));
    let time_of = |exit: &WorkerExit| match error(exit) {
        Some(error) if error.timestamp > 0 => error.timestamp,
        _ => seconds_since_1970(exit.at),
    };
    let root = root_cause(failures, time_of)?;
    let local_rank = root.local_rank;
    let folder = setting.logs.folder(local_rank);
    let mut others: Vec<_> = exits
        .iter()
        .filter(|exit| exit.local_rank != local_rank && exit.ended.code() != 0)
        .map(|exit| (setting.generation.rank(exit.local_rank), *exit))
        .collect();
    others.sort_by_key(|(rank, exit)| (!exit.is_failure(), *rank));
    Some(RootCause {
        rank: setting.generation.rank(local_rank),
        local_rank,
        pid: workers[local_rank].pid().as_raw_pid(),
        host: setting.host.to_owned(),
        ended: root.ended,
        attempt: setting.generation.number,
        after: root.at.saturating_duration_since(began),
        error: error(&root),
        last_lines: stderr_tail(setting, &workers[local_rank], local_rank),
        logs: has_files(&folder).then_some(folder),
        others,
    })
}

/// What went to a file only is read from there.
fn stderr_tail(setting: &Setting, worker: &Worker, local_rank: usize) -> Vec<String> {
    let output = &setting.plan.output;
    let is_in_file = output.redirects.of(local_rank).err && !output.tee.of(local_rank).err;
    if is_in_file { last_lines(&setting.logs.stream(local_rank, Stream::Err)) } else { worker.last_lines() }
}

fn seconds_since_1970(at: Instant) -> u64 {
    let time = SystemTime::now().checked_sub(at.elapsed());
    let since = time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}
