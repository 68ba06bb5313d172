//! Carries out one attempt: starts this node's workers, does what [`crate::attempt`] decides, and buries them.

use std::io;
use std::time::{Duration, Instant, SystemTime};

use crate::attempt::{Action, Attempt, Exit, News, Outcome, Rules, root_cause};
use crate::error_file::ErrorFile;
use crate::event::{Event, is_caught};
use crate::guard::Guard;
use crate::logs::{AttemptLogs, has_files};
use crate::mailbox::Mailbox;
use crate::output::Outlets;
use crate::plan::Plan;
use crate::report::{RootCause, last_lines};
use crate::round::{Round, line_prefix, worker_command, worker_variables};
use crate::streams::Stream;
use crate::worker::{Start, Worker};
use candlewick_comm::place::Variables;

/// What an attempt needs to know.
#[derive(Debug)]
pub struct Setting<'a> {
    /// The settings.
    pub plan: &'a Plan,
    /// What the nodes agreed on.
    pub round: &'a Round,
    /// Its number.
    pub attempt: usize,
    /// How many failures there were before.
    pub restart: usize,
    /// Its folders.
    pub logs: &'a AttemptLogs,
    /// This machine's name.
    pub host: &'a str,
    /// The launcher's own variables.
    pub variables: &'a Variables,
}

/// How an attempt ended.
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
pub fn run(setting: &Setting, mailbox: &Mailbox, guard: &mut Guard, tell: &dyn Fn(News)) -> io::Result<Ending> {
    let began = Instant::now();
    let mut workers = start_all(setting, mailbox, guard)?;
    let mut notices = Notices::new(workers.len(), mailbox);
    let grace = setting.plan.grace;
    let rules = Rules { grace, ending: setting.plan.signals.numbers.clone() };
    let mut attempt = Attempt::new(workers.len(), rules);
    while !attempt.running().is_empty() {
        notices.deliver(attempt.running(), &workers);
        let look_again = notices.is_any().then(|| Instant::now() + LOOK_AGAIN);
        let action = match mailbox.next(attempt.deadline().into_iter().chain(look_again).min()) {
            Some(Event::Peer { round, .. }) if round != setting.attempt => Action::Wait,
            Some(event) => {
                let action = attempt.on(&event, Instant::now());
                attempt.news(&event).into_iter().for_each(tell);
                action
            }
            None if attempt.deadline().is_some_and(|deadline| Instant::now() >= deadline) => attempt.time_is_up(),
            None => Action::Wait,
        };
        let running = attempt.running().iter().map(|local_rank| &workers[*local_rank]);
        match action {
            Action::Wait => {}
            Action::Send(signal) => running.for_each(|worker| worker.signal(signal)),
            Action::Notify(signal) => running.for_each(|worker| worker.notify(signal)),
        }
    }
    bury_all(&mut workers, mailbox, guard);
    let outcome = attempt.outcome();
    let root = match &outcome {
        Outcome::Failed(failures) => describe(setting, &workers, failures, attempt.exits(), began),
        _ => None,
    };
    Ok(Ending { outcome, root, is_stopping: attempt.is_stopping() })
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
                bury_all(&mut workers, mailbox, guard);
                return Err(error);
            }
        }
    }
    Ok(workers)
}

/// Returns what one worker is started with.
pub fn start_of(setting: &Setting, local_rank: usize) -> Start {
    let Setting { plan, round, restart, logs, variables, .. } = setting;
    let mut own = worker_variables(plan, round, *restart, local_rank, variables);
    let error_file = logs.error_file(local_rank).display().to_string();
    own.insert("TORCHELASTIC_ERROR_FILE".into(), error_file);
    let command = worker_command(plan, local_rank);
    Start { local_rank, command, variables: own, prefix: line_prefix(plan, round, local_rank) }
}

/// The guard must not hear of a number's end after the kernel may have given it to somebody else.
fn bury_all(workers: &mut [Worker], mailbox: &Mailbox, guard: &mut Guard) {
    workers.iter().for_each(Worker::end_leftovers);
    for worker in workers {
        guard.forget(worker.pid());
        worker.bury(&|| mailbox.interrupted().is_some());
    }
}

fn describe(
    setting: &Setting,
    workers: &[Worker],
    failures: &[Exit],
    exits: &[Exit],
    began: Instant,
) -> Option<RootCause> {
    let error = |exit: &Exit| ErrorFile::read(&setting.logs.error_file(exit.local_rank));
    let time_of = |exit: &Exit| match error(exit) {
        Some(error) if error.timestamp > 0 => error.timestamp,
        _ => seconds_since_1970(exit.at),
    };
    let root = root_cause(failures, time_of)?;
    let local_rank = root.local_rank;
    let folder = setting.logs.folder(local_rank);
    let mut others: Vec<_> = exits
        .iter()
        .filter(|exit| exit.local_rank != local_rank && exit.ended.code() != 0)
        .map(|exit| (setting.round.rank(exit.local_rank), *exit))
        .collect();
    others.sort_by_key(|(rank, exit)| (!exit.is_failure(), *rank));
    Some(RootCause {
        rank: setting.round.rank(local_rank),
        local_rank,
        pid: workers[local_rank].pid().as_raw_pid(),
        host: setting.host.to_owned(),
        ended: root.ended,
        attempt: setting.attempt,
        after: root.at.saturating_duration_since(began),
        error: error(&root),
        last_lines: last_words(setting, &workers[local_rank], local_rank),
        logs: has_files(&folder).then_some(folder),
        others,
    })
}

/// What went to a file only is read from there.
fn last_words(setting: &Setting, worker: &Worker, local_rank: usize) -> Vec<String> {
    let output = &setting.plan.output;
    let is_in_file = output.redirects.of(local_rank).err && !output.tee.of(local_rank).err;
    if is_in_file { last_lines(&setting.logs.stream(local_rank, Stream::Err)) } else { worker.last_lines() }
}

fn seconds_since_1970(at: Instant) -> u64 {
    let time = SystemTime::now().checked_sub(at.elapsed());
    let since = time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}
