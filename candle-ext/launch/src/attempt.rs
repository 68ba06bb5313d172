//! The decisions of one attempt, apart from processes and clocks: what to do when a worker ends, a signal comes, another
//! node fails, or time is up. [`crate::group`] carries them out.

use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGKILL, SIGTERM};

use crate::ended::{Ended, OK, PEER, PREEMPTED};
use crate::event::{Event, Peer};
use crate::plan::Grace;

/// The state of an attempt.
#[derive(Debug)]
pub struct Attempt {
    rules: Rules,
    running: Vec<usize>,
    /// The others, in the order in which they ended.
    ended: Vec<Exit>,
    sent: Sent,
    stop: Option<Stop>,
    peer: Option<Peer>,
    deadline: Option<Instant>,
    /// Killed because it did not end in time, not because somebody asked for it.
    timed_out: bool,
}

/// What an attempt goes by.
#[derive(Clone, Debug)]
pub struct Rules {
    /// How long workers may take to end.
    pub grace: Grace,
    /// The signals that end the group. Others are passed on.
    pub ending: Vec<i32>,
}

/// A worker that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Its number on this machine.
    pub local_rank: usize,
    /// How.
    pub ended: Ended,
    /// When.
    pub at: Instant,
    /// What it had been sent by then.
    pub sent: Sent,
}

/// The signals that were sent to every running worker in order to end it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent(u64);

/// Why no worker will be started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop {
    signal: i32,
    at: Instant,
    /// It came twice.
    is_kill: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Wait,
    /// Send this signal to every worker that runs, and to what it started.
    Send(i32),
    /// Send this signal to every worker that runs: it ends nothing.
    Notify(i32),
}

/// What the other nodes must hear at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// This node was asked to stop, by this signal.
    Stops(i32),
    /// A worker saved or failed, and does not blame another.
    Ended(Exit),
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every worker ended with 0.
    Succeeded,
    /// The workers ended because they were asked to, with this code.
    Stopped(i32),
    /// These workers failed by themselves, in this order.
    Failed(Vec<Exit>),
    /// Workers of another node failed; the text says which.
    PeerFailed(String),
    /// Another node was asked to stop, so these workers were too, with this code; the text says which.
    PeerStopped(String, i32),
    /// The nodes must meet anew: another one came.
    Regroup,
}

impl Attempt {
    /// Starts the watch over `n_workers` workers.
    pub fn new(n_workers: usize, rules: Rules) -> Self {
        let running = (0..n_workers).collect();
        let (ended, sent) = (Vec::new(), Sent::default());
        Self { rules, running, ended, sent, stop: None, peer: None, deadline: None, timed_out: false }
    }

    /// Returns the workers that run.
    pub fn running(&self) -> &[usize] {
        &self.running
    }

    /// Returns how the others ended, in that order.
    pub fn exits(&self) -> &[Exit] {
        &self.ended
    }

    /// Returns when [`Attempt::time_is_up`] must be called, if nothing happens before.
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
            Event::Ended { local_rank, ended } => self.on_end(*local_rank, *ended, now),
            Event::Signal(signal) => self.on_signal(*signal, now),
            Event::Peer { peer, .. } => self.on_peer(peer, now),
        }
    }

    /// Returns what the other nodes must hear of an event that was just taken in, and of which worker.
    pub fn news(&self, event: &Event) -> Option<News> {
        let exit = self.ended.last();
        match event {
            Event::Signal(signal) if self.stop.is_some_and(|stop| stop.signal == *signal) => Some(News::Stops(*signal)),
            Event::Ended { .. } => exit.filter(|exit| exit.is_news()).map(|exit| News::Ended(*exit)),
            _ => None,
        }
    }

    /// Takes in that the deadline has passed.
    pub fn time_is_up(&mut self) -> Action {
        self.deadline = None;
        self.timed_out = true;
        self.end_by(SIGKILL)
    }

    fn on_end(&mut self, local_rank: usize, ended: Ended, at: Instant) -> Action {
        self.running.retain(|running| *running != local_rank);
        let exit = Exit { local_rank, ended, at, sent: self.sent };
        self.ended.push(exit);
        match ended {
            Ended::Code(OK) => return Action::Wait,
            // It was asked to stop, by whom ever. The others save too and must not hear it twice.
            Ended::Code(PREEMPTED) => self.end_within(self.rules.grace.after_signal, at),
            // It did not save, but the others may.
            _ if !exit.is_failure() => self.end_within(self.rules.grace.after_signal, at),
            _ => self.end_within(self.rules.grace.after_failure, at),
        }
        let is_first_failure = exit.is_failure() && self.sent == Sent::default();
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
        let is_told = self.sent != Sent::default() || matches!(peer, Peer::Saved(_));
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
        let failures: Vec<_> = self.ended.iter().copied().filter(Exit::is_failure).collect();
        let was_preempted = self.ended.iter().any(|exit| exit.ended == Ended::Code(PREEMPTED));
        match (&self.stop, &self.peer) {
            (Some(stop), _) if stop.is_kill => Outcome::Stopped(128 + stop.signal),
            (_, Some(Peer::Failed(text) | Peer::Lost(text))) if failures.iter().all(Exit::is_consequence) => {
                Outcome::PeerFailed(text.clone())
            }
            (_, Some(Peer::Stopped(text) | Peer::Saved(text)))
                if !failures.is_empty() && failures.iter().all(Exit::is_consequence) =>
            {
                Outcome::PeerFailed(text.clone())
            }
            _ if !failures.is_empty() => Outcome::Failed(failures),
            (Some(stop), _) => Outcome::Stopped(self.code_after(stop.signal, was_preempted)),
            (None, Some(Peer::Joins)) => Outcome::Regroup,
            (None, Some(Peer::Stopped(text))) => Outcome::PeerStopped(text.clone(), self.code_for_peer(was_preempted)),
            _ if self.timed_out => Outcome::Stopped(128 + SIGKILL),
            _ if was_preempted => Outcome::Stopped(PREEMPTED),
            _ => Outcome::Succeeded,
        }
    }

    fn code_for_peer(&self, was_preempted: bool) -> i32 {
        match was_preempted {
            _ if self.ended.iter().all(|exit| exit.ended == Ended::Code(OK)) => OK,
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

impl Sent {
    fn has(self, signal: i32) -> bool {
        (0..64).contains(&signal) && self.0 >> signal & 1 == 1
    }
}

impl Exit {
    /// Says whether the worker failed by itself: not if it ended well, or saved, or died of what it was sent.
    pub fn is_failure(&self) -> bool {
        let was_told = self.sent != Sent::default();
        match self.ended {
            Ended::Code(OK | PREEMPTED) => false,
            Ended::Code(PEER) if was_told => false,
            // Whoever is told to end, and says so in its code, obeyed.
            Ended::Code(code) => !self.sent.has(code - 128),
            Ended::Signal(signal) => !self.sent.has(signal),
        }
    }

    fn is_news(&self) -> bool {
        let has_saved = self.ended == Ended::Code(PREEMPTED);
        self.sent == Sent::default() && !self.blames_another() && (has_saved || self.is_failure())
    }

    /// Says whether another's end may be the cause: the worker says so, or ended after it was told to.
    pub fn is_consequence(&self) -> bool {
        self.blames_another() || self.sent != Sent::default()
    }

    /// Says whether the worker's code is "another rank failed".
    pub fn blames_another(&self) -> bool {
        self.ended == Ended::Code(PEER)
    }
}

/// Picks the failure that the others follow from: the earliest of those that do not blame another rank.
///
/// `time_of` says when a worker failed, in whole seconds; among the same, the order in which they ended decides.
pub fn root_cause(failures: &[Exit], time_of: impl Fn(&Exit) -> u64) -> Option<Exit> {
    failures.iter().min_by_key(|exit| (exit.blames_another(), time_of(exit))).copied()
}

#[cfg(test)]
mod tests;
