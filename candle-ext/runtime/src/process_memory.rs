//! Memory of the program itself, independent of the model.

use std::sync::OnceLock;

/// Bytes that a run adds after its start: code pages, thread stacks and thread buffers.
///
/// The smallest run of `trainer/tests/process_memory.rs` took 48 MiB in total, of which 9.5 MiB were resident at the
/// start.
const RUN_BYTES: u64 = 38 << 20;

/// Resident bytes of the program's file at its start, if the kernel reports none.
const DEFAULT_START_BYTES: u64 = 10 << 20;

/// Returns the bytes of a training process without its data: the program's files at the first call, plus those of a run.
///
/// Call it first at the start, before other files are mapped.
pub fn program_bytes() -> u64 {
    static START_BYTES: OnceLock<u64> = OnceLock::new();
    *START_BYTES.get_or_init(|| resident_file_bytes().unwrap_or(DEFAULT_START_BYTES)) + RUN_BYTES
}

/// Returns the resident bytes of mapped files, or `None` outside of Linux.
fn resident_file_bytes() -> Option<u64> {
    let pages = parse_statm(&std::fs::read_to_string("/proc/self/statm").ok()?)?;
    // SAFETY: sysconf has no preconditions.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Some(pages * u64::try_from(page_bytes).ok()?)
}

/// Parses the resident pages of mapped files from `/proc/self/statm` (proc_pid_statm(5)): size, resident, shared, ..
fn parse_statm(text: &str) -> Option<u64> {
    text.split(' ').nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_number_of_statm_counts_pages_of_files() {
        assert_eq!(parse_statm("10829 4311 3907 10163 0 1022 0\n"), Some(3907));
        assert_eq!(parse_statm(""), None);
    }

    #[test]
    fn a_later_call_returns_the_bytes_of_the_first() {
        let first = program_bytes();
        assert!(first > RUN_BYTES);
        let ballast = std::hint::black_box(vec![1u8; 8 << 20]);
        assert_eq!(program_bytes(), first);
        drop(ballast);
    }
}
