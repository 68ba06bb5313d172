//! The signals that stop a program.

use libc::{SIGHUP, SIGINT, SIGTERM};

/// Returns the signals that stop a program in an orderly way: SIGTERM, SIGINT, and SIGHUP, which a lost terminal causes.
///
/// `nohup` starts a program with SIGHUP ignored, and that must stay. Other ignored signals come from a shell's `&`.
pub fn stop_signals() -> Vec<i32> {
    let is_nohup = is_ignored(SIGHUP);
    [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|signal| !(is_nohup && *signal == SIGHUP)).collect()
}

/// Returns true if this process inherited a signal as ignored.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}
