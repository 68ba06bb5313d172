//! Memory of this process and of the machine, as the kernel reports it.

use serde::{Deserialize, Serialize};

/// Memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Resident set size of this process.
    pub rss_bytes: u64,
    /// Peak resident set size of this process.
    pub peak_rss_bytes: u64,
    /// Memory in use on the machine.
    pub node_used_bytes: u64,
    /// Total memory of the machine.
    pub node_total_bytes: u64,
}

impl Memory {
    /// Reads /proc; `None` if there is none.
    pub fn now() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
        Self::parse(&status, &meminfo)
    }

    fn parse(status: &str, meminfo: &str) -> Option<Self> {
        let node_total_bytes = bytes_of(meminfo, "MemTotal:")?;
        Some(Self {
            rss_bytes: bytes_of(status, "VmRSS:")?,
            peak_rss_bytes: bytes_of(status, "VmHWM:")?,
            node_used_bytes: node_total_bytes.saturating_sub(bytes_of(meminfo, "MemAvailable:")?),
            node_total_bytes,
        })
    }
}

/// Parses a line such as `VmRSS:   1234 kB`.
fn bytes_of(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed() {
        let status = "Name:\ttrainer\nVmPeak:\t 9 kB\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n";
        let meminfo = "MemTotal:       4096 kB\nMemFree:        1 kB\nMemAvailable:    1024 kB\n";
        let want =
            Memory { rss_bytes: 1 << 20, peak_rss_bytes: 2 << 20, node_used_bytes: 3 << 20, node_total_bytes: 4 << 20 };
        assert_eq!(Memory::parse(status, meminfo), Some(want));
        assert_eq!(Memory::parse("", meminfo), None);
    }

    #[test]
    fn the_peak_of_this_process_is_at_least_its_memory() {
        let memory = Memory::now().unwrap();
        assert!(memory.rss_bytes > 0 && memory.peak_rss_bytes >= memory.rss_bytes);
        assert!(memory.node_used_bytes <= memory.node_total_bytes);
    }
}
