//! Points at which a test ends or pauses the process with a signal. Release builds have none.

use signal_hook::consts::{SIGKILL, SIGSTOP, SIGTERM};
use signal_hook::low_level::raise;

/// Variables with the `NAME:STEP` of the failpoint at which the process gets a signal.
///
/// `SIGKILL` runs no destructor and flushes no buffer. `SIGTERM` requests a stop. `SIGSTOP` pauses it until `SIGCONT`.
const VARIABLES: [(&str, i32); 3] = [
    ("CANDLEWICK_TEST_KILL_AT", SIGKILL),
    ("CANDLEWICK_TEST_TERMINATE_AT", SIGTERM),
    ("CANDLEWICK_TEST_PAUSE_AT", SIGSTOP),
];

/// Sends the process a signal if the environment names this failpoint and step.
///
/// A failpoint of a run before the first step has step 0. One of a chunk of rows has the index of the chunk.
pub(crate) fn failpoint(name: &str, step: usize) {
    if !cfg!(debug_assertions) {
        return;
    }
    for (variable, signal) in VARIABLES {
        if std::env::var(variable).is_ok_and(|chosen| chosen == format!("{name}:{step}")) {
            raise(signal).expect("a process may send itself a signal");
        }
    }
}
