//! Signals. Each case runs in a child process, which is this test program again.

use std::process::{Command, ExitStatus, Stdio};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::low_level::raise;
use trainer::signals::{Signal, StopRequest, StopSignals};

const SIGNALS: &str = "CANDLEWICK_TEST_SIGNALS";

/// Sends the signals to a child that has installed the handlers. Its exit code is 10 plus the `Signal` that it reads after
/// all have arrived.
#[track_caller]
fn check(signals: &[i32], want: i32) {
    let list: Vec<String> = signals.iter().map(i32::to_string).collect();
    let status: ExitStatus = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "signals::child", "--nocapture"])
        .env(SIGNALS, list.join(" "))
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(want), "{signals:?}: {status}");
}

#[test]
fn child() {
    let Ok(signals) = std::env::var(SIGNALS) else { return };
    let requests = StopSignals::install(None).unwrap();
    assert_eq!(requests.poll(), None);
    for signal in signals.split(' ') {
        raise(signal.parse().unwrap()).unwrap();
    }
    std::process::exit(match requests.poll() {
        Some(StopRequest::Signal(Signal::Terminate)) => 10,
        Some(StopRequest::Signal(Signal::Interrupt)) => 11,
        Some(StopRequest::Signal(Signal::Preempt)) => 12,
        Some(StopRequest::KillSwitch(_)) | None => 19,
    });
}

#[test]
fn the_first_signal_is_a_request() {
    check(&[SIGTERM], 10);
    check(&[SIGINT], 11);
    check(&[SIGUSR1], 12);
}

#[test]
fn the_second_signal_ends_the_process_with_its_own_code() {
    check(&[SIGTERM, SIGTERM], 128 + SIGTERM);
    check(&[SIGINT, SIGINT], 128 + SIGINT);
    check(&[SIGTERM, SIGINT], 128 + SIGINT);
}

#[test]
fn a_preemption_notice_is_not_the_first_of_two() {
    check(&[SIGUSR1, SIGUSR1, SIGTERM], 10);
    check(&[SIGUSR1, SIGTERM, SIGTERM], 128 + SIGTERM);
}
