//! The event queue of the agent. It remembers signals that arrive while no worker runs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::event::{Event, catch_signals};

/// The queue of events, and the signals received so far.
#[derive(Debug)]
pub struct EventQueue {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    /// Signals that stop the worker group. Others are forwarded.
    ending_signals: Vec<i32>,
    /// A stop signal that arrived while no worker ran.
    interrupt: Cell<Option<i32>>,
    /// Forwarded signals received so far. Workers started later receive them too.
    forwarded_signals: RefCell<BTreeSet<i32>>,
}

impl EventQueue {
    /// Opens the queue and catches `ending_signals` and the forwarded signals.
    pub fn open(ending_signals: &[i32]) -> io::Result<Self> {
        let (sender, receiver) = channel();
        catch_signals(ending_signals, sender.clone())?;
        let (interrupt, forwarded_signals) = (Cell::new(None), RefCell::new(BTreeSet::new()));
        Ok(Self { sender, receiver, ending_signals: ending_signals.to_vec(), interrupt, forwarded_signals })
    }

    /// Returns a sender of events.
    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// Returns the next event, or `None` after the deadline.
    pub fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        const UNBOUNDED: Duration = Duration::from_secs(1 << 20);
        loop {
            let left = deadline.map_or(UNBOUNDED, |deadline| deadline.saturating_duration_since(Instant::now()));
            match self.receiver.recv_timeout(left) {
                Ok(event) => {
                    self.record(&event);
                    return Some(event);
                }
                Err(RecvTimeoutError::Timeout) if deadline.is_some() => return None,
                Err(_) => {}
            }
        }
    }

    /// Returns a stop signal received while no worker runs. Other pending events are dropped.
    pub fn interrupted(&self) -> Option<i32> {
        for event in self.receiver.try_iter() {
            self.record(&event);
            match event {
                Event::Signal(signal) if self.ending_signals.contains(&signal) => self.interrupt.set(Some(signal)),
                _ => {}
            }
        }
        self.interrupt.get()
    }

    /// Returns the forwarded signals received so far.
    pub fn forwarded_signals(&self) -> Vec<i32> {
        self.forwarded_signals.borrow().iter().copied().collect()
    }

    /// Returns whether a signal stops the worker group.
    pub fn is_ending(&self, signal: i32) -> bool {
        self.ending_signals.contains(&signal)
    }

    fn record(&self, event: &Event) {
        match event {
            Event::Signal(signal) if !self.is_ending(*signal) => {
                self.forwarded_signals.borrow_mut().insert(*signal);
            }
            _ => {}
        }
    }
}
