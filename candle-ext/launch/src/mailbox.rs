//! The channel on which the launcher hears of everything, and what it heard while no worker ran.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::event::{Event, catch_signals};

/// Where events come from and go to.
#[derive(Debug)]
pub struct Mailbox {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
    /// The signals that end the group. Others are passed on.
    ending: Vec<i32>,
    /// One of them came while no worker ran.
    stop: Cell<Option<i32>>,
    /// Those that were passed on, or came while no worker ran: a worker that starts later hears them too.
    notices: RefCell<BTreeSet<i32>>,
}

impl Mailbox {
    /// Opens the mailbox for signals: those of `ending`, and those that are passed on.
    pub fn open(ending: &[i32]) -> io::Result<Self> {
        let (sender, receiver) = channel();
        catch_signals(ending, sender.clone())?;
        let (stop, notices) = (Cell::new(None), RefCell::new(BTreeSet::new()));
        Ok(Self { sender, receiver, ending: ending.to_vec(), stop, notices })
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
                    self.note(&event);
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
            self.note(&event);
            match event {
                Event::Signal(signal) if self.ending.contains(&signal) => self.stop.set(Some(signal)),
                _ => {}
            }
        }
        self.stop.get()
    }

    /// Returns the signals that were passed on so far.
    pub fn notices(&self) -> Vec<i32> {
        self.notices.borrow().iter().copied().collect()
    }

    /// Says whether a signal ends the group.
    pub fn is_ending(&self, signal: i32) -> bool {
        self.ending.contains(&signal)
    }

    fn note(&self, event: &Event) {
        match event {
            Event::Signal(signal) if !self.is_ending(*signal) => drop(self.notices.borrow_mut().insert(*signal)),
            _ => {}
        }
    }
}
