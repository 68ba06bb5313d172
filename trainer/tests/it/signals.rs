//! Signals. Each case runs in a child process, which is this test program again.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::low_level::raise;
use trainer::exit::ExitCode;
use trainer::signals::{Signal, SignalReaction, StopRequest, StopSignals};

const SIGNALS: &str = "CANDLEWICK_TEST_SIGNALS";

/// Sends the signals to a child that has installed the handlers. Its exit code is 10 plus the `Signal` that it reads after
/// all have arrived.
#[track_caller]
fn check(signals: &[i32], want: i32) {
    check_list(signals.iter().map(i32::to_string).collect(), want);
}

/// Sends `signals` like [`check`], and then `last` until the process ends.
#[track_caller]
fn check_repeated(signals: &[i32], last: i32, want: i32) {
    check_list(signals.iter().map(i32::to_string).chain([format!("{last}*")]).collect(), want);
}

#[track_caller]
fn check_list(list: Vec<String>, want: i32) {
    // A second signal ends a child that a busy machine suspends for half a second after the first. One of some children is not.
    let mut codes = (0..5).map(|_| status_after(&list).code());
    assert!(codes.any(|code| code == Some(want)), "{list:?}: no exit code was {want}");
}

fn status_after(list: &[String]) -> ExitStatus {
    of_child("signals::child").env(SIGNALS, list.join(" ")).status().unwrap()
}

/// Returns the command of one of this program's tests, which reacts to SIGHUP.
fn of_child(test: &str) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", test, "--nocapture"]).stdout(Stdio::null());
    // nohup ignores SIGHUP, and children inherit that.
    // SAFETY: `signal` is async-signal-safe, and the closure calls nothing else.
    unsafe {
        child.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_DFL);
            Ok(())
        })
    };
    child
}

#[test]
fn child() {
    let Ok(signals) = std::env::var(SIGNALS) else { return };
    let requests = StopSignals::install(None).unwrap();
    assert_eq!(requests.poll(), None);
    for signal in signals.split(' ') {
        match signal.strip_suffix('*') {
            Some(signal) => loop {
                raise(signal.parse().unwrap()).unwrap();
                std::thread::park_timeout(Duration::from_millis(10));
            },
            None => raise(signal.parse().unwrap()).unwrap(),
        }
    }
    std::process::exit(match requests.poll() {
        Some(StopRequest::Signal(Signal::Terminate)) => 10,
        Some(StopRequest::Signal(Signal::Interrupt)) => 11,
        Some(StopRequest::Signal(Signal::Preempt)) => 12,
        Some(StopRequest::Signal(Signal::HangUp)) => 13,
        Some(StopRequest::KillSwitch(_)) | None => 19,
    });
}

const REACTION: &str = "CANDLEWICK_TEST_REACTION";

/// Runs `signals::reacting_child` with this case, and returns its status.
fn status_of(case: &str) -> ExitStatus {
    of_child("signals::reacting_child").env(REACTION, case).status().unwrap()
}

#[test]
fn reacting_child() {
    let Ok(case) = std::env::var(REACTION) else { return };
    let requests = StopSignals::install(None).unwrap();
    match case.as_str() {
        "deadline" => {
            let _deadline = requests.deadline(Duration::from_millis(1), ExitCode::Preempted).unwrap();
            raise(SIGTERM).unwrap();
            loop {
                std::thread::park();
            }
        }
        "handled" => {
            let deadline = requests.deadline(Duration::from_secs(3600), ExitCode::Preempted).unwrap();
            raise(SIGTERM).unwrap();
            drop(deadline);
            std::process::exit(10);
        }
        "response" => {
            requests.respond_with(|signal| std::process::exit(signal as i32 + 20));
            raise(SIGHUP).unwrap();
            // The main thread never reads the request.
            loop {
                std::thread::park();
            }
        }
        "at once" => {
            requests.set_reaction(SignalReaction::EndAtOnce);
            raise(SIGTERM).unwrap();
            std::process::exit(11);
        }
        _ => {
            requests.set_reaction(SignalReaction::EndAtOnce);
            requests.set_reaction(SignalReaction::Request);
            raise(SIGTERM).unwrap();
            std::process::exit(if requests.signal() == Some(Signal::Terminate) { 12 } else { 13 });
        }
    }
}

#[test]
fn work_that_does_not_react_ends_at_its_deadline() {
    assert_eq!(status_of("deadline").code(), Some(ExitCode::Preempted as i32));
    assert_eq!(status_of("handled").code(), Some(10));
}

#[test]
fn a_signal_ends_the_process_at_once_only_while_that_is_its_reaction() {
    assert_eq!(status_of("at once").signal(), Some(SIGTERM));
    assert_eq!(status_of("request").code(), Some(12));
}

#[test]
fn the_first_signal_is_a_request() {
    check(&[SIGTERM], 10);
    check(&[SIGINT], 11);
    check(&[SIGUSR1], 12);
    check(&[SIGHUP], 13);
}

#[test]
fn a_later_second_signal_ends_the_process_with_its_own_code() {
    check_repeated(&[SIGTERM], SIGTERM, 128 + SIGTERM);
    check_repeated(&[SIGINT], SIGINT, 128 + SIGINT);
    check_repeated(&[SIGTERM], SIGINT, 128 + SIGINT);
}

/// Ctrl-C reaches a rank from the terminal and from its launcher.
#[test]
fn two_signals_at_a_time_are_one_request() {
    check(&[SIGTERM, SIGTERM], 10);
    check(&[SIGINT, SIGINT, SIGINT], 11);
    check(&[SIGTERM, SIGINT], 11);
}

/// The kernel and the shell may both send SIGHUP, and systemd sends it after SIGTERM.
#[test]
fn a_lost_terminal_is_not_the_first_or_second_of_two() {
    check(&[SIGHUP, SIGHUP], 13);
    check(&[SIGHUP, SIGTERM], 10);
    check(&[SIGTERM, SIGHUP], 13);
    check_repeated(&[SIGHUP, SIGTERM], SIGTERM, 128 + SIGTERM);
}

#[test]
fn a_program_that_nohup_started_ignores_a_lost_terminal() {
    let mut nohup = Command::new("nohup");
    nohup.arg(std::env::current_exe().unwrap()).args(["--exact", "signals::child", "--nocapture"]);
    nohup.env(SIGNALS, SIGHUP.to_string()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert_eq!(nohup.status().unwrap().code(), Some(19));
}

#[test]
fn a_preemption_notice_is_not_the_first_of_two() {
    check(&[SIGUSR1, SIGUSR1, SIGTERM], 10);
    check_repeated(&[SIGUSR1, SIGTERM], SIGTERM, 128 + SIGTERM);
}

#[test]
fn the_first_signal_is_responded_to_at_once() {
    assert_eq!(status_of("response").code(), Some(20 + Signal::HangUp as i32));
}

#[test]
fn an_acknowledgement_names_the_signals_that_end_the_program() {
    let line = |signal: Signal| signal.acknowledgement("finishing the step, then saving");
    assert_eq!(line(Signal::Interrupt), "SIGINT: finishing the step, then saving; Ctrl-C again ends at once");
    assert_eq!(line(Signal::Terminate), "SIGTERM: finishing the step, then saving; a second SIGTERM ends at once");
    assert_eq!(line(Signal::HangUp), "SIGHUP (lost terminal): finishing the step, then saving");
}
