//! The folder for temporary files, and its kind: a disk or RAM.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder of temporary files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TempDir {
    /// Its path.
    pub path: PathBuf,
    /// True if the folder is in RAM (tmpfs).
    pub is_memory: bool,
}

impl TempDir {
    /// Detects the file system of `path` from /proc/self/mountinfo. An unknown one counts as a disk.
    pub(super) fn detect(path: PathBuf) -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let is_memory = fs::canonicalize(&path).is_ok_and(|path| is_memory(&path, &mounts));
        Self { path, is_memory }
    }
}

/// Returns true if `path` is on a tmpfs of `mounts`. A line is a mount: "36 35 98:0 / /mnt rw,noatime shared:1 - ext4
/// /dev/root rw". Its fifth field is the mount point; the first field after the dash is the type. A later mount on
/// the same point hides an earlier one.
fn is_memory(path: &Path, mounts: &str) -> bool {
    let mount = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let place = before.split(' ').nth(4)?.replace("\\040", " ");
        let kind = after.split(' ').next()?.to_owned();
        path.starts_with(&place).then_some((place.len(), kind))
    };
    let nearest = mounts.lines().filter_map(mount).max_by_key(|(depth, _)| *depth);
    nearest.is_some_and(|(_, kind)| ["tmpfs", "ramfs"].contains(&kind.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
28 27 0:23 / /tmp rw,nosuid - tmpfs tmpfs rw,size=24682416k
29 28 254:0 /x /tmp/on\\040disk rw - ext4 /dev/vdb rw
30 27 254:0 / /hidden rw - ext4 /dev/vdb rw
31 30 0:24 / /hidden rw - ramfs none rw
";

    #[test]
    fn the_nearest_mount_decides_between_memory_and_disk() {
        for (path, want) in [
            ("/", false),
            ("/var/tmp", false),
            ("/tmp", true),
            ("/tmp/run/1", true),
            ("/tmpfiles", false),
            ("/tmp/on disk/run", false),
            ("/hidden", true),
        ] {
            assert_eq!(is_memory(Path::new(path), MOUNTS), want, "{path}");
        }
        assert!(!is_memory(Path::new("/tmp"), "what is this"));
    }
}
