//! Tests of the worker group's state machine.

use super::*;
use Action::{Forward, Terminate, Wait};
use signal_hook::consts::{SIGHUP, SIGSEGV, SIGUSR1};

const SECOND: Duration = Duration::from_secs(1);

struct Group {
    run: WorkerGroupRun,
    now: Instant,
}

fn group(n_workers: usize) -> Group {
    let timeouts = ShutdownTimeouts { after_failure: 30 * SECOND, after_signal: 300 * SECOND };
    let policy = ShutdownPolicy { timeouts, ending_signals: vec![SIGTERM, SIGINT, SIGHUP] };
    Group { run: WorkerGroupRun::new(n_workers, policy), now: Instant::now() }
}

impl Group {
    fn after(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self
    }

    #[track_caller]
    fn ends(&mut self, local_rank: usize, reason: ExitReason, want: Action) -> &mut Self {
        self.event(Event::Exited { local_rank, reason }, want)
    }

    #[track_caller]
    fn exits(&mut self, local_rank: usize, code: i32, want: Action) -> &mut Self {
        self.ends(local_rank, ExitReason::Code(code), want)
    }

    #[track_caller]
    fn dies(&mut self, local_rank: usize, signal: i32, want: Action) -> &mut Self {
        self.ends(local_rank, ExitReason::Signal(signal), want)
    }

    #[track_caller]
    fn receives(&mut self, signal: i32, want: Action) -> &mut Self {
        self.event(Event::Signal(signal), want)
    }

    #[track_caller]
    fn event(&mut self, event: Event, want: Action) -> &mut Self {
        assert_eq!(self.run.handle(&event, self.now), want, "{event:?}");
        self
    }

    #[track_caller]
    fn has_seconds_left(&mut self, want: u64) -> &mut Self {
        assert_eq!(self.run.deadline(), Some(self.now + Duration::from_secs(want)));
        self
    }

    #[track_caller]
    fn has_outcome(&mut self, want: WorkerGroupOutcome) {
        assert_eq!(self.run.outcome(), want);
    }

    /// Checks the failed local ranks and the root cause.
    #[track_caller]
    fn failed(&mut self, want: &[usize], first: usize) {
        let WorkerGroupOutcome::Failed(failures) = self.run.outcome() else { panic!("{:?}", self.run.outcome()) };
        assert_eq!(failures.iter().map(|exit| exit.local_rank).collect::<Vec<_>>(), want);
        assert_eq!(root_cause(&failures, |_| 0).map(|exit| exit.local_rank), Some(first));
    }
}

#[test]
fn a_run_succeeds_when_every_worker_exits_with_0() {
    group(2).exits(1, 0, Wait).exits(0, 0, Wait).has_outcome(WorkerGroupOutcome::Succeeded);
}

#[test]
fn the_first_failure_terminates_the_other_workers() {
    let mut group = group(3);
    group.exits(1, 3, Terminate(SIGTERM)).has_seconds_left(30);
    group.dies(0, SIGTERM, Wait).exits(2, 128 + SIGTERM, Wait).failed(&[1], 1);
}

#[test]
fn a_worker_killed_at_the_deadline_is_no_failure() {
    let mut group = group(2);
    group.dies(0, SIGKILL, Terminate(SIGTERM));
    assert_eq!(group.run.on_deadline(), Terminate(SIGKILL));
    group.dies(1, SIGKILL, Wait).failed(&[0], 0);
}

#[test]
fn a_worker_that_reports_a_peer_failure_is_not_the_root_cause() {
    group(2).exits(0, PEER, Terminate(SIGTERM)).exits(1, 1, Wait).failed(&[0, 1], 1);
}

#[test]
fn the_timestamps_of_error_files_order_failures() {
    let mut group = group(2);
    group.exits(0, 1, Terminate(SIGTERM)).exits(1, 1, Wait);
    let WorkerGroupOutcome::Failed(failures) = group.run.outcome() else { panic!("no worker failed") };
    let root = root_cause(&failures, |exit| 10 - exit.local_rank as u64);
    assert_eq!(root.map(|exit| exit.local_rank), Some(1));
}

#[test]
fn a_signal_is_forwarded_once_and_workers_get_time_to_save() {
    let mut group = group(2);
    group.receives(SIGTERM, Terminate(SIGTERM)).has_seconds_left(300);
    group.exits(0, PREEMPTED, Wait).exits(1, PREEMPTED, Wait).has_outcome(WorkerGroupOutcome::Stopped(PREEMPTED));
}

#[test]
fn the_exit_code_after_a_signal_follows_from_the_workers_exit_codes() {
    group(2)
        .receives(SIGTERM, Terminate(SIGTERM))
        .exits(0, 0, Wait)
        .exits(1, 75, Wait)
        .has_outcome(WorkerGroupOutcome::Stopped(75));
    group(2)
        .receives(SIGTERM, Terminate(SIGTERM))
        .exits(0, 0, Wait)
        .exits(1, 0, Wait)
        .has_outcome(WorkerGroupOutcome::Stopped(0));
    group(2)
        .receives(SIGINT, Terminate(SIGINT))
        .dies(0, SIGINT, Wait)
        .exits(1, 75, Wait)
        .has_outcome(WorkerGroupOutcome::Stopped(130));
    group(1).receives(SIGTERM, Terminate(SIGTERM)).exits(0, 143, Wait).has_outcome(WorkerGroupOutcome::Stopped(143));
    // A worker that is killed while it saves a checkpoint has failed.
    group(2).receives(SIGTERM, Terminate(SIGTERM)).dies(0, SIGKILL, Wait).exits(1, 75, Wait).failed(&[0], 0);
}

#[test]
fn a_second_interrupt_kills() {
    let mut group = group(1);
    group.receives(SIGINT, Terminate(SIGINT)).receives(SIGINT, Terminate(SIGKILL)).dies(0, SIGKILL, Wait);
    group.has_outcome(WorkerGroupOutcome::Stopped(130));
}

#[test]
fn a_repeated_signal_within_half_a_second_is_ignored() {
    let mut group = group(1);
    group.receives(SIGHUP, Terminate(SIGHUP)).receives(SIGHUP, Wait).receives(SIGTERM, Wait);
    group.after(SECOND).receives(SIGTERM, Terminate(SIGKILL));
}

#[test]
fn a_worker_that_misses_the_deadline_is_killed() {
    let mut group = group(2);
    group.receives(SIGTERM, Terminate(SIGTERM)).exits(0, 75, Wait);
    assert_eq!(group.run.on_deadline(), Terminate(SIGKILL));
    group.dies(1, SIGKILL, Wait).has_outcome(WorkerGroupOutcome::Stopped(137));
}

#[test]
fn other_signals_are_forwarded_without_a_deadline() {
    let mut group = group(2);
    group.receives(SIGUSR1, Forward(SIGUSR1)).receives(SIGUSR1, Forward(SIGUSR1));
    assert_eq!(group.run.deadline(), None);
    // Each worker saves at its own pace. The first exit sends no signal to the other worker.
    group.exits(1, 75, Wait).has_seconds_left(300).exits(0, 75, Wait).has_outcome(WorkerGroupOutcome::Stopped(75));
}

#[test]
fn a_signal_after_a_failure_prevents_a_restart() {
    let mut group = group(2);
    group.exits(0, 1, Terminate(SIGTERM)).receives(SIGINT, Terminate(SIGINT)).dies(1, SIGINT, Wait).failed(&[0], 0);
    assert!(group.run.is_stopping());
}

#[test]
fn a_failure_on_another_node_terminates_the_workers() {
    let failed = Event::Peer { generation: 0, peer: PeerEvent::Failed("rank 5 failed".into()) };
    let peer_failed = WorkerGroupOutcome::PeerFailed("rank 5 failed".into());
    group(1).event(failed.clone(), Terminate(SIGTERM)).exits(0, PEER, Wait).has_outcome(peer_failed.clone());
    group(1).exits(0, PEER, Terminate(SIGTERM)).event(failed.clone(), Wait).has_outcome(peer_failed);
    group(2).exits(0, 1, Terminate(SIGTERM)).event(failed, Wait).dies(1, SIGTERM, Wait).failed(&[0], 0);
}

#[test]
fn workers_may_save_after_one_was_killed_by_the_signal() {
    for reason in [ExitReason::Signal(SIGTERM), ExitReason::Code(128 + SIGTERM)] {
        let mut group = group(2);
        group.receives(SIGTERM, Terminate(SIGTERM)).ends(0, reason, Wait).has_seconds_left(300);
        group.after(100 * SECOND).exits(1, PREEMPTED, Wait).has_outcome(WorkerGroupOutcome::Stopped(143));
    }
    // A failure after the signal is still a failure.
    group(2).receives(SIGTERM, Terminate(SIGTERM)).exits(0, 1, Wait).has_seconds_left(30);
}

#[test]
fn failures_after_a_peer_failure_are_not_root_causes() {
    let failed = Event::Peer { generation: 0, peer: PeerEvent::Failed("rank 5 failed".into()) };
    let peer_failed = WorkerGroupOutcome::PeerFailed("rank 5 failed".into());
    let mut one = group(2);
    one.event(failed.clone(), Terminate(SIGTERM))
        .exits(0, 1, Wait)
        .dies(1, SIGSEGV, Wait)
        .has_outcome(peer_failed.clone());
    group(2).exits(0, PEER, Terminate(SIGTERM)).exits(1, 1, Wait).event(failed, Wait).has_outcome(peer_failed);
}

#[test]
fn a_stop_on_another_node_stops_the_workers() {
    let stopped = Event::Peer { generation: 0, peer: PeerEvent::Stopped("signal 15".into()) };
    for (codes, want) in [([75, 75], 75), ([0, 0], 0), ([143, 0], PEER)] {
        let mut group = group(2);
        group.event(stopped.clone(), Terminate(SIGTERM)).has_seconds_left(300);
        group.exits(0, codes[0], Wait).exits(1, codes[1], Wait);
        group.has_outcome(WorkerGroupOutcome::PeerStopped("signal 15".into(), want));
    }
    // The node's own scheduler may send the signal too. The worker does not receive it twice.
    group(1)
        .event(stopped, Terminate(SIGTERM))
        .receives(SIGTERM, Wait)
        .exits(0, 75, Wait)
        .has_outcome(WorkerGroupOutcome::Stopped(75));
}

#[test]
fn a_checkpoint_on_another_node_sends_no_signal() {
    let saved = Event::Peer { generation: 0, peer: PeerEvent::Saved("rank 5".into()) };
    group(1).event(saved, Wait).has_seconds_left(300).exits(0, 75, Wait).has_outcome(WorkerGroupOutcome::Stopped(75));
}

#[test]
fn failures_checkpoints_and_stops_are_announced_to_the_other_nodes() {
    let announced = |group: &mut Group, event: Event| {
        group.run.handle(&event, group.now);
        group.run.announcement(&event)
    };
    let exit = |local_rank, code| Event::Exited { local_rank, reason: ExitReason::Code(code) };
    let mut one = group(4);
    assert_eq!(announced(&mut one, exit(0, 0)), None);
    assert_eq!(announced(&mut one, exit(1, PEER)), None);
    assert_eq!(announced(&mut one, exit(2, 1)), None, "it was sent a signal before");
    let mut one = group(2);
    assert!(matches!(announced(&mut one, exit(1, 3)), Some(Announcement::Exited(WorkerExit { local_rank: 1, .. }))));
    let mut one = group(2);
    assert!(matches!(
        announced(&mut one, exit(1, PREEMPTED)),
        Some(Announcement::Exited(WorkerExit { local_rank: 1, .. }))
    ));
    assert_eq!(announced(&mut one, Event::Signal(SIGUSR1)), None);
    assert_eq!(announced(&mut one, Event::Signal(SIGTERM)), Some(Announcement::Stopping(SIGTERM)));
}

#[test]
fn a_joining_node_causes_a_rerendezvous() {
    group(1)
        .event(Event::Peer { generation: 0, peer: PeerEvent::Joins }, Terminate(SIGTERM))
        .has_seconds_left(300)
        .exits(0, 75, Wait)
        .has_outcome(WorkerGroupOutcome::Rerendezvous);
}
