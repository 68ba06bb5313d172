//! What ranks show of themselves while nothing moves: who is at work, who waits for whom. Whoever has waited for too long
//! learns here whether somebody is worth waiting for, or who is to blame.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How many signs of life there are in a time-out: one that comes late, or two, cost nothing.
pub(crate) const PER_TIMEOUT: u32 = 8;

/// What was seen of the ranks of a world.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signs(BTreeMap<usize, Sign>);

/// What was seen of one.
#[derive(Clone, Debug, Default)]
struct Sign {
    /// When it showed last that it is at work.
    at_work: Option<Instant>,
    /// When it showed last that it waits for these.
    waits_for: BTreeMap<usize, Instant>,
}

/// How long one rank has waited in one exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    timeout: Duration,
    /// When something moved last.
    moved: Instant,
    /// When this rank showed last that it waits.
    shown: Instant,
}

impl Signs {
    /// A rank is at work.
    pub(crate) fn at_work(&mut self, rank: usize) {
        self.0.entry(rank).or_default().at_work = Some(Instant::now());
    }

    /// A rank waits for others.
    pub(crate) fn waits(&mut self, rank: usize, others: &[usize]) {
        let now = Instant::now();
        self.0.entry(rank).or_default().waits_for.extend(others.iter().map(|other| (*other, now)));
    }

    /// Returns whom `own` has waited for in vain, if it has waited for the whole time-out. It waits for `others`, who may
    /// wait in turn, also for what another thread of `own` waits to do: those of them all are named who showed nothing. Nobody
    /// is where all wait in the end for ranks at work.
    pub(crate) fn blamed(&self, own: usize, others: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        if !wait.is_over() {
            return None;
        }
        // Who has done its work has the whole time for what comes next. Who waits goes on showing it.
        let is_busy = |seen: &Instant| seen.elapsed() < wait.timeout;
        let still_waits = |seen: &Instant| seen.elapsed() < wait.timeout / 2;
        let (mut met, mut silent, mut is_any_at_work) = (others.to_vec(), Vec::new(), false);
        let mut next = 0;
        while let Some(&rank) = met.get(next) {
            next += 1;
            let sign = self.0.get(&rank);
            let waits_for = || sign.into_iter().flat_map(|sign| &sign.waits_for).filter(|(_, seen)| still_waits(seen));
            if sign.is_some_and(|sign| sign.at_work.as_ref().is_some_and(is_busy)) {
                is_any_at_work = true;
            } else if rank != own && waits_for().next().is_none() {
                silent.push(rank);
            } else {
                let new: Vec<usize> =
                    waits_for().map(|(other, _)| *other).filter(|other| !met.contains(other)).collect();
                met.extend(new);
            }
        }
        match (silent.is_empty(), is_any_at_work) {
            (false, _) => Some(silent),
            (true, true) => None,
            // They wait for each other.
            (true, false) => Some(others.to_vec()),
        }
    }
}

impl Wait {
    pub(crate) fn begin(timeout: Duration) -> Self {
        let now = Instant::now();
        Self { timeout, moved: now, shown: now }
    }

    /// Something has moved: the wait begins anew.
    pub(crate) fn moved(&mut self) {
        *self = Self::begin(self.timeout);
    }

    /// Returns for how long nothing has moved.
    #[cfg(feature = "mpi")]
    pub(crate) fn elapsed(&self) -> Duration {
        self.moved.elapsed()
    }

    /// Tells whether it has lasted for the time-out.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// Returns when to look again: at the end of the time-out, or to show that this rank waits.
    pub(crate) fn patience(&self) -> Duration {
        let until_shown = (self.timeout / PER_TIMEOUT).saturating_sub(self.shown.elapsed());
        let left = self.left();
        if left.is_zero() { until_shown } else { until_shown.min(left) }
    }

    /// Tells whether this rank should show again that it waits.
    pub(crate) fn is_to_be_shown(&mut self) -> bool {
        let is_due = self.shown.elapsed() >= self.timeout / PER_TIMEOUT;
        if is_due {
            self.shown = Instant::now();
        }
        is_due
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.moved.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whom rank 0 blames, after the time-out, which waits for `others`, where these are at work and those wait.
    fn blamed(others: &[usize], at_work: &[usize], waiting: &[(usize, &[usize])]) -> Option<Vec<usize>> {
        let timeout = Duration::from_secs(3600);
        let mut signs = Signs::default();
        at_work.iter().for_each(|rank| signs.at_work(*rank));
        waiting.iter().for_each(|(rank, others)| signs.waits(*rank, others));
        let begun = Wait::begin(timeout);
        assert_eq!(signs.blamed(0, others, &begun), None, "its time is not up");
        let long_ago = Instant::now().checked_sub(timeout).expect("the machine has been up for an hour");
        signs.blamed(0, others, &Wait { moved: long_ago, ..begun })
    }

    #[test]
    fn who_shows_nothing_is_named_and_not_who_waits_or_works() {
        assert_eq!(blamed(&[1, 2], &[], &[]), Some(vec![1, 2]));
        assert_eq!(blamed(&[1, 2], &[2], &[]), Some(vec![1]));
        assert_eq!(blamed(&[1, 2], &[1, 2], &[]), None);
        // Along a chain.
        assert_eq!(blamed(&[1], &[], &[(1, &[2]), (2, &[3])]), Some(vec![3]));
        assert_eq!(blamed(&[1], &[3], &[(1, &[2]), (2, &[3])]), None);
        assert_eq!(blamed(&[1], &[3], &[(1, &[2, 3])]), Some(vec![2]));
        // For another thread of this rank, which waits for somebody else, or is at work.
        assert_eq!(blamed(&[1], &[], &[(0, &[1, 2]), (1, &[0])]), Some(vec![2]));
        assert_eq!(blamed(&[1], &[0], &[(0, &[1]), (1, &[0])]), None);
        // In a circle.
        assert_eq!(blamed(&[1], &[], &[(1, &[2]), (2, &[0, 1])]), Some(vec![1]));
        assert_eq!(blamed(&[1], &[3], &[(1, &[2]), (2, &[0])]), Some(vec![1]));
    }

    #[test]
    fn what_was_seen_long_ago_counts_no_more() {
        let mut signs = Signs::default();
        signs.at_work(1);
        signs.waits(2, &[1]);
        let wait = Wait::begin(Duration::ZERO);
        assert_eq!(signs.blamed(0, &[1, 2], &wait), Some(vec![1, 2]));
    }

    #[test]
    fn a_wait_is_shown_some_times_before_it_is_over() {
        let timeout = Duration::from_secs(80);
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).expect("the machine is up");
        let mut wait = Wait { timeout, moved: ago(75), shown: ago(2) };
        assert!(wait.patience() <= Duration::from_secs(5) && !wait.is_to_be_shown());
        wait.shown = ago(11);
        assert!(wait.patience().is_zero() && wait.is_to_be_shown() && !wait.is_to_be_shown());
        let over = Wait { timeout, moved: ago(90), shown: ago(1) };
        assert!(over.patience() > Duration::from_secs(5));
        wait.moved();
        assert!(wait.patience() > Duration::from_secs(5));
    }
}
