//! The elastic agent of a node: joins the rendezvous, runs the worker group, reports the root cause of a failure, and
//! restarts the workers up to `--max-restarts` times.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::console::{self, log};
use crate::error_file::forward_error_file;
use crate::event::{Event, PeerEvent};
use crate::event_queue::EventQueue;
use crate::exit::{ExitReason, FAILED, OK, PEER, PREEMPTED};
use crate::generation::Generation;
use crate::guard::Guard;
use crate::log_dir::{AttemptLogDir, LogDir};
use crate::node_resources::NodeResources;
use crate::plan::LaunchPlan;
use crate::rendezvous::{POLL_INTERVAL, Rendezvous, RendezvousError};
use crate::report::RootCause;
use crate::streams::StdStream;
use crate::worker_group::{self, WorkerGroupSpec};
use crate::worker_group::{Announcement, WorkerExit, WorkerGroupOutcome};

/// An error that ends the launcher.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The rendezvous failed.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// A process could not be started, or a file could not be written.
    #[error("{action}: {source}")]
    System {
        /// The attempted action.
        action: &'static str,
        /// The error of the operating system.
        source: io::Error,
    },
}

type Result<T> = std::result::Result<T, LaunchError>;

impl LaunchError {
    /// Returns the exit code of the launcher.
    pub fn code(&self) -> i32 {
        match self {
            LaunchError::Rendezvous(RendezvousError::Interrupted(signal)) => 128 + signal,
            _ => FAILED,
        }
    }
}

/// Runs the plan on this node and returns the exit code of the launcher.
pub fn run(plan: &LaunchPlan, node_resources: &NodeResources) -> Result<i32> {
    let events = EventQueue::open(&plan.signals.numbers).map_err(system_error("watch for signals"))?;
    let agent = Agent { plan, node_resources, events };
    let mut rendezvous = Rendezvous::open(plan, node_resources, &|| agent.events.interrupted())?;
    let logs = LogDir::create(&plan.output, &plan.run_id).map_err(system_error("create the log directory"))?;
    if plan.output.keeps_files() {
        log(&format!("logs are in {}", logs.path().display()));
    }
    let code = agent.run_generations(&mut rendezvous, &logs);
    if let Err(error) = &code {
        rendezvous.publish(&agent.failure_event(error));
    }
    rendezvous.shutdown(&|| agent.events.interrupted());
    logs.remove_if_empty();
    code
}

struct Agent<'a> {
    plan: &'a LaunchPlan,
    node_resources: &'a NodeResources,
    events: EventQueue,
}

/// The next step after a run of the worker group.
enum NextStep {
    /// End the agent; the launcher exits with this code.
    Exit(i32),
    /// Restart the worker group; counts towards `--max-restarts`.
    Restart,
    /// Restart the worker group after a membership change; not counted as a restart.
    Rerendezvous(&'static str),
}

/// The longest wait for other nodes after this node's workers succeeded, as in torchrun. The store host waits
/// without limit.
const EXIT_BARRIER: Duration = Duration::from_secs(300);

impl Agent<'_> {
    fn run_generations(&self, rendezvous: &mut Rendezvous, logs: &LogDir) -> Result<i32> {
        let max_restarts = self.plan.max_restarts;
        let mut n_restarts = 0;
        loop {
            match self.run_generation(rendezvous, logs, n_restarts)? {
                NextStep::Exit(code) => return Ok(code),
                NextStep::Restart => {
                    n_restarts += 1;
                    log(&format!("restarting the worker group: restart {n_restarts} of {max_restarts}"));
                }
                NextStep::Rerendezvous(reason) => log(&format!("{reason}: restarting the worker group")),
            }
        }
    }

    fn run_generation(&self, rendezvous: &mut Rendezvous, logs: &LogDir, restart: usize) -> Result<NextStep> {
        let generation = rendezvous.next_generation(&|| self.events.interrupted())?;
        let n_workers = self.plan.local_world_size;
        let attempt_logs = logs
            .attempt_dir(generation.number, n_workers)
            .map_err(system_error("create the log directory of an attempt"))?;
        let (plan, node_resources) = (self.plan, self.node_resources);
        let (hostname, variables) = (&node_resources.hostname, &node_resources.variables);
        let spec = WorkerGroupSpec { plan, generation: &generation, restart, logs: &attempt_logs, hostname, variables };
        let monitor = rendezvous.monitor_peers(self.events.sender())?;
        let mut guard = Guard::start().map_err(system_error("start the guard process"))?;
        let announce = |announcement| rendezvous.publish(&self.peer_event(announcement, &generation));
        let result =
            worker_group::run(&spec, &self.events, &mut guard, &announce).map_err(system_error("start workers"))?;
        let may_restart = restart < plan.max_restarts && !result.is_stopping;
        let next = match result.outcome {
            WorkerGroupOutcome::Succeeded => self.after_success(rendezvous, generation.number, may_restart)?,
            WorkerGroupOutcome::Stopped(code) => NextStep::Exit(code),
            WorkerGroupOutcome::Failed(failures) => match self.peer_failure(rendezvous, &failures) {
                Some(text) => after_peer_failure(&text, may_restart),
                None => self.after_failure(rendezvous, result.root, &attempt_logs, may_restart),
            },
            WorkerGroupOutcome::PeerFailed(text) => after_peer_failure(&text, may_restart),
            WorkerGroupOutcome::PeerStopped(text, code) => after_peer_stop(rendezvous, &text, code),
            WorkerGroupOutcome::Rerendezvous => NextStep::Rerendezvous(NODE_JOINED),
        };
        drop(monitor);
        Ok(next)
    }

    /// Waits for the other nodes: their workers may still fail and cause a restart.
    fn after_success(&self, rendezvous: &Rendezvous, generation: usize, may_restart: bool) -> Result<NextStep> {
        let started = Instant::now();
        let may_wait = || rendezvous.is_host() || started.elapsed() < EXIT_BARRIER;
        rendezvous.mark_done();
        // A lost store does not undo the success of these workers.
        while rendezvous.are_peers_running() && may_wait() {
            match self.events.next(Some(Instant::now() + POLL_INTERVAL)) {
                Some(Event::Signal(signal)) if self.events.is_ending(signal) => {
                    return Err(RendezvousError::Interrupted(signal).into());
                }
                Some(Event::Peer { generation: of, peer }) if of == generation => match peer {
                    PeerEvent::Failed(text) => return Ok(after_peer_failure(&text, may_restart)),
                    PeerEvent::Stopped(text) => return Ok(after_peer_stop(rendezvous, &text, OK)),
                    PeerEvent::Joins => return Ok(NextStep::Rerendezvous(NODE_JOINED)),
                    PeerEvent::Lost(_) | PeerEvent::Saved(_) => break,
                },
                _ => {}
            }
        }
        Ok(NextStep::Exit(OK))
    }

    /// Returns a failure published by another node, if all failed workers report a peer failure.
    fn peer_failure(&self, rendezvous: &Rendezvous, failures: &[WorkerExit]) -> Option<String> {
        let is_secondary = failures.iter().all(WorkerExit::reports_peer_failure);
        is_secondary.then(|| rendezvous.wait_for_peer_failure(&|| self.events.interrupted()))?
    }

    fn after_failure(
        &self,
        rendezvous: &Rendezvous,
        root: Option<RootCause>,
        logs: &AttemptLogDir,
        may_restart: bool,
    ) -> NextStep {
        let Some(root) = root else { return NextStep::Exit(FAILED) };
        console::write(StdStream::Err, root.text().as_bytes());
        rendezvous.publish(&PeerEvent::Failed(format!("rank {} on {}: {}", root.rank, root.hostname, root.reason)));
        if may_restart {
            return NextStep::Restart;
        }
        // The parent process may be a launcher that expects an error file.
        if let Some(own) = self.node_resources.variables.get("TORCHELASTIC_ERROR_FILE") {
            let _ = forward_error_file(&logs.error_file(root.local_rank), Path::new(own), root.reason);
        }
        NextStep::Exit(root.reason.code())
    }

    /// Returns the event that an announcement of this node is for the other nodes.
    fn peer_event(&self, announcement: Announcement, generation: &Generation) -> PeerEvent {
        let hostname = &self.node_resources.hostname;
        match announcement {
            Announcement::Stopping(signal) => self.stop_event(signal),
            Announcement::Exited(WorkerExit { local_rank, reason: ExitReason::Code(PREEMPTED), .. }) => {
                PeerEvent::Saved(format!(
                    "rank {} on {hostname} saved a checkpoint and exited",
                    generation.rank(local_rank)
                ))
            }
            Announcement::Exited(exit) => {
                PeerEvent::Failed(format!("rank {} on {hostname}: {}", generation.rank(exit.local_rank), exit.reason))
            }
        }
    }

    fn failure_event(&self, error: &LaunchError) -> PeerEvent {
        match error {
            LaunchError::Rendezvous(RendezvousError::Interrupted(signal)) => self.stop_event(*signal),
            _ => PeerEvent::Failed(format!("the launcher on {} failed to {error}", self.node_resources.hostname)),
        }
    }

    fn stop_event(&self, signal: i32) -> PeerEvent {
        PeerEvent::Stopped(format!(
            "the launcher on {} received {}",
            self.node_resources.hostname,
            ExitReason::Signal(signal)
        ))
    }
}

const NODE_JOINED: &str = "another node joined";

fn after_peer_failure(text: &str, may_restart: bool) -> NextStep {
    log(&format!("workers of another node failed: {text}"));
    if may_restart { NextStep::Restart } else { NextStep::Exit(PEER) }
}

fn after_peer_stop(rendezvous: &Rendezvous, text: &str, code: i32) -> NextStep {
    log(&format!("another node was stopped: {text}"));
    if rendezvous.can_continue_without_peer() {
        NextStep::Rerendezvous("another node left")
    } else {
        NextStep::Exit(code)
    }
}

fn system_error(action: &'static str) -> impl Fn(io::Error) -> LaunchError {
    move |source| LaunchError::System { action, source }
}
