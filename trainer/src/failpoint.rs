//! Points at which a test kills the process, to resume the run from there. Release builds have none.

use signal_hook::consts::SIGKILL;
use signal_hook::low_level::raise;

/// `NAME:STEP` of the failpoint that kills the process.
const VARIABLE: &str = "CANDLEWICK_TEST_KILL_AT";

/// Kills the process if the environment names this failpoint and step.
///
/// `SIGKILL` runs no destructor and flushes no buffer. A failpoint before the first step is one of step 0.
pub(crate) fn failpoint(name: &str, step: usize) {
    if cfg!(debug_assertions) && std::env::var(VARIABLE).is_ok_and(|chosen| chosen == format!("{name}:{step}")) {
        raise(SIGKILL).expect("a process may kill itself");
    }
}
