//! A node's whole run: meet the others, run the workers, report who failed, and start all of them again while that is
//! allowed.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::console::{self, say};
use crate::error_file::forward_error_file;
use crate::event::{Event, Peer};
use crate::exit::{ExitReason, FAILED, OK, PEER, PREEMPTED};
use crate::generation::Generation;
use crate::guard::Guard;
use crate::host::Host;
use crate::logs::{AttemptLogs, Logs};
use crate::mailbox::Mailbox;
use crate::plan::Plan;
use crate::rendezvous::{Rendezvous, RendezvousError, SLICE};
use crate::report::RootCause;
use crate::streams::Stream;
use crate::worker_group::{self, Setting};
use crate::worker_group::{Announcement, Outcome, WorkerExit};

/// Why nothing more could be done.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The nodes did not meet.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
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
            LaunchError::Rendezvous(RendezvousError::Interrupted(signal)) => 128 + signal,
            _ => FAILED,
        }
    }
}

/// Runs the plan on this node, and returns the code to end with.
pub fn run(plan: &Plan, host: &Host) -> Result<i32> {
    let mailbox = Mailbox::open(&plan.signals.numbers).map_err(system("watch for signals"))?;
    let agent = Agent { plan, host, mailbox };
    let mut rendezvous = Rendezvous::open(plan, host, &|| agent.mailbox.interrupted())?;
    let logs = Logs::create(&plan.output, &plan.run_id).map_err(system("make the folder of logs"))?;
    if plan.output.keeps_files() {
        say(&format!("logs are in {}", logs.path().display()));
    }
    let code = agent.run_attempts(&mut rendezvous, &logs);
    if let Err(error) = &code {
        rendezvous.tell(&agent.end_by(error));
    }
    rendezvous.leave(&|| agent.mailbox.interrupted());
    logs.tidy();
    code
}

struct Agent<'a> {
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
    Rerendezvous(&'static str),
}

/// How long a node whose workers are done waits for the others, as torchrun's does, unless it hosts the store.
const EXIT_BARRIER: Duration = Duration::from_secs(300);

impl Agent<'_> {
    fn run_attempts(&self, rendezvous: &mut Rendezvous, logs: &Logs) -> Result<i32> {
        let most = self.plan.max_restarts;
        let mut n_restarts = 0;
        loop {
            match self.run_attempt(rendezvous, logs, n_restarts)? {
                Next::End(code) => return Ok(code),
                Next::Again => {
                    n_restarts += 1;
                    say(&format!("starting all workers again: restart {n_restarts} of {most}"));
                }
                Next::Rerendezvous(why) => say(&format!("{why}: starting all workers again")),
            }
        }
    }

    fn run_attempt(&self, rendezvous: &mut Rendezvous, logs: &Logs, restart: usize) -> Result<Next> {
        let generation = rendezvous.next_generation(&|| self.mailbox.interrupted())?;
        let n_workers = self.plan.local_world_size;
        let folder = logs.attempt(generation.number, n_workers).map_err(system("make the folders of logs"))?;
        let (plan, host) = (self.plan, self.host);
        let (name, variables) = (&host.name, &host.variables);
        let setting = Setting { plan, generation: &generation, restart, logs: &folder, host: name, variables };
        let watch = rendezvous.watch(self.mailbox.sender())?;
        let mut guard = Guard::start().map_err(system("start the guard"))?;
        let tell = |news| rendezvous.tell(&self.peer_of(news, &generation));
        let ending = worker_group::run(&setting, &self.mailbox, &mut guard, &tell).map_err(system("start workers"))?;
        let may_restart = restart < plan.max_restarts && !ending.is_stopping;
        let next = match ending.outcome {
            Outcome::Succeeded => self.after_success(rendezvous, generation.number, may_restart)?,
            Outcome::Stopped(code) => Next::End(code),
            Outcome::Failed(failures) => match self.cause_elsewhere(rendezvous, &failures) {
                Some(text) => after_peer(&text, may_restart),
                None => self.after_failure(rendezvous, ending.root, &folder, may_restart),
            },
            Outcome::PeerFailed(text) => after_peer(&text, may_restart),
            Outcome::PeerStopped(text, code) => after_stop(rendezvous, &text, code),
            Outcome::Rerendezvous => Next::Rerendezvous(CAME),
        };
        drop(watch);
        Ok(next)
    }

    /// The others may still fail, and then all start again.
    fn after_success(&self, rendezvous: &Rendezvous, generation: usize, may_restart: bool) -> Result<Next> {
        let began = Instant::now();
        let is_patient = || rendezvous.is_host() || began.elapsed() < EXIT_BARRIER;
        rendezvous.say_done();
        // A store that is gone takes back nothing that was done.
        while rendezvous.are_others_busy() && is_patient() {
            match self.mailbox.next(Some(Instant::now() + SLICE)) {
                Some(Event::Signal(signal)) if self.mailbox.is_ending(signal) => {
                    return Err(RendezvousError::Interrupted(signal).into());
                }
                Some(Event::Peer { generation: of, peer }) if of == generation => match peer {
                    Peer::Failed(text) => return Ok(after_peer(&text, may_restart)),
                    Peer::Stopped(text) => return Ok(after_stop(rendezvous, &text, OK)),
                    Peer::Joins => return Ok(Next::Rerendezvous(CAME)),
                    Peer::Lost(_) | Peer::Saved(_) => break,
                },
                _ => {}
            }
        }
        Ok(Next::End(OK))
    }

    /// Workers who all say that another rank failed are believed, if the nodes know of one.
    fn cause_elsewhere(&self, rendezvous: &Rendezvous, failures: &[WorkerExit]) -> Option<String> {
        let is_blamed = failures.iter().all(WorkerExit::blames_another);
        is_blamed.then(|| rendezvous.wait_for_failure(&|| self.mailbox.interrupted()))?
    }

    fn after_failure(
        &self,
        rendezvous: &Rendezvous,
        root: Option<RootCause>,
        folder: &AttemptLogs,
        may_restart: bool,
    ) -> Next {
        let Some(root) = root else { return Next::End(FAILED) };
        console::write(Stream::Err, root.text().as_bytes());
        rendezvous.tell(&Peer::Failed(format!("rank {} on {}: {}", root.rank, root.host, root.ended)));
        if may_restart {
            return Next::Again;
        }
        // Who started this launcher may be one itself.
        if let Some(own) = self.host.variables.get("TORCHELASTIC_ERROR_FILE") {
            let _ = forward_error_file(&folder.error_file(root.local_rank), Path::new(own), root.ended);
        }
        Next::End(root.ended.code())
    }

    /// Returns what is to the other nodes what `news` is to this one.
    fn peer_of(&self, news: Announcement, generation: &Generation) -> Peer {
        let host = &self.host.name;
        match news {
            Announcement::Stopping(signal) => self.stopped_by(signal),
            Announcement::Exited(WorkerExit { local_rank, ended: ExitReason::Code(PREEMPTED), .. }) => {
                Peer::Saved(format!("rank {} on {host} saved and ended", generation.rank(local_rank)))
            }
            Announcement::Exited(exit) => {
                Peer::Failed(format!("rank {} on {host}: {}", generation.rank(exit.local_rank), exit.ended))
            }
        }
    }

    fn end_by(&self, error: &LaunchError) -> Peer {
        match error {
            LaunchError::Rendezvous(RendezvousError::Interrupted(signal)) => self.stopped_by(*signal),
            _ => Peer::Failed(format!("the launcher on {} failed to {error}", self.host.name)),
        }
    }

    fn stopped_by(&self, signal: i32) -> Peer {
        Peer::Stopped(format!("the launcher on {} got {}", self.host.name, ExitReason::Signal(signal)))
    }
}

const CAME: &str = "another node came";

fn after_peer(text: &str, may_restart: bool) -> Next {
    say(&format!("workers of another node failed: {text}"));
    if may_restart { Next::Again } else { Next::End(PEER) }
}

fn after_stop(rendezvous: &Rendezvous, text: &str, code: i32) -> Next {
    say(&format!("another node was stopped: {text}"));
    if rendezvous.can_go_on() { Next::Rerendezvous("another node left") } else { Next::End(code) }
}

fn system(what: &'static str) -> impl Fn(io::Error) -> LaunchError {
    move |source| LaunchError::System { what, source }
}
