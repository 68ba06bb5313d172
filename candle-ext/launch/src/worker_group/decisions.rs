//! The decisions about a worker group, apart from processes and clocks: the action after a worker's exit, a signal, the
//! failure of another node, or a deadline.

use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGKILL, SIGTERM};

use crate::event::{Event, Peer};
use crate::exit::{ExitReason, OK, PEER, PREEMPTED};
use crate::plan::Grace;

/// The state of one run of the worker group.
#[derive(Debug)]
pub struct WorkerGroupRun {
    rules: Rules,
    running: Vec<usize>,
    /// The others, in the order in which they ended.
    ended: Vec<WorkerExit>,
    sent: SignalsSent,
    stop: Option<Stop>,
    peer: Option<Peer>,
    deadline: Option<Instant>,
    /// Killed because it did not end in time, not because somebody asked for it.
    timed_out: bool,
}

/// The rules of a run.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How long workers may take to end.
    pub grace: Grace,
    /// The signals that end the group. Others are passed on.
    pub ending: Vec<i32>,
}

/// A worker that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerExit {
    /// Its number on this machine.
    pub local_rank: usize,
    /// How.
    pub ended: ExitReason,
    /// When.
    pub at: Instant,
    /// What it had been sent by then.
    pub sent: SignalsSent,
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
    Send(i32),
    /// Send this signal to every worker that runs: it ends nothing.
    Notify(i32),
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
pub enum Outcome {
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
    pub fn new(n_workers: usize, rules: Rules) -> Self {
        let running = (0..n_workers).collect();
        let (ended, sent) = (Vec::new(), SignalsSent::default());
        Self { rules, running, ended, sent, stop: None, peer: None, deadline: None, timed_out: false }
    }

    /// Returns the workers that run.
    pub fn running(&self) -> &[usize] {
        &self.running
    }

    /// Returns how the others ended, in that order.
    pub fn exits(&self) -> &[WorkerExit] {
        &self.ended
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
    pub fn on(&mut self, event: &Event, now: Instant) -> Action {
        match event {
            Event::Exited { local_rank, ended } => self.on_end(*local_rank, *ended, now),
            Event::Signal(signal) => self.on_signal(*signal, now),
            Event::Peer { peer, .. } => self.on_peer(peer, now),
        }
    }

    /// Returns what the other nodes must hear of an event that was just taken in, and of which worker.
    pub fn announcement(&self, event: &Event) -> Option<Announcement> {
        let exit = self.ended.last();
        match event {
            Event::Signal(signal) if self.stop.is_some_and(|stop| stop.signal == *signal) => {
                Some(Announcement::Stopping(*signal))
            }
            Event::Exited { .. } => exit.filter(|exit| exit.is_news()).map(|exit| Announcement::Exited(*exit)),
            _ => None,
        }
    }

    /// Takes in that the deadline has passed.
    pub fn time_is_up(&mut self) -> Action {
        self.deadline = None;
        self.timed_out = true;
        self.end_by(SIGKILL)
    }

    fn on_end(&mut self, local_rank: usize, ended: ExitReason, at: Instant) -> Action {
        self.running.retain(|running| *running != local_rank);
        let exit = WorkerExit { local_rank, ended, at, sent: self.sent };
        self.ended.push(exit);
        match ended {
            ExitReason::Code(OK) => return Action::Wait,
            // It was asked to stop, by whom ever. The others save too and must not hear it twice.
            ExitReason::Code(PREEMPTED) => self.end_within(self.rules.grace.after_signal, at),
            // It did not save, but the others may.
            _ if !exit.is_failure() => self.end_within(self.rules.grace.after_signal, at),
            _ => self.end_within(self.rules.grace.after_failure, at),
        }
        let is_first_failure = exit.is_failure() && self.sent == SignalsSent::default();
        if is_first_failure { self.end_by(SIGTERM) } else { Action::Wait }
    }

    fn on_signal(&mut self, signal: i32, now: Instant) -> Action {
        match self.stop {
            _ if !self.rules.ending.contains(&signal) => Action::Notify(signal),
            None => {
                self.stop = Some(Stop { signal, at: now, is_kill: false });
                self.end_within(self.rules.grace.after_signal, now);
                // Another node may have been told before, and have told this one.
                if self.sent.has(signal) { Action::Wait } else { self.end_by(signal) }
            }
            // Schedulers and shells say it more than once; a person at the keyboard means it.
            Some(stop) if signal != SIGINT && now < stop.at + ECHO => Action::Wait,
            Some(_) => {
                self.stop = Some(Stop { signal, at: now, is_kill: true });
                self.end_by(SIGKILL)
            }
        }
    }

    fn on_peer(&mut self, peer: &Peer, now: Instant) -> Action {
        if self.peer.is_some() || self.stop.is_some() {
            return Action::Wait;
        }
        self.peer = Some(peer.clone());
        let grace = self.rules.grace;
        let is_lost = matches!(peer, Peer::Failed(_) | Peer::Lost(_));
        self.end_within(if is_lost { grace.after_failure } else { grace.after_signal }, now);
        let is_told = self.sent != SignalsSent::default() || matches!(peer, Peer::Saved(_));
        if is_told { Action::Wait } else { self.end_by(SIGTERM) }
    }

    /// An earlier deadline stands.
    fn end_within(&mut self, grace: Duration, now: Instant) {
        let deadline = now + grace;
        self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
    }

    fn end_by(&mut self, signal: i32) -> Action {
        self.sent.0 |= 1 << signal;
        Action::Send(signal)
    }

    /// Returns how the attempt ended. Every worker must have.
    pub fn outcome(&self) -> Outcome {
        assert!(self.running.is_empty(), "an attempt ends with its last worker");
        let failures: Vec<_> = self.ended.iter().copied().filter(WorkerExit::is_failure).collect();
        let was_preempted = self.ended.iter().any(|exit| exit.ended == ExitReason::Code(PREEMPTED));
        match (&self.stop, &self.peer) {
            (Some(stop), _) if stop.is_kill => Outcome::Stopped(128 + stop.signal),
            (_, Some(Peer::Failed(text) | Peer::Lost(text))) if failures.iter().all(WorkerExit::is_consequence) => {
                Outcome::PeerFailed(text.clone())
            }
            (_, Some(Peer::Stopped(text) | Peer::Saved(text)))
                if !failures.is_empty() && failures.iter().all(WorkerExit::is_consequence) =>
            {
                Outcome::PeerFailed(text.clone())
            }
            _ if !failures.is_empty() => Outcome::Failed(failures),
            (Some(stop), _) => Outcome::Stopped(self.code_after(stop.signal, was_preempted)),
            (None, Some(Peer::Joins)) => Outcome::Rerendezvous,
            (None, Some(Peer::Stopped(text))) => Outcome::PeerStopped(text.clone(), self.code_for_peer(was_preempted)),
            _ if self.timed_out => Outcome::Stopped(128 + SIGKILL),
            _ if was_preempted => Outcome::Stopped(PREEMPTED),
            _ => Outcome::Succeeded,
        }
    }

    fn code_for_peer(&self, was_preempted: bool) -> i32 {
        match was_preempted {
            _ if self.ended.iter().all(|exit| exit.ended == ExitReason::Code(OK)) => OK,
            true => PREEMPTED,
            false => PEER,
        }
    }

    /// What the workers made of the signal: killed for being slow, ended by it, saved, or done anyway.
    fn code_after(&self, signal: i32, was_preempted: bool) -> i32 {
        let ended_as = |code| self.ended.iter().any(|exit| exit.ended.code() == code);
        match (self.timed_out && ended_as(128 + SIGKILL), ended_as(128 + signal)) {
            (true, _) => 128 + SIGKILL,
            (false, true) => 128 + signal,
            (false, false) if was_preempted => PREEMPTED,
            (false, false) => OK,
        }
    }
}

/// A signal that comes again within this time is an echo of the first.
const ECHO: Duration = Duration::from_millis(500);

impl SignalsSent {
    fn has(self, signal: i32) -> bool {
        (0..64).contains(&signal) && self.0 >> signal & 1 == 1
    }
}

impl WorkerExit {
    /// Says whether the worker failed by itself: not if it ended well, or saved, or died of what it was sent.
    pub fn is_failure(&self) -> bool {
        let was_told = self.sent != SignalsSent::default();
        match self.ended {
            ExitReason::Code(OK | PREEMPTED) => false,
            ExitReason::Code(PEER) if was_told => false,
            // Whoever is told to end, and says so in its code, obeyed.
            ExitReason::Code(code) => !self.sent.has(code - 128),
            ExitReason::Signal(signal) => !self.sent.has(signal),
        }
    }

    fn is_news(&self) -> bool {
        let has_saved = self.ended == ExitReason::Code(PREEMPTED);
        self.sent == SignalsSent::default() && !self.blames_another() && (has_saved || self.is_failure())
    }

    /// Says whether another's end may be the cause: the worker says so, or ended after it was told to.
    pub fn is_consequence(&self) -> bool {
        self.blames_another() || self.sent != SignalsSent::default()
    }

    /// Says whether the worker's code is "another rank failed".
    pub fn blames_another(&self) -> bool {
        self.ended == ExitReason::Code(PEER)
    }
}

/// Picks the failure that the others follow from: the earliest of those that do not blame another rank.
///
/// `time_of` says when a worker failed, in whole seconds; among the same, the order in which they ended decides.
pub fn root_cause(failures: &[WorkerExit], time_of: impl Fn(&WorkerExit) -> u64) -> Option<WorkerExit> {
    failures.iter().min_by_key(|exit| (exit.blames_another(), time_of(exit))).copied()
}

#[cfg(test)]
mod tests;
