//! The state machine of a worker group, without processes and clocks: the action after a worker's exit, a signal, an
//! event on another node, or a deadline.

use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGKILL, SIGTERM};

use crate::event::{Event, PeerEvent};
use crate::exit::{ExitReason, OK, PEER, PREEMPTED};
use crate::plan::ShutdownTimeouts;

/// The state of one run of the worker group.
#[derive(Debug)]
pub struct WorkerGroupRun {
    policy: ShutdownPolicy,
    running: Vec<usize>,
    /// Exits of the other workers, in order.
    exits: Vec<WorkerExit>,
    signals_sent: SignalsSent,
    stop: Option<Stop>,
    peer: Option<PeerEvent>,
    deadline: Option<Instant>,
    /// Workers were killed at the deadline, not by a second stop signal.
    timed_out: bool,
}

/// The shutdown settings of a run.
#[derive(Clone, Debug)]
pub struct ShutdownPolicy {
    /// Time between the stop signal and SIGKILL.
    pub timeouts: ShutdownTimeouts,
    /// Signals that stop the worker group. Others are forwarded.
    pub ending_signals: Vec<i32>,
}

/// The exit of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerExit {
    /// Local rank.
    pub local_rank: usize,
    /// Exit code or signal.
    pub reason: ExitReason,
    /// Time of the exit.
    pub at: Instant,
    /// Stop signals sent to the worker before its exit.
    pub signals_sent: SignalsSent,
}

/// The set of stop signals sent to all running workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignalsSent(u64);

/// A received stop signal. No restart follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop {
    signal: i32,
    at: Instant,
    /// The signal was received twice and the workers were killed.
    is_kill: bool,
}

/// An action of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// No action.
    Wait,
    /// Send this signal to the process group of every running worker.
    Terminate(i32),
    /// Forward this signal to every running worker, but not to its children.
    Forward(i32),
}

/// An event that is published to the other nodes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// This node received this stop signal.
    Stopping(i32),
    /// A worker saved a checkpoint and exited, or failed without reporting a peer failure.
    Exited(WorkerExit),
}

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerGroupOutcome {
    /// Every worker exited with 0.
    Succeeded,
    /// The workers stopped on request, with this exit code.
    Stopped(i32),
    /// These workers failed, in this order.
    Failed(Vec<WorkerExit>),
    /// Workers of another node failed. The text names the cause.
    PeerFailed(String),
    /// Another node received a stop signal, so the workers stopped with this exit code. The text names the node.
    PeerStopped(String, i32),
    /// A node waits to join, so a new rendezvous is needed.
    Rerendezvous,
}

impl WorkerGroupRun {
    /// Starts a run of `n_workers` workers.
    pub fn new(n_workers: usize, policy: ShutdownPolicy) -> Self {
        let running = (0..n_workers).collect();
        let (exits, signals_sent) = (Vec::new(), SignalsSent::default());
        Self { policy, running, exits, signals_sent, stop: None, peer: None, deadline: None, timed_out: false }
    }

    /// Returns the local ranks of the running workers.
    pub fn running(&self) -> &[usize] {
        &self.running
    }

    /// Returns the exits so far, in order.
    pub fn exits(&self) -> &[WorkerExit] {
        &self.exits
    }

    /// Returns the time at which [`WorkerGroupRun::on_deadline`] must be called.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns whether a stop signal was received.
    pub fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// Handles an event and returns the resulting action.
    pub fn handle(&mut self, event: &Event, now: Instant) -> Action {
        match event {
            Event::Exited { local_rank, reason } => self.on_exit(*local_rank, *reason, now),
            Event::Signal(signal) => self.on_signal(*signal, now),
            Event::Peer { peer, .. } => self.on_peer(peer, now),
        }
    }

    /// Returns the announcement of the event handled last, if the other nodes need one.
    pub fn announcement(&self, event: &Event) -> Option<Announcement> {
        let exit = self.exits.last();
        match event {
            Event::Signal(signal) if self.stop.is_some_and(|stop| stop.signal == *signal) => {
                Some(Announcement::Stopping(*signal))
            }
            Event::Exited { .. } => exit.filter(|exit| exit.is_announced()).map(|exit| Announcement::Exited(*exit)),
            _ => None,
        }
    }

    /// Handles the deadline: kills the remaining workers.
    pub fn on_deadline(&mut self) -> Action {
        self.deadline = None;
        self.timed_out = true;
        self.terminate(SIGKILL)
    }

    fn on_exit(&mut self, local_rank: usize, reason: ExitReason, at: Instant) -> Action {
        self.running.retain(|running| *running != local_rank);
        let exit = WorkerExit { local_rank, reason, at, signals_sent: self.signals_sent };
        self.exits.push(exit);
        match reason {
            ExitReason::Code(OK) => return Action::Wait,
            // The worker was preempted. The others save a checkpoint too and must not get a second signal.
            ExitReason::Code(PREEMPTED) => self.tighten_deadline(self.policy.timeouts.after_signal, at),
            // The stop signal ended this worker before it saved. The others may still save.
            _ if !exit.is_failure() => self.tighten_deadline(self.policy.timeouts.after_signal, at),
            _ => self.tighten_deadline(self.policy.timeouts.after_failure, at),
        }
        let is_first_failure = exit.is_failure() && self.signals_sent == SignalsSent::default();
        if is_first_failure { self.terminate(SIGTERM) } else { Action::Wait }
    }

    fn on_signal(&mut self, signal: i32, now: Instant) -> Action {
        match self.stop {
            _ if !self.policy.ending_signals.contains(&signal) => Action::Forward(signal),
            None => {
                self.stop = Some(Stop { signal, at: now, is_kill: false });
                self.tighten_deadline(self.policy.timeouts.after_signal, now);
                // A stop of another node may have sent this signal already.
                if self.signals_sent.has(signal) { Action::Wait } else { self.terminate(signal) }
            }
            // Schedulers and shells repeat a signal at once. A second SIGINT comes from a user and kills.
            Some(stop) if signal != SIGINT && now < stop.at + REPEAT_WINDOW => Action::Wait,
            Some(_) => {
                self.stop = Some(Stop { signal, at: now, is_kill: true });
                self.terminate(SIGKILL)
            }
        }
    }

    fn on_peer(&mut self, peer: &PeerEvent, now: Instant) -> Action {
        if self.peer.is_some() || self.stop.is_some() {
            return Action::Wait;
        }
        self.peer = Some(peer.clone());
        let timeouts = self.policy.timeouts;
        let is_failure = matches!(peer, PeerEvent::Failed(_) | PeerEvent::Lost(_));
        self.tighten_deadline(if is_failure { timeouts.after_failure } else { timeouts.after_signal }, now);
        let needs_no_signal = self.signals_sent != SignalsSent::default() || matches!(peer, PeerEvent::Saved(_));
        if needs_no_signal { Action::Wait } else { self.terminate(SIGTERM) }
    }

    /// Sets the deadline, unless an earlier one exists.
    fn tighten_deadline(&mut self, grace_period: Duration, now: Instant) {
        let deadline = now + grace_period;
        self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    fn terminate(&mut self, signal: i32) -> Action {
        self.signals_sent.0 |= 1 << signal;
        Action::Terminate(signal)
    }

    /// Returns the outcome. All workers must have exited.
    pub fn outcome(&self) -> WorkerGroupOutcome {
        assert!(self.running.is_empty(), "a worker is still running");
        let failures: Vec<_> = self.exits.iter().copied().filter(WorkerExit::is_failure).collect();
        let was_preempted = self.exits.iter().any(|exit| exit.reason == ExitReason::Code(PREEMPTED));
        match (&self.stop, &self.peer) {
            (Some(stop), _) if stop.is_kill => WorkerGroupOutcome::Stopped(128 + stop.signal),
            (_, Some(PeerEvent::Failed(text) | PeerEvent::Lost(text)))
                if failures.iter().all(WorkerExit::may_follow_other_failure) =>
            {
                WorkerGroupOutcome::PeerFailed(text.clone())
            }
            (_, Some(PeerEvent::Stopped(text) | PeerEvent::Saved(text)))
                if !failures.is_empty() && failures.iter().all(WorkerExit::may_follow_other_failure) =>
            {
                WorkerGroupOutcome::PeerFailed(text.clone())
            }
            _ if !failures.is_empty() => WorkerGroupOutcome::Failed(failures),
            (Some(stop), _) => WorkerGroupOutcome::Stopped(self.exit_code_after_signal(stop.signal, was_preempted)),
            (None, Some(PeerEvent::Joins)) => WorkerGroupOutcome::Rerendezvous,
            (None, Some(PeerEvent::Stopped(text))) => {
                WorkerGroupOutcome::PeerStopped(text.clone(), self.exit_code_after_peer_stop(was_preempted))
            }
            _ if self.timed_out => WorkerGroupOutcome::Stopped(128 + SIGKILL),
            _ if was_preempted => WorkerGroupOutcome::Stopped(PREEMPTED),
            _ => WorkerGroupOutcome::Succeeded,
        }
    }

    fn exit_code_after_peer_stop(&self, was_preempted: bool) -> i32 {
        match was_preempted {
            _ if self.exits.iter().all(|exit| exit.reason == ExitReason::Code(OK)) => OK,
            true => PREEMPTED,
            false => PEER,
        }
    }

    /// Returns the exit code after a stop signal: killed at the deadline, ended by the signal, preempted, or succeeded.
    fn exit_code_after_signal(&self, signal: i32, was_preempted: bool) -> i32 {
        let ended_as = |code| self.exits.iter().any(|exit| exit.reason.code() == code);
        match (self.timed_out && ended_as(128 + SIGKILL), ended_as(128 + signal)) {
            (true, _) => 128 + SIGKILL,
            (false, true) => 128 + signal,
            (false, false) if was_preempted => PREEMPTED,
            (false, false) => OK,
        }
    }
}

/// A repeated stop signal within this time is ignored.
const REPEAT_WINDOW: Duration = Duration::from_millis(500);

impl SignalsSent {
    fn has(self, signal: i32) -> bool {
        (0..64).contains(&signal) && self.0 >> signal & 1 == 1
    }
}

impl WorkerExit {
    /// Returns whether the worker failed. Success, a saved checkpoint and death by a sent signal are no failures.
    pub fn is_failure(&self) -> bool {
        let was_signaled = self.signals_sent != SignalsSent::default();
        match self.reason {
            ExitReason::Code(OK | PREEMPTED) => false,
            ExitReason::Code(PEER) if was_signaled => false,
            // A worker may catch a sent signal and exit with 128 + signal.
            ExitReason::Code(code) => !self.signals_sent.has(code - 128),
            ExitReason::Signal(signal) => !self.signals_sent.has(signal),
        }
    }

    fn is_announced(&self) -> bool {
        let has_saved = self.reason == ExitReason::Code(PREEMPTED);
        self.signals_sent == SignalsSent::default() && !self.reports_peer_failure() && (has_saved || self.is_failure())
    }

    /// Returns whether the exit may follow from another failure: the worker reports one, or was sent a signal before.
    pub fn may_follow_other_failure(&self) -> bool {
        self.reports_peer_failure() || self.signals_sent != SignalsSent::default()
    }

    /// Returns whether the worker's exit code reports a failure of another rank.
    pub fn reports_peer_failure(&self) -> bool {
        self.reason == ExitReason::Code(PEER)
    }
}

/// Returns the root cause: the earliest failure that does not report a peer failure.
///
/// `failure_time` returns the Unix time of a failure in seconds. The order of exits breaks ties.
pub fn root_cause(failures: &[WorkerExit], failure_time: impl Fn(&WorkerExit) -> u64) -> Option<WorkerExit> {
    failures.iter().min_by_key(|exit| (exit.reports_peer_failure(), failure_time(exit))).copied()
}

#[cfg(test)]
mod tests;
