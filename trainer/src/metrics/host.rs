//! The machine of a run, and the versions of the program.

use std::fmt;
use std::fs;

use serde::Serialize;

use super::memory::Memory;

/// The versions of the program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Versions {
    /// The version of this package.
    pub candlewick: &'static str,
    /// The commit, if `CANDLEWICK_COMMIT` was set at build time.
    pub commit: Option<&'static str>,
}

/// The machine of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostInfo {
    /// The host name.
    pub name: Option<String>,
    /// Operating system and architecture: "linux x86_64".
    pub system: String,
    /// The CPU model.
    pub cpu: Option<String>,
    /// The number of threads available to this process.
    pub n_cpus: usize,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
}

impl Versions {
    /// Returns the versions of this program.
    pub fn this() -> Self {
        Self { candlewick: env!("CARGO_PKG_VERSION"), commit: option_env!("CANDLEWICK_COMMIT") }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.candlewick)?;
        self.commit.map_or(Ok(()), |commit| write!(f, " ({commit})"))
    }
}

impl HostInfo {
    /// Describes this machine.
    pub fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
        let name = fs::read_to_string("/proc/sys/kernel/hostname").ok();
        Self {
            name: name.map(|name| name.trim().to_owned()),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: model.map(|model| model.trim_start_matches(['\t', ' ', ':']).to_owned()),
            n_cpus: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            memory_bytes: Memory::now().map(|memory| memory.node_total_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_includes_the_commit_if_it_is_known() {
        let text = |commit| Versions { candlewick: "0.1.0", commit }.to_string();
        assert_eq!([text(None), text(Some("12ab-dirty"))], ["0.1.0", "0.1.0 (12ab-dirty)"]);
    }
}
