//! The order in which the groups of a device launch their operations: that of the calls to them.
//!
//! NCCL wants the operations of several communicators launched in one order on all ranks. Each group launches from a thread of
//! its own, so each call takes a ticket, and its thread waits for the tickets before it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::sync::lock;

/// The tickets of a device.
#[derive(Default)]
pub(super) struct LaunchOrder {
    n_tickets: AtomicU64,
    /// The ticket whose turn it is.
    next: AtomicU64,
    /// The later ones that have been dropped.
    dropped: Mutex<BTreeSet<u64>>,
    changed: Condvar,
}

/// A call's place in the order. Dropping it lets the next one launch.
pub(super) struct Ticket {
    order: Arc<LaunchOrder>,
    number: u64,
}

impl LaunchOrder {
    /// Takes the next place.
    pub(super) fn ticket(self: &Arc<Self>) -> Ticket {
        Ticket { order: Arc::clone(self), number: self.n_tickets.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Ticket {
    /// Waits for its turn for as long as `within`; returns whether it has come.
    pub(super) fn await_turn(&self, within: Duration) -> bool {
        let dropped = lock(&self.order.dropped);
        drop(self.order.changed.wait_timeout_while(dropped, within, |_| !self.has_turn()));
        self.has_turn()
    }

    fn has_turn(&self) -> bool {
        self.order.next.load(Ordering::Acquire) == self.number
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut dropped = lock(&self.order.dropped);
        dropped.insert(self.number);
        let mut next = self.order.next.load(Ordering::Acquire);
        while dropped.remove(&next) {
            next += 1;
        }
        self.order.next.store(next, Ordering::Release);
        self.order.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::from_millis(1);
    const PATIENT: Duration = Duration::from_secs(60);

    #[test]
    fn a_ticket_waits_for_those_before_it() {
        let order = Arc::<LaunchOrder>::default();
        let [first, second, third] = [(); 3].map(|()| order.ticket());
        assert!(first.await_turn(PATIENT) && !second.await_turn(SOON) && !third.await_turn(SOON));
        // One that needs no turn gives it up.
        drop(second);
        assert!(!third.await_turn(SOON));
        drop(first);
        assert!(third.await_turn(PATIENT));
        drop(third);
        assert!(order.ticket().await_turn(PATIENT));
    }

    #[test]
    fn threads_take_turns_in_the_order_of_their_tickets() {
        let (order, taken) = (Arc::<LaunchOrder>::default(), Mutex::new(Vec::new()));
        let tickets: Vec<Ticket> = (0..200).map(|_| order.ticket()).collect();
        thread::scope(|scope| {
            for ticket in tickets.into_iter().rev() {
                scope.spawn(|| {
                    let ticket = ticket;
                    assert!(ticket.await_turn(PATIENT));
                    taken.lock().expect("no thread panics").push(ticket.number);
                });
            }
        });
        assert_eq!(*taken.lock().expect("no thread panics"), (0..200).collect::<Vec<_>>());
    }
}
