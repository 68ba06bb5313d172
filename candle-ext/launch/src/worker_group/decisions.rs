//! The decisions about a worker group, apart from processes and clocks: the action after a worker's exit, a signal, the
//! failure of another node, or a deadline.

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
    /// The others, in the order in which they ended.
    exits: Vec<WorkerExit>,
    signals_sent: SignalsSent,
    stop: Option<Stop>,
    peer: Option<PeerEvent>,
    deadline: Option<Instant>,
    /// Killed because it did not end in time, not because somebody asked for it.
    timed_out: bool,
}

/// The rules of a run.
#[derive(Clone, Debug)]
pub struct ShutdownPolicy {
    /// How long workers may take to end.
    pub timeouts: ShutdownTimeouts,
    /// The signals that end the group. Others are passed on.
    pub ending_signals: Vec<i32>,
}

/// A worker that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerExit {
    /// Its number on this machine.
    pub local_rank: usize,
    /// How.
    pub reason: ExitReason,
    /// When.
    pub at: Instant,
    /// What it had been sent by then.
    pub signals_sent: SignalsSent,
}

/// The signals that were sent to every running worker in order to end it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SignalsSent(u64);

/// The signal after which no worker is started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop {
    signal: i32,
    at: Instant,
    /// It came twice.
    is_kill: bool,
}

/// An action to carry out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Wait,
    /// Send this signal to every worker that runs, and to what it started.
    Terminate(i32),
    /// Send this signal to every worker that runs: it ends nothing.
    Forward(i32),
}

/// An event that the other nodes must learn at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// This node was asked to stop, by this signal.
    Stopping(i32),
    /// A worker saved or failed, and does not blame another.
    Exited(WorkerExit),
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerGroupOutcome {
    /// Every worker ended with 0.
    Succeeded,
    /// The workers ended because they were asked to, with this code.
    Stopped(i32),
    /// These workers failed by themselves, in this order.
    Failed(Vec<WorkerExit>),
    /// Workers of another node failed; the text says which.
    PeerFailed(String),
    /// Another node was asked to stop, so these workers were too, with this code; the text says which.
    PeerStopped(String, i32),
    /// The nodes must meet anew: another one came.
    Rerendezvous,
}

impl WorkerGroupRun {
    /// Begins a run of `n_workers` workers.
    pub fn new(n_workers: usize, policy: ShutdownPolicy) -> Self {
        let running = (0..n_workers).collect();
        let (exits, signals_sent) = (Vec::new(), SignalsSent::default());
        Self { policy, running, exits, signals_sent, stop: None, peer: None, deadline: None, timed_out: false }
    }

    /// Returns the workers that run.
    pub fn running(&self) -> &[usize] {
        &self.running
    }

    /// Returns how the others ended, in that order.
    pub fn exits(&self) -> &[WorkerExit] {
        &self.exits
    }

    /// Returns when [`WorkerGroupRun::time_is_up`] must be called, if nothing happens before.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Says whether a signal asked the group to end.
    pub fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// Takes in something that happened.
    pub fn handle(&mut self, event: &Event, now: Instant) -> Action {
        match event {
            Event::Exited { local_rank, reason } => self.on_exit(*local_rank, *reason, now),
            Event::Signal(signal) => self.on_signal(*signal, now),
            Event::Peer { peer, .. } => self.on_peer(peer, now),
        }
    }

    /// Returns what the other nodes must hear of an event that was just taken in, and of which worker.
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

    /// Takes in that the deadline has passed.
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
            // It was asked to stop, by whom ever. The others save too and must not hear it twice.
            ExitReason::Code(PREEMPTED) => self.tighten_deadline(self.policy.timeouts.after_signal, at),
            // It did not save, but the others may.
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
                // Another node may have been told before, and have told this one.
                if self.signals_sent.has(signal) { Action::Wait } else { self.terminate(signal) }
            }
            // Schedulers and shells say it more than once; a person at the keyboard means it.
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

    /// An earlier deadline stands.
    fn tighten_deadline(&mut self, grace_period: Duration, now: Instant) {
        let deadline = now + grace_period;
        self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    fn terminate(&mut self, signal: i32) -> Action {
        self.signals_sent.0 |= 1 << signal;
        Action::Terminate(signal)
    }

    /// Returns how the attempt ended. Every worker must have.
    pub fn outcome(&self) -> WorkerGroupOutcome {
        assert!(self.running.is_empty(), "an attempt ends with its last worker");
        let failures: Vec<_> = self.exits.iter().copied().filter(WorkerExit::is_failure).collect();
        let was_preempted = self.exits.iter().any(|exit| exit.reason == ExitReason::Code(PREEMPTED));
        match (&self.stop, &self.peer) {
            (Some(stop), _) if stop.is_kill => WorkerGroupOutcome::Stopped(128 + stop.signal),
            (_, Some(PeerEvent::Failed(text) | PeerEvent::Lost(text)))
                if failures.iter().all(WorkerExit::is_consequence) =>
            {
                WorkerGroupOutcome::PeerFailed(text.clone())
            }
            (_, Some(PeerEvent::Stopped(text) | PeerEvent::Saved(text)))
                if !failures.is_empty() && failures.iter().all(WorkerExit::is_consequence) =>
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

    /// What the workers made of the signal: killed for being slow, ended by it, saved, or done anyway.
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

/// A signal that comes again within this time is an echo of the first.
const REPEAT_WINDOW: Duration = Duration::from_millis(500);

impl SignalsSent {
    fn has(self, signal: i32) -> bool {
        (0..64).contains(&signal) && self.0 >> signal & 1 == 1
    }
}

impl WorkerExit {
    /// Says whether the worker failed by itself: not if it ended well, or saved, or died of what it was sent.
    pub fn is_failure(&self) -> bool {
        let was_signaled = self.signals_sent != SignalsSent::default();
        match self.reason {
            ExitReason::Code(OK | PREEMPTED) => false,
            ExitReason::Code(PEER) if was_signaled => false,
            // Whoever is told to end, and says so in its code, obeyed.
            ExitReason::Code(code) => !self.signals_sent.has(code - 128),
            ExitReason::Signal(signal) => !self.signals_sent.has(signal),
        }
    }

    fn is_announced(&self) -> bool {
        let has_saved = self.reason == ExitReason::Code(PREEMPTED);
        self.signals_sent == SignalsSent::default() && !self.reports_peer_failure() && (has_saved || self.is_failure())
    }

    /// Says whether another's end may be the cause: the worker says so, or ended after it was told to.
    pub fn is_consequence(&self) -> bool {
        self.reports_peer_failure() || self.signals_sent != SignalsSent::default()
    }

    /// Says whether the worker's code is "another rank failed".
    pub fn reports_peer_failure(&self) -> bool {
        self.reason == ExitReason::Code(PEER)
    }
}

/// Picks the failure that the others follow from: the earliest of those that do not blame another rank.
///
/// `time_of` says when a worker failed, in whole seconds; among the same, the order in which they ended decides.
pub fn root_cause(failures: &[WorkerExit], failure_time: impl Fn(&WorkerExit) -> u64) -> Option<WorkerExit> {
    failures.iter().min_by_key(|exit| (exit.reports_peer_failure(), failure_time(exit))).copied()
}

#[cfg(test)]
mod tests;
