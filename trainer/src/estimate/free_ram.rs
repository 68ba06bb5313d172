//! The RAM that this process may still allocate, limited by the kernel and by cgroups.

use std::path::{Path, PathBuf};

use crate::metrics::Memory;

/// Returns the free bytes; `None` where /proc has no memory statistics.
pub(super) fn free_ram() -> Option<u64> {
    let memory = Memory::now()?;
    let machine = memory.node_total_bytes.saturating_sub(memory.node_used_bytes);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(folders(&groups).iter().filter_map(|folder| below_limit(folder)).fold(machine, u64::min))
}

/// Returns the folders of the cgroups that limit this process's memory: its own and all parents.
fn folders(groups: &str) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            names if names.split(',').any(|name| name == "memory") => Path::new("/sys/fs/cgroup/memory"),
            _ => continue,
        };
        // In a container the path may be that of the host. Then only the root exists.
        let own = root.join(path.trim_start_matches('/'));
        folders.extend(own.ancestors().take_while(|folder| folder.starts_with(root)).map(Path::to_path_buf));
    }
    folders
}

/// Returns the bytes below a cgroup's memory limit; `None` without a limit. Inactive page cache counts as free.
fn below_limit(folder: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let (limit, used) = match read("memory.max") {
        Some(limit) => (limit, read("memory.current")?),
        None => (read("memory.limit_in_bytes")?, read("memory.usage_in_bytes")?),
    };
    let cached = read("memory.stat").unwrap_or_default();
    let cached = cached.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let used = used.trim().parse::<u64>().ok()?.saturating_sub(cached.and_then(|n| n.parse().ok()).unwrap_or(0));
    Some(limit.trim().parse::<u64>().ok()?.saturating_sub(used))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_folders_of_both_cgroup_versions_are_found() {
        let names = |text: &str| folders(text).iter().map(|f| f.display().to_string()).collect::<Vec<_>>();
        let second = ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"];
        assert_eq!(names("0::/a/b\n"), second);
        let first = ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"];
        assert_eq!(names("7:cpu,cpuacct:/x\n4:memory:/job\n"), first);
        assert!(names("").is_empty());
    }

    #[test]
    fn free_bytes_are_the_limit_less_the_use_without_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(below_limit(folder.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(below_limit(folder.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(below_limit(folder.path()), Some(300));
        write("memory.stat", "anon 600\ninactive_file 100\n");
        assert_eq!(below_limit(folder.path()), Some(400));
    }

    #[test]
    fn this_machine_has_free_ram() {
        assert!(free_ram().is_some_and(|bytes| bytes > 1 << 20));
    }
}
