//! Carries out one attempt: starts this node's workers, does what [`crate::attempt`] decides, and buries them.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant, SystemTime};

use crate::attempt::{Action, Attempt, Exit, Outcome, Rules, root_cause};
use crate::error_file::ErrorFile;
use crate::event::Event;
use crate::guard::Guard;
use crate::logs::AttemptLogs;
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
    /// Its folders.
    pub logs: &'a AttemptLogs,
    /// This machine's name.
    pub host: &'a str,
    /// The launcher's own variables.
    pub variables: &'a Variables,
}

/// Where events come from and go to.
#[derive(Debug)]
pub struct Mailbox {
    /// For whoever has something to say.
    pub sender: Sender<Event>,
    /// For the launcher.
    pub receiver: Receiver<Event>,
}

/// How an attempt ended.
#[derive(Debug)]
pub struct Result {
    /// In one word.
    pub outcome: Outcome,
    /// Who failed first, if somebody did.
    pub root: Option<RootCause>,
    /// Whether a signal asked the group to end.
    pub is_stopping: bool,
}

/// Runs this node's workers to their end.
pub fn run(setting: &Setting, mailbox: &Mailbox, guard: &mut Guard) -> io::Result<Result> {
    let began = Instant::now();
    let mut workers = start_all(setting, mailbox, guard)?;
    let grace = setting.plan.grace;
    let rules = Rules { grace, ending: setting.plan.signals.numbers.clone() };
    let mut attempt = Attempt::new(workers.len(), rules);
    while !attempt.running().is_empty() {
        let action = match next_event(mailbox, attempt.deadline()) {
            Some(Event::Peer { round, .. }) if round != setting.attempt => Action::Wait,
            Some(event) => attempt.on(&event, Instant::now()),
            None => attempt.time_is_up(),
        };
        if let Action::Send(signal) = action {
            attempt.running().iter().for_each(|local_rank| workers[*local_rank].signal(signal));
        }
    }
    bury_all(&mut workers, guard)?;
    let outcome = attempt.outcome();
    let root = match &outcome {
        Outcome::Failed(failures) => describe(setting, &workers, failures, attempt.exits(), began),
        _ => None,
    };
    Ok(Result { outcome, root, is_stopping: attempt.is_stopping() })
}

/// Either all are started, or those that were are ended again.
fn start_all(setting: &Setting, mailbox: &Mailbox, guard: &mut Guard) -> io::Result<Vec<Worker>> {
    let outlets = Outlets::open(&setting.plan.output, setting.logs)?;
    let mut workers = Vec::new();
    for local_rank in 0..setting.plan.local_world_size {
        let start = start_of(setting, local_rank);
        let worker = Worker::start(&start, &outlets, guard, mailbox.sender.clone());
        match worker {
            Ok(worker) => workers.push(worker),
            Err(error) => {
                bury_all(&mut workers, guard)?;
                return Err(error);
            }
        }
    }
    Ok(workers)
}

/// Returns what one worker is started with.
pub fn start_of(setting: &Setting, local_rank: usize) -> Start {
    let Setting { plan, round, attempt, logs, variables, .. } = setting;
    let mut own = worker_variables(plan, round, *attempt, local_rank, variables);
    let error_file = logs.error_file(local_rank).display().to_string();
    own.insert("TORCHELASTIC_ERROR_FILE".into(), error_file);
    let command = worker_command(plan, local_rank);
    Start { local_rank, command, variables: own, prefix: line_prefix(plan, round, local_rank) }
}

/// The guard must not hear of a number's end after the kernel may have given it to somebody else.
fn bury_all(workers: &mut [Worker], guard: &mut Guard) -> io::Result<()> {
    for worker in workers {
        worker.end_leftovers();
        guard.forget(worker.pid())?;
        worker.bury();
    }
    Ok(())
}

/// Returns the next event, or `None` if the deadline passes before.
fn next_event(mailbox: &Mailbox, deadline: Option<Instant>) -> Option<Event> {
    const FOR_EVER: Duration = Duration::from_secs(1 << 20);
    loop {
        let left = deadline.map_or(FOR_EVER, |deadline| deadline.saturating_duration_since(Instant::now()));
        match mailbox.receiver.recv_timeout(left) {
            Ok(event) => return Some(event),
            Err(RecvTimeoutError::Timeout) if deadline.is_some() => return None,
            Err(_) => {}
        }
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

fn has_files(folder: &Path) -> bool {
    folder.read_dir().is_ok_and(|mut entries| entries.next().is_some())
}

fn seconds_since_1970(at: Instant) -> u64 {
    let time = SystemTime::now().checked_sub(at.elapsed());
    let since = time.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_secs())
}

/// Returns where a worker's error file is, for whoever started the launcher.
pub fn error_file(logs: &AttemptLogs, root: &RootCause) -> PathBuf {
    logs.error_file(root.local_rank)
}
