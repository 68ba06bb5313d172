//! Launch order of a device's process groups: operations launch in the order of the calls.
//!
//! NCCL requires all ranks to launch the operations of several communicators in the same order. Each group launches from its
//! own thread. So each call takes a ticket, and its thread waits for all earlier tickets.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::sync::lock;

/// Tickets of a device.
#[derive(Default)]
pub(super) struct LaunchOrder {
    n_tickets: AtomicU64,
    /// Ticket that may launch.
    next: AtomicU64,
    /// Later tickets that were dropped.
    dropped: Mutex<BTreeSet<u64>>,
    changed: Condvar,
}

/// Position of a call in the launch order. Dropping it lets the next call launch.
pub(super) struct Ticket {
    order: Arc<LaunchOrder>,
    number: u64,
}

impl LaunchOrder {
    /// Takes the next ticket.
    pub(super) fn ticket(self: &Arc<Self>) -> Ticket {
        Ticket { order: Arc::clone(self), number: self.n_tickets.fetch_add(1, Ordering::Relaxed) }
    }
}

impl Ticket {
    /// Waits up to `within` for the ticket's turn. Returns true if it may launch.
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
    fn a_ticket_waits_for_earlier_tickets() {
        let order = Arc::<LaunchOrder>::default();
        let [first, second, third] = [(); 3].map(|()| order.ticket());
        assert!(first.await_turn(PATIENT) && !second.await_turn(SOON) && !third.await_turn(SOON));
        // A dropped ticket passes its turn on.
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
