//! Wait-for graph of the ranks, which finds the unresponsive ranks of a stalled exchange.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::HEARTBEATS_PER_TIMEOUT;

/// Last heartbeats of each rank of a world.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaitGraph(BTreeMap<usize, RankHeartbeats>);

/// Last heartbeats of one rank.
#[derive(Clone, Debug, Default)]
struct RankHeartbeats {
    busy: Option<Instant>,
    /// Ranks that it waits for, each with the time of the heartbeat.
    waits_for: BTreeMap<usize, Instant>,
}

/// State of one rank in the graph.
enum RankState {
    Busy,
    Unresponsive,
    WaitsFor(Vec<usize>),
}

/// Wait of one rank in one exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    timeout: Duration,
    last_progress: Instant,
    /// Time of this rank's last heartbeat.
    last_heartbeat: Instant,
}

impl WaitGraph {
    /// Records that a rank is busy between calls.
    pub(crate) fn record_busy(&mut self, rank: usize) {
        self.0.entry(rank).or_default().busy = Some(Instant::now());
    }

    /// Records that a rank waits for others.
    pub(crate) fn record_wait(&mut self, rank: usize, others: &[usize]) {
        let now = Instant::now();
        self.0.entry(rank).or_default().waits_for.extend(others.iter().map(|other| (*other, now)));
    }

    /// Returns the suspects after `own` has waited for `others` for the whole timeout, or `None` before.
    ///
    /// Follows the graph from `others`, also through other threads of `own`, and returns its unresponsive ranks. Without any,
    /// returns `None` if a rank is busy, and `others` if all ranks wait for each other (a deadlock).
    pub(crate) fn suspects(&self, own: usize, others: &[usize], wait: &Wait) -> Option<Vec<usize>> {
        if !wait.is_timed_out() {
            return None;
        }
        let (mut visited, mut unresponsive, mut is_any_busy) = (others.to_vec(), Vec::new(), false);
        let mut next = 0;
        while let Some(&rank) = visited.get(next) {
            next += 1;
            match self.state(rank, rank == own, wait.timeout) {
                RankState::Busy => is_any_busy = true,
                RankState::Unresponsive => unresponsive.push(rank),
                RankState::WaitsFor(ranks) => {
                    let new: Vec<usize> = ranks.into_iter().filter(|rank| !visited.contains(rank)).collect();
                    visited.extend(new);
                }
            }
        }
        match (unresponsive.is_empty(), is_any_busy) {
            (false, _) => Some(unresponsive),
            (true, true) => None,
            (true, false) => Some(others.to_vec()),
        }
    }

    /// Returns the state of a rank. A heartbeat of a busy rank counts for the whole timeout, that of a waiting rank for half.
    ///
    /// This process itself is never unresponsive.
    fn state(&self, rank: usize, is_own: bool, timeout: Duration) -> RankState {
        let heartbeats = self.0.get(&rank);
        if heartbeats.and_then(|heartbeats| heartbeats.busy).is_some_and(|seen| seen.elapsed() < timeout) {
            return RankState::Busy;
        }
        let is_recent = |(_, seen): &(&usize, &Instant)| seen.elapsed() < timeout / 2;
        let waits_for = heartbeats.into_iter().flat_map(|heartbeats| &heartbeats.waits_for).filter(is_recent);
        let waits_for: Vec<usize> = waits_for.map(|(other, _)| *other).collect();
        if waits_for.is_empty() && !is_own { RankState::Unresponsive } else { RankState::WaitsFor(waits_for) }
    }
}

impl Wait {
    pub(crate) fn begin(timeout: Duration) -> Self {
        let now = Instant::now();
        Self { timeout, last_progress: now, last_heartbeat: now }
    }

    /// Restarts the timeout after progress.
    pub(crate) fn progress(&mut self) {
        *self = Self::begin(self.timeout);
    }

    /// Returns the time since the last progress.
    #[cfg(feature = "mpi")]
    pub(crate) fn elapsed(&self) -> Duration {
        self.last_progress.elapsed()
    }

    /// Returns true after the timeout without progress.
    pub(crate) fn is_timed_out(&self) -> bool {
        self.left().is_zero()
    }

    /// Returns the time until the timeout or the next heartbeat.
    pub(crate) fn next_check_in(&self) -> Duration {
        let until_heartbeat = (self.timeout / HEARTBEATS_PER_TIMEOUT).saturating_sub(self.last_heartbeat.elapsed());
        let left = self.left();
        if left.is_zero() { until_heartbeat } else { until_heartbeat.min(left) }
    }

    /// Returns true if this rank's next heartbeat is due, and counts it as sent.
    ///
    /// Restarts the timeout if several heartbeats are due: this process was suspended, and has not read those of others.
    pub(crate) fn is_heartbeat_due(&mut self) -> bool {
        let elapsed = self.last_heartbeat.elapsed();
        if elapsed >= self.timeout / 2 {
            self.progress();
            return true;
        }
        let is_due = elapsed >= self.timeout / HEARTBEATS_PER_TIMEOUT;
        if is_due {
            self.last_heartbeat = Instant::now();
        }
        is_due
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.last_progress.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the suspects of rank 0, which has timed out waiting for `others`, given the busy and the waiting ranks.
    fn suspects(others: &[usize], busy: &[usize], waiting: &[(usize, &[usize])]) -> Option<Vec<usize>> {
        let timeout = Duration::from_secs(3600);
        let mut graph = WaitGraph::default();
        busy.iter().for_each(|rank| graph.record_busy(*rank));
        waiting.iter().for_each(|(rank, others)| graph.record_wait(*rank, others));
        let begun = Wait::begin(timeout);
        assert_eq!(graph.suspects(0, others, &begun), None, "the timeout has not passed");
        let long_ago = Instant::now().checked_sub(timeout).expect("the machine has been up for an hour");
        graph.suspects(0, others, &Wait { last_progress: long_ago, ..begun })
    }

    #[test]
    fn unresponsive_ranks_are_suspects_and_waiting_or_busy_ranks_are_not() {
        assert_eq!(suspects(&[1, 2], &[], &[]), Some(vec![1, 2]));
        assert_eq!(suspects(&[1, 2], &[2], &[]), Some(vec![1]));
        assert_eq!(suspects(&[1, 2], &[1, 2], &[]), None);
        // A chain of waits.
        assert_eq!(suspects(&[1], &[], &[(1, &[2]), (2, &[3])]), Some(vec![3]));
        assert_eq!(suspects(&[1], &[3], &[(1, &[2]), (2, &[3])]), None);
        assert_eq!(suspects(&[1], &[3], &[(1, &[2, 3])]), Some(vec![2]));
        // A wait for another thread of rank 0, which itself waits or is busy.
        assert_eq!(suspects(&[1], &[], &[(0, &[1, 2]), (1, &[0])]), Some(vec![2]));
        assert_eq!(suspects(&[1], &[0], &[(0, &[1]), (1, &[0])]), None);
        // A cycle.
        assert_eq!(suspects(&[1], &[], &[(1, &[2]), (2, &[0, 1])]), Some(vec![1]));
        assert_eq!(suspects(&[1], &[3], &[(1, &[2]), (2, &[0])]), Some(vec![1]));
    }

    #[test]
    fn expired_heartbeats_do_not_count() {
        let mut graph = WaitGraph::default();
        graph.record_busy(1);
        graph.record_wait(2, &[1]);
        let wait = Wait::begin(Duration::ZERO);
        assert_eq!(graph.suspects(0, &[1, 2], &wait), Some(vec![1, 2]));
    }

    #[test]
    fn a_wait_sends_several_heartbeats_before_it_times_out() {
        let timeout = Duration::from_secs(80);
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).expect("the machine is up");
        let mut wait = Wait { timeout, last_progress: ago(75), last_heartbeat: ago(2) };
        assert!(wait.next_check_in() <= Duration::from_secs(5) && !wait.is_heartbeat_due());
        wait.last_heartbeat = ago(11);
        assert!(wait.next_check_in().is_zero() && wait.is_heartbeat_due() && !wait.is_heartbeat_due());
        let over = Wait { timeout, last_progress: ago(90), last_heartbeat: ago(1) };
        assert!(over.next_check_in() > Duration::from_secs(5));
        wait.progress();
        assert!(wait.next_check_in() > Duration::from_secs(5));
    }

    #[test]
    fn a_process_that_was_suspended_waits_for_the_whole_timeout_again() {
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).expect("the machine is up");
        let timed_out_after = |last_heartbeat| {
            let timeout = Duration::from_secs(80);
            let mut wait = Wait { timeout, last_progress: ago(85), last_heartbeat };
            (wait.is_heartbeat_due(), wait.is_timed_out())
        };
        assert_eq!(timed_out_after(ago(11)), (true, true));
        assert_eq!(timed_out_after(ago(41)), (true, false));
    }
}
