//! The channel on which the launcher hears of everything, and what it heard while no worker ran.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::event::{Event, catch_signals};

/// Where events come from and go to.
#[derive(Debug)]
pub struct EventQueue {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    /// The signals that end the group. Others are passed on.
    ending_signals: Vec<i32>,
    /// One of them came while no worker ran.
    interrupt: Cell<Option<i32>>,
    /// Those that were passed on, or came while no worker ran: a worker that starts later hears them too.
    forwarded_signals: RefCell<BTreeSet<i32>>,
}

impl EventQueue {
    /// Opens the mailbox for signals: those of `ending`, and those that are passed on.
    pub fn open(ending_signals: &[i32]) -> io::Result<Self> {
        let (sender, receiver) = channel();
        catch_signals(ending_signals, sender.clone())?;
        let (interrupt, forwarded_signals) = (Cell::new(None), RefCell::new(BTreeSet::new()));
        Ok(Self { sender, receiver, ending_signals: ending_signals.to_vec(), interrupt, forwarded_signals })
    }

    /// Returns an address for whoever has something to say.
    pub fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// Returns the next event, or `None` if the deadline passes before.
    pub fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        const FOR_EVER: Duration = Duration::from_secs(1 << 20);
        loop {
            let left = deadline.map_or(FOR_EVER, |deadline| deadline.saturating_duration_since(Instant::now()));
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

    /// Returns the signal that ends the group, if one came while no worker ran. What else came is over.
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

    /// Returns the signals that were passed on so far.
    pub fn forwarded_signals(&self) -> Vec<i32> {
        self.forwarded_signals.borrow().iter().copied().collect()
    }

    /// Says whether a signal ends the group.
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
