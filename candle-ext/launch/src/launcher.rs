//! A node's whole run: meet the others, run the workers, report who failed, and start all of them again while that is
//! allowed.

use std::io;
use std::path::Path;
use std::sync::mpsc::channel;

use crate::attempt::Outcome;
use crate::ended::{FAILED, OK, PEER};
use crate::error_file::hand_up;
use crate::event::{Event, catch_signals};
use crate::group::{self, Mailbox, Setting};
use crate::guard::Guard;
use crate::host::Host;
use crate::logs::{AttemptLogs, Logs};
use crate::meeting::{Meeting, MeetingError};
use crate::plan::Plan;
use crate::report::RootCause;

/// Why nothing more could be done.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The nodes did not meet.
    #[error(transparent)]
    Meeting(#[from] MeetingError),
    /// A process could not be started, or a file not be written.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, LaunchError>;

impl LaunchError {
    /// Returns the code that the launcher ends with.
    pub fn code(&self) -> i32 {
        match self {
            LaunchError::Meeting(MeetingError::Interrupted(signal)) => 128 + signal,
            _ => FAILED,
        }
    }
}

/// Runs the plan on this node, and returns the code to end with.
pub fn run(plan: &Plan, host: &Host) -> Result<i32> {
    let (sender, receiver) = channel();
    let mailbox = Mailbox { sender, receiver };
    catch_signals(&plan.signals.numbers, mailbox.sender.clone()).map_err(system("watch for signals"))?;
    let launcher = Launcher { plan, host, mailbox };
    let mut meeting = Meeting::open(plan, host, &|| launcher.interrupted())?;
    let logs = Logs::create(&plan.output, &plan.run_id).map_err(system("make the folder of logs"))?;
    if plan.output.keeps_files() {
        say(&format!("logs are in {}", logs.path().display()));
    }
    let code = launcher.run_attempts(&mut meeting, &logs);
    meeting.leave();
    logs.tidy();
    code
}

/// Writes a line of the launcher's own.
pub fn say(text: &str) {
    eprintln!("launch: {text}");
}

struct Launcher<'a> {
    plan: &'a Plan,
    host: &'a Host,
    mailbox: Mailbox,
}

/// What follows an attempt.
enum Next {
    /// This is the end, with this code.
    End(i32),
    /// All workers are started again.
    Again,
    /// The same, but it is nobody's fault.
    Regroup,
}

impl Launcher<'_> {
    fn run_attempts(&self, meeting: &mut Meeting, logs: &Logs) -> Result<i32> {
        let mut restarts_left = self.plan.max_restarts;
        loop {
            match self.run_attempt(meeting, logs, restarts_left)? {
                Next::End(code) => return Ok(code),
                Next::Again => {
                    restarts_left -= 1;
                    let most = self.plan.max_restarts;
                    say(&format!("starting all workers again: restart {} of {most}", most - restarts_left));
                }
                Next::Regroup => say("another node came: starting all workers again"),
            }
        }
    }

    fn run_attempt(&self, meeting: &mut Meeting, logs: &Logs, restarts_left: usize) -> Result<Next> {
        let (attempt, round) = meeting.next_round(&|| self.interrupted())?;
        let n_workers = self.plan.local_world_size;
        let folder = logs.attempt(attempt, n_workers).map_err(system("make the folders of logs"))?;
        let (plan, host) = (self.plan, self.host);
        let setting =
            Setting { plan, round: &round, attempt, logs: &folder, host: &host.name, variables: &host.variables };
        let watch = meeting.watch(self.mailbox.sender.clone())?;
        let mut guard = Guard::start().map_err(system("start the guard"))?;
        let result = group::run(&setting, &self.mailbox, &mut guard).map_err(system("start workers"))?;
        if let Some(root) = &result.root {
            self.report(root, &folder);
            meeting.tell_failure(&format!("rank {} on {}: {}", root.rank, root.host, root.ended));
        }
        let may_restart = restarts_left > 0 && !result.is_stopping;
        let next = match (result.outcome, result.root) {
            (Outcome::Succeeded, _) => self.after_success(meeting, may_restart)?,
            (Outcome::Stopped(code), _) => Next::End(code),
            (Outcome::Failed(_), _) if may_restart => Next::Again,
            (Outcome::Failed(_), root) => Next::End(root.map_or(FAILED, |root| root.ended.code())),
            (Outcome::PeerFailed(text), _) => after_peer(&text, may_restart),
            (Outcome::Regroup, _) => Next::Regroup,
        };
        drop(watch);
        Ok(next)
    }

    /// The others may still fail, and then all start again.
    fn after_success(&self, meeting: &Meeting, may_restart: bool) -> Result<Next> {
        match meeting.wait_for_others(&|| self.interrupted())? {
            true => Ok(Next::End(OK)),
            false => Ok(after_peer("after the workers of this node had ended well", may_restart)),
        }
    }

    fn report(&self, root: &RootCause, folder: &AttemptLogs) {
        eprint!("{}", root.text());
        // Who started this launcher may be one itself.
        if let Some(own) = self.host.variables.get("TORCHELASTIC_ERROR_FILE") {
            let _ = hand_up(&folder.error_file(root.local_rank), Path::new(own), root.ended.code());
        }
    }

    /// Returns the signal that ends the group, if one came while no worker ran.
    fn interrupted(&self) -> Option<i32> {
        self.mailbox.receiver.try_iter().find_map(|event| match event {
            Event::Signal(signal) if self.plan.signals.numbers.contains(&signal) => Some(signal),
            _ => None,
        })
    }
}

fn after_peer(text: &str, may_restart: bool) -> Next {
    say(&format!("workers of another node failed: {text}"));
    if may_restart { Next::Again } else { Next::End(PEER) }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> LaunchError {
    move |source| LaunchError::System { what, source }
}
